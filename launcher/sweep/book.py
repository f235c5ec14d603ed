"""sweep.json: the cells of a sweep, and the run that each of them has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.fromjson import build
from launcher.paths import RunPaths, SweepPaths, read_json, write_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration of a sweep.

    ``overrides``: key=value, as the sweeper gave them; no two cells have the same ones. ``content``: what it computes,
    as a digest; ``run``: its run's directory, relative to the sweep's own, the newest one where it was begun again.
    Both None where ``problem`` says why it cannot run.
    """

    overrides: tuple[str, ...]
    content: str | None
    run: str | None
    problem: str | None

    @property
    def label(self) -> str:
        """Its overrides without the groups of their keys: ``accumulation=4 workers_per_node=2``."""
        pairs = (override.lstrip("+").partition("=") for override in self.overrides)
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """``created``: ISO 8601, UTC. ``arguments``: what all cells come from, as it was typed."""

    format: int
    name: str
    created: str
    arguments: tuple[str, ...]
    cells: tuple[Cell, ...]

    def with_cells(self, new: tuple[Cell, ...]) -> Sweep:
        """With these in place of those that have the same overrides, and added where there are none."""
        cells = {cell.overrides: cell for cell in (*self.cells, *new)}
        return dataclasses.replace(self, cells=tuple(cells.values()))

    def runs(self, paths: SweepPaths) -> dict[tuple[str, ...], RunPaths]:
        """The run of each cell that has one, by its overrides."""
        return {cell.overrides: RunPaths((paths.root / cell.run).resolve()) for cell in self.cells if cell.run}

    def save(self, paths: SweepPaths) -> None:
        write_json(paths.book, dataclasses.asdict(self))


def load(paths: SweepPaths) -> Sweep:
    """Raises UserError for what another version has written."""
    fields: dict[str, Any] = read_json(paths.book) or {}
    if fields.get("format") != FORMAT:
        raise UserError(f"{paths.book} has not format {FORMAT}: it was written by another version of launcher.")
    return build(Sweep, fields)


def is_sweep(directory: Path) -> bool:
    return SweepPaths(directory).book.is_file()
