"""`launch report RUN... | SWEEP`: runs compared, as a table, CSV or JSON, and as one page for the browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.markup import escape

from launcher.cluster import ledger
from launcher.commands.parser import Parser
from launcher.errors import EXIT_DONE, UserError
from launcher.paths import RunPaths, SweepPaths, write_text
from launcher.report import compare, export, terminal
from launcher.report.compare import IMPOSSIBLE, Comparison, Entry
from launcher.report.reading import read_all
from launcher.report.tables import near
from launcher.sweep import book

MISSING = "missing"


@dataclass(frozen=True)
class _Asked:
    """What one word of the command line means. ``sweep``: None for runs that only lie side by side."""

    title: str
    sweep: SweepPaths | None
    runs: tuple[RunPaths, ...] = ()


def report(arguments: list[str]) -> int:
    parser = Parser(prog="launch report", description="Runs compared: tables, plots, one page.", allow_abbrev=False)
    parser.add_argument("what", nargs="+", metavar="RUN", help="runs, sweeps, or directories of runs")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default: runs)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the page goes")
    parser.add_argument("--loss", type=float, metavar="X", help="the training loss that hours are counted to")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="a line a run; no page without --html")
    form.add_argument("--json", action="store_true", help="one object; no page without --html")
    given = parser.parse_args(arguments)
    if given.loss is not None and not math.isfinite(given.loss):
        raise UserError(f"--loss {given.loss}: must be a number, in the unit of train/loss.")
    if given.html is not None and not given.html.absolute().parent.is_dir():
        raise UserError(f"--html {given.html}: there is no directory {given.html.parent}.\n  Make it, or name another.")
    asked = [_asked(word, given.dir) for word in given.what]
    found = _entries(asked)
    title = ", ".join(one.title for one in asked[:3]) + (f" and {len(asked) - 3} more" if len(asked) > 3 else "")
    compared = compare.compare(title, found, read_all(list({one.dir: None for one in found if one.dir})), given.loss)
    if given.csv or given.json:
        print((export.as_csv if given.csv else export.as_json)(compared), end="" if given.csv else "\n")
        if given.html is not None:
            _write_page(compared, given.html)
        return EXIT_DONE
    _show(compared)
    place = given.html or _page_of(asked, given.dir)
    _write_page(compared, place)
    print(f"\nThe page: {near(place.absolute())} (one file, opens without network)")
    return EXIT_DONE


def _page_of(asked: Sequence[_Asked], runs: Path) -> Path:
    """Beside what it tells of; for runs from several places, where runs lie."""
    if len(asked) > 1:
        return (runs if runs.is_dir() else Path()) / "report.html"
    return asked[0].sweep.report if asked[0].sweep else asked[0].runs[0].root.parent / "report.html"


def _asked(word: str, runs: Path) -> _Asked:
    """A sweep, a directory of runs, or a run. Raises UserError where it is none of them."""
    for place in (runs / word, Path(word)):
        if book.is_sweep(place):
            return _Asked(place.resolve().name, SweepPaths(place.resolve()))
    for place in (runs / word, Path(word)):
        if place.is_dir() and not RunPaths(place).plan.is_file():
            if held := ledger.find(place):
                return _Asked(place.resolve().name, None, tuple(RunPaths(run.root.resolve()) for run in held))
            raise UserError(
                f"{word}: {near(place.absolute())} holds no run and no sweep.\n"
                "  Name a run, a sweep, or a directory with runs in it; `launch runs` lists them."
            )
    sweeps = [place for place in _sweeps(runs) if place.name.startswith(word)]
    if len(sweeps) == 1 and not [run for run in ledger.find(runs) if run.root.name.startswith(word)]:
        return _Asked(sweeps[0].name, SweepPaths(sweeps[0].resolve()))
    run = ledger.resolve(word, runs)
    return _Asked(run.root.name, None, (run,))


def _sweeps(runs: Path) -> list[Path]:
    return [place for place in sorted(runs.iterdir()) if book.is_sweep(place)] if runs.is_dir() else []


def _entries(asked: Sequence[_Asked]) -> list[Entry]:
    """A line for each run and each cell; how all of them stand is asked once."""
    sweeps = {one.sweep: book.load(one.sweep) for one in asked if one.sweep}
    runs = [run for one in asked for run in one.runs]
    of_cells = {sweep: loaded.runs(sweep) for sweep, loaded in sweeps.items()}
    there = {run.root: run for run in [*runs, *(run for cells in of_cells.values() for run in cells.values())]}
    state = {Path(run.dir): run for run in ledger.look(run for run in there.values() if run.plan.is_file())}
    named = len(sweeps) > 1 or (sweeps and runs)
    entries: list[Entry] = []
    for one in asked:
        for run in one.runs:
            entries.append(_entry(run.root.name, run.root, state))
        if one.sweep is None:
            continue
        for cell in sweeps[one.sweep].cells:
            label = (f"{one.title}: " if named else "") + (cell.label or "defaults")
            if cell.run is None:
                problem = (cell.problem or "it has no run").partition("\n")[0]
                entries.append(Entry(label=label, state=IMPOSSIBLE, detail=problem, dir=None))
                continue
            root = of_cells[one.sweep][cell.overrides].root
            elsewhere = "" if root.is_relative_to(one.sweep.root) else near(root.parent)
            entries.append(_entry(label, root, state, elsewhere))
    return entries


def _entry(label: str, root: Path, state: dict[Path, ledger.Run], elsewhere: str = "") -> Entry:
    if root not in state:
        return Entry(label=label, state=MISSING, detail=f"there is no run in {near(root)}", dir=None)
    run = state[root]
    return Entry(label=label, state=run.state.value, detail=run.detail, dir=root, elsewhere=elsewhere)


def _show(compared: Comparison) -> None:
    console = terminal.console()
    console.print(export.table(compared))
    lines = [f"{row.entry.label}: {row.entry.state}: {row.entry.detail}" for row in compared.rows if row.entry.detail]
    for group in compared.groups:
        if group.loss is not None:
            which = "the loss asked for" if group.given else "the lowest that every finished run has reached"
            lines.append(f"Hours to a smoothed training loss of {group.loss:.4f} ({which}).")
    for line in [*lines, *compared.notes]:
        console.print(escape(line), soft_wrap=True, highlight=False)


def _write_page(compared: Comparison, place: Path) -> None:
    from launcher.report.page import page

    try:
        write_text(place, page(compared, datetime.now().astimezone()))
    except OSError as error:
        raise UserError(
            f"{near(place.absolute())}: cannot be written: {error.strerror}.\n  Name another: --html FILE."
        ) from error
