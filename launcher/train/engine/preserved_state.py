"""State that is restored after passes that do not train: random state, buffers, and attributes of Python objects."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from launcher.train.data.randomness import random_state, restore_random_state
from launcher.train.parallel.replicas import differs

# Limit of copied bytes. Beyond it, changes of tensors are only detected, and arrays are ignored.
MAX_COPY_BYTES = 256 * 2**20
# A longer container is taken for data, not state: its list of elements is restored, but not the elements themselves.
MAX_ELEMENTS = 10_000
# Torch's own bookkeeping of a module: parameters, buffers, hooks. Buffers are those of SavedState.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_ATOMS = (int, float, complex, str, bytes, type(None), type, range, FunctionType, BuiltinFunctionType, ModuleType)
_FOREIGN = frozenset({"torch", "launcher", "numpy"}) | sys.stdlib_module_names


class SavedState:
    """Saved random state and buffers of a model."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device, self._random = device, random_state(device)
        # a forward pass may put a new tensor in a buffer's place, or register a buffer
        self._buffers = [
            (part, [(name, buffer, None if buffer is None else buffer.detach().clone())
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
            for _, buffer, value in buffers:
                if buffer is not None and value is not None:
                    buffer.copy_(value)


class SavedAttributes:
    """Saved attributes of the user's objects, and of the objects that they refer to.

    Attributes, lists, dicts, sets, deques and tuples are followed. Tensors that are neither parameters nor buffers,
    NumPy arrays, and random generators of torch, NumPy and Python are restored in place. Of data sets, objects of
    installed packages, and iterators, only the reference is restored.
    """

    def __init__(self, *roots: object) -> None:
        self._packages = {_package(type(root)) for root in roots} - _FOREIGN
        self._seen: dict[int, object] = {}  # holds the objects, so that no other one gets the same id
        self._undo: list[Callable[[], str | None]] = []
        self._copied_bytes = 0
        waiting = deque(roots)
        while waiting:
            value = waiting.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
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
            case nn.Parameter() | random.SystemRandom():
                pass
            case Tensor():
                self._save_tensor(value)
            case torch.Generator():
                self._keep(value.set_state, value.get_state())
            case random.Random():
                self._keep(value.setstate, value.getstate())
            case list():
                self._keep(lambda items: value.__setitem__(slice(None), items), [*value])
                return value
            case dict():
                self._keep(lambda items: (value.clear(), value.update(items)), {**value})
                return value.values()
            case set():
                self._keep(lambda items: (value.clear(), value.update(items)), {*value})
            case deque():
                self._keep(lambda items: (value.clear(), value.extend(items)), [*value])
                return value
            case tuple() | frozenset():
                return value
            case MethodType():
                return [value.__self__]
            case _ if numpy and isinstance(value, numpy.ndarray):
                self._save_array(value)
            case _ if numpy and isinstance(value, numpy.random.Generator):
                self._keep(lambda state: setattr(value.bit_generator, "state", state), value.bit_generator.state)
            case _ if numpy and isinstance(value, numpy.random.RandomState):
                self._keep(value.set_state, value.get_state(legacy=False))
            case _:
                return self._save_object(value)
        return ()

    def _save_object(self, value: Any) -> Collection[object]:
        parts: list[nn.Module | None] = []
        hidden = frozenset[str]()
        if isinstance(value, nn.Module):
            parts, hidden = [*value._modules.values()], _OF_TORCH
            followed = not type(value).__module__.startswith("torch._")  # torch.compile's own
        else:
            followed = isinstance(value, SimpleNamespace) or (
                not isinstance(value, Dataset)
                and (_package(type(value)) in self._packages or not _is_installed(type(value)))
            )
        if not followed:
            return parts
        attributes = {name: held for name, held in _attributes(value).items() if name not in hidden}

        def restore(saved: Mapping[str, Any]) -> None:
            for name in _attributes(value).keys() - saved.keys() - hidden:
                object.__delattr__(value, name)
            for name, held in saved.items():
                object.__setattr__(value, name, held)

        self._keep(restore, attributes)
        return [*attributes.values(), *parts]

    def _save_tensor(self, value: Tensor) -> None:
        if value.grad_fn is not None or value.layout is not torch.strided or value.is_inference() or value.is_meta:
            return  # nothing changes these in place
        if self._has_room(value.nbytes):
            # the memory of one that has not changed may be read-only
            self._keep(lambda old: differs(value, old) and value.copy_(old), value.detach().clone())
            return
        version, shape = value._version, tuple(value.shape)
        self._undo.append(lambda: f"a tensor of shape {shape}" if value._version != version else None)

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


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, those in slots too."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return found | getattr(value, "__dict__", {})


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    names = [names] if isinstance(names, str) else [*names]
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


@functools.cache
def _is_installed(kind: type) -> bool:
    """Return whether ``kind`` is of Python, or of an installed package."""
    package = _package(kind)
    file = getattr(sys.modules.get(package), "__file__", None)
    installed = file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return package in _FOREIGN or installed
