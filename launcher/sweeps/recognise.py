"""Which cells need not begin, or need not begin from nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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
_SAVED = frozenset({State.stopped, State.cancelled})


@dataclass(frozen=True)
class Known:
    """Runs by what they compute. ``standing``: finished, in any sweep beside this one, or under way in this one;
    ``resumable``: stopped in this one, with a checkpoint to go on from."""

    standing: dict[str, RunPaths]
    resumable: dict[str, RunPaths]


def run_name(cell: Cell) -> str:
    """``accumulation=4+workers_per_node=2-3fa9c1d2``: what varies, and the content, so that no two share a name."""
    label = re.sub(r"[^A-Za-z0-9_.=+-]+", "_", cell.label.replace(" ", "+"))[:_LONGEST_LABEL].strip("_+.-=")
    return f"{label or 'cell'}-{str(cell.content)[:8]}"


def recognise(wanted: Iterable[Cell], paths: SweepPaths) -> Known:
    """What there is already of the cells that are ``wanted``; a run of this sweep's own comes before another's."""
    own = {str(cell.content): _of_name(paths.root / run_name(cell)) for cell in wanted}
    recorded = _recorded(paths, set(own))
    every = {str(run.root): run for several in (*own.values(), *recorded.values()) for run in several}
    state = {run.dir: run.state for run in look(every.values())}
    known = Known({}, {})
    for content, mine in own.items():
        newest_first = mine[::-1]
        done = [run for run in (*newest_first, *recorded.get(content, ())) if state[str(run.root)] is State.done]
        active = [run for run in newest_first if state[str(run.root)] in _UNDER_WAY]
        saved = [run for run in newest_first if state[str(run.root)] in _SAVED and run.newest_step()]
        if done or active:
            known.standing[content] = (done or active)[0]
        elif saved:
            known.resumable[content] = saved[0]
    return known


def _of_name(place: Path) -> list[RunPaths]:
    """The run of a cell in its sweep, then those that began it again, as they did."""
    again = [found for found in place.parent.glob(f"{place.name}.retry*") if found.suffix[6:].isdecimal()]
    places = [place, *sorted(again, key=lambda found: int(found.suffix[6:]))]
    return [RunPaths(found) for found in places if is_run(found)]


def _recorded(paths: SweepPaths, contents: set[str]) -> dict[str, list[RunPaths]]:
    """Runs of these contents, of all sweeps beside this one and of this one."""
    found: dict[str, list[RunPaths]] = {}
    for sweep_paths in find_sweeps(paths.root.parent):
        try:
            sweep = book.load(sweep_paths)
        except UserError:  # another version's, which has computed something else, or not for us to read
            continue
        runs = sweep.runs(sweep_paths)
        for cell in sweep.cells:
            if cell.content in contents and cell.overrides in runs and is_run(runs[cell.overrides].root):
                found.setdefault(str(cell.content), []).append(runs[cell.overrides])
    return found
