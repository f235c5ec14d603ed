"""HTML page of `launch report`: it works offline, for readers who do not know this tool."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from markupsafe import Markup

import launcher
from launcher.errors import UserError
from launcher.extensions.page.answer import Finding, findings
from launcher.extensions.page.compare import Row, RunComparison, TaskGroup, natural_sort_key, with_drawn_runs
from launcher.extensions.page.comparison_tables import DEFINITIONS, Column, columns_of, page_headings, page_line
from launcher.extensions.page.plotly_format import Plot
from launcher.extensions.page.plots import heat_maps, plots
from launcher.quantities import count, first_names
from launcher.rundir.files import write_text

# settings that are shown if all runs share them
_CONSTANT = {
    "cluster.device": "device", "strategy.kind": "strategy", "precision.kind": "precision",
    "optimizer.kind": "optimizer", "optimizer.lr": "learning rate", "train.steps": "steps",
}  # fmt: skip
_VALUES_SHOWN = 8


def page(
    comparison: RunComparison,
    now: datetime,
    answer: Sequence[Sequence[Finding]] | None = None,
    *,
    standalone: bool = True,
) -> str:
    """Return the HTML text.

    Args:
        now: time with a time zone.
        answer: findings of each task, if they are known already.
        standalone: the page contains the plot library; False: it needs ``library_name()`` beside it.
    """
    drawn: list[Plot] = []
    sections: list[dict[str, Any]] = []
    for number, group in enumerate(comparison.groups):
        shown = with_drawn_runs(group)
        numbered = list(enumerate([*heat_maps(group), *plots(shown)], len(drawn)))
        drawn += [plot for _, plot in numbered]
        found = findings(group) if answer is None else answer[number]
        section = {"target": group.target, "findings": found, "plots": numbered, "hints": _hints(group)}
        sections.append(section | {"left_out": _left_out(group, shown)})
    columns = columns_of(comparison)
    table = [page_line(row) | {"cells": _cells(columns, row)} for row in comparison.rows]
    import jinja2
    import orjson

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("launcher.extensions.page", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        version=launcher.__version__,
        library=library_name(),
        plotly=Markup(_library()) if standalone else None,
        # escaped so that no text can close the <script> element
        figures=Markup(orjson.dumps(drawn).decode().replace("<", "\\u003c")),
        title=comparison.title,
        now=now.strftime("%Y-%m-%d %H:%M %Z"),
        states=Counter(row.entry.state for row in comparison.rows).most_common(),
        varied=_varied(comparison),
        constant=_constant(comparison),
        projects=_projects(table),
        sections=sections,
        columns=page_headings(comparison, columns),
        table=table,
        notes=comparison.notes,
        definitions=DEFINITIONS,
    )


def library_name() -> str:
    """Return the name of the file with the plot library that the pages of a directory share."""
    return f"plotly-{metadata.version('plotly')}.min.js"


def _library() -> str:
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]

    return get_plotlyjs()


def _cells(columns: Sequence[Column], row: Row) -> Markup:
    """Return the HTML of a row's figures. The template would take most of the page's time for those of many rows."""
    escaped = html.escape("\0".join(column.text(row) or "–" for column in columns), quote=False)
    return Markup(f"<td>{escaped.replace(chr(0), '</td><td>')}</td>")


def _projects(table: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return name and address of each project that tracks runs of the table."""
    links = dict.fromkeys(link for line in table for link in line["links"])
    return list(dict.fromkeys((name, url.partition("/runs/")[0]) for name, url in links if "/runs/" in url))


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


def write_page(
    compared: RunComparison,
    place: Path,
    answer: Sequence[Sequence[Finding]] | None = None,
    *,
    standalone: bool = False,
) -> None:
    """Write the HTML page of a comparison.

    Args:
        answer: findings of each task (``launcher.extensions.page.answer``), if they are known already.
        standalone: the page contains the plot library; False: it is a file beside the page, shared by all pages there.

    Raises:
        UserError: ``place`` cannot be written.
    """
    text = page(compared, datetime.now().astimezone(), answer, standalone=standalone)
    library = place.with_name(library_name())
    try:
        if not standalone and not library.exists():
            write_text(library, _library())
        write_text(place, text)
    except OSError as error:
        raise UserError(
            f"{place}: cannot be written: {error.strerror}.\n  Choose another file: --html FILE."
        ) from error
