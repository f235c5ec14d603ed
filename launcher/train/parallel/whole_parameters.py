"""Whole values of sharded parameters, for code of the user's that runs between two windows."""

from __future__ import annotations

from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_tensor: Any = Tensor  # its properties are descriptors, which type checkers do not know
# on the shards themselves: they are the parameters, and have the whole one's shape
_ON_SHARDS: frozenset[Any] = frozenset({
    _tensor.requires_grad_, _tensor.size, _tensor.dim, _tensor.numel, _tensor.__hash__,
    _tensor.requires_grad.__get__, _tensor.requires_grad.__set__, _tensor.grad.__get__, _tensor.grad.__set__,
    _tensor.shape.__get__, _tensor.dtype.__get__, _tensor.device.__get__,
})  # fmt: skip


class WholeParameters(TorchFunctionMode):
    """Context in which functions of torch get the whole of each sharded parameter. What they write into it is written
    into the shards at the end. All ranks run the same functions in it.

    Args:
        device: that of the whole parameters.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._whole: dict[int, tuple[DTensor, nn.Parameter]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ON_SHARDS:
            args, kwargs = tree_map_only(DTensor, self._gathered, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _gathered(self, shard: DTensor) -> Tensor:
        if id(shard) not in self._whole:
            whole = cast("DTensor", shard.detach().to(self._device)).full_tensor().clone()
            self._whole[id(shard)] = shard, nn.Parameter(whole, requires_grad=shard.requires_grad)
        return self._whole[id(shard)][1]

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for shard, whole in self._whole.values():
                # without communication: each rank has the whole
                placed = distribute_tensor(whole.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
                own, written = shard.to_local(), placed.to_local()
                if not torch.equal(own, written.to(own.device)):
                    own.copy_(written)
        self._whole.clear()
