"""`launch report RUN... | SWEEP`: comparison of runs as a table, CSV, JSON, and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from launcher.api import compare, write_page
from launcher.cli.names import Parser, resolve_any
from launcher.errors import EXIT_DONE, UserError
from launcher.report import comparison_tables, live
from launcher.report.compare import Comparison
from launcher.report.tables import near
from launcher.rundir.paths import RunPaths, SweepPaths, find, find_sweeps, is_run, is_sweep


def report(arguments: list[str]) -> int:
    parser = Parser(prog="launch report", description="Compare runs: tables, plots, one page.", allow_abbrev=False)
    parser.add_argument("what", nargs="+", metavar="RUN", help="runs, sweeps, or directories of runs")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="directory of the runs (default: runs)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file for the page")
    parser.add_argument("--loss", type=float, metavar="X", help="the training loss up to which hours are counted")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="one line per run; no page without --html")
    form.add_argument("--json", action="store_true", help="one object; no page without --html")
    given = parser.parse_args(arguments)
    if given.loss is not None and not math.isfinite(given.loss):
        raise UserError(f"--loss {given.loss}: must be a number, in the unit of train/loss.")
    if given.html is not None and not given.html.absolute().parent.is_dir():
        raise UserError(
            f"--html {given.html}: there is no directory {given.html.parent}.\n  Create it, or name another."
        )
    asked = [paths for word in given.what for paths in _asked(word, given.dir)]
    names = [Path(word).name or str(word) for word in given.what]
    title = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    compared = compare(asked, title=title, loss=given.loss)
    if given.csv or given.json:
        print(
            (comparison_tables.as_csv if given.csv else comparison_tables.as_json)(compared),
            end="" if given.csv else "\n",
        )
        if given.html is not None:
            write_page(compared, given.html)
        return EXIT_DONE
    _show(compared)
    place = given.html or _page_of(given.what, asked, given.dir)
    write_page(compared, place)
    print(f"\nThe page: {near(place.absolute())} (one file, opens without network)")
    return EXIT_DONE


def _asked(word: str, runs: Path) -> list[RunPaths | SweepPaths]:
    """Return a run, a sweep, or all runs and sweeps in a directory.

    Raises:
        UserError: ``word`` is none of them.
    """
    for place in (runs / word, Path(word)) if word else ():
        if place.is_dir() and not is_run(place) and not is_sweep(place):
            if held := [*find(place), *find_sweeps(place)]:
                return held
            raise UserError(
                f"{word}: {near(place.absolute())} holds no run and no sweep.\n"
                "  Name a run, a sweep, or a directory with runs in it; `launch runs` lists them."
            )
    return [resolve_any(word, runs)]


def _page_of(words: Sequence[str], asked: Sequence[RunPaths | SweepPaths], runs: Path) -> Path:
    """Return the page's path: beside the runs, or in the directory of all runs if they come from several places."""
    if len(words) > 1:
        return (runs if runs.is_dir() else Path()) / "report.html"
    return (
        asked[0].report
        if isinstance(asked[0], SweepPaths) and len(asked) == 1
        else asked[0].root.parent / "report.html"
    )


def _show(compared: Comparison) -> None:
    console = live.console()
    console.print(comparison_tables.terminal_table(compared))
    lines = [f"{row.entry.label}: {row.entry.state}: {row.entry.detail}" for row in compared.rows if row.entry.detail]
    for group in compared.groups:
        if group.loss is not None:
            which = "given by --loss" if group.given else "the lowest that every finished run reached"
            of = f" of {group.target}" if len(compared.groups) > 1 else ""
            lines.append(f"Hours to a smoothed training loss{of} of {group.loss:.4g} ({which}).")
    for line in [*lines, *compared.notes]:
        console.print(escape(line), soft_wrap=True, highlight=False)
