"""Comparison as a terminal table, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from rich.markup import escape
from rich.table import Table

from launcher.report.compare import Comparison, Row, TaskGroup
from launcher.report.figures import SMOOTHED_OVER, Measured
from launcher.report.run_list import COLOURS

# figure -> how it is computed from metrics.jsonl
DEFINITIONS = {
    "own windows": "full windows: records with batch/samples = batch/global_size, of the largest batch/global_size",
    "time/step_s": "median of time/step_s over own windows; seconds",
    "time/data_s": "median of time/data_s over own windows: the part of a step that waited for data; seconds",
    "comm/exposed_s": "as the calibration before training measured it: a window's passes less the same passes without "
    "any collective; seconds. 0 on one worker; below zero: within the noise; absent: not measured",
    "time/compute_s": "time/step_s - time/data_s - comm/exposed_s (no less than 0); absent where the latter was not "
    "measured, or is longer than the step",
    "throughput/samples_per_s": "batch/global_size / time/step_s; the whole job",
    "scaling/efficiency": "(samples/s on W workers) / (W / W0 × samples/s on W0 workers), W0 the fewest workers among "
    "the finished runs with the same other settings (but for length, evaluation, logging and checkpoints); of several "
    "such runs the fastest",
    "comm/wire_bytes": "median over own windows: bytes one rank puts on the wire a step, as counted",
    "comm/wire_bytes_every": "the same, had each micro-batch been synchronised",
    "comm/saved_fraction": "1 - comm/wire_bytes / comm/wire_bytes_every",
    "comm/speedup": "(median step + what its passes take longer with sync=every, as the calibration before training "
    "measured it) / median step",
    "comm/speedup_low": "lower end of its 95% interval; comm/speedup_high: the upper end. Where 1 is between them, no "
    "difference was measured",
    "train/loss_smoothed": f"mean of the newest {SMOOTHED_OVER} logged values of train/loss (of fewer at the start)",
    "time/total_s": "wall seconds of training up to the last record, over all starts of the run",
    "loss/hours": "batch/world_size × time/total_s / 3600 at the first record whose smoothed loss is loss/target or "
    "lower; GPU-hours on GPUs, worker-hours on CPUs",
    "loss/target": "the given one, or else the lowest smoothed loss that every finished run of the task has reached",
}


def record_of(row: Row, group: TaskGroup | None) -> dict[str, Any]:
    """Return a run as a JSON object; None: unknown or not measured."""
    facts, measured, entry = row.facts, row.measured, row.entry
    known: dict[str, Any] = {
        "run": entry.label,
        "state": entry.state,
        "detail": entry.detail,
        "dir": str(entry.dir) if entry.dir else None,
        "elsewhere": entry.elsewhere or None,
        "same_as": row.same_as or None,
        "problem": row.figures.problem or None,
        "version": facts.version if facts else None,
        "task": facts.target if facts else None,
        "device": facts.device if facts else None,
        "strategy": facts.strategy if facts else None,
        "sync": facts.sync if facts else None,
        "batch/world_size": facts.world_size if facts else None,
        "batch/global_size": facts.global_size if facts else None,
        "batch/micro_size": facts.micro_size if facts else None,
        "batch/accumulation": facts.accumulation if facts else None,
        "step": measured.step if measured else None,
        "steps": facts.steps if facts else None,
        "progress/samples": measured.samples if measured else None,
        "own_windows": measured.windows if measured else None,
        "time/total_s": measured.total_s if measured else None,
        "time/step_s": measured.step_s if measured else None,
        "time/data_s": measured.data_s if measured else None,
        "time/compute_s": row.rest_s if row.exposed_s is not None else None,
        "comm/exposed_s": measured.exposed_s if measured else None,
        "throughput/samples_per_s": row.samples_per_s,
        "scaling/efficiency": row.efficiency.value if row.efficiency else None,
        "scaling/baseline_world_size": row.efficiency.baseline if row.efficiency else None,
        "comm/wire_bytes": measured.wire_bytes if measured else None,
        "comm/wire_bytes_every": measured.wire_bytes_every if measured else None,
        "comm/saved_fraction": row.saved_fraction,
        "comm/speedup": measured.speedup if measured else None,
        "comm/speedup_low": measured.speedup_95.low if measured and measured.speedup_95 else None,
        "comm/speedup_high": measured.speedup_95.high if measured and measured.speedup_95 else None,
        "train/loss": measured.loss if measured else None,
        "train/loss_smoothed": measured.smoothed if measured else None,
        "train/loss_smoothed_min": measured.lowest if measured else None,
        "eval/loss": measured.eval_loss if measured else None,
        "loss/target": group.loss if group else None,
        "loss/hours": row.hours,
        "loss/hours_unit": group.hours if group else None,
        "loss/step": row.reached_step,
    }
    return known


def records(comparison: Comparison) -> list[dict[str, Any]]:
    groups = {group.target: group for group in comparison.groups}
    return [record_of(row, groups.get(row.facts.target) if row.facts else None) for row in comparison.rows]


def as_json(comparison: Comparison) -> str:
    runs = [
        record | {"settings": {key: row.facts.settings.get(key) for key in comparison.varying} if row.facts else {}}
        for record, row in zip(records(comparison), comparison.rows, strict=True)
    ]
    whole = {"title": comparison.title, "runs": runs, "notes": comparison.notes, "definitions": DEFINITIONS}
    return json.dumps(whole, indent=2, allow_nan=False)


def as_csv(comparison: Comparison) -> str:
    """Return CSV with a header and one line per run; an unknown value is an empty cell."""
    lines = records(comparison)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def table(comparison: Comparison) -> Table:
    """Return a table with one line per run; a value that was not measured is empty."""
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    found.add_column("run", overflow="fold")
    found.add_column("state", no_wrap=True)
    groups = {group.target: group for group in comparison.groups}
    hours = "/".join(sorted({group.hours for group in comparison.groups})) or "worker-hours"
    for column in (
        "workers", "batch", "acc.", "step", "ms/step", "exposed", "samples/s", "efficiency", "MB/step", "saved",
        "speed-up", "loss", f"{hours} to loss",
    ):  # fmt: skip
        found.add_column(column, justify="right", overflow="fold")
    for row in comparison.rows:
        colour = COLOURS.get(row.entry.state, "magenta")
        group = groups.get(row.facts.target) if row.facts else None
        found.add_row(escape(row.entry.label), f"[{colour}]{row.entry.state}[/]", *_cells(row, group))
    return found


def _cells(row: Row, group: TaskGroup | None) -> list[str]:
    facts, measured = row.facts, row.measured
    if facts is None:
        return []
    sizes = [str(facts.world_size), str(facts.global_size), str(facts.accumulation)]
    if measured is None:
        return sizes
    return [
        *sizes,
        str(measured.step),
        _shown(measured.step_s, 1e3, ".1f"),
        _shown(row.exposed_s, 1e3, ".1f"),
        _shown(row.samples_per_s, 1, ",.1f"),
        _shown(row.efficiency.value if row.efficiency else None, 1, ".0%"),
        _shown(measured.wire_bytes, 1e-6, ",.2f"),
        _shown(row.saved_fraction, 1, ".1%"),
        shown_speedup(measured),
        _shown(measured.smoothed, 1, ".4f"),
        _shown(row.hours, 1, ".4g") or ("not reached" if group and group.loss is not None else ""),
    ]


def shown_speedup(measured: Measured) -> str:
    """Return the speed-up if it may be claimed, its interval if not, and nothing if it was not measured."""
    if measured.speedup_95 is None:
        return ""
    if measured.claimed_speedup is not None:
        return f"{measured.claimed_speedup:.2f}"
    return f"{measured.speedup_95.low:.2f}–{measured.speedup_95.high:.2f}"


def _shown(value: float | None, times: float, form: str) -> str:
    return "" if value is None else format(value * times, form)
