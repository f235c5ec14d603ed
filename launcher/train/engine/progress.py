"""Progress of an engine, for its users: counters, position, and the newest measurements."""

from __future__ import annotations

from launcher.errors import EngineMisuse
from launcher.plan.run_plan import RunPlan
from launcher.train.data.window_feed import WindowPosition
from launcher.train.engine.calibration import Calibrated, Calibration
from launcher.train.engine.optimizer_step import OptimizerStep
from launcher.train.engine.window import CurrentWindow
from launcher.train.measure.noise_scale import Noise, NoiseScale


class EngineProgress:
    """Progress of an engine, as its parts have counted and measured it.

    Attributes:
        plan: the plan, with smaller micro-batches after ``batch.on_oom=shrink``.
        position: that of the next window in the data; the same on all ranks.
    """

    plan: RunPlan
    position: WindowPosition
    _optimizer_step: OptimizerStep
    _current: CurrentWindow
    _calibration: Calibration
    _noise: NoiseScale
    _again = False  # whether the loop over the windows continues at another position

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self._optimizer_step.steps

    @property
    def skipped_steps(self) -> int:
        """Windows not applied because fp16 overflowed."""
        return self._optimizer_step.skipped_steps

    @property
    def empty_windows(self) -> int:
        """Windows not applied because they held no item."""
        return self._optimizer_step.empty_windows

    @property
    def nonfinite_windows(self) -> int:
        """Windows not applied because their loss or gradient was not finite (train.on_nonfinite=skip)."""
        return self._optimizer_step.nonfinite_windows

    @property
    def samples(self) -> int:
        """Samples seen so far, on all ranks."""
        return self._optimizer_step.samples

    @property
    def items(self) -> float:
        """Items seen so far, on all ranks."""
        return self._optimizer_step.items

    @property
    def over(self) -> bool:
        """True if the plan's steps or epochs are done."""
        steps, epochs = self.plan.train.steps, self.plan.train.epochs
        over_by_steps = steps is not None and self.steps >= steps
        return over_by_steps if epochs is None else self.position.epoch >= epochs

    @property
    def samples_in_batch(self) -> int:
        """Samples of the current micro-batch; 0 in a placeholder that only keeps step with the other ranks."""
        if self._current.micro is None:
            raise EngineMisuse("No micro-batch is under way.")
        return self._current.micro.samples

    @property
    def window_index(self) -> int:
        """Index of the next window in the run, from 0."""
        return self.position.index

    @property
    def calibrated(self) -> Calibrated | None:
        """Result of the calibration; None without one."""
        return self._calibration.result

    @property
    def noise(self) -> Noise | None:
        """Gradient noise scale; None before enough windows."""
        return self._noise.estimate

    def _step_and_epoch(self) -> tuple[int, int]:
        return self.steps + (self._current.window is not None), self.position.epoch
