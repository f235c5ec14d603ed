"""Plan solver: config, site and task description -> RunPlan. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from launcher.config.key_facts import EPOCH
from launcher.config.schema import (
    Balance,
    BatchConfig,
    BestMode,
    CheckpointConfig,
    ClusterKind,
    Config,
    LrScaling,
    Norm,
    OnNonfinite,
    OnOom,
    Parameters,
    PrecisionKind,
    Recompute,
    ScheduleConfig,
    ScheduleKind,
    ShortWindow,
    StrategyKind,
    TrainConfig,
    check_values,
)
from launcher.errors import ConfigError, TaskError, did_you_mean
from launcher.plan.batch import (
    AUTO,
    EXACT_NORMS,
    Batch,
    batch_notes,
    in_samples,
    norm_of_window_loss,
    require_short_batches,
    solve_batch,
    solve_largest,
    solve_smaller,
    ways_out_of_one_value,
)
from launcher.plan.callback_plan import callback_notes, notify_entries, solve_callbacks
from launcher.plan.data_shards import require_second_epoch, solve_data_shards
from launcher.plan.division import UndividedJob, division_of
from launcher.plan.float_format import float_format
from launcher.plan.host import Site
from launcher.plan.launch_plan import PLAN_FORMAT, ClusterPlan, RunInfo, node_range
from launcher.plan.optimizer_plan import require_target, solve_optimizer
from launcher.plan.placement import compiler_notes, device_notes, solve_cluster, solve_env
from launcher.plan.run_plan import (
    EpochPlan,
    OptimizerPlan,
    PrecisionPlan,
    RunPlan,
    SchedulePlan,
    StrategyPlan,
    TaskPlan,
    TrainPlan,
    solved_part,
)
from launcher.plan.strategy import solve_precision, solve_strategy
from launcher.plan.strategy_choice import ONE_RANK, UNKNOWN, with_reason, with_strategy
from launcher.plan.sync_policy import SHARDED
from launcher.plan.windows import Windows, count_windows, least_share
from launcher.quantities import count, first_names


def what_norms_do(layers: int, batch: Batch) -> str | None:
    """Return a sentence on the statistics that the model's BatchNorms use and on the alternatives; None without any."""
    if not layers:
        return None
    who = count(layers, "BatchNorm layer")
    if batch.norm is Norm.freeze:
        return f"{who}: batch.norm=freeze, normalised by the running statistics that model() comes with."
    seen = batch.micro_size if batch.norm is Norm.leave else batch.unit
    if seen == batch.global_size:
        return f"{who}: batch.norm={batch.norm.value}, statistics of the whole window, which is one micro-batch."
    if batch.norm.looks_ahead:
        return (
            f"{who}: batch.norm={batch.norm.value}, exact statistics of each window: every micro-batch runs "
            f"at least {2 * layers} times more (docs/explanations/batchnorm.md)."
        )
    if batch.norm is Norm.sync and batch.world_size == 1:
        use = "".join(f"; use {name}" for name in EXACT_NORMS)
        return f"{who}: batch.norm=sync has no effect on one rank{use} (docs/explanations/batchnorm.md)."
    of = "one rank's micro-batch" if batch.norm is Norm.leave else "a micro-batch over all ranks"
    sync = ["sync"] if batch.norm is Norm.leave and batch.world_size > 1 else []
    others = "|".join([*sync, "freeze", *EXACT_NORMS])
    return (
        f"{who}: statistics of {seen} samples ({of}), not of the {batch.global_size} of a window, so the gradient is "
        f"not that of one big batch. Other choices: batch.norm={others} (docs/explanations/batchnorm.md)."
    )


DEFAULT_STEPS = 300
WORKER_COMMAND = ("-P", "-m", "launcher.train.worker")


