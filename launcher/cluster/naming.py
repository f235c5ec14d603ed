"""Which runs and sweeps there are, and which of them a word means."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from launcher.errors import UserError, did_you_mean
from launcher.paths import RunPaths, SweepPaths

_SHOWN = 8


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


def resolve(word: str, runs: Path) -> RunPaths:
    """The run that a user means.

    Raises:
        UserError: there is none, or several, or it is a sweep.
    """
    found = resolve_any(word, runs)
    if isinstance(found, SweepPaths):
        raise UserError(
            f"{word}: is a sweep, and this takes one run.\n"
            f"  `launch runs {word}` lists its cells; write {found.root.name}/ and the beginning of one's name."
        )
    return found


def resolve_any(word: str, runs: Path) -> RunPaths | SweepPaths:
    """The run or sweep that a user means: by its directory, its name, or the beginning of its name; a cell's run as
    SWEEP/RUN.

    Raises:
        UserError: there is none, or several.
    """
    for place in (runs / word, Path(word)):
        if is_run(place):
            return RunPaths(place.resolve())
        if is_sweep(place):
            return SweepPaths(place.resolve())
    beginning, _, cell = word.rstrip("/").rpartition("/")
    sweeps = find_sweeps(runs)
    inside = [sweep for sweep in sweeps if beginning and sweep.root.name.startswith(beginning)]
    if beginning and is_sweep(beginning):
        inside = [SweepPaths(Path(beginning).resolve())]
    if len(inside) == 1:
        return resolve_any(cell, inside[0].root)
    known = sorted([*find(runs), *sweeps], key=lambda paths: paths.root.name)
    found = inside or [paths for paths in known if paths.root.name.startswith(word)]
    if len(found) == 1:
        return type(found[0])(found[0].root.resolve())
    names = [paths.root.name for paths in found or known]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UserError(
            f"{word}: {len(found)} runs begin like that: {', '.join(names[:_SHOWN])}{more}.\n  Write more of the name."
        )
    there = f"`launch runs --dir {runs}` lists them." if known else f"{runs} holds no run."
    hint = did_you_mean(word, names) or there
    raise UserError(f"{word}: there is no such run in {runs}.\n  {hint} Elsewhere: --dir DIR, or the run's directory.")
