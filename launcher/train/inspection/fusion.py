"""Fusion: which operators of compiled modules become one, and what is left of their memory traffic.

The rule:

- Operators of a compiled module that run between two that are not fused, and that share a tensor, become one operator.
  It reads each tensor from outside once, and writes each result once that anything outside reads later: another
  operator, the backward pass, a collective, the optimizer. All other results never reach memory.
- Not fused are matrix products, convolutions, attention, writes to indices (scatter), collectives, and what runs
  outside of compiled modules: autograd's accumulation, clipping, the optimizer. The forward pass of a module and its
  backward pass are compiled apart, so what the former saves for the latter is written and read.

Sources: TorchInductor fuses pointwise operators and reductions that read what another one writes, or the same tensor
(torch/_inductor/scheduler.py, ``Scheduler.can_fuse`` and ``score_fusion_memory``; Ansel et al., "PyTorch 2: Faster
Machine Learning Through Dynamic Python Bytecode Transformation and Graph Compilation", 2024). It leaves products and
attention to libraries unless it is set to tune templates (``max_autotune`` in torch/_inductor/config.py, off).

Not in the rule: compiled code computes some results again in the backward pass instead of saving them, and moves
operators past products, which makes it faster; it does not fuse operators whose loops differ too much, and reads a row
twice that does not fit into a reduction's registers, which makes it slower.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from launcher.train.parallel.mixed_precision import in_backward


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors in memory; one that repeats a smaller tensor has only those of that one."""
    return sum(min(each.numel() * each.itemsize, each.untyped_storage().nbytes()) for each in tensors)


@dataclass
class _Result:
    """Storage that a fused operator computes. ``is_read``: something outside reads it later."""

    size: int
    storage: weakref.ref[Any]
    is_read: bool = False


@dataclass(eq=False)
class FusedOperator:
    """Operators that a compiler fuses into one, by the numbers of the storages that they read and compute."""

    read: dict[int, int] = field(default_factory=dict[int, int])
    results: dict[int, _Result] = field(default_factory=dict[int, _Result])

    def traffic(self) -> tuple[int, int]:
        """Return the bytes read and written, once the whole window has run. Results that nothing has read by then count
        if they still exist, such as parameters that were changed in place."""
        results = (each for each in self.results.values() if each.is_read or each.storage() is not None)
        return sum(self.read.values()), sum(each.size for each in results)


class Fusion:
    """Fusion of the operators of a trace, which are added one after the other."""

    def __init__(self) -> None:
        self._running: int | None = None  # number of the call of a compiled module
        self._numbers = itertools.count()
        # calls of compiled modules, by the first and after the last of the numbers of their autograd nodes
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._open: dict[int, FusedOperator] = {}  # by the storages that they read or compute
        self._makers: dict[int, FusedOperator] = {}  # of each storage that a fused operator has computed

    def compile(self, modules: Sequence[nn.Module]) -> None:
        """Stand in for the compilation of modules: their operators are fused."""
        for module in modules:
            module.forward = functools.partial(self._call, module.forward)

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running is not None:  # inside another compiled module
            return forward(*args, **kwargs)
        self._running, start = next(self._numbers), torch.autograd._get_sequence_nr()
        try:
            return forward(*args, **kwargs)
        finally:
            self._running = None
            if not in_backward():  # the nodes of a recomputation do not run
                self._starts.append(start)
                self._ends.append(torch.autograd._get_sequence_nr())

    def current_pass(self) -> int | None:
        """Return the number of the forward or backward pass of a compiled module that the operator which has just run
        belongs to; None if it belongs to none."""
        if self._running is not None:
            return self._running
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number = node._sequence_nr()
        place = bisect_right(self._starts, number) - 1
        return -1 - place if place >= 0 and number < self._ends[place] else None

    def add(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Add an operator that can be fused."""
        read, written = ([(self._number(each), each) for each in tensors] for tensors in (inputs, outputs))
        joined = self._joined([number for number, _ in (*read, *written)])
        for number, tensor in read:
            if number not in joined.results:
                joined.read[number] = max(bytes_of([tensor]), joined.read.get(number, 0))
                self._use(number)
        for number, tensor in written:
            storage = tensor.untyped_storage()
            before = joined.results.get(number)
            size = max(bytes_of([tensor]), 0 if before is None else before.size)
            joined.results[number], self._makers[number] = _Result(size, weakref.ref(storage)), joined

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Note that an operator that is not fused reads tensors."""
        for tensor in tensors:
            self._use(self._number(tensor))

    def close(self) -> list[FusedOperator]:
        """Return the fused operators of what was added since the last call."""
        fused = [*dict.fromkeys(self._open.values())]
        self._open = {}
        return fused

    def _joined(self, numbers: Sequence[int]) -> FusedOperator:
        """Return one operator in place of all open ones that share one of the storages."""
        first, *others = dict.fromkeys(self._open[each] for each in numbers if each in self._open) or [FusedOperator()]
        for other in others:
            first.results |= other.results
            first.read = {
                number: max(first.read.get(number, 0), other.read.get(number, 0))
                for number in {**first.read, **other.read}
            }
            self._makers |= dict.fromkeys(other.results, first)
            numbers = [*numbers, *other.read, *other.results]
        self._open |= dict.fromkeys(numbers, first)
        return first

    def _use(self, number: int) -> None:
        if (maker := self._makers.get(number)) is not None:
            maker.results[number].is_read = True

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage. The id of a storage may be that of an earlier one."""
        storage = tensor.untyped_storage()
        reference, number = self._storages.get(id(storage), (None, 0))
        if reference is None or reference() is not storage:
            number = next(self._numbers)
            self._storages[id(storage)] = weakref.ref(storage), number
        return number
