"""Runner of a drill: runs the job undisturbed, then once per kind of interruption, and compares each with the first."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import RunError
from launcher.extensions.drill.backends import Backend
from launcher.extensions.drill.verdict import (
    Difference,
    DrillResult,
    InterruptedRun,
    Interruption,
    RecordLines,
    first_difference,
    judge_drill,
    wrong_steps,
)
from launcher.plan.callback_plan import without_reports
from launcher.plan.run_plan import RunPlan
from launcher.plan.strategy import job_lines
from launcher.process import wait_until
from launcher.quantities import count
from launcher.rundir.paths import RunPaths


@dataclasses.dataclass(frozen=True)
class Length:
    """Length of the runs of a drill, in optimizer steps.

    ``windows``: steps of each run. ``every``: steps between checkpoints. ``until``: step after which a run is
    interrupted, one step after a checkpoint, so that there is uncommitted work to lose.
    """

    windows: int

    @property
    def every(self) -> int:
        return max(2, self.windows // 4)

    @property
    def until(self) -> int:
        return self.windows // 2 // self.every * self.every + 1


def with_length(plan: RunPlan, paths: RunPaths, length: Length) -> RunPlan:
    """Return ``plan`` as a new run in ``paths`` with the given length."""
    run = dataclasses.replace(plan.run, name=paths.root.name, id=secrets.token_hex(4), dir=str(paths.root))
    train = dataclasses.replace(plan.train, steps=length.windows, epochs=None)
    checkpoint = dataclasses.replace(plan.checkpoint, every=length.every)
    callbacks = without_reports(plan.callbacks)
    return dataclasses.replace(plan.as_run(run), train=train, checkpoint=checkpoint, callbacks=callbacks, notify=())


def shortened(plan: RunPlan) -> tuple[RunPlan, tuple[str, ...]]:
    """Return the plan that a drill runs for a plan of `launch train`, and a description of each changed setting."""
    changed = ["calibration is left out (run.calibrate_s=0)", "every step is recorded (train.log_every=1)"]
    schedule = dataclasses.replace(plan.schedule, steps=plan.schedule_steps)
    keep = plan.checkpoint.keep or 2
    if plan.checkpoint.keep is None:
        changed.append(f"checkpoint.keep={keep}")
    if plan.checkpoint.every_minutes is not None:
        changed.append("no checkpoints by the clock (checkpoint.every_minutes)")
    if not plan.cluster.max_restarts:
        changed.append("cluster.max_restarts=1, or a killed worker would end the job")
    if plan.train.patience is not None:
        changed.append("no run ends early (train.patience=null)")
    cluster = dataclasses.replace(plan.cluster, max_restarts=max(1, plan.cluster.max_restarts))
    plan = dataclasses.replace(
        plan,
        cluster=cluster,
        schedule=schedule,
        train=dataclasses.replace(plan.train, log_every=1, calibrate_s=0.0, patience=None),
        checkpoint=dataclasses.replace(plan.checkpoint, every_minutes=None, keep=keep),
    )
    return plan, tuple(changed)


def drilled_job(plan: RunPlan) -> dict[str, str]:
    """Return the description of the drilled job, by subject."""
    cluster, schedule = plan.cluster, plan.schedule
    steps = "" if schedule.steps is None else f" over {schedule.steps} steps"
    return job_lines(plan) | {
        "cluster": f"{cluster.kind}, {cluster.nodes} × {cluster.workers_per_node}, {cluster.device.value}",
        "schedule": f"{'that of the whole job: ' if steps else ''}{schedule.name}{steps}",
    }


POLL_S = 0.02
# with more steps than this, a step takes microseconds, and no interruption would hit between two steps
_MOST_WINDOWS = 4096
# a drill that was too short is repeated with at least _LONGER times as many windows, and _MARGIN times those needed
_LONGER, _MARGIN = 2, 1.5


class TooLate(Exception):
    """The run ended before it could be interrupted."""


class Drill:
    """Drill of one job.

    Args:
        plan: plan of the user's job, from ``shortened``. Its directory is the drill's.
        changed: description of each setting that differs from the user's, from ``shortened``.
        yaml: text of the config, for each run's config.yaml.
        say: shows one line of progress to the user.
    """

    def __init__(
        self, plan: RunPlan, changed: tuple[str, ...], yaml: str, backend: Backend, say: Callable[[str], None]
    ) -> None:
        self.plan, self._changed, self._yaml, self._backend, self._say = plan, changed, yaml, backend, say

    def run(self, length: Length) -> DrillResult:
        """Run the drill, with longer runs if the job ends before it can be interrupted.

        Raises:
            RunError: The job fails undisturbed, or is over before it can be interrupted.
        """
        needed_s = self._backend.least_remaining_s
        while length.windows <= _MOST_WINDOWS:
            longer: float = _LONGER
            try:
                cold_start_s, remaining_s, run_s = self._undisturbed("undisturbed", length)
                if remaining_s < needed_s:
                    longer = max(longer, _MARGIN * needed_s / max(remaining_s, 0.01))
                    raise TooLate
                results = tuple(self._disturbed(kind, length, cold_start_s) for kind in self._backend.kinds)
            except TooLate:
                self._say(f"{length.windows} windows are over too soon to be interrupted: repeating with more.")
                self._remove(length)
                length = Length(length.windows * min(64, math.ceil(longer)))
                continue
            rerun_difference = None
            if any(result.difference is not None and not result.difference.identical for result in results):
                self._undisturbed("undisturbed again", length)
                rerun_difference = self._difference("undisturbed again", length)
            outcome, reason = judge_drill(results, rerun_difference)
            return DrillResult(
                job=drilled_job(self.plan), changed=self._changed, windows=length.windows, every=length.every,
                cold_start_s=cold_start_s, run_s=run_s, interrupted=results, rerun_difference=rerun_difference,
                outcome=outcome, reason=reason,
            )  # fmt: skip
        raise RunError(
            f"The job ends before it can be interrupted, even with {_MOST_WINDOWS} steps: it is too fast to drill."
        )

    @contextmanager
    def _started(self, name: str, length: Length) -> Generator[RunPaths]:
        """Start a run; end it if an exception leaves the context."""
        plan = with_length(self.plan, self._paths(name, length), length)
        self._backend.start(plan, self._yaml)
        try:
            yield plan.paths
        except BaseException:
            self._backend.abandon()
            raise

    def _paths(self, name: str, length: Length) -> RunPaths:
        return RunPaths(Path(self.plan.run.dir) / f"{name.replace(' ', '_')}-{length.windows}")

    def _remove(self, length: Length) -> None:
        """Remove the runs of a length that was too short."""
        for name in ("undisturbed", *(kind.value for kind in self._backend.kinds)):
            shutil.rmtree(self._paths(name, length).root, ignore_errors=True)

    def _undisturbed(self, name: str, length: Length) -> tuple[float, float, float]:
        """Run the job undisturbed.

        Returns:
            Seconds to its first step, from step ``length.until`` to its end, and in total.
        """
        self._say(f"{name}: {count(length.windows, 'window')} ...")
        started = time.monotonic()
        recorded_at: dict[int, float] = {}  # by step
        ended = False
        with self._started(name, length) as paths:
            while not ended:
                ended = self._backend.ended()  # asked first, so that the last reading of the record is complete
                last = RecordLines.of(paths.metrics).step
                recorded_at |= {step: time.monotonic() for step in range(len(recorded_at) + 1, last + 1)}
                time.sleep(POLL_S)
        if problem := self._backend.problem(None) or wrong_steps(RecordLines.of(paths.metrics), length.windows):
            raise RunError(f"The reference run failed, although it was not interrupted.\n  {problem}")
        remaining_s = recorded_at[length.windows] - recorded_at[length.until]
        return recorded_at[1] - started, remaining_s, time.monotonic() - started

    def _disturbed(self, kind: Interruption, length: Length, cold_start_s: float) -> InterruptedRun:
        """Run the job with an interruption, and compare it with the undisturbed run."""
        self._say(f"{kind.value} ...")
        with self._started(kind.value, length) as paths:
            result = self._interrupt(kind, paths, length, cold_start_s)
        if result.problem:
            self._backend.abandon()
            return result
        result.left = (*self._backend.leftovers(), *(path.name for _, path in paths.partial_checkpoints()))
        try:
            result.difference = self._difference(kind.value, length)
        except RunError as error:  # its last checkpoint may be missing
            result.problem = str(error)
        return result

    def _interrupt(self, kind: Interruption, paths: RunPaths, length: Length, cold_start_s: float) -> InterruptedRun:
        """Interrupt a run that has just started, resume it if necessary, and follow it to its end."""
        backend = self._backend
        limit_s = None if backend.queues else 120 + 10 * cold_start_s
        wait_until(lambda: backend.ended() or RecordLines.of(paths.metrics).step >= length.until, every_s=POLL_S)
        record = RecordLines.of(paths.metrics)
        if record.step < length.until:
            if problem := backend.problem(None):
                raise RunError(f"The job ended before it was interrupted.\n  {problem}")
            raise TooLate
        died = time.monotonic()
        result = InterruptedRun(kind=kind, what=backend.interrupt(kind))
        if not result.what:
            raise TooLate
        if kind in backend.resumed_by_hand:
            wait_until(backend.ended, every_s=POLL_S)
            if kind is Interruption.preempt:
                result.saving_s, died = time.monotonic() - died, time.monotonic()
            record = RecordLines.of(paths.metrics)
            result.at_step = record.step
            if record.step >= length.windows:
                raise TooLate
            if problem := backend.problem(kind):
                result.problem = problem
                return result
            if left := backend.leftovers():
                result.left, result.problem = tuple(left), "it did not end"
                return result
            backend.resume()
        record, result.from_step, result.recovery_s = next_step(backend, paths, record, died, limit_s)
        result.at_step = record.step
        if result.recovery_s is not None:
            wait_until(backend.ended, every_s=POLL_S)
            result.problem = backend.problem(None)
        elif record.step >= length.windows:
            raise TooLate
        else:
            ended = backend.problem(None) if backend.ended() else ""
            result.problem = ended or f"no further step within {limit_s:.0f} s of the interruption"
        return result

    def _difference(self, name: str, length: Length) -> Difference:
        """Return the difference of a finished run from the undisturbed one."""
        ours, theirs = self._paths(name, length), self._paths("undisturbed", length)
        checkpoints = [str(paths.checkpoint(length.windows)) for paths in (ours, theirs)]
        # in another process, because it imports torch
        command = [sys.executable, "-P", "-m", "launcher.extensions.drill.diff", *checkpoints, str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"The checkpoints of {name} cannot be compared.\n  {done.stderr.strip()}")
        record = RecordLines.of(ours.metrics)
        found = {"steps": wrong_steps(record, length.windows)}
        found["figure"] = first_difference(record, RecordLines.of(theirs.metrics))
        return Difference(**json.loads(done.stdout) | found)


def next_step(
    backend: Backend, paths: RunPaths, before: RecordLines, died: float, limit_s: float | None
) -> tuple[RecordLines, int | None, float | None]:
    """Wait for the first step of a run after an interruption.

    Args:
        before: record read before the interruption.
        died: monotonic time of the interruption.
        limit_s: longest time in seconds from the interruption; None: no limit.

    Returns:
        The record as it was when the run died, the step from which it resumed, and the seconds from the interruption
        to its next step; the last two are None if there was none.
    """
    while True:
        ended = backend.ended()
        record = RecordLines.of(paths.metrics)
        if record.file == before.file:
            before = record
        elif len(record.lines) > (kept := record.shared_lines(before)):
            return before, kept, time.monotonic() - died
        if ended or (limit_s is not None and time.monotonic() - died > limit_s):
            return before, None, None
        time.sleep(POLL_S)
