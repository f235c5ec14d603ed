"""`launch report RUN... | SWEEP`: compare runs: a table, CSV, JSON, and one HTML page with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from launcher.cli import login
from launcher.cli.names import command_parser, resolve_any
from launcher.errors import EXIT_DONE, UserError
from launcher.extensions.page import comparison_tables
from launcher.extensions.page.answer import findings
from launcher.extensions.page.page import library_name, write_page
from launcher.extensions.page.run_data import compare_runs
from launcher.plan.tracker_plan import MLFLOW_STORE
from launcher.process import no_collection
from launcher.quantities import first_names, printable
from launcher.report import live
from launcher.report.tables import near, require_place
from launcher.rundir.paths import RunPaths, SweepPaths, find, find_sweeps, is_run, is_sweep

FLAGS = ("--csv", "--json", "--html", "--loss", "--standalone", "--dir")


@no_collection()
def launch_report(arguments: list[str]) -> int:
    parser = command_parser("report", "Compare runs: tables, plots, one HTML page.", run=False)
    parser.add_argument("what", nargs="+", metavar="RUN", help="runs, sweeps, or directories of runs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="path of the page")
    parser.add_argument("--loss", type=float, metavar="X", help="training loss up to which hours are counted")
    parser.add_argument(
        "--standalone", action="store_true", help="the page contains the plot library: one file of 5 MB"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="one line per run; no page without --html")
    form.add_argument("--json", action="store_true", help="one object; no page without --html")
    options = parser.parse_args(arguments)
    if options.loss is not None and not math.isfinite(options.loss):
        raise UserError(f"--loss {options.loss}: must be a number, in the unit of train/loss.")
    if options.html is not None:
        require_place(options.html)
    # runs/* names MLflow's store too
    words = [word for word in options.what if Path(word).name != MLFLOW_STORE] or options.what
    chosen = [paths for word in words for paths in _runs_of(word, options.dir)]
    names = [Path(word).name or str(word) for word in words]
    compared = compare_runs(chosen, title=first_names(names, 3), loss=options.loss)
    if options.csv or options.json:
        as_text = comparison_tables.as_csv if options.csv else comparison_tables.as_json
        print(printable(as_text(compared)), end="" if options.csv else "\n")
        if options.html is not None:
            write_page(compared, options.html, standalone=options.standalone)
        return EXIT_DONE
    answer = [findings(group) for group in compared.groups]
    comparison_tables.print_comparison(live.console(), compared, answer)
    page = options.html or _page_of(options.what, chosen, options.dir)
    write_page(compared, page, answer, standalone=options.standalone)
    library = "one file" if options.standalone else f"with {library_name()} beside it"
    print(f"\nThe page: {near(page.absolute())} ({library}; opens without network)")
    return EXIT_DONE


def write_report(sweep: Path, loss: float | None = None) -> Path:
    """Write the page of `launch report SWEEP` and return its path.

    Args:
        sweep: directory of the sweep, such as ``Study.dir``.
        loss: training loss up to which hours are counted.
    """
    paths = SweepPaths(sweep)
    write_page(compare_runs([paths], title=sweep.name, loss=loss), paths.report)
    return paths.report


def _runs_of(word: str, runs: Path) -> list[RunPaths | SweepPaths]:
    """Return a run, a sweep, or all runs and sweeps in a directory.

    Raises:
        UserError: ``word`` is none of them.
    """
    for place in (runs / word, Path(word)) if word else ():
        if place.is_dir() and not is_run(place) and not is_sweep(place):
            if runs_there := [*find(place), *find_sweeps(place)]:
                return runs_there
            login.require_local_runs(place)
            raise UserError(
                f"{word}: {near(place.absolute())} contains no run and no sweep.\n"
                "  Name a run, a sweep, or a directory that contains runs; `launch runs` lists them."
            )
    return [resolve_any(word, runs)]


def _page_of(words: Sequence[str], chosen: Sequence[RunPaths | SweepPaths], runs: Path) -> Path:
    """Return the page's path: beside the runs, or in the directory of all runs if they come from several places."""
    if len(words) > 1:
        return (runs if runs.is_dir() else Path()) / "report.html"
    first = chosen[0]
    return first.report if isinstance(first, SweepPaths) and len(chosen) == 1 else first.root.parent / "report.html"
