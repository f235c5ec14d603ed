"""Best evaluation so far by ``checkpoint.best``: which checkpoint has it, and when ``train.patience`` ends the run.

Every rank has the same state: it follows from metrics that are the same on all ranks. Checkpoints contain it, and the
evaluation of a step that was saved before it was evaluated is judged when the run resumes from there. A resumed run
therefore keeps and ends as the undisturbed run does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.config.schema import BestMode
from launcher.errors import ConfigError, did_you_mean
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint.save import Retention
from launcher.train.metrics import Metrics


class BestEvaluation:
    """Best value of the metric ``checkpoint.best``, and the evaluations since then. Without that key it does nothing.

    Attributes:
        metric: the metric; None: there is nothing to judge.
        step, value: of the best evaluation; None before there is one with a finite value.
        judged: step of the newest evaluation that was judged.
        misses: evaluations since the best one.
        extra: steps of checkpoints that were saved only because they were the best, the newest last.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.metric, self._mode = plan.checkpoint.best, plan.checkpoint.best_mode
        self._keep, self._patience = plan.checkpoint.keep, plan.train.patience
        self.step: int | None = None
        self.value: float | None = None
        self.judged: int | None = None
        self.misses = 0
        self.extra: list[int] = []
        self._warned = False

    def judge(self, step: int, values: Mapping[str, float | None]) -> bool:
        """Return whether the evaluation of ``step`` is the best so far. A step is judged once; a value that is not
        finite is never the best.

        Raises:
            ConfigError: ``values`` lacks the metric.
        """
        if self.metric is None or self.judged == step:
            return False
        self.require_known(values)
        value = values[self.metric]
        self.judged = step
        if value is None or not math.isfinite(value) or not self._is_better(value):
            self.misses += 1
            return False
        self.step, self.value, self.misses = step, value, 0
        return True

    def warning(self, values: Mapping[str, float | None]) -> str | None:
        """Return a message on the first evaluation of this process whose value is not finite; None otherwise."""
        if self.metric is None or self._warned or self.metric not in values:
            return None
        value = values[self.metric]
        if value is not None and math.isfinite(value):
            return None
        self._warned = True
        return f"Warning: checkpoint.best={self.metric} is {value} in this evaluation, which therefore is not the best."

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        return value < self.value if self._mode is BestMode.min else value > self.value

    def require_known(self, names: Iterable[str]) -> None:
        """Check that the metric is among ``names``, those of an evaluation.

        Raises:
            ConfigError: it is not.
        """
        known = sorted(name for name in names if name.startswith("eval/"))
        if self.metric is not None and self.metric not in known:
            raise ConfigError(
                "checkpoint.best", self.metric, "the evaluation has no such metric.",
                f"{did_you_mean(self.metric, known)}Its metrics: {', '.join(known) or 'none'}.",
            )  # fmt: skip

    @property
    def exhausted(self) -> bool:
        """True if the run ends: ``train.patience`` evaluations in a row were no better."""
        return self._patience is not None and self.misses >= self._patience

    @property
    def is_new(self) -> bool:
        """True if there is a metric, and no evaluation has been judged by it."""
        return self.metric is not None and self.judged is None

    def retention(self) -> Retention:
        """Return the checkpoints to keep."""
        superseded = tuple(step for step in self.extra if step != self.step)
        return Retention(self._keep, self.step, superseded)

    def saved_as_best(self) -> None:
        """Note that the current step is saved only because it is the best so far."""
        if self.step is not None:
            self.extra = [*self.extra[-1:], self.step]  # an earlier one was deleted with the last save

    def metrics(self) -> Metrics:
        """Return the metrics of the record."""
        if self.step is None or self.value is None:
            return {}
        return {"best/step": self.step, "best/value": self.value}

    def summary(self, paths: RunPaths, *, over: bool) -> dict[str, Any]:
        """Return the entries of summary.json. ``over``: the run has reached its planned end."""
        if self.metric is None or self._mode is None:
            return {}
        directory = None if self.step is None else paths.checkpoint(self.step)
        best = {
            "metric": self.metric,
            "mode": self._mode.value,
            "step": self.step,
            "value": self.value,
            "judged": self.judged,
            "directory": str(directory) if directory is not None and directory.exists() else None,
        }
        return {"best": best} | ({"stopped_early": self.verdict} if self.exhausted and not over else {})

    @property
    def verdict(self) -> str:
        """Reason why the run ends early."""
        since = f"since step {self.step} ({self.value:.6g})" if self.step is not None else "from the start"
        return f"{self.metric} has not improved in {count(self.misses, 'evaluation')}, {since}"

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state as JSON, for a checkpoint."""
        if self.metric is None:
            return None
        return {
            "metric": self.metric, "mode": self._mode, "step": self.step, "value": self.value, "judged": self.judged,
            "misses": self.misses, "extra": self.extra,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any] | None) -> str:
        """Restore ``state``, and return a message if it is dropped: it is that of another metric, or direction."""
        if state is None:
            return ""
        if (state["metric"], state["mode"]) != (self.metric, self._mode):
            if state["step"] is None:
                return ""
            now = "nothing is the best now" if self.metric is None else f"that by {self.metric} starts afresh"
            return (
                f"The best evaluation by {state['metric']} ({state['mode']}), {state['value']:.6g} at step "
                f"{state['step']}, no longer counts, and its checkpoint is kept no longer than others: {now}."
            )
        self.step, self.value, self.judged = state["step"], state["value"], state["judged"]
        self.misses, self.extra = state["misses"], list(state["extra"])
        return ""