def solve(
    config: Config,
    site: Site,
    task: TaskPlan,
    run: RunInfo,
    started: tuple[int, int] | None = None,
    rebatch: Callable[[Batch], Batch] = lambda batch: batch,
) -> RunPlan:
    """Return the plan of a training job.

    Args:
        config: the user's settings. strategy=auto is the simplest one here, where no memory is known.
        site: hardware of this machine or partition.
        task: description of the model and the data.
        run: the run's name, id and directory.
        started: (hosts, ranks per host) if the user's own torchrun fixed them; None: the cluster group decides.
        rebatch: maps the solved batch to that of a run with completed windows (``launcher.plan.windows.changed_at``).

    Raises:
        ConfigError: impossible values, alone or in combination, in any of the world sizes that the job may have.
    """
    if (tokens := config.batch.global_tokens) is not None:
        size = in_samples(config.batch, task.tokens_per_sample)
        try:
            return solve(dataclasses.replace(config, batch=size), site, task, run, started, rebatch)
        except ConfigError as error:
            if not error.key.startswith("batch.global_size"):
                raise
            each = task.tokens_per_sample or 1
            problem = f"is {count(size.global_size or 0, 'sample')} of {each:,} tokens. {error}"
            raise ConfigError("batch.global_tokens", tokens, problem) from None
    if config.strategy.kind is StrategyKind.auto:
        plan = solve(with_strategy(config, StrategyKind.ddp), site, task, run, started, rebatch)
        if plan.cluster.world_size > 1 or not plan.cluster.range.fixed:
            return with_reason(plan, UNKNOWN)
        return with_reason(
            solve(with_strategy(config, StrategyKind.single), site, task, run, started, rebatch), ONE_RANK
        )
    check_values(config)
    _require_consistent(config)
    config = _with_ready_batches(config, task)
    nodes = node_range(config.cluster.nodes)
    cluster = solve_cluster(config.cluster, site, run.name, config.strategy.kind, started)
    fixed = started is not None or nodes.fixed
    try:
        largest = rebatch((solve_batch if fixed else solve_largest)(config.batch, cluster.world_size))
    except ConfigError as error:
        if task.stream is not None and task.stream.ready:
            error.args = (_on_loader(str(error)),)
        raise
    if fixed:
        return _on_cluster(config, site, task, run, cluster, largest)
    plan = _on_cluster(config, site, task, run, cluster, largest)
    fewer: list[RunPlan] = []
    for hosts in range(nodes.least, nodes.most):
        try:
            cluster = solve_cluster(config.cluster, site, run.name, config.strategy.kind, nodes=hosts)
            batch = rebatch(solve_smaller(config.batch, largest, cluster.world_size))
            fewer.append(_on_cluster(config, site, task, run, cluster, batch))
        except ConfigError as error:
            raise _on_hosts(hosts, config.cluster.nodes, error) from None
    batches = {each.cluster.nodes: each.batch for each in (plan, *fewer)}
    return plan.with_fewer(fewer).with_notes(batch_notes(config.batch, batches, task.batch_norms))


def _on_loader(message: str) -> str:
    """Return advice on batch.micro_size as advice on the DataLoader whose batches are the micro-batches."""
    message = message.replace("; or batch.micro_size=", "; or a DataLoader with batch_size=")
    if "cluster.workers_per_node" in message:
        return message
    # a window has no whole number of batches, which neither other ranks nor unequal shares would change
    return message.replace("; or unequal shares (batch.uneven=true)", "")


def _with_ready_batches(config: Config, task: TaskPlan) -> Config:
    """Return ``config`` with micro-batches of the size of the training data's batches, if these are used as they are.
    Raises ConfigError if ``batch`` does not allow it."""
    if task.stream is None or not task.stream.ready:
        return config
    size, micro, key = task.stream.batch_size, config.batch.micro_size, "batch.micro_size"
    if micro == AUTO:
        raise ConfigError(key, micro, "the training data has ready batches, which are used whole.", "Leave it out.")
    if micro is None and size is None:
        raise ConfigError(
            key, micro, "the training data has batches of unknown size.",
            "Set it to the number of samples that a batch counts for.",
        )  # fmt: skip
    require_short_batches(config.batch.short_window)
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, micro_size=micro or size))


