"""Which cells need not begin: the same has been computed, or is being computed now."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from launcher.cluster.ledger import look
from launcher.cluster.naming import find_sweeps, is_run
from launcher.errors import UserError
from launcher.paths import RunPaths, SweepPaths
from launcher.runstate import ACTIVE, State
from launcher.sweeps import book
from launcher.sweeps.book import Cell

_LONGEST_LABEL = 80
_UNDER_WAY = ACTIVE | {State.unknown}


def run_name(cell: Cell) -> str:
    """``accumulation=4+workers_per_node=2-3fa9c1d2``: what varies, and the content, so that no two share a name."""
    label = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", cell.label.replace(" ", "+"))[:_LONGEST_LABEL].strip("_+.-=")
    return f"{label or 'cell'}-{str(cell.content)[:8]}"


def standing(wanted: Iterable[Cell], paths: SweepPaths) -> dict[str, RunPaths]:
    """By content, a run that makes it needless to begin one: finished, in any sweep beside this one, or finished or
    under way in this one."""
    own = {str(cell.content): [*_of_name(paths.root / run_name(cell))] for cell in wanted}
    others = {content: [run for run, its in _recorded(paths) if its == content] for content in own}
    every = {str(run.root): run for several in (*own.values(), *others.values()) for run in several}
    state = {run.dir: run.state for run in look(every.values())}
    found: dict[str, RunPaths] = {}
    for content in own:
        done = [run for run in (*own[content], *others[content]) if state[str(run.root)] is State.done]
        active = [run for run in own[content] if state[str(run.root)] in _UNDER_WAY]
        if done or active:
            found[content] = (done or active)[-1]
    return found


def _of_name(place: Path) -> list[RunPaths]:
    """The run of a cell in its sweep, and those that began it again."""
    places = [place, *sorted(place.parent.glob(f"{place.name}.retry*"))]
    return [RunPaths(found) for found in places if is_run(found)]


def _recorded(paths: SweepPaths) -> list[tuple[RunPaths, str]]:
    """Runs of all sweeps beside this one, and this one, with their contents."""
    found: list[tuple[RunPaths, str]] = []
    for sweep_paths in find_sweeps(paths.root.parent):
        try:
            sweep = book.load(sweep_paths)
        except UserError:  # another version's: it has computed something else
            continue
        runs = sweep.runs(sweep_paths)
        known = ((runs[cell.overrides], cell.content) for cell in sweep.cells if cell.overrides in runs)
        found += [(run, content) for run, content in known if content is not None and is_run(run.root)]
    return found
