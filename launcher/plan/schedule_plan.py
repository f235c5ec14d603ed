"""Learning rate schedule of a plan: its factor at each optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.config.schema import ScheduleConfig, ScheduleKind


@dataclass(frozen=True, kw_only=True)
class SchedulePlan(ScheduleConfig):
    """Learning rate schedule.

    Attributes:
        steps: length of the schedule if it differs from the run's: a drill runs the first windows of a longer job.
    """

    min_ratio: float = 0.0
    steps: int | None = None

    @property
    def name(self) -> str:
        """Return the kind, or the class of a custom schedule."""
        return self.target or self.kind.value

    def factor(self, step: int, steps: int | None) -> float:
        """Return the multiple of the learning rate that optimizer step ``step`` (from 0) of ``steps`` applies.

        It reaches ``min_ratio`` only after the last step, as with torch's CosineAnnealingLR(T_max=steps).
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind is ScheduleKind.constant or steps is None:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, steps - self.warmup_steps))
        fall = (1 + math.cos(math.pi * progress)) / 2 if self.kind is ScheduleKind.cosine else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * fall
