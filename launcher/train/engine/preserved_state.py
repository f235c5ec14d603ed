"""State that passes without training must not change: what they can change is saved before and restored after them.

Such passes are the calibration, the count of a loss's items, the passes that look ahead over a window, a window that
runs again, and trials before the first step. One mechanism serves all: ``PreservedState``.
"""

from __future__ import annotations

import array
import copy
import functools
import itertools
import operator
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import Dataset

from launcher.errors import TaskError
from launcher.plan.host import free_host_bytes
from launcher.quantities import first_names
from launcher.train.data.randomness import random_state, restore_random_state
from launcher.train.parallel.base import local
from launcher.train.parallel.replicas import differs

# Limit of copied bytes. Beyond it, changes of tensors are only detected, and arrays are ignored. All parameters are
# copied once, to see which ones change.
MAX_COPY_BYTES = 256 * 2**20
# A longer container is taken for data, not state: its list of elements is restored, but not the elements themselves.
MAX_ELEMENTS = 10_000
# Torch's own bookkeeping of a module: parameters, buffers, hooks. Buffers are those of SavedState.
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_ATOMS = (int, float, complex, str, bytes, type(None), range, Enum, BuiltinFunctionType, ModuleType)
FOREIGN = frozenset({"torch", "launcher", "numpy"}) | sys.stdlib_module_names
# methods that run before training, or in the loader
_OF_DATA = frozenset({"__init__", "__new__", "model", "train_data", "eval_data", "collate"})


class PreservedState:
    """Saved state of everything that forward and backward passes without an optimizer step can change: random state,
    buffers, parameters, and attributes and variables of the user's code.

    Args:
        roots: the user's objects and functions that the passes run, such as the task.
        changing: what is known of the model's parameters; it is updated.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, roots: Iterable[object], changing: ChangingParameters
    ) -> None:
        self._state = SavedState(module, device)
        self._parameters = SavedParameters(module, changing)
        self._attributes = SavedAttributes(module, *roots)

    def restore(self, after: str, remedy: str) -> None:
        """Restore the state, as often as needed.

        Args:
            after: the passes, for the message.
            remedy: sentence on how to do without them.

        Raises:
            TaskError: state has changed that is too large to be copied.
        """
        if changed := self.undo():
            raise TaskError(f"The forward pass changes {changed}, too large to be restored after {after}.\n  {remedy}")

    @property
    def names_read(self) -> set[str]:
        """Names of variables and attributes in the user's code that passes run."""
        return self._attributes.names_read

    def undo(self) -> str:
        """Restore the state, and return a description of the changes that are too large; empty if none."""
        changed = [self._attributes.restore(), self._parameters.restore()]
        self._state.restore()
        return ", ".join(filter(None, changed))

    def keep_changing(self) -> None:
        """Find out which parameters the passes since the start have changed, and drop the copies of others. Called
        before the optimizer step."""
        self._parameters.keep_changing()


