"""Names of runs on the command line: the parser of commands on runs, and resolution of a name to a run or sweep."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from launcher.cli.elsewhere import elsewhere
from launcher.config.key_facts import PATH
from launcher.errors import UserError, did_you_mean
from launcher.quantities import first_names
from launcher.report.tables import near
from launcher.rundir.paths import RunPaths, SweepPaths, find, find_sweeps, is_run, is_sweep
from launcher.sweeps import manifest


class Parser(argparse.ArgumentParser):
    """Argument parser with error messages in the format of `launch`; a path must not be a URL."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register("type", Path, _local_path)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message.removesuffix('.')}.\n  {' '.join(self.format_usage().split())}")


def _local_path(text: str) -> Path:
    if not PATH.holds(text):
        raise argparse.ArgumentTypeError(f"{text}: {PATH.problem}")
    return Path(text)


def command_parser(verb: str, does: str, *, run: bool = True) -> Parser:
    """Return the parser of a command on runs. ``run``: it takes one RUN."""
    parser = Parser(prog=f"launch {verb}", description=does, allow_abbrev=False)
    if run:
        parser.add_argument("run", metavar="RUN", help="its name, its directory, or a prefix of its name")
    parser.add_argument("--dir", type=Path, default=Path("runs"), help="directory of the runs (default: runs)")
    return parser


Place = TypeVar("Place", RunPaths, SweepPaths, RunPaths | SweepPaths)


def resolve(word: str, runs: Path) -> RunPaths:
    """Return the run named by ``word``.

    Raises:
        UserError: there is none, there are several, or it is a sweep.
    """
    paths = resolve_any(word, runs)
    if isinstance(paths, SweepPaths):
        raise UserError(
            f"{word}: is a sweep, and this command takes one run.\n"
            f"  `launch runs {word}` lists its cells; write {paths.root.name}/ and a prefix of a cell's name."
        )
    return paths


def resolve_any(word: str, runs: Path) -> RunPaths | SweepPaths:
    """Return the run or sweep named by its directory, its name, or a prefix of its name; a cell's run by SWEEP/CELL.

    Raises:
        OnLoginNode: it is on a login node.
        UserError: there is none, or several.
    """
    if not word.strip():
        raise UserError("RUN is empty.\n  Name a run or a sweep; `launch runs` lists them.")
    for place in (runs / word, Path(word)):
        if is_run(place):
            return RunPaths(place.resolve())
        if is_sweep(place):
            return SweepPaths(place.resolve())
    elsewhere().require_local(word, runs)
    sweeps = {paths.root.name: paths for paths in find_sweeps(runs)}
    if (found := _in_a_sweep(word, runs, sweeps)) is not None:
        return found
    return _one(word, {paths.root.name: paths for paths in find(runs)} | sweeps, runs)


def _in_a_sweep(word: str, runs: Path, sweeps: Mapping[str, SweepPaths]) -> RunPaths | None:
    """Return a cell's latest run; None if no part of the word before a slash names a sweep."""
    for at in (at for at, letter in enumerate(word) if letter == "/"):
        beginning, cell = word[:at], word[at + 1 :]
        named = [paths for name, paths in sweeps.items() if beginning and name.startswith(beginning)]
        inside = [SweepPaths(place.resolve()) for place in (runs / beginning, Path(beginning)) if is_sweep(place)]
        if inside or named:
            sweep = inside[0] if inside else _one(beginning, sweeps, runs)
            exact = sweep.root / cell
            return RunPaths(exact) if cell and is_run(exact) else _one(cell, _cells(sweep), sweep.root)
    return None


def _cells(sweep: SweepPaths) -> dict[str, RunPaths]:
    """Return the sweep's runs by all names of a cell: as shown by `launch runs`, and its directory's name."""
    try:
        sweep_manifest = manifest.load_sweep(sweep)
    except UserError:
        return {run.root.name: run for run in find(sweep.root)}
    runs, run_of = sweep_manifest.runs(sweep), dict[str, RunPaths]()
    for cell in sweep_manifest.cells:
        if (run := runs.get(cell.overrides)) is not None:
            names = (cell.label, cell.label.replace(" ", "+"), run.root.name)
            run_of |= dict.fromkeys(names, RunPaths(run.root.resolve()))
    return run_of


def _one(word: str, places: Mapping[str, Place], where: Path) -> Place:
    """Return the place whose name is ``word`` or starts with it."""
    if word in places:
        return places[word]
    matches = {paths.root: paths for name, paths in places.items() if name.startswith(word)}
    if len(matches) == 1:
        return next(iter(matches.values()))
    names = sorted({paths.root.name for paths in (matches or places).values()})
    if matches:
        raise UserError(f"{word}: {len(matches)} runs match: {first_names(names, 8)}.\n  Write more of the name.")
    verb = "runs" if is_sweep(where) else "runs --dir"
    listing = f"`launch {verb} {near(where.absolute())}` lists them." if places else f"{where} contains no run."
    hint = did_you_mean(word, names) or listing
    other = "A run can also be named by its directory; --dir DIR searches another directory."
    raise UserError(f"{word}: there is no such run in {where}.\n  {hint} {other}")
