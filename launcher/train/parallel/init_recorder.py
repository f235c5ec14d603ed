"""What a constructor does to its tensors, written down while they have no memory: the log behind ``deferred``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_META, _CPU = torch.device("meta"), torch.device("cpu")
_ANSWERS: dict[Any, Any] = {
    vars(torch._C.TensorBase)["is_meta"].__get__: False,
    vars(torch._C.TensorBase)["is_cpu"].__get__: True,
    vars(torch._C.TensorBase)["device"].__get__: _CPU,
}
_EMPTY = {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}
_CONSTANT = {"zeros", "ones", "full", "eye"}
# in place, and what stood there before does not matter
_OVERWRITE = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"}


class NotDeferrable(Exception):
    """This model's construction cannot be recorded; the message says why. Build it the ordinary way."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a deferred tensor lies: all that is needed to make the same view of the real storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Call:
    """One operator call. Deferred tensors in ``args`` and ``kwargs`` are places, real ones copies of their values.

    ``needs``: storages whose values it reads. ``writes``: those that it changes or makes, ``covers``: those of them
    of which it leaves nothing as it was. ``fresh``: of its result's tensors, those with a storage of their own.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: set[int]
    writes: set[int]
    covers: set[int]
    fresh: dict[int, Place]
    random: bool
    default_dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """Records every operator that touches a deferred tensor: what has no memory yet, and so lies on the meta device.

    Empty, constant and random tensors are deferred wherever they are made. What is made from values is real and runs
    as it does without this; where real and deferred ones meet, the result is deferred. Whatever would not be the same
    as in an ordinary build is refused with NotDeferrable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
        self.refusal: NotDeferrable | None = None
        self._generators: dict[int, tuple[torch.Generator, Tensor, Tensor]] = {}
        self._drawn_from(torch.default_generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # here the tensors answer as what they are
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, inputs = func.overloadpacket.__name__, tensors((args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        # torch.load starts from an empty tensor without elements and gives it a storage: that one stays real
        if not inputs and (draws or name in _CONSTANT or (name in _EMPTY and 0 not in args[0])):
            if kwargs.get("device") == _META and name not in _CONSTANT:  # it would draw nothing in an ordinary build
                raise self.refuse("it makes meta tensors of its own")
            if kwargs.get("device") in (None, _CPU):
                kwargs["device"] = _META
        if kwargs.get("device") == _META or any(tensor.is_meta for tensor in inputs):
            return self._record(func, name, args, kwargs, draws)
        if draws:
            raise self.refuse(f"{func} draws random numbers for a tensor that has its memory already")
        return func(*args, **kwargs)

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, draws: bool) -> Any:
        if name == "set_":  # a new storage for the same tensor: places are read at each use
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise self.refuse("its constructor asks a tensor for its value (.item(), bool(), ...)")
        needs, writes, covers = self._effects(func, name, args, kwargs)
        stored_args, stored_kwargs = tree_map(self._stored, (args, kwargs))
        meta_args, meta_kwargs = tree_map(lambda x: x.to(_META) if isinstance(x, Tensor) else x, (args, kwargs))
        held = {self.place(tensor).storage for tensor in tensors((args, kwargs)) if tensor.is_meta}
        result = func(*meta_args, **meta_kwargs)
        outputs = tensors(result)
        if not all(output.is_meta for output in outputs):
            raise self.refuse(f"{func} moves a tensor to another device")
        places = [self.place(output) for output in outputs]
        fresh = {i: place for i, place in enumerate(places) if place.storage not in held}
        made = {place.storage for place in fresh.values()}
        if name not in _EMPTY and (writes or made):  # else there is nothing to compute: no values, or a view
            if draws:
                generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
                self._drawn_from(generators[0] if generators else torch.default_generator)
            effects = (needs, writes | made, covers | made, fresh)
            self.calls.append(Call(func, stored_args, stored_kwargs, *effects, draws, torch.get_default_dtype()))
        return result

    def _effects(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[set[int], set[int], set[int]]:
        """Which storages the call reads, writes, and writes whole."""
        needs, writes, covers = set[int](), set[int](), set[int]()
        for position, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            blind = written and (argument.is_out or name in _OVERWRITE)
            for tensor in tensors(args[position] if position < len(args) else kwargs.get(argument.name)):
                if not tensor.is_meta:
                    if written:
                        raise self.refuse(f"{func} writes deferred values into a tensor that has its memory already")
                    continue
                storage = self.place(tensor).storage
                if not blind:
                    needs.add(storage)
                if written:
                    writes.add(storage)
                whole = tensor.numel() * tensor.itemsize == self.storages[storage].nbytes()
                if blind and whole and tensor.is_contiguous():
                    covers.add(storage)
        return needs, writes, covers

    def made(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, on meta, is one of those recorded here."""
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self.storages

    def place(self, tensor: Tensor) -> Place:
        """Raises: NotDeferrable: a tensor that is more than strides over a storage."""
        own_dispatch = any("__torch_dispatch__" in vars(cls) for cls in type(tensor).__mro__ if cls is not Tensor)
        if own_dispatch or tensor.layout != torch.strided:
            raise self.refuse(f"it makes a {type(tensor).__name__} of layout {tensor.layout}")
        if tensor.is_conj() or tensor.is_neg():
            raise self.refuse("it makes a lazily conjugated tensor")
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage._cdata, storage)
        return Place(storage._cdata, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _stored(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):  # a real one may be changed before the replay
            return self.place(leaf) if leaf.is_meta else leaf.clone()
        return _CPU if leaf == _META else leaf

    def _drawn_from(self, generator: torch.Generator) -> None:
        """Moves ``generator`` on at each recorded draw: a state set back or drawn from meanwhile is so found."""
        self._check(generator)
        _, start, _ = self._generators.get(id(generator), (generator, generator.get_state(), None))
        torch.rand((), generator=generator)
        self._generators[id(generator)] = generator, start, generator.get_state()

    def _check(self, generator: torch.Generator) -> None:
        known = self._generators.get(id(generator))
        if known is not None and not torch.equal(known[2], generator.get_state()):
            raise self.refuse("it seeds or restores torch's random numbers, or draws some for tensors with memory")

    def check(self) -> None:
        """Raises what the constructor may have swallowed."""
        if self.refusal is not None:
            raise self.refusal
        for generator, _, _ in self._generators.values():
            self._check(generator)

    def restore(self) -> None:
        """Gives the generators back as they were before the recording."""
        for generator, start, _ in self._generators.values():
            generator.set_state(start)

    def refuse(self, reason: str) -> NotDeferrable:
        self.refusal = self.refusal or NotDeferrable(reason)
        return self.refusal

    def trunc_normal(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``original`` as one call: it draws again until all values are inside, which only the replay can know."""

        def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            generators = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
            with torch.no_grad():
                tensor.normal_(generator=generators[0] if generators else None)  # same reads, same writes
            call = self.calls[-1]
            call.run, call.args, call.kwargs = original, (call.args[0], *args), kwargs
            return tensor

        return recorded


class PretendCpu(TorchFunctionMode):
    """Deferred tensors answer as the CPU tensors that they stand for: much code, torch's own too, skips meta ones."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            return func(*args, **kwargs)
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func is Tensor.cpu:
            return args[0]
        if func is Tensor.new_tensor:  # values that are known, and that a meta tensor would lose
            return func(*args, **{"device": _CPU, **kwargs})
        args = tuple(_META if isinstance(arg, torch.device | str) and arg in ("cpu", _CPU) else arg for arg in args)
        if kwargs.get("device") in ("cpu", _CPU):
            kwargs["device"] = _META
        try:
            return func(*args, **kwargs)
        except Exception as error:  # the constructor may catch what it would not meet in an ordinary build
            self._recorder.refuse(f"{type(error).__name__}: {error}")
            raise


def tensors(tree: Any) -> list[Tensor]:
    """Those among the arguments or results of an operator, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
