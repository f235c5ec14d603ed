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
from launcher.extensions.page.answer import Finding
from launcher.extensions.page.compare import Row, RunComparison, TaskGroup, natural_sort_key, with_drawn_runs
from launcher.extensions.page.comparison_tables import Column, columns_of, page_line
from launcher.extensions.page.plots import Plot, heat_maps, plots
from launcher.quantities import first_names
from launcher.rundir.files import write_text

_VALUES_SHOWN = 8


def page(comparison: RunComparison, answer: Sequence[Sequence[Finding]], now: datetime, *, standalone: bool) -> str:
    """Return the HTML text.

    Args:
        answer: findings of each task.
        now: time with a time zone.
        standalone: the page contains the plot library; False: it needs ``library_name()`` beside it.
    """
    drawn: list[Plot] = []
    sections: list[dict[str, Any]] = []
    for group, found in zip(comparison.groups, answer, strict=True):
        shown = with_drawn_runs(group)
        numbered = list(enumerate([*heat_maps(group), *plots(shown)], len(drawn)))
        drawn += [plot for _, plot in numbered]
        left_out = _left_out(group, shown)
        sections.append({"target": group.target, "findings": found, "plots": numbered, "left_out": left_out})
    columns = columns_of(comparison)
    headings = [(column.heading.format(hours=comparison.hours_unit), column.unit) for column in columns]
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
        sections=sections,
        columns=[("run", ""), ("state", ""), *headings],
        table=table,
        notes=comparison.notes,
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


def _varied(comparison: RunComparison) -> list[tuple[str, str]]:
    """Return the settings that vary, with their values."""
    settings = [row.data.settings for row in comparison.rows if row.data.settings]
    varied: list[tuple[str, str]] = []
    for key in comparison.varying:
        values = sorted({each.get(key, "null") for each in settings}, key=natural_sort_key)
        shown = ["not set" if value == "null" else value for value in values]
        varied.append((key, first_names(shown, _VALUES_SHOWN)))
    return varied


def _left_out(group: TaskGroup, shown: TaskGroup) -> str:
    """Return which runs the plots show; empty if they show all."""
    if len(shown.rows) == len(group.rows):
        return ""
    return (
        f"The plots show {len(shown.rows)} of {len(group.rows):,} runs: those that end with the lowest smoothed loss, "
        "finished runs first, each together with the runs that differ from it only in workers, accumulation or batch "
        "size. The figures above and the table are of all runs. `launch report RUN ...` plots the runs that it names."
    )


def write_page(
    compared: RunComparison, answer: Sequence[Sequence[Finding]], place: Path, *, standalone: bool = False
) -> None:
    """Write the HTML page of a comparison.

    Args:
        answer: findings of each task.
        standalone: the page contains the plot library; False: it is a file beside the page, shared by all pages there.

    Raises:
        UserError: ``place`` cannot be written.
    """
    text = page(compared, answer, datetime.now().astimezone(), standalone=standalone)
    library = place.with_name(library_name())
    try:
        if not standalone and not library.exists():
            write_text(library, _library())
        write_text(place, text)
    except OSError as error:
        raise UserError(
            f"{place}: cannot be written: {error.strerror}.\n  Choose another file: --html FILE."
        ) from error
