"""Plan and summary of a run as tables, and a failure as text."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.config.key_facts import typed
from launcher.config.schema import (
    Balance,
    BestMode,
    CheckpointConfig,
    Compress,
    Device,
    LrScaling,
    OnOom,
    PrecisionKind,
    Recompute,
    ScheduleKind,
    ShortWindow,
    StrategyKind,
    Sync,
)
from launcher.errors import UserError
from launcher.plan.callback_plan import name_of
from launcher.plan.data_shards import data_shards_text
from launcher.plan.float_format import float_format
from launcher.plan.host import without_path
from launcher.plan.optimizer_plan import MATCH, TARGET
from launcher.plan.run_plan import Forecast, OptimizerPlan, RunPlan, StrategyPlan
from launcher.plan.strategy import least_note
from launcher.process import CRASH_MARK
from launcher.quantities import bytes_text, count, exposed_text, prediction_text, printable, speedup_text
from launcher.record.measurements import task_metrics
from launcher.report.recorded_step import RecordedStep
from launcher.rundir.files import Unreadable, last_lines, read_json
from launcher.rundir.job_end import failed_rank, fails_again, failure_record
from launcher.rundir.paths import RunPaths
from launcher.runs.status import metrics_text
from launcher.trackers.installed import described_tracker, recorded_trackers


def named_lines(title: str) -> tuple[Table, Callable[..., None]]:
    """Return a table of named lines, and a function that adds one from its name, its text and perhaps a style; brackets
    in a path are text, not rich's markup."""
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def add(name: str, text: str, style: str | None = None) -> None:
        table.add_row(name, Text(printable(text), style or ""))

    return table, add


def plan_table(plan: RunPlan, recorded: RecordedStep | None = None) -> Table:
    """Return the plan as a table with one row per decision: what matters most, the job, predictions, places, notes.

    Args:
        recorded: measured step of an earlier run of the same job.
    """
    table, add = named_lines(f"Plan: {plan.run.name}")
    forecasts = list(forecast_lines(plan))
    cut = 1 if forecasts and forecasts[0][0] == WIRE else 0
    if recorded is not None:
        forecasts.insert(cut, ("step time", recorded.text))
    groups = (_main_lines(plan, forecasts[:cut]), _job_lines(plan), forecasts[cut:], _places(plan))
    for number, lines in enumerate(groups):
        if number and lines:
            add("", "")
        for name, text in lines:
            add(name, text, None if number else "bold")
    if plan.notes:
        add("", "")
    for note in plan.notes:
        add("note", note, "yellow")
    return table


