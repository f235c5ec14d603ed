"""The classic mistakes of gradient accumulation, each as a patch of an engine: the suite must fail with every one.

They exist here only, to show that the suite would see them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor, nn

from launcher import Engine
from launcher.config.schema import Sync
from launcher.train.engine.window_totals import ReducedTotals, WindowTotals
from tests.equivalence.grid import CLIP


def mean_of_means(engine: Engine) -> None:
    """Every micro-batch counts alike, however many items it has."""
    backward = engine.backward
    engine.backward = lambda loss_sum, items: backward(loss_sum / items, 1)


def _with_items(engine: Engine, items: Callable[[ReducedTotals], int]) -> None:
    apply = engine._optimizer_step.apply

    def wrong(
        gradients: list[Tensor], agreed: ReducedTotals, totals: WindowTotals, samples: Callable[[int], str]
    ) -> float:
        return apply(gradients, dataclasses.replace(agreed, denominator=items(agreed)), totals, samples)

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
    """The gradient accumulated so far is clipped after each backward pass."""
    if engine.plan.train.clip_norm is not None:
        _after_backward(engine, lambda: nn.utils.clip_grad_norm_(engine.parallel.module.parameters(), CLIP))


def schedule_per_micro_batch(engine: Engine) -> None:
    current, accumulation = engine._current, engine.plan.batch.accumulation
    _after_backward(engine, lambda: current.handed_out == accumulation or engine._optimizer_step.schedule.step())


def sync_never_skipped(engine: Engine) -> None:
    """Every micro-batch is sent, as without ``no_sync``."""
    micro_batch = engine.parallel.micro_batch

    def last(sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:  # noqa: ARG001
        return micro_batch(sync, first=first, last=True)

    engine.parallel.micro_batch = last


MISTAKES: dict[str, Callable[[Engine], None]] = {
    mistake.__name__: mistake
    for mistake in (
        mean_of_means, no_division, full_count, clip_per_micro_batch, schedule_per_micro_batch, sync_never_skipped,
    )
}  # fmt: skip
