"""What summary.json says of the whole run, over all the times that it was begun: it travels in the checkpoints."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective
from launcher.train.checkpoint.contents import origin
from launcher.train.checkpoint.load import Restored
from launcher.train.engine.calibration import WARM_UP_WINDOWS
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.measure.comm_meter import CommStats, Traffic
from launcher.train.metrics import calibration_metrics, noise_metrics, peak_memory_bytes

# the newest so many full windows have their say in the median of the step's time
SAMPLED_WINDOWS = 1000
# full windows needed before their median is recorded with the calibration
SETTLED_WINDOWS = 10


def _seconds() -> deque[tuple[float, float]]:
    return deque(maxlen=SAMPLED_WINDOWS)


@dataclass
class Account:
    """Kept by every rank, after each window.

    Args:
        loss: of the last window with items, None before one.
        eval_loss: of the last evaluation, None where that was not finite or there was none.
        evaluated: whether there was one.
        typical: what the last full window sent; seconds: (step, waiting for data) of such windows, without the first
            ones of each process; first_seconds: of those, in this process.
        settles: whether the calibration is to go into the next record: the median of ``seconds`` has become worth it.
        peak_bytes: the most memory that this rank has held.
        resumed: how often the run has gone on from a checkpoint, on the way that led here.
        seconds_before: of training, up to the checkpoint that this process went on from.
        checkpoint: the newest one's directory.
        failed_saves: checkpoints that could not be written.
        size: samples of the last full window.
        since: the step after which a step takes, sends and holds what it does now; 0: from the start.
        worlds: where the run went on in another world: the steps done by then, and both of them.
        commit: of the task's code, see ``snapshot.commit_of``; rank 0 knows it. ``commits``: where the run went on with
            another one, as ``worlds``.
    """

    plan: RunPlan
    engine: Engine
    loss: float | None = None
    eval_loss: float | None = None
    evaluated: bool = False
    typical: CommStats | None = None
    seconds: deque[tuple[float, float]] = field(default_factory=_seconds)
    first_seconds: deque[tuple[float, float]] = field(default_factory=_seconds)
    settles: bool = False
    peak_bytes: int = 0
    resumed: int = 0
    seconds_before: float = 0.0
    checkpoint: str | None = None
    failed_saves: int = 0
    size: int | None = None
    since: int = 0
    worlds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    commit: str | None = None
    commits: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    started: float = field(default_factory=time.perf_counter)
    _windows_here: int = 0

    def take_in(self, result: StepResult) -> None:
        if result.items:
            self.loss = result.loss
        size = self.plan.batch.global_size_at(result.window)
        self._windows_here += 1
        if result.samples == size:
            if size != self.size:  # batch.ramp has come one stage further
                self.size = size
                self.seconds.clear()
                self.first_seconds.clear()
            self.typical = result.comm
            waited_s = result.data_s if result.spent is None else max(result.data_s, result.spent.data_most_s)
            warm = self._windows_here > WARM_UP_WINDOWS
            (self.seconds if warm else self.first_seconds).append((result.step_s, waited_s))
            self.settles |= warm and len(self.seconds) == SETTLED_WINDOWS

    @property
    def total_s(self) -> float:
        return self.seconds_before + time.perf_counter() - self.started

    def memory(self) -> int:
        """Bytes: the most that this rank has held so far."""
        self.peak_bytes = max(self.peak_bytes, peak_memory_bytes(self.engine.device))
        return self.peak_bytes

    def calibration(self) -> dict[str, float]:
        """Return what the calibration says of a whole step; nothing before there are both."""
        calibrated = self.engine.calibrated
        if calibrated is None or not self.seconds:
            return {}
        step_s, data_s = (statistics.median(column) for column in zip(*self.seconds, strict=True))
        return calibration_metrics(calibrated, step_s, data_s, reads_ahead=self.plan.train.loader_workers > 0)

    def state_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "evaluated": self.evaluated,
            "typical": None if self.typical is None else dataclasses.asdict(self.typical),
            "step_seconds": [step_s for step_s, _ in self.seconds],
            "data_seconds": [data_s for _, data_s in self.seconds],
            "peak_bytes": self.memory(),
            "size": self.size,
            "since": self.since,
            "resumed": self.resumed,
            "worlds": self.worlds,
            "commit": self.commit,
            "commits": self.commits,
            "failed_saves": self.failed_saves,
            "total_s": self.total_s,
        }

    def go_on(self, restored: Restored) -> None:
        """From a checkpoint. Where a step takes, sends and holds other than it did then, those figures begin anew."""
        state = restored.run["account"]
        self.loss, self.eval_loss, self.evaluated = state["loss"], state["eval_loss"], state["evaluated"]
        self.resumed, self.seconds_before = state["resumed"] + 1, state["total_s"]
        self.worlds, self.failed_saves = state.get("worlds", []), state.get("failed_saves", 0)
        before = _world(restored.origin | {"world_size": restored.ranks})
        now = _world(origin(self.engine.plan))
        if restored.origin and before != now:
            self.worlds.append({"step": self.engine.steps, "from": before, "to": now})
        self.commits = state.get("commits", [])
        if (saved_by := restored.other_commit(self.commit)) is not None:
            self.commits.append({"step": self.engine.steps, "from": saved_by, "to": self.commit})
        self.commit = self.commit or state.get("commit")
        self.since = state.get("since", 0) if restored.alike else self.engine.steps
        if not restored.alike:
            return
        self.peak_bytes, self.size = state["peak_bytes"], state["size"]
        if (typical := state["typical"]) is not None:
            kinds = {Collective(kind): Traffic(**traffic) for kind, traffic in typical["kinds"].items()}
            self.typical = CommStats(**{**typical, "kinds": kinds})
        self.seconds.extend(zip(state["step_seconds"], state.get("data_seconds", ()), strict=False))

    def summary(self, verdict: str) -> dict[str, Any]:
        """What summary.json holds. ``train/loss``: of the last window; times: medians over full windows."""
        engine = self.engine
        summary: dict[str, Any] = {
            "verdict": verdict,
            "resumed": self.resumed,
            **({"worlds": self.worlds} if self.worlds else {}),
            **({"commit": self.commit} if self.commit else {}),
            **({"commits": self.commits} if self.commits else {}),
            "steps": engine.steps,
            "precision": engine.plan.precision.kind.value,
            **({} if self.loss is None else {"train/loss": self.loss}),
            **({"eval/loss": self.eval_loss} if self.evaluated else {}),
            "batch/global_size": self.size or self.plan.batch.global_size,
            "batch/micro_size": engine.plan.batch.micro_size,
            "progress/samples": engine.samples,
            "progress/items": engine.items,
            "memory/peak_bytes": self.memory(),
            "amp/skipped_steps": engine.skipped_steps,
            "batch/empty_windows": engine.empty_windows,
            "time/total_s": self.total_s,
            "checkpoint": self.checkpoint,
            "checkpoint/failed": self.failed_saves,
        }
        if self.typical is not None:
            summary["comm/wire_bytes"] = self.typical.wire_bytes
            summary["comm/wire_bytes_every"] = self.typical.wire_bytes_every
            summary["comm/saved_fraction"] = self.typical.saved_fraction
            summary["comm/time_s"] = self.typical.time_s
            if len(self.typical.kinds) > 1:
                for kind, traffic in self.typical.kinds.items():
                    summary[f"comm/{kind.value}/wire_bytes"] = traffic.wire_bytes
            summary["time/step_s"] = statistics.median(step_s for step_s, _ in self.seconds or self.first_seconds)
            summary["throughput/samples_per_s"] = summary["batch/global_size"] / summary["time/step_s"]
        if (named := engine.pace.named) is not None:
            over = engine.pace.straggler is None
            summary["straggler"] = {
                "rank": named.rank, "host": named.host, "share": named.share, "of": named.of, "over": over,
                "steps": engine.pace.slow[named.rank], "measured": engine.pace.measured,
            }  # fmt: skip
        summary |= self.calibration()
        if (calibrated := engine.calibrated) is not None and calibrated.not_measured:
            summary["comm/not_measured"] = calibrated.not_measured
        if (noise := engine.noise) is not None:
            summary |= noise_metrics(noise)
        return summary


def _world(origin: Mapping[str, Any]) -> dict[str, Any]:
    names = ("world_size", "strategy", "global_size", "micro_size", "accumulation", "precision")
    return {name: origin.get(name) for name in names}
