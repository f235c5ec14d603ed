"""Writes to parameters that sharding loses, observed in every window.

Plain PyTorch keeps what a forward pass or a loss writes to a parameter. ``fully_shard`` loses it if it is written to a
gathered copy, which is freed. An operation in place changes the copy's version counter, which is read whenever a copy
is freed. A write through ``.data`` does not; in the first windows, in a few later ones and in the run's last one, the
copies' checksums are compared, too. A write that leaves all values as they are is none.

``parameter.data = tensor`` changes neither a gathered copy nor a shard, but what the module's attribute refers to:
FSDP would neither gather nor reduce it. It shows in the storage.

Between windows, in callbacks and in hooks of the optimizer, code works on the shards, which are DTensors. Most
operations on them are those of the whole tensor. Two are not, without a message: a view of rows (``w[0]``,
``w.diagonal()``) is a copy, and ``item()`` of a sum or a norm returns that of the rank's own part.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.quantities import first_names
from launcher.train.measure.observer import Observer
from launcher.train.parallel.base import local
from launcher.train.parallel.mixed_precision import groups_of
from launcher.train.parallel.replicas import checksum, differs

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_WATCHED: weakref.WeakSet[LostWrites] = weakref.WeakSet()
FIRST_WINDOWS = 3  # the values of which are compared, and those of every later one whose number is a power of two


class LostWrites(Observer):
    """Observer of the writes to the parameters of a sharded model.

    Args:
        modules: the sharded modules, the root first.
        model: the root.
    """

    def __init__(self, modules: Sequence[FSDPModule], model: nn.Module, kind: StrategyKind) -> None:
        self._model, self._kind = model, kind
        self._copies: list[_Copy] = []
        self._windows = 0
        self._compares = False  # the values of this window are compared
        self._found: list[tuple[str, Tensor | bool]] = []  # whether a parameter was written
        self._sent = 0  # number of those in the window's all-reduce
        places = {
            (module, attribute): f"{name}.{attribute}" if name else attribute
            for name, module in model.named_modules()
            for attribute in module._parameters
        }
        for module in modules:
            for group in groups_of(module):
                self._watch(group, places)
        _WATCHED.add(self)
        shard_operations()

    def _watch(self, group: Any, places: Mapping[tuple[nn.Module, str], str]) -> None:
        unshard, gathered, freed = group.unshard, group._to_unsharded, group._to_sharded
        copies: list[_Copy] = []
        for parameter in group.fsdp_params:
            info = parameter._module_info
            copies.append(_Copy(places[info.module, info.param_name], parameter, group))
        self._copies += copies

        def gather(async_op: bool = False) -> None:
            before = group._all_gather_result
            unshard(async_op)
            if group._all_gather_result is not before:
                for copy in copies:
                    copy.sent()

        def to_unsharded() -> None:
            gathered()
            for copy in copies:
                copy.gathered(compares=self._compares)

        def to_sharded() -> None:
            if group.is_unsharded:
                self._look(copies)
            freed()

        group.unshard, group._to_unsharded, group._to_sharded = gather, to_unsharded, to_sharded

    def _look(self, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            if copy.may_differ:
                self._found.append((copy.name, copy.differs()))

    def begin_window(self, *, last: bool) -> None:
        """Start a window. ``last``: no other follows. What passes between two windows have left is no write.

        Raises:
            TaskError: the data of a shard was replaced.
        """
        self.require_same_shards()
        self._found = []
        self._windows += 1
        few = self._windows & (self._windows - 1) == 0
        self._compares = last or few or self._windows <= FIRST_WINDOWS

    def require_same_shards(self) -> None:
        """Raise TaskError if code has replaced the data of a shard since the first window."""
        if names := [copy.name for copy in self._copies if copy.shard_replaced()]:
            raise TaskError(
                f"{first_names(names)}: its data was replaced (parameter.data = ...), which strategy={self._kind.value}"
                " would lose: the parameter is a shard.\n"
                "  Write it in place: with torch.no_grad(): parameter.copy_(...)."
            )

    def name_of(self, storage: int) -> str | None:
        """Return the name of the parameter whose shard, or whose gradient, has this storage."""
        for name, parameter in self._model.named_parameters():
            for what, tensor in ((name, parameter), (f"the gradient of {name}", parameter.grad)):
                if tensor is not None and local(tensor).untyped_storage()._cdata == storage:
                    return what
        return None

    def contribution(self) -> Sequence[Tensor | float]:
        self._look([copy for copy in self._copies if copy.is_gathered])
        self._found += [(copy.name, True) for copy in self._copies if copy.replaced()]
        self._sent = len(self._found)
        return [_any(self._found).double()] if self._found else [0.0]  # a tensor of the host would be waited for

    def receive(self, sums: Sequence[float]) -> None:
        """Raise TaskError, on all ranks if a rank has found a write before the window's all-reduce."""
        if not sums[0]:
            del self._found[: self._sent]
        own = self._names()
        everyone = [own]
        if sums[0] > 0 and dist.get_world_size() > 1:
            everyone *= dist.get_world_size()
            dist.all_gather_object(everyone, own)
        self._require_none([name for names in everyone for name in names])

    def require_none(self) -> None:
        """Raise TaskError if this rank has found a write."""
        self._require_none(self._names())

    def _names(self) -> list[str]:
        found, self._found = self._found, []
        return [name for name, flag in found if flag] if _any(found) else []  # the host waits for the device once

    def _require_none(self, names: Sequence[str]) -> None:
        if not names:
            return
        names = list(dict.fromkeys(names))
        because = limited_norms(self._model, names)
        raise TaskError(
            f"{first_names(names)}: written by the forward pass, the loss or the backward pass{because}, which "
            f"strategy={self._kind.value} would lose: the write goes to a copy, gathered from shards.\n"
            "  Write the whole parameter on every rank after the optimizer step, in a callback's on_step(engine, "
            "result):\n"
            f"  with torch.no_grad(): w = engine.model.get_parameter({names[0]!r}); w.copy_(...).\n"
            "  Or use strategy=ddp, if all ranks write the same."
        )


