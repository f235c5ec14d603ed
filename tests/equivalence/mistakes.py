"""The classic mistakes of gradient accumulation, each as a patch of an engine: the suite must fail with every one.

They exist here only, to show that the suite would see them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from launcher import Engine
from launcher.train.engine.window_totals import ReducedTotals
from tests.equivalence.grid import CLIP


def mean_of_means(engine: Engine) -> None:
    """Every micro-batch counts alike, however many items it has."""
    backward = engine.backward
    engine.backward = lambda loss_sum, items: backward(loss_sum / items, 1)


def _with_items(engine: Engine, items: Callable[[ReducedTotals], int]) -> None:
    apply = engine._optimizer_step.apply

    def wrong(gradients: list[Tensor], agreed: ReducedTotals) -> float:
        return apply(gradients, dataclasses.replace(agreed, items=items(agreed)))

    engine._optimizer_step.apply = wrong


def no_division(engine: Engine) -> None:
    """The gradient of the sum."""
    _with_items(engine, lambda _: 1)


def full_count(engine: Engine) -> None:
    """K, instead of the micro-batches that a short window really has."""
    full = engine.plan.batch.global_size
    _with_items(engine, lambda agreed: round(agreed.items * full / agreed.samples))


def _after_backward(engine: Engine, then: Callable[[], object]) -> None:
    backward = engine.precision.backward

    def wrong(loss: Tensor) -> None:
        backward(loss)
        then()

    engine.precision.backward = wrong


def clip_per_micro_batch(engine: Engine) -> None:
    """What has been accumulated so far is clipped after each backward pass."""
    if engine.plan.train.clip_norm is not None:
        _after_backward(engine, lambda: nn.utils.clip_grad_norm_(engine.parallel.module.parameters(), CLIP))


def schedule_per_micro_batch(engine: Engine) -> None:
    _after_backward(engine, lambda: engine._current.at_boundary or engine._optimizer_step.schedule.step())


def sync_outside_forward(engine: Engine) -> None:
    """The context that skips a sync opens after the forward pass, in which DDP decides: every micro-batch is sent."""
    micro_batch, backward = engine.parallel.micro_batch, engine.precision.backward
    opened: list[AbstractContextManager[object]] = []

    def late(*args: Any, **kwargs: Any) -> AbstractContextManager[object]:
        opened[:] = [micro_batch(*args, **kwargs)]
        return nullcontext()

    def wrong(loss: Tensor) -> None:
        with opened[0]:
            backward(loss)

    engine.parallel.micro_batch, engine.precision.backward = late, wrong


MISTAKES: dict[str, Callable[[Engine], None]] = {
    mistake.__name__: mistake
    for mistake in (
        mean_of_means, no_division, full_count, clip_per_micro_batch, schedule_per_micro_batch, sync_outside_forward,
    )
}  # fmt: skip