def _require_consistent(config: Config) -> None:
    """Raise ConfigError for values that exclude each other, whatever the task and the ranks."""
    train, grace_s = config.train, config.cluster.grace_s
    if train.steps is not None and train.epochs is not None:
        raise ConfigError("train.epochs", train.epochs, f"train.steps={train.steps} is set too.", "Leave one out.")
    if train.on_nonfinite is OnNonfinite.skip and config.strategy.compress.keeps_residue:
        raise ConfigError(
            "train.on_nonfinite", "skip", f"does not work with strategy.compress={config.strategy.compress.value}, "
            "which adds what it did not send to the next gradient: one nan would spoil all later steps.",
            "Use another strategy.compress, or train.on_nonfinite=stop.",
        )  # fmt: skip
    if train.hang_timeout is not None and train.hang_timeout <= grace_s:
        raise ConfigError(
            "train.hang_timeout", train.hang_timeout,
            f"must be above cluster.grace_s={grace_s}, the seconds in which workers must stop.",
            "Raise it or lower cluster.grace_s; train.hang_timeout=null disables the check.",
        )  # fmt: skip


def _require_possible(config: Config, task: TaskPlan, batch: Batch) -> None:
    """Raise ConfigError for a value that does not work with the task's model and data, or has no effect with them."""
    if config.batch.balance is Balance.length and (task.samples is None or task.lengths is False):
        problem = f"the lengths of the samples of task._target_={task.target} are not known."
        remedy = "Give the task a method lengths(data), one number for each sample; or length(sample); or leave it out."
        if task.samples is None:
            problem = "does not work with a stream, whose samples are not known before they are read."
            remedy = "Leave it out, or return map-style data (__len__ and __getitem__)."
        raise ConfigError("batch.balance", "length", problem, remedy)
    if task.own_order and not config.train.shuffle:
        raise ConfigError(
            "train.shuffle", "false", "has no effect: the task has a method order(epoch, seed).", "Leave it out."
        )
    cadences = {"train.eval_every": config.train.eval_every, "checkpoint.every": config.checkpoint.every}
    for key in (key for key, every in cadences.items() if every == EPOCH):
        if task.samples is None and config.train.epochs is None:
            raise ConfigError(
                key, EPOCH, "the training data is a stream of unknown length, whose first epoch may not end within "
                "train.steps.", f"Write a number of steps, such as {key}=500, or train.epochs instead of train.steps.",
            )  # fmt: skip
    if config.optimizer.lr_scaling is not LrScaling.none and sets_own_rates(task, config.schedule):
        raise ConfigError(
            "optimizer.lr_scaling", config.optimizer.lr_scaling,
            "has no effect on an optimizer or a schedule of your own, which sets the rates itself.", "Leave it out.",
        )  # fmt: skip
    if task.batch_norms == 0 and batch.norm is not Norm.leave:
        raise ConfigError("batch.norm", batch.norm, "has no effect: the model has no BatchNorm.", "Leave it out.")
    if not batch.norm.looks_ahead or not batch.accumulates:
        return
    if config.strategy.recompute is not Recompute.none:
        # recomputed activations would enter the window's statistics twice
        raise ConfigError(
            "batch.norm", batch.norm, f"does not work with strategy.recompute={config.strategy.recompute.value}.",
            "Leave strategy.recompute out, or use batch.norm=sync.",
        )  # fmt: skip
    if task.window_loss:
        raise norm_of_window_loss(batch.norm)


def _on_hosts(hosts: int, nodes: int | str, error: ConfigError) -> ConfigError:
    """Return ``error``, which occurs on ``hosts`` hosts, as an error about the range ``nodes``."""
    problem, _, remedy = str(error).partition("\n  ")
    remedy = f"{remedy} Or start the range above {hosts}.".strip()
    return ConfigError("cluster.nodes", nodes, f"not possible on {count(hosts, 'host')}: {problem}", remedy)


def sets_own_rates(task: TaskPlan, schedule: ScheduleConfig) -> bool:
    """Return whether the learning rates follow from other code than the launcher's."""
    return task.own_optimizer or task.own_schedule or schedule.kind is ScheduleKind.custom


