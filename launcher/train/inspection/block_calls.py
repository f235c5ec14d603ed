"""Calls of repeated blocks in a forward pass of the whole model, and whether they are alike.

A trace of a shortened model shows the first blocks of a run and the last one only. The code between the blocks, and the
blocks' own settings, may treat one in the middle differently: other arguments, recomputation, autocast, an output that
is kept. One forward pass on tensors without memory shows all of them, without a strategy and without a backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportMissingModuleSource]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.train.inspection.repeated_blocks import SHORTEST_BLOCKS, BlockRun, IrregularModel

# Arguments that are compared. Whole numbers are not: a block's index may be one, and the operators show what follows.
_COMPARED = (bool, float, complex, str, bytes, type(None), torch.dtype)


class BlockCalls(TorchDispatchMode):
    """Mode that records the calls of the blocks of ``runs`` in ``model``, in which it registers hooks.

    Args:
        model: the whole model, on fake tensors.
    """

    def __init__(self, model: nn.Module, runs: Sequence[BlockRun], device: torch.device) -> None:
        super().__init__()
        self._runs, self._device = runs, device.type
        self._calls: dict[str, list[list[Any]]] = defaultdict(list)  # for each block, what each of its calls does
        self._order: list[tuple[BlockRun, int]] = []
        self._inside = False
        self._makers: dict[int, int] = {}  # the call that made a tensor, by the tensor's id
        self._alive: list[Tensor] = []  # an id may be used again if its tensor is gone
        for run in runs:
            for index, name in enumerate(run.names):
                block = model.get_submodule(name)
                block.register_forward_pre_hook(self._opener(run, index), prepend=True, with_kwargs=True)
                block.register_forward_hook(self._close)

    def _opener(self, run: BlockRun, index: int) -> Callable[..., None]:
        def open_call(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside:
                raise IrregularModel("equal blocks call each other")
            leaves = tree_leaves((args, kwargs))
            conditions = (
                torch.is_grad_enabled(),
                _top_saved_tensors_default_hooks(True) is not None,  # checkpointing, offloading
                torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device),
            )
            self._inside = True
            self._order.append((run, index))
            self._calls[run.names[index]].append([conditions, [_argument(leaf) for leaf in leaves]])

        return open_call

    def _close(self, *_: Any) -> None:
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        call = len(self._order) - 1
        for tensor in given:
            maker = self._makers.get(id(tensor))
            if maker is not None and not (self._inside and maker >= call - 1):
                raise IrregularModel("the model reads what an inner block computes elsewhere than in the next block")
        if self._inside:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            run, index = self._order[-1]
            self._calls[run.names[index]][-1].append((func, [(tensor.shape, tensor.dtype) for tensor in made]))
            if run.names[index] in run.left_out(SHORTEST_BLOCKS[0]):
                new = [tensor for tensor in made if all(tensor is not each for each in given)]
                self._makers.update(dict.fromkeys(map(id, new), call))
                self._alive += new
        return result

    def check(self) -> None:
        """Raise IrregularModel unless each block was called once, in order, and the inner ones of a run did the same.

        The first blocks and the last one of a run may differ, because no stand-in takes their place.
        """
        for run in self._runs:
            if [index for each, index in self._order if each is run] != list(range(len(run.names))):
                raise IrregularModel("the model does not call each of its equal blocks once, in their order")
            inner = [self._calls[name] for name in run.left_out(SHORTEST_BLOCKS[0])]
            if any(calls != inner[0] for calls in inner):
                raise IrregularModel("equal blocks differ in what they do, or in how they are called")


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    return value if isinstance(value, _COMPARED) else type(value)
