"""HTML page of `launch report`: one file that works offline, for readers who do not know this tool."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from markupsafe import Markup

from launcher.errors import UserError
from launcher.quantities import NO_INTERVAL, count, first_names
from launcher.report.compare import Row, RunComparison, TaskGroup, natural_sort_key, with_drawn_runs
from launcher.report.comparison_tables import DEFINITIONS, Column, columns_of, page_headings, page_line
from launcher.report.plots import Plot, plots
from launcher.rundir.files import write_text

# settings that are shown if all runs share them
_CONSTANT = {
    "cluster.device": "device", "strategy.kind": "strategy", "precision.kind": "precision",
    "optimizer.kind": "optimizer", "optimizer.lr": "learning rate", "train.steps": "steps",
}  # fmt: skip
_VALUES_SHOWN = 8


def page(comparison: RunComparison, now: datetime) -> str:
    """Return the HTML text.

    Args:
        now: time with a time zone.
    """
    drawn: list[Plot] = []
    sections: list[dict[str, Any]] = []
    for group in comparison.groups:
        shown = with_drawn_runs(group)
        numbered = list(enumerate(plots(shown), len(drawn)))
        drawn += [plot for _, plot in numbered]
        section = {"target": group.target, "headlines": headlines(group), "plots": numbered, "hints": _hints(group)}
        sections.append(section | {"left_out": _left_out(group, shown)})
    columns = columns_of(comparison)
    return render(
        "page.html.j2",
        drawn,
        title=comparison.title,
        now=now.strftime("%Y-%m-%d %H:%M %Z"),
        states=Counter(row.entry.state for row in comparison.rows).most_common(),
        varied=_varied(comparison),
        constant=_constant(comparison),
        sections=sections,
        columns=page_headings(comparison, columns),
        table=[page_line(row) | {"cells": _cells(columns, row)} for row in comparison.rows],
        notes=comparison.notes,
        definitions=DEFINITIONS,
    )


def render(template: str, drawn: Sequence[Plot], **values: Any) -> str:
    """Return the text of a page that works offline.

    Args:
        template: its file in this package.
        drawn: the page's plots, which the template refers to by their numbers.
        values: what else the template contains.
    """
    import jinja2
    import orjson
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("launcher", "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        version=metadata.version("launcher"),
        plotly=Markup(get_plotlyjs()),
        # escaped so that no text can close the <script> element
        figures=Markup(orjson.dumps(list(drawn)).decode().replace("<", "\\u003c")),
        **values,
    )


def require_place(place: Path) -> None:
    """Check that the directory of ``--html FILE`` exists.

    Raises:
        UserError: it does not.
    """
    if not place.absolute().parent.is_dir():
        raise UserError(f"--html {place}: there is no directory {place.parent}.\n  Create it, or choose another path.")


def save_page(text: str, place: Path) -> None:
    """Write a page.

    Raises:
        UserError: ``place`` cannot be written.
    """
    try:
        write_text(place, text)
    except OSError as error:
        raise UserError(
            f"{place}: cannot be written: {error.strerror}.\n  Choose another file: --html FILE."
        ) from error


def _cells(columns: Sequence[Column], row: Row) -> Markup:
    """Return the HTML of a row's figures. The template would take most of the page's time for those of many rows."""
    escaped = html.escape("\0".join(text for column in columns for text in column.cell(row))).split("\0")
    pairs = zip(escaped[::2], escaped[1::2], strict=True)
    return Markup("".join(f'<td class="number" data-value="{value}">{text}</td>' for text, value in pairs))


def _varied(comparison: RunComparison) -> list[tuple[str, str]]:
    """Return the settings that vary, with their values."""
    settings = [row.data.settings for row in comparison.rows if row.data.settings]
    varied: list[tuple[str, str]] = []
    for key in comparison.varying:
        values = sorted({each.get(key, "null") for each in settings}, key=natural_sort_key)
        varied.append((key, first_names([_or_not_set(value) for value in values], _VALUES_SHOWN)))
    return varied


def _constant(comparison: RunComparison) -> list[tuple[str, str]]:
    """Return the settings that all runs share."""
    rows = [row for row in comparison.rows if row.data.settings]
    if not rows:
        return []
    figures = {
        "task": "task", "workers": "batch/world_size", "global batch": "batch/global_size",
        "accumulation": "batch/accumulation", "sync policy": "sync",
    }  # fmt: skip
    unit = {"global batch": " samples"}
    constant = [
        (name, f"{rows[0][figure]:{'' if isinstance(rows[0][figure], str) else ','}}{unit.get(name, '')}")
        for name, figure in figures.items()
        if len({row[figure] for row in rows}) == 1
    ]
    same = rows[0].data.settings
    return constant + [
        (name, _or_not_set(same[key]))
        for key, name in _CONSTANT.items()
        if key not in comparison.varying and key in same
    ]


def _or_not_set(value: str) -> str:
    return "not set" if value == "null" else value


def _left_out(group: TaskGroup, shown: TaskGroup) -> str:
    """Return which runs the plots show; empty if they show all."""
    if len(shown.rows) == len(group.rows):
        return ""
    return (
        f"The plots show {len(shown.rows)} of {len(group.rows):,} runs: those that end with the lowest smoothed loss, "
        "finished runs first, each together with the runs that differ from it only in workers, accumulation or batch "
        "size. The figures above and the table are of all runs. `launch report RUN ...` plots the runs that it names."
    )


def _hints(group: TaskGroup) -> list[str]:
    """Return which plots are missing, and why."""
    hints: list[str] = []
    worlds = {row["batch/world_size"] for row in group.rows}
    accumulations = {row["batch/accumulation"] for row in group.rows if row["batch/world_size"] > 1}
    if len(worlds) == 1:
        hints.append(f"All runs have {count(worlds.pop(), group.worker)}, so there is no scaling to show.")
    if len(accumulations) == 1:
        hints.append(
            f"All runs on several workers have accumulation {accumulations.pop()}, so there is no plot over it; the "
            "table has bytes and speed-up."
        )
    if group.loss is None:
        hints.append(
            f"No run has finished, so no loss is set up to which {group.worker}-hours count; `--loss X` sets one."
        )
    return hints


@dataclass(frozen=True)
class Headline:
    """Headline of the page: a large ``figure`` and the ``text`` that explains it."""

    figure: str
    text: str


def headlines(group: TaskGroup) -> list[Headline]:
    """Return at most four headlines; none if no run has finished."""
    done = [row for row in group.rows if row.done]
    made = [_fastest(done, group), _scaling(done, group), _saved(done, group), _cheapest(done, group)]
    return [headline for headline in made if headline is not None]


def _fastest(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    timed = [row for row in rows if row["throughput/samples_per_s"]]
    if not timed:
        return None
    best = max(timed, key=lambda row: row["throughput/samples_per_s"])
    which = f"the fastest of {len(timed)} finished runs: " if len(timed) > 1 else ""
    return Headline(
        f"{best['throughput/samples_per_s']:,.4g} samples/s",
        f"on {count(best['batch/world_size'], group.worker)}: {which}{group.describe(best)}.",
    )


def _scaling(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    """Return the headline on scaling from the fewest workers to the most that were compared with them."""
    compared = [
        row for row in rows if row["batch/world_size"] > (row["scaling/baseline_world_size"] or row["batch/world_size"])
    ]
    if not compared:
        return None
    most = max(row["batch/world_size"] for row in compared)
    compared = [row for row in compared if row["batch/world_size"] == most]
    baseline = min(row["scaling/baseline_world_size"] for row in compared)
    values = [row["scaling/efficiency"] for row in compared if row["scaling/baseline_world_size"] == baseline]
    gained = " to ".join(dict.fromkeys(f"{value * most / baseline:.2f}×" for value in (min(values), max(values))))
    span = " to ".join(dict.fromkeys(f"{value:.0%}" for value in (min(values), max(values))))
    over = "" if len(values) == 1 else f", across {len(values)} settings"
    return Headline(
        f"{gained} the speed", f"from {baseline} to {most} {group.worker}s: {span} scaling efficiency{over}."
    )


def _saved(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    saving = [row for row in rows if row["comm/saved_fraction"]]
    if not saving:
        return None
    best = max(saving, key=lambda row: (row["comm/saved_fraction"], row.claimed_speedup or 0.0))
    if best.claimed_speedup is not None:
        gain = f", and a step ran {best.claimed_speedup:.2f}× as fast"
    elif best.speedup is not None:
        gain = "; no difference in speed was measured"
    elif best["comm/speedup"] is not None:
        gain = f"; the speed-up was {NO_INTERVAL}"
    else:
        gain = "; the effect on speed was not measured"
    return Headline(
        f"{best['comm/saved_fraction']:.1%} fewer bytes",
        f"on the wire with accumulation {best['batch/accumulation']} than if every micro-batch were synchronised{gain} "
        f"({group.describe(best)}).",
    )


def _cheapest(rows: Sequence[Row], group: TaskGroup) -> Headline | None:
    reached = sorted((row for row in rows if row["loss/hours"]), key=lambda row: row["loss/hours"])
    if group.loss is None or len(reached) < 2:
        return None
    best, worst = reached[0], reached[-1]
    unit, factor = group.time_unit
    return Headline(
        f"{best['loss/hours'] * factor:.3g} {unit}",
        f"is the lowest cost of a training loss of {group.loss:.4g}: {group.describe(best)}. The highest is "
        f"{worst['loss/hours'] / best['loss/hours']:.2f} times as much: {group.describe(worst)}.",
    )