def _on_cluster(
    config: Config, site: Site, task: TaskPlan, run: RunInfo, cluster: ClusterPlan, batch: Batch
) -> RunPlan:
    """Derive everything that follows from the cluster and its batch."""
    if task.stream is not None and task.stream.ready:
        batch.of_ready_batches(task.stream.batch_size)
    _require_possible(config, task, batch)
    require_second_epoch(config.train.epochs, task.stream)
    epoch = _epoch(config.batch, batch, task)
    steps = _steps(config.train, epoch, batch, task)
    precision = solve_precision(config, cluster, site.bf16)
    division = division_of(UndividedJob(config, batch, cluster, task.samples, epoch.short_window, task.parameters))
    sites, own_strategy, site_notes = division or (None, config.strategy, [])
    own_batch = batch if sites is None else batch.of_site(sites.count)
    strategy = solve_strategy(own_strategy, own_batch, cluster, precision, task)
    if batch.on_oom is OnOom.shrink and batch.micro_size > 1:
        cluster = dataclasses.replace(
            cluster, max_restarts=max(cluster.max_restarts, (batch.micro_size - 1).bit_length())
        )
    schedule = _schedule(config.schedule, steps)
    optimizer = solve_optimizer(config.optimizer, batch.global_size)
    callbacks = solve_callbacks(config.callbacks)
    notify_entries(config.notify)  # raises for what has no known form
    return RunPlan(
        format=PLAN_FORMAT,
        run=run,
        cluster=cluster,
        env=solve_env(cluster, site),
        command=WORKER_COMMAND,
        batch=batch,
        epoch=epoch,
        task=task,
        strategy=strategy,
        precision=precision,
        optimizer=optimizer,
        schedule=schedule,
        train=solved_part(
            TrainPlan,
            config.train,
            steps=steps,
            calibrate_s=config.run.calibrate_s,
            data_shards=solve_data_shards(config.train.data_shards, batch, task),
        ),
        sites=sites,
        checkpoint=solve_checkpoint(config, task),
        wandb=config.wandb,
        callbacks=callbacks,
        notify=tuple(config.notify),
        trackers=tuple(config.trackers),
        added=config.added_values(),
        notes=(
            *device_notes(config.cluster, cluster, site),
            *compiler_notes(config.cluster, cluster.device, "train.compile" if config.train.compile else task.compiles),
            *site_notes,
            *_step_notes(schedule, steps, epoch, batch, optimizer),
            *_model_notes(config, task, strategy, precision),
            *_norm_notes(epoch, batch, task, steps),
            *_window_notes(batch, config.train, task),
            *task.data_notes,
            *_parameter_notes(config, precision, task),
            *callback_notes(callbacks, steps, cluster.world_size),
        ),
    )


def _epoch(config: BatchConfig, batch: Batch, task: TaskPlan) -> EpochPlan:
    policy = config.short_window
    if task.samples is None:
        if policy is ShortWindow.drop:
            raise ConfigError(
                "batch.short_window", "drop", "a stream has no length, so its last window is not known in advance.",
                "Use batch.short_window=exact.",
            )  # fmt: skip
        return EpochPlan(windows=None, short_window=0, short_window_policy=policy)
    if task.samples == 0:
        raise TaskError(f"task._target_={task.target}: train_data() is empty.")
    if task.samples < batch.global_size:
        raise ConfigError(
            "batch.global_size", batch.global_size,
            f"the task has {count(task.samples, 'sample')}, fewer than one window.",
            f"Use batch.global_size of {task.samples} or less.",
        )  # fmt: skip
    windows, short = count_windows(task.samples, batch.global_size, keep_short=policy is ShortWindow.exact)
    return EpochPlan(windows=windows, short_window=short, short_window_policy=policy)


def _steps(config: TrainConfig, epoch: EpochPlan, batch: Batch, task: TaskPlan) -> int | None:
    if config.epochs is None:
        return DEFAULT_STEPS if config.steps is None else config.steps
    if task.samples is None:
        return None
    keep_short = epoch.short_window_policy is ShortWindow.exact
    return Windows(task.samples, batch, keep_short=keep_short).before(config.epochs)


