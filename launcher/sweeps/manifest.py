"""Sweep manifest (sweep.json): the cells, the run of each cell, and the digest that identifies equal cells."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import socket
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from launcher.config.key_facts import AFFECTED
from launcher.config.multirun import cell_label, override_key
from launcher.errors import ConfigError, SiteError, UserError
from launcher.plan.run_plan import RunPlan, part
from launcher.rundir.files import read_json, value_from_json, write_json
from launcher.rundir.paths import RunPaths, SweepPaths

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One configuration of a sweep.

    Attributes:
        overrides: key=value from the sweeper, unique among the cells.
        content: digest of the computation; None if the cell cannot run.
        run: directory of its latest run, relative to the sweep's; None if the cell cannot run.
        problem: why it cannot run, or None.
    """

    overrides: tuple[str, ...]
    content: str | None
    run: str | None
    problem: str | None

    @property
    def label(self) -> str:
        """Return the overrides without the groups of their keys."""
        return cell_label(self.overrides)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Contents of the manifest.

    Attributes:
        fixed: key=value that all cells share, as typed.
        at_once: limit on concurrently running cells; None: no limit in an array, and 1 on one machine.
    """

    format: int
    fixed: tuple[str, ...]
    at_once: int | None
    cells: tuple[Cell, ...]

    def with_cells(self, new: tuple[Cell, ...]) -> Sweep:
        """Return the sweep with ``new`` cells added, or in place of cells with the same overrides."""
        cells = {cell.overrides: cell for cell in (*self.cells, *new)}
        return dataclasses.replace(self, cells=tuple(cells.values()))

    def varied_by(self, varying: set[str]) -> Sweep:
        """Return the sweep with its fixed keys as overrides of its cells where they are ``varying``."""
        moved = tuple(word.removeprefix("++") for word in self.fixed if override_key(word) in varying)
        if not moved:
            return self
        fixed = tuple(word for word in self.fixed if override_key(word) not in varying)
        cells = tuple(dataclasses.replace(cell, overrides=(*cell.overrides, *moved)) for cell in self.cells)
        return dataclasses.replace(self, fixed=fixed, cells=cells)

    def runs(self, paths: SweepPaths) -> dict[tuple[str, ...], RunPaths]:
        """Return the run of each cell that has one, by the cell's overrides."""
        return {cell.overrides: RunPaths((paths.root / cell.run).resolve()) for cell in self.cells if cell.run}

    def save(self, paths: SweepPaths) -> None:
        write_json(paths.manifest, dataclasses.asdict(self))


def load_sweep(paths: SweepPaths) -> Sweep:
    """Return the manifest.

    Raises:
        UserError: it was written by another version, or cannot be read.
    """
    try:
        fields: dict[str, Any] = read_json(paths.manifest) or {}
        if fields.get("format") == FORMAT:
            sweep: Sweep = value_from_json(Sweep, fields)
            sweep.runs(paths)  # checks the paths
            return sweep
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{paths.manifest}: cannot be read: {type(error).__name__}: {error}.") from None
    raise UserError(f"{paths.manifest} does not have format {FORMAT}: another version of launcher wrote it.")


def opened(paths: SweepPaths, fixed: tuple[str, ...], varying: set[str], at_once: int | None) -> Sweep:
    """Return the sweep's manifest, a new one if there is none.

    Args:
        fixed: key=value shared by all cells.
        varying: keys that vary.

    Raises:
        ConfigError: the existing sweep has other keys or values.
    """
    if not paths.manifest.exists():
        return Sweep(format=FORMAT, fixed=fixed, at_once=at_once, cells=())
    sweep = load_sweep(paths).varied_by(varying)
    before = {override_key(word) for cell in sweep.cells[:1] for word in cell.overrides}
    was, now = {*sweep.fixed, *map("{}=...".format, before or varying)}, {*fixed, *map("{}=...".format, varying)}
    if was != now:
        raise ConfigError(
            "sweep.name", paths.root.name, f"was started with {_but(was, now)}, not with {_but(now, was)}: cells "
            "would replace each other, or be compared although they differ.",
            "Choose another sweep.name, or leave it out.",
        )  # fmt: skip
    return dataclasses.replace(sweep, at_once=at_once)


def _but(words: set[str], others: set[str]) -> str:
    """Return the ``words`` missing in ``others``, and the keys that only ``others`` have."""
    lacking = {override_key(word) for word in others} - {override_key(word) for word in words}
    return " ".join([*sorted(words - others), *(f"no {key}" for key in sorted(lacking))])


@contextmanager
def alone(paths: SweepPaths) -> Generator[None]:
    """Lock the sweep, so that no other command starts its cells a second time.

    Raises:
        UserError: another command holds the lock.
        SiteError: the directory cannot be used.
    """
    try:
        paths.root.mkdir(parents=True, exist_ok=True)
        lock_file = paths.root / ".lock"
        lock = lock_file.open("a")
    except OSError as error:
        raise SiteError(
            f"{paths.root}: cannot be written to: {error.strerror}.\n  Choose another sweep.name or run.dir."
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
        except BlockingIOError:
            holder = lock_file.read_text().strip()
            raise UserError(
                f"{paths.root.name}: another `launch` is starting this sweep's cells: {holder}.\n"
                "  Wait for its end, or stop it with Ctrl-C; then this command continues the sweep."
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


_QUEUEING = (
    "job-name", "time", "account", "qos", "dependency", "mem", "requeue", "comment", "mail-type", "mail-user",
    "nice", "begin",
)  # fmt: skip


def content_of(plan: RunPlan, code: str) -> str:
    """Return a digest of a plan's computation and of the hardware on which its speed is measured.

    Args:
        code: digest of the user's files.
    """
    content = part(plan, *AFFECTED) | {"data": _without(dataclasses.asdict(plan.task), ("flops_per_sample",))}
    # the defaults follow from cores and workers; cells side by side have fewer threads, and the same results
    content |= {"environment": plan.env.set, "initial": plan.initial and plan.initial.digest}
    slurm = plan.cluster.slurm
    if slurm is None:
        content["machine"] = socket.gethostname()  # different machines may share a home directory
    else:
        content["options"] = _without(slurm.options, _QUEUEING)
        content["slurm"] = [slurm.container, slurm.setup]
    return digest([content, plan.run.version, importlib.metadata.version("torch"), code])


def _without(fields: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
