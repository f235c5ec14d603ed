"""Checkpoint solver: how often to save, and the metric that decides which checkpoint is the best one."""

from __future__ import annotations

import dataclasses

from launcher.config.schema import BestMode, CheckpointConfig, ClusterKind, Config, TrainConfig
from launcher.errors import ConfigError, did_you_mean
from launcher.plan.run_plan import TaskPlan

PREFIX = "eval/"
# defaults: minutes between two checkpoints, longer on Slurm, which gives notice of most stops; number of those kept
SAVES_EVERY_MIN, SLURM_SAVES_EVERY_MIN, KEEPS = 5.0, 10.0, 3
# parts of the names of metrics whose smaller value is the better one
_SMALLER_IS_BETTER = ("loss", "perplexity")


def solve_checkpoint(config: Config, task: TaskPlan) -> CheckpointConfig:
    """Return the checkpoint plan; by default a job saves every few minutes, because it may fail at any step.

    Raises:
        ConfigError: as ``solve_best_mode``.
    """
    plan = dataclasses.replace(config.checkpoint, best_mode=solve_best_mode(config.checkpoint, config.train, task))
    if plan.every is not None or plan.every_minutes is not None:
        return plan
    minutes = SLURM_SAVES_EVERY_MIN if config.cluster.kind is ClusterKind.slurm else SAVES_EVERY_MIN
    return dataclasses.replace(plan, every_minutes=minutes, keep=plan.keep or KEEPS)


def solve_best_mode(checkpoint: CheckpointConfig, train: TrainConfig, task: TaskPlan) -> BestMode | None:
    """Return the direction of ``checkpoint.best``; None without that key.

    Raises:
        ConfigError: the metric cannot be one of this job's evaluations, its direction is not known, or the keys
            contradict each other.
    """
    metric = checkpoint.best
    if metric is None:
        return None
    _require_metric(metric, task)
    if not checkpoint.enabled and train.patience is None:
        raise ConfigError(
            "checkpoint.best", metric, "has no effect: no checkpoint is saved (checkpoint.enabled=false), and the run "
            "does not end early (train.patience=null).", "Leave it out.",
        )  # fmt: skip
    if train.patience is not None and not train.eval_every:
        raise ConfigError(
            "train.patience", train.patience, "has no effect: the only evaluation is that at the end "
            "(train.eval_every=0).", "Set train.eval_every, in optimizer steps.",
        )  # fmt: skip
    if checkpoint.best_mode is not None:
        return checkpoint.best_mode
    if any(part in metric.rpartition("/")[2].lower() for part in _SMALLER_IS_BETTER):
        return BestMode.min
    raise ConfigError(
        "checkpoint.best_mode", None, f"is needed with checkpoint.best={metric}, whose better value is not known.",
        "Set checkpoint.best_mode=max if the larger one is (accuracy), or min (an error rate).",
    )  # fmt: skip


def _require_metric(metric: str, task: TaskPlan) -> None:
    """Raise ConfigError if the evaluations of this task cannot have the metric. Most names are known only when the
    loss has run: the workers check them before the first step."""
    if not metric.startswith(PREFIX) or metric == PREFIX:
        raise ConfigError(
            "checkpoint.best", metric, f"is not a metric of the evaluation, whose names start with {PREFIX}.",
            "Use eval/loss, or eval/NAME of a metric that the task's loss or eval_metrics() returns.",
        )  # fmt: skip
    if task.eval_sets is None:
        return
    if not task.eval_sets:
        raise ConfigError(
            "checkpoint.best", metric, "the task has no held-out data, so no evaluation takes place.",
            "Give it a method eval_data(), or leave checkpoint.best out.",
        )  # fmt: skip
    name, found, _ = metric.removeprefix(PREFIX).partition("/")
    named = [each for each in task.eval_sets if each]
    if found and named and name not in named:
        raise ConfigError(
            "checkpoint.best", metric, f"eval_data() has no set {name!r}.",
            f"{did_you_mean(name, named)}Its sets: {', '.join(named)}.",
        )  # fmt: skip


def best_notes(checkpoint: CheckpointConfig, train: TrainConfig) -> list[str]:
    if checkpoint.best is None or train.eval_every:
        return []
    return [
        f"checkpoint.best={checkpoint.best} has one evaluation to choose from, that at the end (train.eval_every=0)."
    ]