def _schedule(config: ScheduleConfig, steps: int | None) -> SchedulePlan:
    require_target("schedule", config.kind, config.target, "torch.optim.lr_scheduler.OneCycleLR")
    if config.kind is ScheduleKind.custom:
        named = {"warmup_steps": config.warmup_steps or None, "min_ratio": config.min_ratio,
                 "decay_share": config.decay_share}  # fmt: skip
        given = {name: value for name, value in named.items() if value is not None}
        return solved_part(SchedulePlan, config, arguments={**config.arguments, **given})
    if config.kind is not ScheduleKind.constant and steps is None:
        raise ConfigError(
            "schedule", config.kind, "needs the last step, and the length of a stream's epoch is unknown.",
            "Set train.steps instead of train.epochs, or use schedule=constant.",
        )  # fmt: skip
    return solved_part(SchedulePlan, config)


def _model_notes(config: Config, task: TaskPlan, strategy: StrategyPlan, precision: PrecisionPlan) -> Iterator[str]:
    """Yield the notes on shard units and number formats."""
    if task.unit_parameters == 0 and strategy.kind in SHARDED:
        yield "The model has no repeated blocks: it is gathered as a whole. See shard units in docs/guides/sharding.md."
    if task.unit_parameters == 0 and strategy.recompute is not Recompute.none:
        yield "strategy.recompute=blocks has no effect: the model has no repeated blocks."
    if precision.kind is PrecisionKind.auto and strategy.kind in SHARDED:
        yield "Bytes and memory are predicted for fp32; in bf16 all-gathers send less."
    if (added := float_format(config)) is not None:
        yield from added.notes(task.format_layers, compiles=config.train.compile)


def _parameter_notes(config: Config, precision: PrecisionPlan, task: TaskPlan) -> Iterator[str]:
    """Yield the notes on modules in eval mode, on narrow parameters, and on the best checkpoint."""
    if task.in_eval_mode == ("",):
        yield "model() returns a model in eval mode: it is put into training mode, with dropout and BatchNorm on."
    elif task.in_eval_mode:
        yield f"Kept in eval mode by model() or by a module's train(): {first_names(task.in_eval_mode)}."
    if task.narrow_parameters:
        handled = "they stay so (precision.parameters=keep), with gradients and optimizer state in that format."
        if precision.parameters is Parameters.fp32:
            handled = "they are trained in fp32 (precision.parameters=keep leaves them as they are)."
        yield f"model() returns {task.narrow_parameters:,} trained parameters in bf16 or fp16: {handled}"
    if (best := config.checkpoint.best) is not None and not config.train.eval_every:
        yield f"checkpoint.best={best} has one evaluation to choose from, that at the end (train.eval_every=0)."


def _norm_notes(epoch: EpochPlan, batch: Batch, task: TaskPlan, steps: int | None) -> list[str]:
    note = None if task.batch_norms is None else what_norms_do(task.batch_norms, batch)
    if note is not None and batch.balance is Balance.length and batch.norm in (Norm.leave, Norm.sync):
        note += " With batch.balance=length these samples have alike lengths."
    notes = _single_sample_notes(epoch, batch, task, steps)
    return notes if note is None else [note, *notes]


def _single_sample_notes(epoch: EpochPlan, batch: Batch, task: TaskPlan, steps: int | None) -> list[str]:
    """Return the note on micro-batches of one sample, on which a BatchNorm may fail: a sample of an image has many
    values per channel, others one.

    Raises:
        ConfigError: the run has such a micro-batch, and the model a BatchNorm that fails on it.
    """
    layer, full = task.one_value_norm, {batch.global_size, *(stage.global_size for stage in batch.ramp)}
    if not task.batch_norms or layer == "" or batch.norm is not Norm.leave or batch.balance is not Balance.none:
        return []
    sizes = full
    if task.samples is not None and steps is not None:
        keep_short = epoch.short_window_policy is ShortWindow.exact
        sizes = Windows(task.samples, batch, keep_short=keep_short).sizes(steps)
    alone = [size for size in sorted(sizes, key=lambda size: size not in full) if least_share(size, batch) <= 1]
    if not alone or (layer is None and batch.micro_size == 1):
        return []
    size = alone[0]
    short = size not in full
    window = f"The short window of {count(size, 'sample')}" if short else f"A window of {count(size, 'sample')}"
    remedy = ways_out_of_one_value(short=short)
    if layer is None:
        return [
            f"{window} has micro-batches of one sample, on which a BatchNorm with one value a channel fails (Expected "
            f"more than 1 value per channel). {remedy}"
        ]
    end = f" at the end of each epoch of {count(task.samples or 0, 'sample')}" if short else ""
    problem = (
        f"the BatchNorm {layer} would fail. {window}{end} has micro-batches of one sample, in which that layer has 1 "
        "value per channel."
    )
    if short:
        raise ConfigError("batch.short_window", epoch.short_window_policy, problem, remedy)
    raise ConfigError("batch.micro_size", batch.micro_size, problem, remedy)


