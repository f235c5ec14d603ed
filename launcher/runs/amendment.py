"""Amendment: new plan of a run that is resumed with changed keys, `launch resume RUN key=value`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import launcher
from launcher.config.hydra import amended, recompose
from launcher.config.schema import BatchConfig, Config, PrecisionKind, ScheduleKind, StrategyKind
from launcher.errors import ConfigError, UserError
from launcher.launch.credentials import require_credentials
from launcher.launch.planner import emulation_notes, site_of, with_predictions
from launcher.plan import windows
from launcher.plan.batch import Batch, in_samples
from launcher.plan.clusters import require_at_hand
from launcher.plan.float_format import float_format
from launcher.plan.host import Site
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.placement import solve_cluster
from launcher.plan.resumable import DATA, Change, as_typed, changes, forced_by, refusal_text, refusals
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import sets_own_rates, solve
from launcher.plan.strategy_choice import choose_strategy, with_reason, with_strategy
from launcher.plan.sync_policy import SHARDED
from launcher.plan.task_inspection import Inspection, InspectionRequest, describe_task, new_inspection
from launcher.quantities import count
from launcher.rundir import history
from launcher.rundir.files import read_bytes, read_config, read_json, write_text
from launcher.rundir.paths import STATE, RunPaths
from launcher.trackers.installed import require_trackers


@dataclass(frozen=True)
class Replanned:
    """New plan of a run. ``yaml``: the new config. ``changed``: keys whose values differ from the old config."""

    plan: RunPlan
    yaml: str
    changed: tuple[Change, ...]

    @property
    def text(self) -> str:
        return ", ".join(f"{each.key} {each.text}" for each in self.changed)


@dataclass(frozen=True)
class SavedProgress:
    """Progress in the newest checkpoint: optimizer steps done, and windows."""

    steps: int
    windows: int


def saved_progress(paths: RunPaths) -> SavedProgress | None:
    """Return the progress in the newest readable checkpoint; None if there is none."""
    for checkpoint in paths.committed_checkpoints():
        try:
            engine = (read_json(checkpoint / STATE) or {})["engine"]
            return SavedProgress(int(engine["progress"]["steps"]), int(engine["place"]["index"]))
        except (OSError, ValueError, LookupError, TypeError):  # damaged: the workers report that and take the next one
            continue
    return None


def replan(paths: RunPaths, old: RunPlan, overrides: Sequence[str], *, force: bool, done: bool) -> Replanned:
    """Return the plan with which a run resumes.

    Args:
        overrides: in the syntax of `launch train`.
        force: True if keys that affect what is learned may change too (``--force``).
        done: True if the run is done, so that only a later end gives it something to do.

    Raises:
        ConfigError, TaskError, SiteError: As for a new run.
        UserError: Some keys may not change when a run resumes; one message names all of them.
    """
    name, kept = old.run.name, read_config(paths.config)
    before, (config, yaml) = recompose(kept, ())[0], recompose(kept, overrides)
    require_at_hand(config.cluster)
    for each in (before, config):  # solved at the first start, and the contract since then
        each.batch = in_samples(each.batch, old.task.tokens_per_sample)
        each.batch = dataclasses.replace(each.batch, global_size=each.batch.global_size or old.batch.global_size)
        each.train = dataclasses.replace(each.train, data_shards=each.train.data_shards or old.train.data_shards)
    changed = changes(as_typed(before), as_typed(config))
    forced = forced_by(changed)
    if wrong := refusals(changed, forced if force else ()):
        raise UserError(f"{name}: {refusal_text(wrong)}")
    if force and not changed:
        forced = (DATA,)
    if force and not forced:
        raise UserError("--force: has no effect: none of these changes needs it.\n  Leave it out.")
    if not changed and done:
        raise UserError(f"{name}: is done, and nothing changes.\n  Set a later end: train.steps=N.")
    at = saved_progress(paths)
    require_credentials(config)
    keeps_strategy = config.strategy.kind is StrategyKind.auto and all(each.key != "strategy.kind" for each in changed)
    if keeps_strategy:
        config = with_strategy(config, old.strategy.kind)
    keeps_precision = config.precision.kind is PrecisionKind.auto
    if keeps_precision:  # also on another kind of machine
        config.precision = dataclasses.replace(config.precision, kind=old.precision.kind)
    site = dataclasses.replace(site_of(config.cluster), cwd=old.cluster.cwd)
    touched = {change.key for change in changed}
    config.batch = _fitted_batch(config, old, site, touched)
    with new_inspection() as asked:

        def plan_of(each: Config, *, weighs: bool = True) -> RunPlan:
            return _solved(each, old, site, touched, at, asked, weighs=weighs)

        if config.strategy.kind is StrategyKind.auto:  # the user has asked for another choice
            plan = choose_strategy(config, plan_of)
        else:
            plan = plan_of(config, weighs=False)
            plan = with_reason(plan, old.strategy.kind_reason) if keeps_strategy else plan
        plan = plan.with_notes(asked.slow_notes())
    require_trackers(config, os.environ)
    if (added := float_format(config)) is not None:
        added.check_machine(plan.cluster)
    if keeps_precision:
        plan = plan.with_precision(old.precision.kind, old.precision.reason)
    _require_something_to_do(plan, old, at, done=done)
    plan = dataclasses.replace(
        plan.with_notes([*_notes(plan, old, at, touched), *emulation_notes(plan)]),
        # the run keeps its original code and working directory
        cluster=dataclasses.replace(plan.cluster, cwd=old.cluster.cwd, import_from=old.cluster.import_from),
        forced=tuple(dict.fromkeys([*old.forced, *forced])),
        initial=old.initial,  # checkpoint.init_from cannot change
    )
    derived = ("global_size", "global_tokens", "micro_size", "accumulation", "uneven")
    solved = {name: getattr(config.batch, name) for name in derived}
    return Replanned(plan, amended(yaml, "batch", solved), tuple(changed))


def _fitted_batch(config: Config, old: RunPlan, site: Site, touched: set[str]) -> BatchConfig:
    """Return the batch with accumulation and, if necessary, the micro-batch that fit the new world size.

    The global batch stays.
    """
    cluster = solve_cluster(config.cluster, site, old.run.name, config.strategy.kind)
    world, batch = cluster.nodes * cluster.workers_per_node, config.batch
    same_world = world == old.batch.world_size
    if "batch.accumulation" not in touched and (not same_world or touched & {"batch.global_size", "batch.micro_size"}):
        batch = dataclasses.replace(batch, accumulation=None)
    if same_world or touched & {"batch.micro_size", "batch.uneven"} or batch.global_size is None:
        return batch
    if batch.accumulation is not None:
        return dataclasses.replace(batch, micro_size=None)
    sizes = [batch.global_size, *(stage[1] for stage in batch.ramp if len(stage) == 2)]
    fixed = batch.micro_size if isinstance(batch.micro_size, int) else None
    if not any(size % (world * (fixed or 1)) for size in sizes):
        return batch
    largest = min(old.batch.micro_size, -(-batch.global_size // world))
    return dataclasses.replace(batch, uneven=True, micro_size=largest if batch.micro_size is None else batch.micro_size)


def _solved(
    config: Config,
    old: RunPlan,
    site: Site,
    touched: set[str],
    at: SavedProgress | None,
    inspection: Inspection,
    *,
    weighs: bool,
) -> RunPlan:
    run = dataclasses.replace(old.run, version=launcher.__version__)
    task, shards = old.task, config.strategy.kind in SHARDED
    tried = ("task.", "batch.balance", "callbacks", *(["optimizer."] if config.optimizer.target is not None else []))
    if any(key.startswith(tried) for key in touched) or (shards and old.strategy.kind not in SHARDED):
        request = InspectionRequest.of(config, old.cluster.import_from[0])
        task = describe_task(request, inspection, limit_s=config.train.hang_timeout)
        for name in ("samples", "own_order"):
            before, after = getattr(old.task, name), getattr(task, name)
            if before != after:
                change = Change(f"task: {name.removeprefix('own_')}", before, after)
                raise UserError(
                    f"{old.run.name}: these keys cannot change when a run resumes:\n  {refusals([change], ())[0]}"
                )

    if wrong := _without_effect(config, old, task, touched):
        raise UserError(f"{old.run.name}: these keys cannot change when a run resumes:\n  " + "\n  ".join(wrong))

    def continued_ramp(batch: Batch) -> Batch:
        if touched & {"batch.global_size", "batch.ramp"}:
            return windows.changed_at(old.batch, batch, at.windows if at else 0)
        return dataclasses.replace(batch, ramp=old.batch.ramp)

    return with_predictions(solve(config, site, task, run, rebatch=continued_ramp), config, inspection, weighs=weighs)


def _without_effect(config: Config, old: RunPlan, task: TaskPlan, touched: set[str]) -> list[str]:
    """Return a line for each change that would not reach the optimizer or schedule of the run."""
    lines: list[str] = []
    for name in ("optimizer", "schedule"):
        had, has = (getattr(plan, f"own_{name}") for plan in (old.task, task))
        if had != has:
            lines.append(f"task: {name}(): the run started {'with' if had else 'without'} this method of the task.")
        if has:
            lines += [f"{key}: the task's own {name} is used." for key in sorted(touched) if key.startswith(f"{name}.")]
    if sets_own_rates(task, config.schedule):
        keys = {"optimizer.lr", "optimizer.lr_scaling", "optimizer.reference_batch"}
        before, after = (
            [group.get("lr") for group in each or ()] for each in (old.optimizer.groups, config.optimizer.groups)
        )
        rates = sorted(touched & (keys if before == after else {*keys, "optimizer.groups"}))
        lines += [f"{key}: the schedule continues from its saved state, which has the rates." for key in rates]
    return lines


def _require_something_to_do(plan: RunPlan, old: RunPlan, at: SavedProgress | None, *, done: bool) -> None:
    steps, end = (at.steps if at else 0), plan.train.steps
    if plan.train.epochs is None and end is not None and end < steps:
        raise ConfigError(
            "train.steps", end, f"{steps} steps are done already and cannot be undone.",
            f"Use train.steps of {steps} or more; for an earlier end use an earlier checkpoint.",
        )  # fmt: skip
    if done and at is None:
        raise UserError(
            f"{old.run.name}: is done, and has no checkpoint to resume from.\n"
            f"  `launch retry {old.run.name}` starts it again under another name."
        )
    longer = (
        (end is not None and end > steps)
        if plan.train.epochs is None
        else plan.train.epochs > (old.train.epochs or 0) and (end is None or end > steps)
    )
    if done and not longer:
        raise UserError(
            f"{old.run.name}: is done: {count(steps, 'step')}, and the end does not change.\n"
            f"  Set a later end: train.steps above {steps}, or more train.epochs."
        )


def _notes(plan: RunPlan, old: RunPlan, at: SavedProgress | None, touched: set[str]) -> list[str]:
    """Return notes on consequences that the user may not expect."""
    notes: list[str] = []
    steps = at.steps if at else 0
    if plan.task.own_schedule or plan.schedule.kind is ScheduleKind.custom:
        name = "The task's own schedule" if plan.task.own_schedule else plan.schedule.name
        if plan.train.steps != old.train.steps:
            notes.append(f"{name} continues from its saved state, whatever the new number of steps.")
    elif plan.train.steps != old.train.steps and plan.schedule.kind is not ScheduleKind.constant:
        before, after = (
            f"{each.optimizer.lr * each.schedule.factor(steps, each.train.steps):.3g}" for each in (old, plan)
        )
        rate = f": the learning rate continues at {after} instead of {before}" if before != after else ""
        notes.append(
            f"schedule={plan.schedule.kind.value} is stretched from {old.train.steps} to {plan.train.steps} steps"
            f"{rate}."
        )
    if plan.precision.kind is not old.precision.kind:
        notes.append(
            f"precision={plan.precision.kind.value} instead of {old.precision.kind.value}: parameters and optimizer "
            "state are fp32 in both and do not change; forward and backward passes round differently from here on."
        )
    elif options := sorted(key for key in touched if key.startswith(f"precision.{plan.precision.kind.value}_")):
        notes.append(f"{', '.join(options)}: {plan.precision.kind.value} rounds differently from here on.")
    if touched & {"batch.global_size", "batch.ramp"} and at is not None:
        notes.append(
            f"The global batch changes after window {at.windows}: the next sample stays the same, the "
            "schedule continues by steps"
            + (", and optimizer.lr_scaling is applied to it." if plan.optimizer.lr != old.optimizer.lr else ".")
        )
    return notes


@contextmanager
def changed(plan: LaunchPlan, config_yaml: str) -> Generator[None, None, None]:
    """Replace a run's plan and config while the body submits the run.

    The old files are kept under the number of the last submission that used them, and are restored if the body raises
    and no submission was accepted.
    """
    paths = plan.paths
    history.require_nobody_runs(paths)
    before = len(history.submissions(paths))
    number = max(0, before - 1)
    old, yaml = (read_bytes(file).decode() for file in (paths.plan, paths.config))
    try:
        write_text(paths.plan_until(number), old)
        write_text(paths.config_until(number), yaml)
        plan.save()
        write_text(paths.config, config_yaml)
        yield
    except BaseException:
        if all(submission.refused for submission in history.submissions(paths)[before:]):
            # restore by rename, which works on a full disk too
            for kept, place in ((paths.config_until(number), paths.config), (paths.plan_until(number), paths.plan)):
                if kept.exists():
                    kept.replace(place)
        raise
