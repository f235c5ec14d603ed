"""Task whose model and code count its forward passes in every place that a forward pass can change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from launcher import Loss

COUNT = 0
SEEN: list[int] = []
WIDTH = 4


class Tally:
    """A class without objects, which the code only names."""

    passes = 0


class Clocks(nn.Module):
    """A trained layer, its momentum teacher, and frozen parameters that count passes in three ways."""

    passes = 0  # of the class
    written: Tensor
    through_data: Tensor
    replaced: Tensor
    resized: Tensor

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.student, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        for name in ("written", "through_data", "replaced"):
            self.register_parameter(name, nn.Parameter(torch.zeros(2), requires_grad=False))
        self.register_buffer("resized", torch.zeros(1))
        self.counted = torch.zeros(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.require_same()
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
            self.written += 1
            self.through_data.data.add_(1)
            self.replaced.data = self.replaced.data + 1
            self.resized.data = torch.full((1 + len(self.resized),), float(len(self.resized)))
            self.counted.data = self.counted.data + 1
        Clocks.passes += 1
        return self.norm(self.student(x)), self.teacher(x)

    def require_same(self) -> None:
        assert len(set(self.numbers())) == 1, self.numbers()

    def numbers(self) -> list[float]:
        tensors = (self.written, self.through_data, self.replaced, self.counted)
        return [Clocks.passes, *(float(each[0]) for each in tensors), len(self.resized) - 1]


class Counting:
    """Its loss counts in an attribute, in variables of its module and of an enclosing function, and in a class."""

    def __init__(self) -> None:
        global COUNT
        self.calls = COUNT = Clocks.passes = Tally.passes = 0
        SEEN.clear()
        self.count = self._counter()

    @staticmethod
    def _counter() -> Callable[[], int]:
        number = 0

        def count() -> int:
            nonlocal number
            number += 1
            return number

        return count

    def difference(self, model: Any, x: Tensor) -> Tensor:
        global COUNT
        COUNT += 1
        self.calls += 1
        Tally.passes += 1
        SEEN.append(COUNT)
        assert COUNT == self.calls == Tally.passes == len(SEEN) == self.count(), "each place counts the same passes"
        found, wanted = model(x)
        return (found - wanted.tanh() * self.calls).square().sum(1)

    def loss(self, model: Any, x: Tensor) -> Loss:
        return Loss(self.difference(model, x).sum(), len(x))

    def terms(self, model: Any, x: Tensor) -> list[Loss]:
        rows = self.difference(model, x)
        return [Loss(rows.sum(), len(x), name="one"), Loss(rows.sqrt().sum(), 2 * len(x), name="two")]


class OfWindow(Counting):
    loss: Any = None

    def outputs(self, model: Any, x: Tensor) -> Tensor:
        return self.difference(model, x)

    def window_loss(self, rows: Tensor) -> Loss:
        return Loss(rows.sum() * (1 + rows.mean()), len(rows))
