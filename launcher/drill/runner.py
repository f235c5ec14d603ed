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
from collections.abc import Callable
from pathlib import Path

from launcher.drill.backends import Stage
from launcher.drill.verdict import Difference, Drilled, Interrupted, Kind, Record, first_difference, judge, wrong_steps
from launcher.errors import RunError
from launcher.plan.run_plan import RunPlan
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

    def more(self, times: int) -> Length:
        return Length(self.windows * times)


def of_length(plan: RunPlan, paths: RunPaths, length: Length) -> RunPlan:
    """Return ``plan`` as a new run in ``paths`` with the given length."""
    run = dataclasses.replace(plan.run, name=paths.root.name, id=secrets.token_hex(4), dir=str(paths.root))
    cluster = plan.cluster
    if cluster.slurm is not None:
        options = cluster.slurm.options | {"job-name": run.name}
        cluster = dataclasses.replace(cluster, slurm=dataclasses.replace(cluster.slurm, options=options))
    train = dataclasses.replace(plan.train, steps=length.windows, epochs=None)
    checkpoint = dataclasses.replace(plan.checkpoint, every=length.every)
    return dataclasses.replace(plan, run=run, cluster=cluster, train=train, checkpoint=checkpoint)


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
    cluster = dataclasses.replace(plan.cluster, max_restarts=max(1, plan.cluster.max_restarts))
    plan = dataclasses.replace(
        plan,
        cluster=cluster,
        schedule=schedule,
        train=dataclasses.replace(plan.train, log_every=1, calibrate_s=0.0),
        checkpoint=dataclasses.replace(plan.checkpoint, every_minutes=None, keep=keep),
    )
    return plan, tuple(changed)


def conclude(
    plan: RunPlan,
    changed: tuple[str, ...],
    found: tuple[Length, float, float, list[Interrupted], Difference | None],
) -> Drilled:
    """Return the drill's result. ``plan``: plan that was drilled. ``found``: what ``Drill.run`` returned."""
    length, cold_s, run_s, interrupted, by_itself = found
    outcome, reason = judge(interrupted, by_itself)
    cluster = plan.cluster
    job = {
        "task": plan.task.target,
        "batch": plan.batch.words,
        "strategy": f"{plan.strategy.kind.value}, sync {plan.strategy.sync.value}",
        "precision": plan.precision.kind.value,
        "cluster": f"{cluster.kind.value}, {cluster.nodes} × {cluster.workers_per_node}, {cluster.device.value}",
        "schedule": f"that of the whole job: {plan.schedule.kind.value} over {plan.schedule.steps} steps",
    }  # fmt: skip
    if plan.schedule.steps is None:
        job["schedule"] = plan.schedule.kind.value
    return Drilled(
        job=job, changed=changed, windows=length.windows, every=length.every, cold_start_s=cold_s, run_s=run_s,
        interrupted=tuple(interrupted), by_itself=by_itself, outcome=outcome, reason=reason,
    )  # fmt: skip


LOOK_EVERY_S = 0.02
# with more steps than this, a step takes microseconds, and no interruption would hit between two steps
_MOST_WINDOWS = 4096
_MORE, _MARGIN = 2, 1.5


class TooLate(Exception):
    """The run was over before it could be interrupted."""