class SavedState:
    """Saved random state and buffers of a model."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device, self._random = device, random_state(device)
        # a forward pass may put a new tensor in a buffer's place, or register a buffer
        self._buffers = [
            (part, [(name, buffer, None if buffer is None else SavedTensor(buffer))
                    for name, buffer in part._buffers.items()])
            for part in module.modules()
        ]  # fmt: skip

    @torch.no_grad()
    def restore(self) -> None:
        """Restore both, in place."""
        restore_random_state(self._random, self._device)
        for part, buffers in self._buffers:
            if [*map(id, part._buffers.values())] != [id(buffer) for _, buffer, _ in buffers]:
                part._buffers.clear()
                part._buffers.update((name, buffer) for name, buffer, _ in buffers)
            for _, _, saved in buffers:
                if saved is not None:
                    saved.restore()


class SavedTensor:
    """Saved memory and values of a tensor; of a sharded one, of this rank's part.

    Args:
        copies: copy the values. Without a copy, changes in place are only detected.
        device: device of the copy.
    """

    def __init__(self, tensor: Tensor, *, copies: bool = True, device: torch.device | None = None) -> None:
        self.tensor, self._memory = tensor, _detached(tensor)
        self._version = tensor._version
        self.copy = self._memory.to(device or self._memory.device, copy=True) if copies else None

    def restore(self) -> None:
        if self._is_replaced and not isinstance(self.tensor, DTensor):
            self.tensor.data = self._memory
        if self.copy is not None:
            self._memory.copy_(self.copy)
            self._version = self.tensor._version

    def restore_if_changed(self) -> bool:
        """Restore the tensor, and return whether it has changed. One that has not is not written to: its memory may be
        read-only."""
        if changed := self.changed:
            self.restore()
        return changed

    @property
    def changed(self) -> bool:
        if self._is_replaced or self.copy is None:
            return self._is_replaced or self.tensor._version != self._version
        return differs(self._memory, self.copy.to(self._memory.device))  # changes of .data have no version

    @property
    def _is_replaced(self) -> bool:
        now, saved = _detached(self.tensor), self._memory
        return (now.shape, now.stride()) != (saved.shape, saved.stride()) or (
            now.layout is torch.strided and now.data_ptr() != saved.data_ptr()
        )


class ChangingParameters:
    """Names of the parameters that passes without an optimizer step change, such as those of a momentum encoder.

    Args:
        ranks: number of ranks on this host, which share its memory.

    Attributes:
        known: the first passes have shown them.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.names = set[str]()
        self.known = False

    @property
    def copied_bytes(self) -> int:
        """Limit of the bytes of parameters that are copied, beside those that are known to change."""
        return MAX_COPY_BYTES if self.known else max(MAX_COPY_BYTES, free_host_bytes() // (4 * self._ranks))


class SavedParameters:
    """Saved parameters of a model, whether they require a gradient, and the parts that they belong to.

    All are copied as long as nothing is known of them. Later, those that change are copied, and others as far as
    ``MAX_COPY_BYTES`` allows. The copies of unknown ones on a GPU are in host memory.
    """

    def __init__(self, module: nn.Module, changing: ChangingParameters) -> None:
        self._changing = changing
        named = dict(module.named_parameters())
        # the gathered parameters of a sharded model, maybe all of them, come and go with each pass: a write is lost
        sharded = any(isinstance(part, FSDPModule) for part in module.modules())
        with_values = {
            name: p for name, p in named.items()
            if not (sharded and not isinstance(p, DTensor)) and p.layout is torch.strided and not p.is_meta
        }  # fmt: skip
        self._flags = [] if sharded else [(p, p.requires_grad) for p in named.values()]
        self._parts = [
            (held, {**held})
            for part in module.modules()
            for held in ([part._modules] if sharded else [part._modules, part._parameters])
            if isinstance(held, dict)  # those of TorchScript are fixed
        ]
        order = sorted(with_values, key=lambda name: (name not in changing.names, with_values[name].requires_grad))
        room = changing.copied_bytes
        self._saved: dict[str, SavedTensor] = {}
        for name in order:
            tensor = local(with_values[name].detach())
            room -= tensor.nbytes
            copies = room >= 0 or name in changing.names
            device = None if changing.known or name in changing.names else torch.device("cpu")
            self._saved[name] = SavedTensor(with_values[name], copies=copies, device=device)

    @torch.no_grad()
    def restore(self) -> str:
        """Restore the parameters, and return a description of the changes that cannot be undone; empty if none."""
        for held, saved in self._parts:
            _restore_dict(held, saved)
        for parameter, flag in self._flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        changed = [name for name, saved in self._saved.items() if saved.restore_if_changed()]
        lost = [name for name in changed if self._saved[name].copy is None]
        self._note(changed)
        return f"the parameters {first_names(lost, 4)}" if lost else ""

    def keep_changing(self) -> None:
        if not self._changing.known:
            self._note([name for name, saved in self._saved.items() if saved.changed])

    def _note(self, changed: Iterable[str]) -> None:
        self._changing.names.update(changed)
        if self._changing.known:
            return
        self._changing.known = True
        room = self._changing.copied_bytes
        for name, saved in self._saved.items():
            if name not in self._changing.names and saved.copy is not None:
                room -= saved.copy.nbytes
                if room < 0:
                    saved.copy = None


class Rewindable(Iterator[Any]):
    """Iterator in the place of one of the user's, which can go back: it keeps the elements since the oldest position.
    Other methods and attributes, such as ``send`` of a generator, are those of ``source``."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        (self._elements,) = itertools.tee(source, 1)

    def __next__(self) -> Any:
        return next(self._elements)

    def __len__(self) -> int:
        return len(self._source)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return bool(self._source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # those with which a copy is made
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def position(self) -> Iterator[Any]:
        return copy.copy(self._elements)

    def go_back(self, position: Iterator[Any]) -> None:
        self._elements = copy.copy(position)


class SavedAttributes:
    """Saved attributes of the user's objects, and of the objects that they refer to.

    Attributes, lists, dicts, sets, deques and tuples are followed; of functions and methods, the variables that they
    name: those of modules of the user and of enclosing functions, and all of the user's classes. Tensors that are
    neither parameters nor buffers of the first module, NumPy arrays, and random generators of torch, NumPy and Python
    are restored in place.
    Attributes and variables that are iterators of Python or of a DataLoader are replaced by ones that can go back.
    Of data sets, of objects of installed packages, and of iterators in containers, only the reference is restored.

    Attributes:
        names_read: names of variables and attributes in the user's code.
        variables: variables of modules, classes and enclosing functions that the code names: holder and attribute.
    """

    def __init__(self, *roots: object) -> None:
        self._packages = packages_of(roots)
        model = next((root for root in roots if isinstance(root, nn.Module)), nn.Module())
        self._of_model = {id(each) for each in (*model.modules(), *model.parameters())}
        self.names_read = set[str]()
        self.variables: dict[str, tuple[Any, str]] = {}
        self._seen: dict[int, object] = {}  # holds the objects, so that no other one gets the same id
        self._names: dict[int, set[str]] = {}  # of the variables of a module that are saved
        self._undo: list[Callable[[], str | None]] = []
        self._iterators: dict[int, Rewindable] = {}
        self._copied_bytes = 0
        own, waiting = packages_of([root for root in roots if root is not model]), deque(roots)
        while waiting:
            value = waiting.popleft()
            if id(value) in self._seen or isinstance(value, _ATOMS):
                continue
            if isinstance(value, type):  # that code names; an installed model's names hundreds that hold no state
                parts = self._save_classes(value) if is_users_module(value.__module__, own) else ()
            else:
                self._seen[id(value)] = value
                parts = self._save(value)
            if len(parts) <= MAX_ELEMENTS:
                waiting.extend(parts)

    @torch.no_grad()
    def restore(self) -> str:
        """Restore the saved state and return a description of the changes that cannot be undone; empty if none."""
        return ", ".join(filter(None, [undo() for undo in self._undo]))

    def _save(self, value: Any) -> Collection[object]:
        """Save ``value``, and return the objects that it refers to."""
        numpy: Any = sys.modules.get("numpy")
        match value:
            case random.SystemRandom():
                pass
            case nn.Parameter() if id(value) in self._of_model:
                pass
            case Optimizer() if not any(
                id(p) in self._of_model for group in value.param_groups for p in group["params"]
            ):
                return [value.state, *value.param_groups]
            case Tensor():
                self._save_tensor(value)
            case list():
                self._keep(functools.partial(_restore_list, value), [*value])
                return value
            case bytearray() | array.array():
                self._keep(functools.partial(_restore_array, value), value[:])
            case dict():
                self._keep(functools.partial(_restore_dict, value), {**value})
                return value.values()
            case set():
                self._keep(lambda items: (value.clear(), value.update(items)), {*value})
            case deque():
                self._keep(lambda items: (value.clear(), value.extend(items)), [*value])
                return value
            case tuple() | frozenset():
                return value
            case MethodType():
                return [value.__self__, value.__func__]
            case FunctionType():
                return self._save_function(value)
            case functools.partial():
                return [value.func, *value.args, *value.keywords.values()]
            case _ if numpy and isinstance(value, numpy.ndarray):
                self._save_array(value)
            case _ if (generator := generator_state(value)) is not None:
                self._keep(*generator)
            case threading.local():  # this thread's attributes
                self._keep(functools.partial(_restore_dict, vars(value)), {**vars(value)})
                return vars(value).values()
            case ContextVar():
                try:
                    held = value.get()
                except LookupError:  # neither set nor with a default
                    return ()
                self._keep(value.set, held)
                return [held]
            case _:
                return self._save_object(value)
        return ()

    def _save_object(self, value: Any) -> Collection[object]:
        parts: Collection[object] = ()
        hidden = frozenset[str]()
        if isinstance(value, nn.Module):
            parts, hidden = [*value._modules.values()], OF_TORCH
            if id(value) not in self._of_model:
                parts = [*parts, *value._parameters.values(), *value._buffers.values()]
            followed = not str(type(value).__module__).startswith("torch._")  # torch.compile's own
        else:
            users = not isinstance(value, Dataset) and self._is_users(type(value).__module__)
            followed = users or isinstance(value, SimpleNamespace)
        if not followed:
            return parts

        def now() -> dict[str, Any]:
            return {name: held for name, held in attributes_of(value).items() if name not in hidden}

        put, drop = (functools.partial(way, value) for way in (object.__setattr__, object.__delattr__))
        attributes = self._keep_names(now, put, drop)
        return [*attributes.values(), *parts, *self._save_classes(type(value))]

    def _save_classes(self, kind: type) -> list[object]:
        """Save the attributes of a class and its bases, and return what their methods and attributes refer to."""
        found: list[object] = []
        for each in kind.__mro__:
            if id(each) in self._seen or not self._is_users(each.__module__):
                continue
            self._seen[id(each)] = each

            def now(each: type = each) -> dict[str, Any]:
                return {name: value for name, value in vars(each).items() if not _is_bound(name, value)}

            put, drop = (functools.partial(way, each) for way in (setattr, delattr))
            held = self._keep_names(now, put, drop)
            self.variables |= {f"{each.__name__}.{name}": (each, name) for name in held}
            found += [*held.values(), *(_function(value) for name, value in vars(each).items() if name not in _OF_DATA)]
        return found

    def _save_function(self, value: FunctionType) -> Collection[object]:
        if not self._is_users(value.__module__):
            return ()
        names = _names_of(value.__code__)
        self.names_read |= names
        found = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), value.__dict__]
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.variables[f"{value.__qualname__}: {name}".replace(".<locals>", "")] = cell, "cell_contents"
            if is_iterator(held):
                held = cell.cell_contents = self._rewindable(held)
            self._keep(functools.partial(setattr, cell, "cell_contents"), held)
            found.append(held)
        imported = sys.modules.keys() & _modules_of(value.__code__, value.__globals__.get("__package__"))
        modules = [sys.modules[name] for name in imported if self._is_users(name)]
        scopes = [value.__globals__, *(vars(each) for each in modules if each is not None)]  # None: import blocked
        return found + [held for scope in scopes for held in self._save_variables(scope, names)]

    def _save_variables(self, scope: dict[str, Any], names: frozenset[str]) -> list[object]:
        """Save the variables of a module that are among ``names``, and return their values."""
        done = self._names.setdefault(id(scope), set())
        new = names - done
        done |= new

        def now() -> dict[str, Any]:
            return {name: scope[name] for name in new if name in scope}

        saved = self._keep_names(now, scope.__setitem__, scope.__delitem__)
        module = scope.get("__name__", "")
        self.variables |= {f"{module}.{name}": (sys.modules.get(module), name) for name in saved}
        modules = [held for held in saved.values() if isinstance(held, ModuleType) and self._is_users(held.__name__)]
        inner = [held for module in modules for held in self._save_variables(vars(module), names)]
        return [*saved.values(), *inner]

    def _keep_names(
        self, now: Callable[[], dict[str, Any]], put: Callable[[str, Any], object], drop: Callable[[str], object]
    ) -> dict[str, Any]:
        """Save the values by name that ``now`` returns, and return them. Iterators are replaced first."""
        saved = now()
        for name, held in saved.items():
            if is_iterator(held):
                saved[name] = self._rewindable(held)
                put(name, saved[name])

        def restore(saved: Mapping[str, Any]) -> None:
            current = now()
            for name in current.keys() - saved.keys():
                drop(name)
            for name, held in saved.items():
                if current.get(name, restore) is not held:
                    put(name, held)

        self._keep(restore, saved)
        return saved

    def _rewindable(self, held: Iterator[Any]) -> Rewindable:
        """Save the position of an iterator, and return what takes its place, the same one everywhere."""
        now = held if isinstance(held, Rewindable) else self._iterators.setdefault(id(held), Rewindable(held))
        self._keep(now.go_back, now.position)
        return now

    def _save_tensor(self, value: Tensor) -> None:
        if is_lazy(value):
            return  # it has no value yet
        if value.grad_fn is not None or value.layout is not torch.strided or value.is_inference() or value.is_meta:
            return  # nothing changes these in place
        saved = SavedTensor(value, copies=self._has_room(value.nbytes))

        def undo() -> str | None:
            if saved.restore_if_changed() and saved.copy is None:
                return f"a tensor of shape {tuple(value.shape)}"
            return None

        self._undo.append(undo)

    def _save_array(self, value: Any) -> None:
        if value.flags.writeable and not value.dtype.hasobject and self._has_room(value.nbytes):
            numpy = sys.modules["numpy"]
            self._keep(lambda old: value.tobytes() != old.tobytes() and numpy.copyto(value, old), value.copy())

    def _has_room(self, size: int) -> bool:
        fits = self._copied_bytes + size <= MAX_COPY_BYTES
        self._copied_bytes += size if fits else 0
        return fits

    def _keep(self, restore: Callable[[Any], object], saved: Any) -> None:
        def undo() -> None:
            restore(saved)

        self._undo.append(undo)

    def _is_users(self, module: str | None) -> bool:
        return is_users_module(module, self._packages)


def _detached(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _restore_list(value: Any, saved: Any) -> None:
    if len(value) != len(saved) or not all(map(operator.is_, value, saved)):
        value[:] = saved


def _restore_array(value: Any, saved: Any) -> None:
    if value != saved:
        value[:] = saved


def _restore_dict(value: dict[Any, Any], saved: dict[Any, Any]) -> None:
    """Restore a dict and its order, if it has changed: another thread may be reading it."""
    same = len(value) == len(saved) and all(
        one is other and value[one] is saved[other] for one, other in zip(value, saved, strict=True)
    )
    if not same:
        value.clear()
        value.update(saved)


def generator_state(value: Any) -> tuple[Callable[[Any], object], Any] | None:
    """Return a function that restores the state of a random generator of torch, Python or NumPy, and the state; None if
    ``value`` is none, or has no state."""
    numpy: Any = sys.modules.get("numpy")
    match value:
        case random.SystemRandom():
            return None
        case torch.Generator():
            return value.set_state, value.get_state()
        case random.Random():
            return value.setstate, value.getstate()
        case _ if numpy and isinstance(value, numpy.random.Generator):
            return functools.partial(setattr, value.bit_generator, "state"), value.bit_generator.state
        case _ if numpy and isinstance(value, numpy.random.RandomState):
            return value.set_state, value.get_state(legacy=False)
        case _:
            return None


def is_iterator(value: object) -> bool:
    """Return whether ``value`` is an iterator of Python or of a DataLoader, which has no state that can be read."""
    if not isinstance(value, Iterator):
        return False
    kind = type(value)
    module = str(kind.__module__)
    return module in ("builtins", "itertools", __name__) or module.startswith("torch.utils.data.")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots too."""
    found = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


@functools.cache
def _slots(kind: type) -> list[str]:
    """Return the names of the slots of a class and its bases."""
    found: list[str] = []
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return [name for name in found if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _is_bound(name: str, value: object) -> bool:
    """Return whether an attribute of a class is part of its definition: a method, a property, a slot."""
    return name.startswith(("__", "_abc_")) or hasattr(type(value), "__get__")


def _function(value: Any) -> object:
    """Return the function of a method or property; None for other attributes of a class."""
    for name in ("__func__", "fget", "func"):
        value = getattr(value, name, value)
    return value if isinstance(value, FunctionType) else None


@functools.cache
def _names_of(code: CodeType) -> frozenset[str]:
    """Return the names that a function refers to by its code, those of inner functions too."""
    inner = [_names_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _modules_of(code: CodeType, package: str | None) -> frozenset[str]:
    """Return the names of the modules that a function may import."""
    return frozenset(full for name in _names_of(code) for full in (name, f"{package}.{name}"))


def packages_of(roots: Iterable[object]) -> set[str]:
    """Return the packages of the user's objects, which may be installed."""
    return {str(type(root).__module__).partition(".")[0] for root in roots} - FOREIGN


def is_users_module(module: str | None, packages: Collection[str]) -> bool:
    """Return whether the code of ``module`` is the user's. ``packages``: those of the user's objects."""
    package = str(module).partition(".")[0]
    return package in packages or not _is_installed(package)


@functools.cache
def _is_installed(package: str) -> bool:
    """Return whether ``package`` is Python's own, or installed."""
    file = getattr(sys.modules.get(package), "__file__", None)
    installed = file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return package in FOREIGN or installed