def _window_notes(batch: Batch, train: TrainConfig, task: TaskPlan) -> Iterator[str]:
    """Yield the notes on the cost of a loss of the whole window, and on what ``batch.micro_tokens`` does not bound."""
    if task.window_loss:
        cost = (
            ": each micro-batch runs forward once more, without gradient, about a third more time "
            "(docs/guides/losses.md)."
        )
        if batch.predicted_accumulation == 1:
            cost = ", which is one micro-batch."
        yield f"The task's window_loss is computed from the outputs of all samples of a window{cost}"
    if batch.micro_tokens is None:
        return
    yield (
        "batch.micro_tokens: a window has as many micro-batches as the lengths of its samples need. Bytes and memory "
        f"are predicted for {batch.predicted_accumulation} a rank."
    )
    if task.eval_sets != () and train.eval_micro_size is None:
        yield (
            f"Evaluation runs {count(batch.micro_size, 'sample')} at once, whatever their tokens: "
            "train.eval_micro_size bounds them."
        )


def _step_notes(
    schedule: SchedulePlan, steps: int | None, epoch: EpochPlan, batch: Batch, optimizer: OptimizerPlan
) -> Iterator[str]:
    """Yield the notes on the batch ramp, the warm-up and the short window."""
    ramp = sum(stage.windows for stage in batch.ramp)
    if steps is not None and ramp >= steps:
        run = count(steps, "step")
        yield f"batch.ramp takes longer than the run's {run}: the global batch stays below {batch.global_size}."
    if ramp and optimizer.lr != optimizer.base_lr:
        yield f"optimizer.lr_scaling is for the {batch.global_size} samples after batch.ramp, from the first step on."
    if steps is not None and schedule.warmup_steps >= steps:
        yield f"schedule.warmup_steps={schedule.warmup_steps} takes up all {count(steps, 'step')} of the run."
    if epoch.short_window and epoch.short_window < batch.world_size:
        yield f"The short window of {count(epoch.short_window, 'sample')} leaves some ranks without a sample."


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
    minutes = SLURM_SAVES_EVERY_MIN if config.cluster.kind == ClusterKind.slurm else SAVES_EVERY_MIN
    return dataclasses.replace(plan, every_minutes=minutes, keep=plan.keep or KEEPS)


def solve_best_mode(checkpoint: CheckpointConfig, train: TrainConfig, task: TaskPlan) -> BestMode | None:
    """Return the direction of ``checkpoint.best``; None without that key.

    Raises:
        ConfigError: the metric cannot be one of this job's evaluations, its direction is not known, or the keys
            contradict each other.
    """
    metric, key = checkpoint.best, "checkpoint.best"
    if metric is None:
        return None
    _require_metric(metric, task)
    if not checkpoint.enabled and train.patience is None:
        raise ConfigError(
            key, metric, "has no effect: no checkpoint is saved (checkpoint.enabled=false), and the run does not end "
            "early (train.patience=null).", "Leave it out.",
        )  # fmt: skip
    if train.patience is not None and not train.eval_every:
        raise ConfigError(
            "train.patience", train.patience, "has no effect: the only evaluation is that at the end "
            "(train.eval_every=0).", "Set train.eval_every: optimizer steps, or epoch.",
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