class Drill:
    """Drill of one job.

    Args:
        plan: plan of the user's job, from ``shortened``. Its directory is the drill's.
        yaml: text of the config, for each run's config.yaml.
        stage: backend.
        say: shows one line of progress to the user.
    """

    def __init__(self, plan: RunPlan, yaml: str, stage: Stage, say: Callable[[str], None]) -> None:
        self.plan, self._yaml, self._stage, self._say = plan, yaml, stage, say

    def run(self, length: Length) -> tuple[Length, float, float, list[Interrupted], Difference | None]:
        """Run the drill, with longer runs if the job ends before it can be interrupted.

        Returns:
            The final length, seconds to the undisturbed run's first step and to its end, the interrupted runs, and the
            difference of two undisturbed runs, or None if it was not needed.

        Raises:
            RunError: The job fails undisturbed, or is over before it can be interrupted.
        """
        times: float = _MORE
        while length.windows <= _MOST_WINDOWS:
            try:
                cold_s, room_s, run_s = self._undisturbed("undisturbed", length)
                if room_s < self._stage.room_s:
                    times = _MARGIN * self._stage.room_s / max(room_s, 0.01)
                    raise TooLate
                found = [self._disturbed(kind, length, cold_s) for kind in self._stage.kinds]
            except TooLate:
                self._say(f"{length.windows} windows are over too soon to be interrupted: again, with more of them.")
                self._remove(length)
                length = length.more(min(64, max(_MORE, math.ceil(times))))
                continue
            by_itself = None
            if any(one.difference is not None and not one.difference.identical for one in found):
                self._undisturbed("undisturbed again", length)
                by_itself = self._difference("undisturbed again", length)
            return length, cold_s, run_s, found, by_itself
        raise RunError(f"This job takes {_MOST_WINDOWS} steps before it can be interrupted: it is too short to drill.")

    def _begin(self, name: str, length: Length) -> RunPaths:
        plan = of_length(self.plan, self._paths(name, length), length)
        self._stage.begin(plan, self._yaml)
        return plan.paths

    def _paths(self, name: str, length: Length) -> RunPaths:
        return RunPaths(Path(self.plan.run.dir) / f"{name.replace(' ', '_')}-{length.windows}")

    def _remove(self, length: Length) -> None:
        """Remove the runs of a length that was too short."""
        for name in ("undisturbed", *(kind.value for kind in self._stage.kinds)):
            shutil.rmtree(self._paths(name, length).root, ignore_errors=True)

    def _undisturbed(self, name: str, length: Length) -> tuple[float, float, float]:
        """Run the job undisturbed.

        Returns:
            Seconds to its first step, from step ``length.until`` to its end, and in total.
        """
        self._say(f"{name}: {count(length.windows, 'window')} ...")
        began = time.monotonic()
        paths = self._begin(name, length)
        seen: dict[int, float] = {}
        try:
            while not (over := self._stage.over()) or length.windows not in seen:
                step = Record.of(paths.metrics).step
                seen |= {known: time.monotonic() for known in range(max(seen, default=0) + 1, step + 1)}
                if over:
                    break
                time.sleep(LOOK_EVERY_S)
        except BaseException:
            self._stage.abandon()
            raise
        if complaint := self._stage.complaint(None):
            raise RunError(f"The job does not come to the end by itself, undisturbed.\n  {complaint}")
        if wrong := wrong_steps(Record.of(paths.metrics), length.windows):
            raise RunError(f"The job does not come to the end by itself, undisturbed.\n  {wrong}")
        return seen[1] - began, seen[length.windows] - seen[length.until], time.monotonic() - began

    def _disturbed(self, kind: Kind, length: Length, cold_s: float) -> Interrupted:
        self._say(f"{kind.value} ...")
        paths = self._begin(kind.value, length)
        try:
            found = self._interrupt(kind, paths, length, cold_s)
        except BaseException:
            self._stage.abandon()
            raise
        if found.problem:
            self._stage.abandon()
            return found
        left = [*self._stage.leftovers(), *(path.name for _, path in paths.partial_checkpoints())]
        try:
            return dataclasses.replace(found, left=tuple(left), difference=self._difference(kind.value, length))
        except RunError as error:  # its last checkpoint may be missing
            return dataclasses.replace(found, left=tuple(left), problem=str(error))

    def _interrupt(self, kind: Kind, paths: RunPaths, length: Length, cold_s: float) -> Interrupted:
        """Interrupt a run that has just started, resume it if necessary, and follow it to its end."""
        stage = self._stage
        wait_until(lambda: stage.over() or Record.of(paths.metrics).step >= length.until, every_s=LOOK_EVERY_S)
        record = Record.of(paths.metrics)
        if record.step < length.until:
            raise_if_failed(stage)
        died = time.monotonic()
        what = stage.interrupt(kind)
        if not what:
            raise TooLate
        found, saving_s, patience = Interrupted(kind=kind, what=what), None, stage.patience_s(cold_s)
        if stage.resumes(kind):
            wait_until(stage.over, every_s=LOOK_EVERY_S)
            if kind is Kind.preempt:
                saving_s, died = time.monotonic() - died, time.monotonic()
            record = Record.of(paths.metrics)
            if record.step >= length.windows:
                raise TooLate
            if complaint := stage.complaint(kind):
                return dataclasses.replace(found, at_step=record.step, problem=complaint)
            if left := stage.leftovers():
                return dataclasses.replace(found, at_step=record.step, left=tuple(left), problem="it did not end")
            stage.resume()
        before, after, recovered = next_step(stage, paths, record, died, patience)
        if recovered is None:
            if before.step >= length.windows:
                raise TooLate
            ended = stage.complaint(None) if stage.over() else ""
            problem = ended or f"it has not come to a further step within {patience} s"
            return dataclasses.replace(found, at_step=before.step, problem=problem)
        wait_until(stage.over, every_s=LOOK_EVERY_S)
        return dataclasses.replace(
            found, at_step=before.step, from_step=after, saving_s=saving_s, recovery_s=recovered,
            problem=stage.complaint(None),
        )  # fmt: skip

    def _difference(self, name: str, length: Length) -> Difference:
        """Return the difference of a finished run from the undisturbed one."""
        ours, theirs = self._paths(name, length), self._paths("undisturbed", length)
        places = [str(paths.checkpoint(length.windows)) for paths in (ours, theirs)]
        # in another process, because it imports torch
        command = [sys.executable, "-P", "-m", "launcher.train.checkpoint.diff", *places, str(os.getpid())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"The checkpoints of {name} cannot be compared.\n  {done.stderr.strip()}")
        record, wanted = Record.of(ours.metrics), Record.of(theirs.metrics)
        return Difference(
            **json.loads(done.stdout),
            steps=wrong_steps(record, length.windows),
            figure=first_difference(record, wanted),
        )


def raise_if_failed(stage: Stage) -> None:
    """Raise for a run that ended before it was interrupted: RunError if it failed, else TooLate."""
    if complaint := stage.complaint(None):
        raise RunError(f"The job does not come to the end by itself.\n  {complaint}")
    raise TooLate


def next_step(
    stage: Stage, paths: RunPaths, before: Record, died: float, patience_s: float | None
) -> tuple[Record, int | None, float | None]:
    """Wait for the first step of a run after an interruption.

    Args:
        before: record read before the interruption.
        died: monotonic time of the interruption.
        patience_s: time limit in seconds, or None.

    Returns:
        The record as it was when the run died, the step from which it resumed, and the seconds from the interruption
        to its next step; the last two are None if there was none.
    """
    while True:
        over = stage.over()
        record = Record.of(paths.metrics)
        if record.file == before.file:
            before = record
        elif len(record.lines) > (kept := record.kept_of(before)):
            return before, kept, time.monotonic() - died
        if over or (patience_s is not None and time.monotonic() - died > patience_s):
            return before, None, None
        time.sleep(LOOK_EVERY_S)
