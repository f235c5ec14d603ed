"""Windows of a measurement: their sizes, and what each of them took."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.config.schema import Sync
from launcher.plan.batch import Batch, RampStage
from launcher.plan.work import seconds_of

STABLE = 0.01  # relative error of all medians at which more windows are not needed


@dataclass(frozen=True, kw_only=True)
class WindowSizes(Batch):
    """Batch whose windows have sizes of their own. ``sizes``: samples of the first windows."""

    sizes: tuple[int, ...] = ()

    @classmethod
    def of(cls, batch: Batch, micro_batches: Sequence[int]) -> WindowSizes:
        """Return the batch whose windows have this many micro-batches, as full ones as those of ``batch``.

        Its ``accumulation``, by which samples are read ahead, is 1: they soon arrive as steadily as they are used.
        """
        unit, share = batch.micro_size * batch.world_size, batch.global_size / batch.accumulation
        sizes = tuple(max(round(share * number), unit * (number - 1) + 1) for number in micro_batches)
        values = {each.name: getattr(batch, each.name) for each in dataclasses.fields(batch)}
        ramp = tuple(RampStage(windows=1, global_size=size) for size in sizes)
        return cls(
            **values | {"global_size": max(sizes), "accumulation": max(micro_batches), "ramp": ramp}, sizes=sizes
        )

    def global_size_at(self, index: int) -> int:
        return self.sizes[index] if index < len(self.sizes) else self.global_size


@dataclass(frozen=True)
class PlannedWindow:
    """A window to be run.

    Attributes:
        counts: whether its time is recorded as a whole.
        splits: whether the times of its parts are. On a GPU this takes longer, because the host waits between them.
    """

    sync: Sync
    micro_batches: int
    counts: bool = False
    splits: bool = False


@dataclass
class Parts:
    """Seconds of the parts of a window: the passes of each micro-batch, the optimizer step, and the rest."""

    forward: list[float] = field(default_factory=list[float])
    backward: list[float] = field(default_factory=list[float])
    optimizer: float = 0.0
    window: float = 0.0


@dataclass
class Timings:
    """Seconds of everything that was measured, in the order in which it ran.

    Attributes:
        windows: whole windows, by policy and number of micro-batches.
        forward, backward: of micro-batches that are neither the first nor the last of a window, under the policy that
            has the fewest collectives.
        optimizer, window: see ``Work``.
    """

    windows: dict[str, dict[int, list[float]]] = field(default_factory=dict[str, dict[int, list[float]]])
    forward: list[float] = field(default_factory=list[float])
    backward: list[float] = field(default_factory=list[float])
    optimizer: list[float] = field(default_factory=list[float])
    window: list[float] = field(default_factory=list[float])

    def add(self, planned: PlannedWindow, step_s: float, parts: Parts) -> None:
        """Add what was measured of a window."""
        if planned.counts:
            self.windows.setdefault(planned.sync.value, {}).setdefault(planned.micro_batches, []).append(step_s)
        if planned.splits:
            self.forward += parts.forward[1:]
            self.backward += parts.backward[:-1]
            self.optimizer.append(parts.optimizer)
            self.window.append(parts.window)

    @property
    def stable(self) -> bool:
        lists = [seconds for sizes in self.windows.values() for seconds in sizes.values()]
        return bool(lists) and all(seconds_of(seconds).error <= STABLE for seconds in lists)
