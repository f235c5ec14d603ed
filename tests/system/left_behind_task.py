"""The task of test_left_behind.py: leaves a mark where it has come to, and waits there to be killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import launcher


def wait_at(place: str) -> NoReturn:
    """Say so in the working directory, and wait."""
    Path(f"at {place} {os.getpid()}").touch()
    while True:
        time.sleep(60)


def is_forecast() -> bool:
    return torch._guards.detect_fake_mode() is not None


class Task:
    """``waits``: where it stays for ever: in its constructor, in shard_units() while memory
    is predicted, in a sample that a loader process reads, or in the loss."""

    def __init__(self, waits: str = "nowhere") -> None:
        self._waits = waits
        if waits == "construction":
            wait_at(waits)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def shard_units(self, model: nn.Sequential) -> list[nn.Module]:
        if self._waits == "forecast" and is_forecast():
            wait_at(self._waits)
        return [*model]

    def train_data(self) -> Task:
        return self

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError
        if self._waits == "sample" and torch.utils.data.get_worker_info() is not None:
            wait_at(self._waits)
        return torch.full((4,), float(index))

    def loss(self, model: Any, batch: Tensor) -> launcher.Loss:
        if self._waits == "loss" and not is_forecast():  # the forecast would be waited for until its time limit
            wait_at(self._waits)
        return launcher.Loss(total=model(batch).sum(), items=len(batch))
