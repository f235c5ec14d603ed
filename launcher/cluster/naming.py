"""Which runs and sweeps there are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from launcher.paths import RunPaths, SweepPaths


def find(runs: Path) -> list[RunPaths]:
    """Every run in a directory of runs; those of a sweep are in the sweep's."""
    return [RunPaths(place) for place in _places(runs, is_run)]


def find_sweeps(runs: Path) -> list[SweepPaths]:
    return [SweepPaths(place) for place in _places(runs, is_sweep)]


def is_run(directory: str | Path) -> bool:
    """Whether this is a run's directory; another user's, closed to this one, is none."""
    return os.path.isfile(os.path.join(directory, "plan.json"))  # noqa: PTH113, PTH118 (pathlib raises where closed)


def is_sweep(directory: str | Path) -> bool:
    return os.path.isfile(os.path.join(directory, "sweep.json"))  # noqa: PTH113, PTH118


def _places(runs: Path, wanted: Callable[[str], bool]) -> list[Path]:
    try:
        with os.scandir(runs.absolute()) as entries:
            return sorted(Path(entry.path) for entry in entries if wanted(entry.path))
    except (FileNotFoundError, NotADirectoryError):
        return []
