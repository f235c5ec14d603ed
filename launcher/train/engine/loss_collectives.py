"""Collectives of the user's own loss: a micro-batch whose loss contains samples of other ranks has another gradient in
a window of several micro-batches than in one big batch.

Each rank then sees the other ranks' current micro-batch in place of the whole window, and no weighting of sums can
repair that. The first micro-batch of this process that is part of such a window is watched from its hand-out to its
backward pass; a collective counts if

- its gradient is part of the loss: it ran in a ``torch.autograd.Function`` whose node is in the loss's graph, such as
  those of torch.distributed.nn.functional, or it is one of torch's functional collectives with gradient; or
- it brings floating-point values of single other ranks (a gather, not a sum), with or without gradient.

A sum over the ranks without gradient, such as an all-reduce of a count, is not reported: it may only be logged.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from launcher.errors import CollectiveInLoss
from launcher.loss import Loss
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.loss_terms import LossWatch

# methods of a process group through which values of single ranks arrive
_BRINGS = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "recv", "recv_anysource",
)  # fmt: skip
# methods that sum over the ranks, or send: they count only with a gradient
_SUMS = (
    "allreduce", "allreduce_coalesced", "reduce", "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "scatter", "gather", "send",
)  # fmt: skip
# nodes of torch's functional collectives: of torch 2.13, and of the versions before
_FUNCTIONAL = re.compile(r"c10d_functional\w*?_(all_gather|all_reduce|reduce_scatter|all_to_all|broadcast)\w*")
_EARLIER = re.compile(r"(AllGatherIntoTensor|ReduceScatterTensor|AllToAllSingle)")
_CHECKPOINT = "torch.utils.checkpoint"


@dataclass(frozen=True)
class _Call:
    """A collective that the user's code has run.

    Args:
        place: file and line of the user's code.
        brings: floating-point values of single other ranks have arrived.
        function: class of the ``torch.autograd.Function`` that ran it; None outside of one.
    """

    method: str
    place: str
    brings: bool
    function: type | None


class LossCollectives(LossWatch):
    """Watch for collectives in the first micro-batch of a window of several, until ``stop``."""

    def __init__(self) -> None:
        self._calls: list[_Call] | None = None

    def hand_out(self, number: int, count: int) -> None:  # noqa: ARG002
        """Record the collectives that this thread runs from now on."""
        if self.over or count == 1:
            return
        self._calls, self._thread = [], threading.get_ident()
        if not _watches:
            for name in (*_BRINGS, *_SUMS):
                if name in vars(dist.ProcessGroup):
                    _originals[name] = vars(dist.ProcessGroup)[name]  # getattr would lose that it is a method
                    setattr(dist.ProcessGroup, name, _recorded(name, getattr(dist.ProcessGroup, name)))
        _watches.append(self)

    def stop(self) -> None:
        """Stop recording, if it has been started."""
        if self in _watches:
            _watches.remove(self)
            if not _watches:
                for name, method in _originals.items():
                    setattr(dist.ProcessGroup, name, method)
                _originals.clear()

    def record(self, method: str, arguments: Sequence[Any]) -> None:
        """Record a call of ``method`` of a process group, unless it is the launcher's own, or BatchNorm's."""
        if threading.get_ident() != self._thread or self._calls is None:
            return
        place, function = _origin(sys._getframe(2))
        if place is not None:
            floats = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(arguments))
            self._calls.append(_Call(method, place, method in _BRINGS and floats, function))

    def before_backward(self, losses: Sequence[Loss], micro: MicroBatch, count: int) -> None:  # noqa: ARG002
        """Raise CollectiveInLoss if the loss contains what other ranks have computed."""
        self.stop()
        if self.over or count == 1:
            return
        self.over = True
        calls, self._calls = self._calls or [], None
        nodes, functional = _nodes([loss.total for loss in losses])
        found = [f"{call.method.strip('_')} in {call.place}" for call in calls if call.brings or call.function in nodes]
        if found or functional:
            names = ", ".join(dict.fromkeys([*found, *functional]))
            raise CollectiveInLoss(
                f"The loss of a micro-batch depends on what other ranks have computed ({names}), and a window has "
                f"{count} micro-batches: its gradient would be another one than that of one big batch. Nothing "
                "was applied.\n"
                "  Give the task outputs(model, batch) and window_loss(outputs) in place of loss: the launcher gathers "
                "the rows of all ranks and micro-batches, exactly. Or use batch.accumulation=1. If the result is only "
                "logged, return sums, Loss(metrics={name: (sum, count)}), which the launcher adds up over the ranks, "
                "or, in a loop of your own, gather it after engine.backward()."
            )


_watches: list[LossCollectives] = []  # of several engines, their windows may be open at the same time
_originals: dict[str, Any] = {}


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for watch in _watches:
            watch.record(name, args)
        return method(*args, **kwargs)

    return call


def _origin(frame: FrameType | None) -> tuple[str | None, type | None]:
    """Return file and line of the user's code that runs in ``frame``, None for the launcher's own code and BatchNorm;
    and the innermost class of ``torch.autograd.Function`` on the stack, if there is one."""
    place: str | None = None
    function: type | None = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        passes = module.partition(".")[0] in ("torch", "contextlib") or frame.f_code.co_name == "__torch_function__"
        if place is None and not passes:
            if module.startswith("launcher."):
                return None, None
            place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        if isinstance(frame.f_locals.get("self"), _BatchNorm):
            return None, None
        if function is None and module == "torch.autograd.function" and frame.f_code.co_name == "apply":
            applied = frame.f_locals.get("cls")
            if applied is not None and applied.__module__ != _CHECKPOINT:
                function = applied
        frame = frame.f_back
    return place, function


def _nodes(totals: Sequence[Tensor]) -> tuple[set[type], list[str]]:
    """Return the classes of ``torch.autograd.Function`` whose nodes are in the graphs of ``totals``, and the names of
    functional collectives there."""
    waiting: list[Any] = [total.grad_fn for total in totals if total.grad_fn is not None]
    seen, classes, functional = set(waiting), set[type](), list[str]()
    while waiting:
        node = waiting.pop()
        if (owner := getattr(type(node), "_forward_cls", None)) is not None:
            classes.add(owner)
        if match := _FUNCTIONAL.search(name := node.name()) or _EARLIER.search(name):
            functional.append(match[1])
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return classes, functional
