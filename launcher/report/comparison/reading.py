"""Many runs' figures at once: as many at a time as there are cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from launcher.paths import RunPaths
from launcher.process import die_with_parent
from launcher.report.comparison.figures import Figures, read

# below so many bytes of records the processes take longer to begin than to read
_ALONE_BYTES = 30_000_000


def read_all(runs: Sequence[Path]) -> dict[Path, Figures]:
    """The figures of each of these directories."""
    sizes = {run: _size(run) for run in runs}
    cores = min(len(os.sched_getaffinity(0)), len(sizes))
    if cores < 2 or sum(sizes.values()) < _ALONE_BYTES:
        return {run: _read(run) for run in sizes}
    largest_first = sorted(sizes, key=lambda run: -sizes[run])
    # spawned: a forked process would have the locks that some other thread of this one happens to hold
    # without the initializer each would outlive this process: it holds both ends of its own queue, which never closes
    context, end = multiprocessing.get_context("spawn"), partial(die_with_parent, os.getpid())
    with ProcessPoolExecutor(cores, mp_context=context, initializer=end) as pool:
        return dict(zip(largest_first, pool.map(_read, largest_first), strict=True))


def _read(run: Path) -> Figures:
    return read(RunPaths(run))


def _size(run: Path) -> int:
    try:
        return RunPaths(run).metrics.stat().st_size
    except OSError:
        return 0
