"""Summary of a run as a table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich.table import Table

from launcher.config.choices import Device
from launcher.plan.run_plan import RunPlan
from launcher.quantities import bytes_text, count, exposed_text, prediction_text, speedup_text
from launcher.record.measurements import task_metrics
from launcher.report.tables import named_lines, near, tracker_lines
from launcher.rundir.files import read_json
from launcher.runs.status import metrics_text

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
