"""Exponential moving average of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from launcher.errors import ConfigError
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.parallel.base import local, wide_copy


class Ema:
    """Exponential moving average of the trained parameters, sharded as they are.

    After each ``every``-th optimizer step, average = decay * average + (1 - decay) * parameter. It starts with the
    initial parameters. Buffers, such as BatchNorm's running statistics, are not averaged: the model's own are used.

    Args:
        decay: between 0 and 1, per update.
        every: optimizer steps between two updates.
        evaluate: evaluate the averages in place of the parameters; ``on_evaluation`` of callbacks sees them, too.

    Attributes:
        averages: by the parameter's name; in fp32 for parameters in bf16 or fp16.
    """

    def __init__(self, decay: float = 0.999, every: int = 1, evaluate: bool = True) -> None:
        if not 0 < decay < 1:
            raise ConfigError("decay", decay, "must be above 0 and below 1.")
        if every < 1:
            raise ConfigError("every", every, "must be at least 1.")
        self._decay, self._every, self._evaluate = decay, every, evaluate
        self.averages: dict[str, Tensor] = {}
        self._restored = set[str]()  # names of averages that a checkpoint had

    def on_setup(self, engine: Engine) -> None:
        self.averages = {name: wide_copy(parameter.detach()) for name, parameter in _trained(engine)}

    def on_start(self, engine: Engine) -> None:
        """Start with the present parameters where a checkpoint without these averages was loaded."""
        for name, average, parameter in zip(self.averages, *self._pairs(engine), strict=True):
            if name not in self._restored:
                average.copy_(parameter)

    @torch.no_grad()
    def on_step(self, engine: Engine, result: StepResult) -> None:
        if result.skipped or result.step % self._every:
            return
        averages, parameters = self._pairs(engine)
        wide = [parameter.to(average.dtype) for average, parameter in zip(averages, parameters, strict=True)]
        torch._foreach_lerp_(averages, wide, 1 - self._decay)

    @contextmanager
    def around_evaluation(self, engine: Engine) -> Iterator[None]:
        """Put the averages in place of the parameters."""
        if not self._evaluate:
            yield
            return
        with torch.no_grad():
            averages, parameters = self._pairs(engine)
            own = [parameter.clone() for parameter in parameters]
            torch._foreach_copy_(parameters, averages)
        yield
        with torch.no_grad():
            torch._foreach_copy_(parameters, own)

    def _pairs(self, engine: Engine) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's averages and parameters, in one order."""
        parameters = dict(engine.model.named_parameters())  # some of them may be frozen for a while
        return [local(average) for average in self.averages.values()], [
            local(parameters[name].detach()) for name in self.averages
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"averages": self.averages}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, average in state["averages"].items():
            if name in self.averages:  # otherwise it is frozen now
                local(self.averages[name]).copy_(local(average))
        self._restored = {*state["averages"]}


def _trained(engine: Engine) -> list[tuple[str, Tensor]]:
    return [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
