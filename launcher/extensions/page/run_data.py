"""Data of a report's runs: from the entry that each has left (``launcher.record.report_entry``), or from its files."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from launcher.extensions.page.compare import Entry, RunComparison, side_by_side
from launcher.process import die_with_parent
from launcher.record.measurements import RunData, read_run
from launcher.record.report_entry import identity_of, read_entry
from launcher.rundir.paths import RunPaths, SweepPaths
from launcher.runs.status import Run, RunState, statuses_of
from launcher.sweeps.reuse import look_at_sweeps

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
    """States and measurements of a report's runs.

    Args:
        read: reads the measurements of runs.
    """

    def __init__(self, read: Callable[[Sequence[Path]], dict[Path, RunData]] = read_all) -> None:
        self._read = read
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
            found |= self._read(missing)
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