def _any(found: Sequence[tuple[str, Tensor | bool]]) -> Tensor:
    device = next((flag.device for _, flag in found if isinstance(flag, Tensor)), torch.device("cpu"))
    return torch.stack(
        [torch.zeros((), dtype=torch.bool, device=device), *(torch.as_tensor(flag, device=device) for _, flag in found)]
    ).any()


def limited_norms(model: nn.Module, names: Iterable[str]) -> str:
    """Return " (NAME: max_norm=N)" for the first of the parameters ``names`` that an embedding scales in its forward
    pass; empty if there is none."""
    for name in names:
        limit = getattr(model.get_submodule(name.rpartition(".")[0]), "max_norm", None)
        if isinstance(limit, int | float):
            return f" ({name}: max_norm={limit:g})"
    return ""


class _Copy:
    """Gathered copy of one parameter.

    Args:
        parameter: torch's FSDPParam.
        group: its FSDPParamGroup.
    """

    def __init__(self, name: str, parameter: Any, group: Any) -> None:
        self.name, self._parameter, self._group = name, parameter, group
        self._memory: Tensor | None = None
        self._version = self._shard_version = 0
        self._sum: Tensor | None = None  # of the values that were gathered
        self._suspect = False  # it was written before, maybe without an effect
        self._shard: tuple[Any, Any] = (None, None)  # and its storage

    @property
    def is_gathered(self) -> bool:
        return self._group.is_unsharded

    def sent(self) -> None:
        self._shard_version = self._parameter._sharded_param_data._version

    def gathered(self, *, compares: bool) -> None:
        if self._memory is None:
            self._memory = memory = self._parameter.all_gather_outputs[0]
            self._version = memory._version
        if compares or self._suspect:
            self._sum = checksum(self._parameter.all_gather_outputs[0])

    @property
    def may_differ(self) -> bool:
        memory, shard = self._parameter.all_gather_outputs[0], self._parameter._sharded_param_data
        written = memory._version != self._version or shard._version != self._shard_version
        return written or self._sum is not None or memory is not self._memory

    def differs(self) -> Tensor | bool:
        """Return whether the values are not those that were gathered, or no longer those of the shard."""
        memory: Tensor = self._parameter.all_gather_outputs[0]
        shard: Tensor = self._parameter._sharded_param_data
        known, self._sum = self._sum, None
        written, replaced = memory._version != self._version, memory is not self._memory
        outdated = shard._version != self._shard_version  # written since, as for a unit that is gathered early
        self._memory, self._version, self._shard_version = memory, memory._version, shard._version
        self._suspect |= written
        if known is not None and not replaced and not outdated:
            return checksum(memory) != known
        rank, size = self._parameter.mesh_info.shard_mesh_rank, self._parameter.mesh_info.shard_mesh_size
        own = memory.view(size, -1)[rank]
        return differs(own, shard.to(own.device, own.dtype))

    def replaced(self) -> bool:
        """Return whether the module's attribute refers to other memory than that which is gathered into."""
        made = getattr(self._parameter, "_unsharded_param", None)
        if made is None:
            return False
        return made.untyped_storage()._cdata != self._parameter.all_gather_outputs[0].untyped_storage()._cdata

    def shard_replaced(self) -> bool:
        """Return whether the shard's data was replaced since the first call. A sharded tensor's own storage is empty;
        it is that of another one then."""
        known, storage = self._shard
        shard = self._parameter.sharded_param
        now = shard.untyped_storage()
        if known is not shard:
            self._shard = shard, now
            return False
        return now._cdata != storage._cdata


