"""Log of the allocations of a trace."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

# DTensor's derivation of a result's shape: it runs the operator on tensors of the whole size, once for each shape in a
# process, on fake tensors in a real job too
_DERIVE = "_propagate_tensor_meta_non_cached"
_is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)


class AllocationLog(TorchDispatchMode):
    """Mode that records each allocation and each free of storages on one kind of device.

    torch's MemTracker also classifies memory by use, for which it hooks each parameter and each module, and fails for
    frozen parameters. Only the sum is needed here.

    Args:
        rounding: bytes of which an allocation has a multiple.

    Attributes:
        events: bytes of each allocation (positive) and each free (negative), in order.
        operators: number of operators that ran.
    """

    def __init__(self, device: torch.device, rounding: int = 1) -> None:
        super().__init__()
        self._rounding = rounding
        self._type = device.type
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.events: list[int] = []
        self.operators = 0
        self._resize = torch.UntypedStorage.resize_
        self._derive = getattr(ShardingPropagator, _DERIVE)
        self._paused = False

    def add(self, tree: Any) -> None:
        """Count every tensor in ``tree``."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.device.type == self._type:
                for storage in get_untyped_storages(leaf):
                    self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), -(-storage.size() // self._rounding) * self._rounding
        reference, before = self._storages.get(key, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, functools.partial(self._forget, key))
        self._storages[key] = reference, size
        self._record(size - before)

    def _forget(self, key: int, _: Any) -> None:
        self._record(-self._storages.pop(key)[1])

    def _record(self, size: int) -> None:
        if size:
            self.events.append(size)

    def __enter__(self) -> AllocationLog:
        def resize(storage: torch.UntypedStorage, size: int) -> None:  # FSDP frees and gathers units by this
            self._resize(storage, size)
            if id(storage) in self._storages:
                self._count(storage)

        def derive(*args: Any) -> Any:  # a method: it takes the propagator
            self._paused = True
            try:
                return self._derive(*args)
            finally:
                self._paused = False

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        setattr(ShardingPropagator, _DERIVE, derive)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        setattr(ShardingPropagator, _DERIVE, self._derive)
        super().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_wrapper, types)):
            return NotImplemented  # the class, such as DTensor, then calls the operator on the tensors inside
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls; takes a tenth of the time
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self.operators += 1
            self.add(result)
        return result
