"""`launch report RUN... | SWEEP`: compare runs: a table, CSV, JSON, and one HTML page with plots."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from launcher.cli.elsewhere import elsewhere
from launcher.cli.names import command_parser, resolve_any
from launcher.errors import EXIT_DONE, UserError
from launcher.extensions.page import comparison_tables
from launcher.extensions.page.answer import findings
from launcher.extensions.page.compare import Entry, RunComparison, side_by_side
from launcher.extensions.page.page import library_name, write_page
from launcher.process import die_with_parent, no_collection
from launcher.quantities import first_names, printable
from launcher.record.measurements import RunData, read_run
from launcher.record.report_entry import identity_of, read_entry
from launcher.report import live
from launcher.report.tables import near, require_place
from launcher.rundir.paths import RunPaths, SweepPaths, find, find_sweeps, is_run, is_sweep
from launcher.runs.status import Run, RunState, statuses_of
from launcher.sweeps.reuse import look_at_sweeps

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
    # runs/* also names the store of a tracker
    words = [word for word in options.what if _has_runs(Path(word))] or options.what
    chosen = [paths for word in words for paths in _runs_of(word, options.dir)]
    names = [Path(word).name or str(word) for word in words]
    compared = compare_runs(chosen, title=first_names(names, 3), loss=options.loss)
    answer = [findings(group) for group in compared.groups]
    if options.csv or options.json:
        as_text = comparison_tables.as_csv if options.csv else comparison_tables.as_json
        print(printable(as_text(compared)), end="" if options.csv else "\n")
        if options.html is not None:
            write_page(compared, answer, options.html, standalone=options.standalone)
        return EXIT_DONE
    comparison_tables.print_comparison(live.console(), compared, answer)
    page = options.html or _page_of(options.what, chosen, options.dir)
    write_page(compared, answer, page, standalone=options.standalone)
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
    compared = compare_runs([paths], title=sweep.name, loss=loss)
    write_page(compared, [findings(group) for group in compared.groups], paths.report)
    return paths.report


def _has_runs(place: Path) -> bool:
    """Return False for a directory without runs and sweeps."""
    return not place.is_dir() or is_run(place) or is_sweep(place) or bool(find(place) or find_sweeps(place))


def _runs_of(word: str, runs: Path) -> list[RunPaths | SweepPaths]:
    """Return a run, a sweep, or all runs and sweeps in a directory."""
    for place in (runs / word, Path(word)) if word else ():
        if place.is_dir() and not is_run(place) and not is_sweep(place):
            if runs_there := [*find(place), *find_sweeps(place)]:
                return runs_there
            elsewhere().require_local_runs(place)
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


# below this many bytes of records, starting processes takes longer than reading; a run's other files take as long as
# 5 kB of them
_ALONE_BYTES, _CONFIG_BYTES = 30_000_000, 5_000


def read_all(runs: Sequence[Path]) -> dict[Path, RunData]:
    """Return the data of each directory in ``runs``, read from its files."""
    sizes = {run: _CONFIG_BYTES + _size(run) for run in runs}
    cores = min(len(os.sched_getaffinity(0)), len(sizes))
    if cores < 2 or sum(sizes.values()) < _ALONE_BYTES:
        return {run: read_run(run) for run in sizes}
    largest_first = sorted(sizes, key=lambda run: -sizes[run])
    # spawn: a forked process would inherit locks that another thread of this one may hold
    # initializer: without it a worker would outlive this process, because it holds both ends of its own queue
    context, end = multiprocessing.get_context("spawn"), partial(die_with_parent, os.getpid())
    with ProcessPoolExecutor(cores, mp_context=context, initializer=end) as pool:
        return dict(zip(largest_first, pool.map(read_run, largest_first, chunksize=1 + len(sizes) // 200), strict=True))


def _size(run: Path) -> int:
    try:
        return RunPaths(run).metrics.stat().st_size
    except OSError:
        return 0


class ReportedRuns:
    """States and measurements of a report's runs."""

    def __init__(self) -> None:
        self._entries: dict[Path, tuple[list[str] | None, RunData] | None] = {}

    def statuses(self, runs: Iterable[RunPaths]) -> list[Run]:
        """Return name, directory, state and detail of each run.

        Only "done" is taken from entries. It is the one state that cannot change while the files stay the same.
        """
        runs = [*runs]
        known: dict[Path, Run] = {}
        for place in {run.root for run in runs}:
            if (entry := self._entry(place)) is not None and entry[0] is not None:
                name, detail = entry[0]
                known[place] = Run(name=name, dir=str(place), state=RunState.done, detail=detail)
        rest = [run for run in dict.fromkeys(runs) if run.root not in known]
        known |= {Path(run.dir): run for run in statuses_of(rest, brief=True)}
        return [known[run.root] for run in runs]

    def measurements(self, runs: Iterable[Path]) -> dict[Path, RunData]:
        """Return the data of ``runs``."""
        runs = list(dict.fromkeys(runs))
        found = {run: entry[1] for run in runs if (entry := self._entry(run)) is not None}
        if missing := [run for run in runs if run not in found]:
            found |= read_all(missing)
        return {run: found[run] for run in runs}

    def _entry(self, run: Path) -> tuple[list[str] | None, RunData] | None:
        """Return the entry that a run has left, read once; None if there is no valid one."""
        if run not in self._entries:
            self._entries[run] = read_entry(run, identity_of(run))
        return self._entries[run]


def compare_runs(asked: Sequence[RunPaths | SweepPaths], *, title: str, loss: float | None = None) -> RunComparison:
    """Return a comparison of runs and of the cells of sweeps, with all figures of `launch report`.

    Args:
        loss: training loss up to which hours are counted; None: the lowest that all finished runs of a task reached.
    """
    reported = ReportedRuns()
    sweeps = look_at_sweeps([paths for paths in asked if isinstance(paths, SweepPaths)], reported.statuses)
    runs = {run.dir: run for run in reported.statuses(paths for paths in asked if isinstance(paths, RunPaths))}
    entries: list[Entry] = []
    for paths in asked:
        for run in sweeps.get(str(paths.root)) or [runs[str(paths.root)]]:
            label = run.cell or run.name
            if run.cell is not None and len(asked) > 1:
                label = f"{paths.root.name}: {label}"
            place = Path(run.dir) if run.dir else None
            elsewhere = place is not None and run.cell is not None and place.parent != paths.root
            entries.append(
                Entry(
                    label=label,
                    state=run.state.value,
                    detail=run.detail,
                    dir=place,
                    elsewhere=str(place.parent) if place is not None and elsewhere else "",
                )
            )
    places = [entry.dir for entry in entries if entry.dir is not None]
    return side_by_side(title, entries, reported.measurements(places), loss)