@functools.cache
def shard_operations() -> ShardOperations:
    """Return the watch on the operations of this process, which starts with the first call."""
    return ShardOperations()


class ShardOperations:
    """Watch on operations of DTensors: it refuses those that would act on something else than those of whole tensors.

    Attributes:
        numbers_allowed: numbers of a rank's own part may be read, by an optimizer that sums them over the ranks.
    """

    def __init__(self) -> None:
        self.numbers_allowed = False
        self._copies: dict[int, tuple[StorageWeakRef, int]] = {}  # with the storage of what was copied
        dispatcher: Any = DTensor._op_dispatcher
        self._redistribute, self._end = dispatcher.redistribute_local_args, dispatcher._dispatch_fast_path_python_tail
        dispatcher.redistribute_local_args = self._redistributed
        dispatcher._dispatch_fast_path_python_tail = self._ended
        dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = self._number

    def _redistributed(self, info: Any, schema: Any, *arguments: Any) -> None:
        """Note the copy of which the operation will return a view."""
        before = info.local_args[0]
        self._redistribute(info, schema, *arguments)
        copy = info.local_args[0]
        if copy is not before and isinstance(before, Tensor) and (info.schema or schema).op._schema._is_view_op():
            storage, source = copy.untyped_storage(), before.untyped_storage()._cdata
            if storage._cdata != source:  # it has the whole otherwise
                self._copies = {key: each for key, each in self._copies.items() if not each[0].expired()}
                self._copies[storage._cdata] = StorageWeakRef(storage), source

    def _ended(self, op: Any, arguments: Sequence[Any], *others: Any) -> Any:
        """Raise TaskError if the operation has written such a copy."""
        if self._copies and op._schema.is_mutable:
            written = arguments[0] if isinstance(arguments[0], list | tuple) else arguments[:1]
            for each in written:
                if isinstance(each, DTensor):
                    self._require_no_copy(each.to_local().untyped_storage()._cdata)
        return self._end(op, arguments, *others)

    def _require_no_copy(self, storage: int) -> None:
        copy, source = self._copies.get(storage, (None, 0))
        if copy is None or copy.expired():
            return
        name = next(filter(None, (writes.name_of(source) for writes in _WATCHED)), "a sharded tensor")
        raise TaskError(
            f"A part of {name} was written in place, as in w[0].zero_() or w.diagonal().fill_(1). The tensor is "
            "sharded, so that its part is a copy, and the write would be lost.\n"
            "  Write the whole tensor on every rank: whole = w.full_tensor(), change it, and w.copy_(torch.distributed."
            "tensor.distribute_tensor(\n  whole, w.device_mesh, w.placements)); or use strategy=ddp."
        )

    def _number(self, op: object, arguments: Sequence[Any], others: object) -> Any:  # noqa: ARG002
        tensor: DTensor = arguments[0]
        sizes = tensor.device_mesh.shape
        partial = any(each.is_partial() and size > 1 for each, size in zip(tensor.placements, sizes, strict=True))
        if partial and not self.numbers_allowed:
            raise TaskError(
                "A number of a sharded tensor was read, by item(), float() or a condition: a sum or a norm of this "
                "rank's part alone.\n"
                "  Take that of the whole tensor, on all ranks: w.norm().full_tensor().item(); or use strategy=ddp."
            )
        return tensor.to_local().item()
