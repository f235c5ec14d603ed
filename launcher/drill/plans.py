"""What plan a drill runs: that of `launch train`, cut short, and otherwise as it is."""

from __future__ import annotations

import dataclasses
import secrets

from launcher.drill.verdict import Difference, Drilled, Interrupted, judge
from launcher.paths import RunPaths
from launcher.plan import RunPlan


@dataclasses.dataclass(frozen=True)
class Length:
    """``windows``: optimizer steps of each run. ``every``: from one checkpoint to the next. ``until``: the step that a
    run is interrupted after: the next one has begun, and no checkpoint has it."""

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
    """``plan`` as a run of its own in ``paths``, of a length."""
    run = dataclasses.replace(plan.run, name=paths.root.name, id=secrets.token_hex(4), dir=str(paths.root))
    cluster = plan.cluster
    if cluster.slurm is not None:
        options = cluster.slurm.options | {"job-name": run.name}
        cluster = dataclasses.replace(cluster, slurm=dataclasses.replace(cluster.slurm, options=options))
    train = dataclasses.replace(plan.train, steps=length.windows, epochs=None)
    checkpoint = dataclasses.replace(plan.checkpoint, every=length.every)
    return dataclasses.replace(plan, run=run, cluster=cluster, train=train, checkpoint=checkpoint)


def shortened(plan: RunPlan) -> tuple[RunPlan, tuple[str, ...]]:
    """The plan of `launch train` as a drill runs it, whatever its length; and what is another one, in words."""
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
    """The drill's result. ``plan``: that was drilled."""
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
