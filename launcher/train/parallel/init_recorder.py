"""Recorder of the operators that a model's constructor calls, while its tensors have no memory: see
``deferred_init``."""

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
# in-place operators whose result does not depend on the previous values
_OVERWRITE = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"}


class NotDeferrable(Exception):
    """The model's construction cannot be recorded, for the reason in the message; build it the ordinary way."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """Storage and layout of a deferred tensor: what is needed to create the same view of the real storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class OperatorCall:
    """One operator call. In ``args`` and ``kwargs``, deferred tensors are replaced by views and real ones copied.

    Args:
        needs: storages whose values the call reads.
        writes: storages that it changes or creates.
        covers: those of ``writes`` that it overwrites completely.
        fresh: result tensors with a storage of their own, by position among the results.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    needs: set[int]
    writes: set[int]
    covers: set[int]
    fresh: dict[int, StorageView]
    random: bool
    default_dtype: torch.dtype


class Recorder(TorchDispatchMode):
    """Recorder of every operator that has a deferred tensor, one on the meta device, among its arguments or results.

    Empty, constant and random tensors are deferred when they are created. Tensors created from values are real, and
    operators on them run as usual; the result of an operator on real and deferred tensors is deferred. Anything whose
    replay could differ from an ordinary build is refused with NotDeferrable.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []
        self.storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no address is reused
        self.refusal: NotDeferrable | None = None
        self._generators: dict[int, tuple[torch.Generator, Tensor, Tensor]] = {}
        self._drawn_from(torch.default_generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # here the tensors must report their real device
            return self._call(func, args, dict(kwargs or {}))

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name, inputs = func.overloadpacket.__name__, tensors_of((args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        # torch.load creates a tensor without elements and then sets its storage: that one must stay real
        if not inputs and (draws or name in _CONSTANT or (name in _EMPTY and 0 not in args[0])):
            if kwargs.get("device") == _META and name not in _CONSTANT:  # on meta, an ordinary build draws nothing
                raise self.refuse("its constructor makes meta tensors itself")
            if kwargs.get("device") in (None, _CPU):
                kwargs["device"] = _META
        if kwargs.get("device") == _META or any(tensor.is_meta for tensor in inputs):
            return self._record(func, name, args, kwargs, draws)
        if draws:
            raise self.refuse(f"{func} draws random numbers for a tensor that has its memory already")
        return func(*args, **kwargs)

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, draws: bool) -> Any:
        if name == "set_":  # the tensor gets another storage; `view_of` reads the current one at each use
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise self.refuse("its constructor asks a tensor for its value (.item(), bool(), ...)")
        needs, writes, covers = self._effects(func, name, args, kwargs)
        stored_args, stored_kwargs = tree_map(self._stored, (args, kwargs))
        meta_args, meta_kwargs = tree_map(lambda x: x.to(_META) if isinstance(x, Tensor) else x, (args, kwargs))
        held = {self.view_of(tensor).storage for tensor in tensors_of((args, kwargs)) if tensor.is_meta}
        result = func(*meta_args, **meta_kwargs)
        outputs = tensors_of(result)
        if not all(output.is_meta for output in outputs):
            raise self.refuse(f"{func} moves a tensor to another device")
        views = [self.view_of(output) for output in outputs]
        fresh = {i: view for i, view in enumerate(views) if view.storage not in held}
        made = {view.storage for view in fresh.values()}
        if name not in _EMPTY and (writes or made):  # otherwise nothing to compute: uninitialised, or a view
            if draws:
                generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
                self._drawn_from(generators[0] if generators else torch.default_generator)
            effects = (needs, writes | made, covers | made, fresh)
            self.calls.append(
                OperatorCall(func, stored_args, stored_kwargs, *effects, draws, torch.get_default_dtype())
            )
        return result

    def _effects(self, func: Any, name: str, args: Any, kwargs: Any) -> tuple[set[int], set[int], set[int]]:
        """Return the storages that the call reads, writes, and overwrites completely."""
        needs, writes, covers = set[int](), set[int](), set[int]()
        for position, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            blind = written and (argument.is_out or name in _OVERWRITE)
            for tensor in tensors_of(args[position] if position < len(args) else kwargs.get(argument.name)):
                if not tensor.is_meta:
                    if written:
                        raise self.refuse(f"{func} writes deferred values into a tensor that has its memory already")
                    continue
                storage = self.view_of(tensor).storage
                if not blind:
                    needs.add(storage)
                if written:
                    writes.add(storage)
                whole = tensor.numel() * tensor.itemsize == self.storages[storage].nbytes()
                if blind and whole and tensor.is_contiguous():
                    covers.add(storage)
        return needs, writes, covers

    def made(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, on the meta device, is one of the deferred ones."""
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self.storages

    def view_of(self, tensor: Tensor) -> StorageView:
        """Return the storage and layout of ``tensor``.

        Raises:
            NotDeferrable: the tensor is not a plain strided view of a storage.
        """
        own_dispatch = any("__torch_dispatch__" in vars(cls) for cls in type(tensor).__mro__ if cls is not Tensor)
        if own_dispatch or tensor.layout != torch.strided:
            raise self.refuse(f"it makes a {type(tensor).__name__} of layout {tensor.layout}")
        if tensor.is_conj() or tensor.is_neg():
            raise self.refuse("it makes a lazily conjugated tensor")
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage._cdata, storage)
        return StorageView(storage._cdata, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _stored(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):  # a real one is copied, since it may change before the replay
            return self.view_of(leaf) if leaf.is_meta else leaf.clone()
        return _CPU if leaf == _META else leaf

    def _drawn_from(self, generator: torch.Generator) -> None:
        """Advance ``generator`` at a recorded draw. Its state then reveals whether the constructor restored it, seeded
        it, or drew from it without being recorded."""
        self._check(generator)
        _, start, _ = self._generators.get(id(generator), (generator, generator.get_state(), None))
        torch.rand((), generator=generator)
        self._generators[id(generator)] = generator, start, generator.get_state()

    def _check(self, generator: torch.Generator) -> None:
        known = self._generators.get(id(generator))
        if known is not None and not torch.equal(known[2], generator.get_state()):
            raise self.refuse("it seeds or restores torch's random numbers, or draws some for tensors with memory")

    def check(self) -> None:
        """Raise a refusal that the constructor may have caught."""
        if self.refusal is not None:
            raise self.refusal
        for generator, _, _ in self._generators.values():
            self._check(generator)

    def restore(self) -> None:
        """Restore the state that the generators had before the recording."""
        for generator, start, _ in self._generators.values():
            generator.set_state(start)

    def refuse(self, reason: str) -> NotDeferrable:
        self.refusal = self.refusal or NotDeferrable(reason)
        return self.refusal

    def trunc_normal(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return ``original`` recorded as one call: it draws until all values are in range, which only the replay can
        determine."""

        def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            generators = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
            with torch.no_grad():
                tensor.normal_(generator=generators[0] if generators else None)  # reads and writes the same storages
            call = self.calls[-1]
            call.run, call.args, call.kwargs = original, (call.args[0], *args), kwargs
            return tensor

        return recorded


class PretendCpu(TorchFunctionMode):
    """Mode in which deferred tensors report that they are on the CPU: much code, torch's included, skips meta
    tensors."""

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
        if func is Tensor.new_tensor:  # the values are given, and a meta tensor would lose them
            return func(*args, **{"device": _CPU, **kwargs})
        args = tuple(_META if isinstance(arg, torch.device | str) and arg in ("cpu", _CPU) else arg for arg in args)
        if kwargs.get("device") in ("cpu", _CPU):
            kwargs["device"] = _META
        try:
            return func(*args, **kwargs)
        except Exception as error:  # the constructor may catch an error that an ordinary build would not raise
            self._recorder.refuse(f"{type(error).__name__}: {error}")
            raise


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