def _main_lines(plan: RunPlan, forecast: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the lines on which everything else depends. ``forecast``: that of a step."""
    cluster = plan.cluster
    hosts = f"{cluster.range.text} host{'' if cluster.nodes == 1 else 's'}"
    lines = [("workers", f"{hosts} × {count(cluster.workers_per_node, 'worker')}, {cluster.device.value}")]
    if cluster.slurm is not None and cluster.slurm.container is None:
        lines.append(("python", f"{sys.executable}, on every node"))
    for world in plan.worlds():
        where = "" if cluster.range.fixed else f"on {count(world.cluster.nodes, 'host')}: "
        tokens = world.batch.global_size * (plan.task.tokens_per_sample or 0)
        size = f"{count(tokens, 'token')} = {world.batch.text}" if tokens else world.batch.text
        lines.append(("global batch" if world.batch is plan.batch else "", f"{where}{size}"))
    lines += [("precision", precision_text(plan)), ("strategy", _strategy(plan.strategy))]
    if plan.sites is not None:
        lines.append(("sites", plan.sites.text))
    return [*lines, *forecast]


def _job_lines(plan: RunPlan) -> list[tuple[str, str]]:
    """Return the lines on what is learned from what."""
    batch, epoch = plan.batch, plan.epoch
    lines = [("task", _task(plan))]
    if plan.initial is not None:
        lines.append(("starts with", f"the weights of {plan.initial.text}"))
    if batch.on_oom is OnOom.shrink:
        lines.append(("micro-batches", "are halved when memory runs out, and the window is repeated"))
    if batch.balance is Balance.length:
        lines.append(("balance", "each window's samples are divided among ranks and micro-batches by their lengths"))
    if batch.ramp:
        stages = ", then ".join(f"{stage.global_size} for {count(stage.windows, 'window')}" for stage in batch.ramp)
        lines.append(("ramp", f"at first {stages}"))
    lines.append(("windows", _windows(plan)))
    if epoch.windows is not None and epoch.short_window_policy is ShortWindow.drop and plan.task.samples is not None:
        left_out = plan.task.samples % batch.global_size
        lines.append(("", f"batch.short_window=drop leaves out {count(left_out, 'sample')} an epoch"))
    lines.append(("length", _length(plan)))
    clip = "no clipping" if plan.train.clip_norm is None else f"clip {plan.train.clip_norm:g}"
    lines += [("" if number else "optimizer", text) for number, text in enumerate(_updates(plan, clip))]
    if (scaled := _scaled_adam(plan.optimizer)) is not None:
        lines.append(("", scaled))
    if plan.callbacks:
        lines.append(("callbacks", ", ".join(map(name_of, plan.callbacks))))
    if (best := _best(plan)) is not None:
        lines.append(("best", best))
    return lines


def _places(plan: RunPlan) -> list[tuple[str, str]]:
    """Return where the run is stored, shown and announced."""
    lines = [("files", near(plan.run.dir)), ("checkpoints", _checkpoints(plan.checkpoint))]
    for tracker in map(described_tracker, plan.trackers):
        place = tracker.destination(plan, os.environ)
        lines.append((tracker.title, printable(place.removeprefix(f"{Path.cwd()}{os.sep}"))))
    if plan.notify:
        lines.append(("messages", ", ".join(map(without_path, plan.notify))))
    return lines


def _checkpoints(plan: CheckpointConfig) -> str:
    if not plan.enabled:
        return "none: the run cannot resume"
    every = [f"every {plan.every if isinstance(plan.every, str) else count(plan.every, 'step')}"] if plan.every else []
    every += [f"every {plan.every_minutes:g} minutes"] if plan.every_minutes else []
    kept = "" if plan.keep is None else f"; the newest {plan.keep} are kept"
    return f"{', '.join([*every, 'at a stop'])} and at the end{kept}"


def _best(plan: RunPlan) -> str | None:
    """Return which evaluation is the best one, and what follows from it; None without ``checkpoint.best``."""
    metric, mode, patience = plan.checkpoint.best, plan.checkpoint.best_mode, plan.train.patience
    if metric is None:
        return None
    parts = [f"the {'highest' if mode is BestMode.max else 'lowest'} {metric}"]
    if plan.checkpoint.enabled:
        parts.append("its checkpoint is kept")
    if patience is not None:
        parts.append(f"the run ends after {count(patience, 'evaluation')} without a better one")
    return ", ".join(parts)


def _updates(plan: RunPlan, clip: str) -> list[str]:
    """Return a line on the update rule, and one on each parameter group."""
    optimizer, schedule, task = plan.optimizer, plan.schedule, plan.task
    rates = "the task's own schedule" if task.own_schedule else schedule.name
    if schedule.kind is not ScheduleKind.custom and not task.own_schedule:
        rates += f" with {count(schedule.warmup_steps, 'warm-up step')}"
    if task.own_optimizer:
        return [f"the task's own optimizer, {rates}, {clip}"]
    known = task.group_parameters
    sizes = (None,) * len(optimizer.groups) if known is None else known[1:]
    used = [(group, size) for group, size in zip(optimizer.groups, sizes, strict=True) if size != 0]
    others = "".join(f"{name} and " for name in dict.fromkeys(group[TARGET] for group, _ in used if TARGET in group))
    lines = [f"{others}{optimizer.name}, lr {_rate(optimizer)}, {rates}, {clip}"]
    for group, number in used:
        options = ", ".join(f"{name} {typed(value)}" for name, value in group.items() if name not in (MATCH, TARGET))
        size = f" ({count(number, 'parameter')})" if number else ""
        lines.append(f"{group[MATCH]}{size}: {', '.join(part for part in (group.get(TARGET), options) if part)}")
    return lines


def _rate(optimizer: OptimizerPlan) -> str:
    """Return the learning rate; with a scaling rule also the base rate and k = global batch / reference batch."""
    if optimizer.lr_scaling is LrScaling.none or optimizer.lr == optimizer.base_lr:
        return f"{optimizer.lr:g}"
    k = (optimizer.lr / optimizer.base_lr) ** (2 if optimizer.lr_scaling is LrScaling.sqrt else 1)
    return f"{optimizer.lr:g} (from {optimizer.base_lr:g}, {optimizer.lr_scaling.value} rule, k={k:.4g})"


def _scaled_adam(optimizer: OptimizerPlan) -> str | None:
    """Return the text on betas and eps changed by lr_scaling=sqrt; None if they are unchanged."""
    before, after = optimizer.base_betas, optimizer.betas
    if before is None or optimizer.base_eps is None or before == after:
        return None
    return (
        f"betas {after[0]:.6g} and {after[1]:.6g} (from {before[0]:g} and {before[1]:g}), eps {optimizer.eps:.4g} "
        f"(from {optimizer.base_eps:g})"
    )


def precision_text(plan: RunPlan) -> str:
    """Return the number format and why it was chosen."""
    precision = plan.precision
    if precision.kind is PrecisionKind.auto:
        return "auto: bf16 if every worker's device computes it natively, else fp32; decided at the start"
    tf32 = ", TF32 for what is in fp32" if precision.tf32 else ""
    if (added := float_format(plan)) is not None:
        return f"{added.text()}, else bf16{tf32}"
    return precision.kind.value + (f" ({precision.reason})" if precision.reason else "") + tf32


def _strategy(strategy: StrategyPlan) -> str:
    parts = [strategy.kind.value + (f" ({strategy.kind_reason})" if strategy.kind_reason else "")]
    if strategy.kind is StrategyKind.hsdp:
        parts.append(f"shard groups of {strategy.shard_size}")
    if strategy.compress is not Compress.none:
        parts.append(f"gradients sent as {strategy.compress.value}")
    if strategy.recompute is not Recompute.none:
        parts.append("blocks recomputed in backward")
    if strategy.cpu_offload:
        parts.append("parameters in host memory")
    return f"{', '.join(parts)}, sync {strategy.sync.value}: {strategy.sync_reason}"


def _task(plan: RunPlan) -> str:
    streamed = plan.task.samples is None or plan.task.stream is not None
    size = data_shards_text(plan) if streamed else f"{plan.task.samples:,} samples"
    if not (plan.train.shuffle or streamed):
        size += " in the dataset's order"
    weights = "" if plan.task.parameters is None else f", {plan.task.parameters:,} parameters"
    if plan.task.parameters is not None and plan.task.frozen_parameters:
        total = plan.task.parameters + plan.task.frozen_parameters
        weights = f", {plan.task.parameters:,} of {total:,} parameters trained"
    return f"{plan.task.target}: {size}{weights}"


def _windows(plan: RunPlan) -> str:
    if plan.epoch.windows is None:
        return "as many as the stream has; the last one is exact, however short"
    short = plan.epoch.short_window
    return f"{plan.epoch.windows:,} an epoch{' after the ramp' if plan.batch.ramp else ''}" + (
        f", the last one short: {count(short, 'sample')}" if short else ", all full"
    )


def _length(plan: RunPlan) -> str:
    steps, windows = plan.train.steps, plan.epoch.windows
    if steps is None:
        return f"{count(plan.train.epochs or 0, 'epoch')} of a stream"
    return count(steps, "step") + (f" = {steps / windows:.3g} epochs" if windows and not plan.batch.ramp else "")


def tracker_lines(paths: RunPaths, trackers: Iterable[str] | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield name, place and problem of each of the run's trackers with a status; empty texts for what is unknown.

    Args:
        trackers: those of the run's plan if it was read before.
    """
    for tracker in recorded_trackers(paths) if trackers is None else trackers:
        try:
            status = read_json(paths.tracker_status(tracker))
        except (OSError, Unreadable):
            status = {"problem": f"{paths.tracker_status(tracker).name} is unreadable"}
        if status:
            where = status.get("url") or (near(str(status["dir"])) if status.get("dir") else "")
            yield described_tracker(tracker).title, str(where), str(status.get("problem") or "")


def failure_text(summary: dict[str, Any], node: int = 0) -> str:
    """Return the output of the first failing rank, followed by its source.

    Args:
        node: number of the host that shows the text. A failure on another host is summarised: that host shows it in
            full.
    """
    failure: dict[str, Any] = failure_record("", None) | summary["failure"]
    if failure.get("log") is None:  # the host is lost
        return printable(f"launch: the job failed: {failure['error']}")
    number = failed_rank(failure)
    if failure.get("node", node) != node:
        rank = "" if number is None else f"rank {number}: "
        where = f"node {failure['node']} ({failure['host']})"
        return printable(
            f"launch: the job failed on {where}: {rank}{failure['error']}\n  Its log there: {failure['log']}"
        )
    log = Path(failure["log"])
    # the launcher's own errors, which have a kind, are complete; for a killed process the end of its log may help
    output = [failure["traceback"].rstrip()] if failure["traceback"] else []
    if not output and not failure["kind"]:
        lines = last_lines(log, 100)
        crash = next((number for number, line in enumerate(lines) if line.startswith(CRASH_MARK)), len(lines) - 15)
        output = lines[max(crash, 0) :][:15]
    rank = "the job" if number is None else f"rank {number}"
    return printable("\n".join([*output, f"launch: {rank} failed: {failure['error']}", f"  Its log: {near(log)}"]))


def resume_hint(failure: dict[str, Any] | None, step: int, name: str) -> str:
    """Return the line on how to resume a run; empty if that would fail again, or if the failure says it.

    Args:
        failure: None: it did not fail.
        step: of the newest checkpoint; 0 without one.
        name: by which commands accept the run.
    """
    if fails_again(failure or {}) or "launch resume" in str((failure or {}).get("error")):
        return ""
    return f"  `launch resume {name}` " + (f"continues from step {step}." if step else "starts it again, from step 0.")


def near(path: str | Path) -> str:
    """Return ``path`` for the terminal, relative if it is below the working directory."""
    path = Path(path)
    return printable(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def require_place(place: Path) -> None:
    """Check that the directory of ``--html FILE`` exists.

    Raises:
        UserError: it does not.
    """
    if not place.absolute().parent.is_dir():
        raise UserError(f"--html {place}: there is no directory {place.parent}.\n  Create it, or choose another path.")


def verdict_text(verdict: str, colour: str, reason: str) -> Text:
    """Return the last line of a test's result."""
    return Text(verdict, style=colour).append(reason, style="not bold default")


WIRE = "wire a step"  # name of a line


def forecast_lines(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line, the bytes of a step first; a further line of one subject has no name."""
    strategy = plan.strategy
    own, every = strategy.forecast, strategy.forecast_of(Sync.every)
    if own and every and every.wire_bytes:  # one rank sends nothing
        yield WIRE, f"{bytes_text(own.wire_bytes)} a rank predicted; {bytes_text(every.wire_bytes)} with sync=every"
    if any(each.peak_bytes is not None for each in strategy.forecasts):
        for number, each in enumerate(strategy.forecasts):
            yield "" if number else "policies", _policy(each)
        if strategy.memory_bytes is not None:
            yield "", f"{bytes_text(strategy.memory_bytes)} are available to each rank"
    elif (least := least_note(plan, None)) and not any(least in note for note in plan.notes):
        yield "memory", least


def _policy(forecast: Forecast) -> str:
    known = forecast.peak_bytes
    memory = "memory not known" if known is None else f"{bytes_text(known)} of memory at most"
    return f"{forecast.sync.value}: {bytes_text(forecast.wire_bytes)} on the wire a step, {memory}"


# factor between global batch and noise scale from which they count as far apart: a step makes less than a fifth of the
# progress of one without noise, or more than four fifths
FAR = 4


def summary_table(plan: RunPlan, summary: dict[str, Any]) -> Table:
    """Return the results of a finished or stopped run and the locations of its files."""
    verdict = summary["verdict"]
    if verdict == "killed" and "stopped_by" in summary:
        verdict = f"stopped by {summary['stopped_by']} before it could save"
    elif verdict == "stopped" and "stopped_by" in summary:
        verdict = f"stopped by {summary['stopped_by']}"
    table, add = named_lines(f"Run {plan.run.name}: {verdict}")
    if "stopped_early" in summary:
        add("stopped early", summary["stopped_early"])
    if "train/loss" in summary:
        held_out = "" if summary.get("eval/loss") is None else f", held-out {summary['eval/loss']:.4f}"
        add("loss", f"{summary['train/loss']:.4f}{held_out} after {count(summary['steps'], 'step')}")
    if metrics := task_metrics(summary):
        add("averages", metrics_text(metrics))
    if "throughput/samples_per_s" in summary:
        rate = f"{summary['throughput/samples_per_s']:,.1f} samples/s, "
        took = f"{summary['time/step_s'] * 1e3:,.1f} ms a step (median); {summary['time/total_s']:,.1f} s in all"
        add("throughput", rate + took)
    size = summary.get("batch/global_size", plan.batch.global_size)
    add("global batch", f"{count(size, 'sample')} in every full window{' at the end' if plan.batch.ramp else ''}")
    if "outer/rounds" in summary:
        rounds = f"{count(summary['outer/rounds'], 'average')} of {summary['outer/sites']} sites"
        add("outer steps", f"{rounds}, {summary['outer/time_s'] * 1e3:,.1f} ms a step (mean)")
        if "outer/synchronous_s" in summary:
            took = f"{summary['outer/synchronous_s'] * 1e3:,.1f} ms a step"
            add("", f"the gradient of a synchronous job would take {took} between the sites, without overlap")
    if summary.get("comm/wire_bytes_every"):
        sent, every = (bytes_text(summary[f"comm/{name}"]) for name in ("wire_bytes", "wire_bytes_every"))
        saved = f"{summary['comm/saved_fraction']:.1%} saved"
        add("wire a step", f"{sent} a rank counted; {every} with sync=every: {saved}")
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "statistics", "outputs"):
            if f"comm/{kind}/wire_bytes" in summary:
                add("", f"{kind}: {bytes_text(summary[f'comm/{kind}/wire_bytes'])}")
        add("speed-up", speedup_text(summary) or _not_measured(plan, summary))
        if (exposed := exposed_text(summary)) is not None:
            add("exposed", exposed)
    if (predicted := prediction_text(summary, has_memory=plan.cluster.device is Device.cuda)) is not None:
        add("prediction", predicted)
    if "noise/scale_low" in summary:
        warm = summary["steps"] > plan.schedule.warmup_steps
        window = size // summary.get("outer/sites", 1)
        add("noise scale", _noise_advice(summary, window) if warm else "not known yet: the learning rate is warming up")
    if (straggler := summary.get("straggler")) is not None:
        add("straggler", _straggler(straggler))
    if summary.get("amp/skipped_steps"):
        add("skipped", f"{count(summary['amp/skipped_steps'], 'window')}, by fp16 overflow")
    if summary.get("batch/empty_windows"):
        add("empty", f"{count(summary['batch/empty_windows'], 'window')} without an item: no step was made")
    if summary.get("batch/nonfinite_windows"):
        windows = count(summary["batch/nonfinite_windows"], "window")
        add("not finite", f"{windows} skipped: loss or gradient was inf or nan")
    if plan.paths.metrics.exists():
        add("metrics", near(plan.paths.metrics))
    if summary.get("checkpoint"):
        add("checkpoint", near(summary["checkpoint"]))
    if (best := summary.get("best")) is not None:
        if best["step"] is not None:
            add("best", best_text(best) + ("" if best["directory"] is None else f": {near(best['directory'])}"))
        elif best.get("judged") is not None:
            add("best", f"none ({best['metric']} was not finite in any evaluation)")
    if summary.get("checkpoint/failed"):
        add("not saved", f"{count(summary['checkpoint/failed'], 'checkpoint')}: see the log of rank 0")
    for title, where, problem in tracker_lines(plan.paths):
        if where:
            add(title, where)
        if problem:
            add("", f"{title} is incomplete: `launch status {near(plan.paths.root)}` shows why")
    mirror = read_json(plan.paths.tracker_status("wandb")) or {}
    if mirror.get("dir") and not mirror.get("url"):
        pattern = Path(mirror["dir"]).parent / "offline-run-*"  # one per start of the run
        several = len([*pattern.parent.glob(pattern.name)]) > 1
        add("upload", f"wandb sync {near(pattern if several else mirror['dir'])}")
    return table


def best_text(best: dict[str, Any]) -> str:
    """Return the metric, value and step of the best evaluation."""
    return f"{best['metric']} {best['value']:.6g} at step {best['step']}"


def _not_measured(plan: RunPlan, summary: dict[str, Any]) -> str:
    """Return why the calibration has no speed-up."""
    if "comm/not_measured" in summary:
        return f"not measured ({summary['comm/not_measured']})"
    if plan.train.calibrate_s == 0:
        return "not measured (run.calibrate_s=0)"
    if "comm/exposed_s" in summary:
        return "none: sync=every sends the same"
    return "not measured (too few full windows)"


def _straggler(straggler: dict[str, Any]) -> str:
    cause = "computing" if straggler["of"] == "compute" else "waiting for data"
    over = "; it is over" if straggler["over"] else ""
    return (
        f"rank {straggler['rank']} on {straggler['host']} was the slowest in {straggler['steps']:,} of "
        f"{straggler['measured']:,} measured steps, by {cause}: {straggler['share']:.0%} of a step at last{over}"
    )


def _noise_advice(summary: dict[str, Any], global_size: int) -> str:
    """Return the noise scale with its interval, in samples, and advice on the global batch valid in the whole interval.

    A step on B samples makes ``1 / (1 + scale / B)`` of the progress of a step on infinitely many samples (McCandlish
    et al. 2018, section 2.2, equation 2.7: SGD whose learning rate is tuned for its batch).
    """
    low, high = summary["noise/scale_low"], summary.get("noise/scale_high", math.inf)
    between = f"between {_samples(low)} and {_samples(high)}" if math.isfinite(high) else f"{_samples(low)} or more"
    if low > global_size * FAR:
        where, advice = "far below", "a larger one would save many steps for few more samples"
    elif high * FAR < global_size:
        where, advice = "far above", "a smaller one would save many samples for few more steps"
    elif low * FAR >= global_size and high <= global_size * FAR:
        where, advice = "near", "steps and samples are in balance"
    elif low == 0 and not math.isfinite(high):
        return "not known yet: the noise hides the gradient of the windows so far"
    else:
        return f"not known yet: {between} samples (95%)"
    about = f"about {_samples(summary['noise/scale'])}, " if "noise/scale" in summary else ""
    shares = [f"{1 / (1 + scale / global_size):.0%}" for scale in (high, low)]
    progress = shares[0] if shares[0] == shares[1] else f"{shares[0]} to {shares[1]}"
    return (
        f"{about}{between} samples (95%). The global batch of {global_size:,} is {where} it: {advice}. (With tuned "
        f"SGD, a step makes {progress} of the progress of a step without noise.)"
    )


def _samples(number: float) -> str:
    return f"{number:,.{0 if number >= 10 else 1}f}"
