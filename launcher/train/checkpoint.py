"""Checkpoints on torch.distributed.checkpoint: one directory a step, written aside and committed by rename.

A directory called step_NNNNNN is whole: tensors and the optimizer's options as torch has them, everything else in
state.json, and in manifest.json what each file must be. The older ones that `checkpoint.keep` gives up go after that.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from launcher.incarnation import Fence, Incarnation
from launcher.paths import RunPaths, write_json
from launcher.plan import CheckpointPlan
from launcher.train import contents, manifest
from launcher.train.engine import Engine
from launcher.train.step import StepResult
from launcher.train.world import World


def save(engine: Engine, paths: RunPaths, keep: int | None = None, run: dict[str, Any] | None = None) -> Path:
    """Save parameters, optimizer, schedule, scaler, counters and every rank's random state. All ranks call it.

    Args:
        keep: how many of the newest checkpoints stay; None: all.
        run: what the caller wants back from ``load``, as JSON has it; rank 0's is kept.

    Returns the committed directory. What was there before is untouched when it raises:

    Raises:
        OSError: the disk refuses.
        Superseded: a newer incarnation of the run has begun.
    """
    target, world = paths.checkpoint(engine.steps), engine.world
    if world.of_rank_0(target.exists()):  # of this very step: it is whole, and saving over it would risk it
        return target
    fence = Fence.here(paths)
    partial = paths.partial_checkpoint(engine.steps, fence.own)
    state = {"origin": contents.origin(engine.plan), "engine": engine.state_dict(), "run": run or {}}
    if world.rank == 0:
        if partial.exists():  # of a save that failed
            partial.rename(paths.discarded_checkpoint(engine.steps, fence.own))
        partial.mkdir(parents=True)
    _wait(world)
    dcp.save(contents.tensors(engine, engine.changing_buffers), checkpoint_id=partial)
    if world.rank == 0:
        write_json(partial / contents.STATE, state)
    written = _checksums_of_all(world, partial)
    if world.rank == 0:
        manifest.write(partial, written)
        _sync_directory(partial)
        fence.check()
        partial.rename(target)
        _sync_directory(target.parent)
        give_up(paths, fence, keep)
    _wait(world)
    return target


def give_up(paths: RunPaths, fence: Fence, keep: int | None) -> None:
    """All but the newest ``keep``. On rank 0; no run fails for what cannot be deleted."""
    for old in paths.committed_checkpoints()[keep:] if keep else ():
        step = int(old.name.removeprefix("step_"))
        with suppress(OSError):  # never seen half gone under its own name
            old.rename(paths.discarded_checkpoint(step, fence.own))
    clear(paths, fence)


def clear(paths: RunPaths, fence: Fence) -> None:
    """Delete what this incarnation and older ones were writing or taking away, and are no more. On NFS what somebody
    has open stays; it goes the next time."""
    for incarnation, partial in paths.partial_checkpoints():
        if Incarnation.parse(incarnation) <= fence.own:
            shutil.rmtree(partial, ignore_errors=True)


def _checksums_of_all(world: World, directory: Path) -> manifest.Files:
    """Each rank reads what it wrote, while that is still in its host's memory. On rank 0: of all."""
    own = [*directory.glob(f"__{world.rank}_*.distcp")]
    if world.rank == 0:
        own += [directory / ".metadata", directory / contents.STATE]
    return {name: value for files in world.of_all(manifest.checksums(own)) for name, value in files.items()}


def _wait(world: World) -> None:
    if world.size > 1:
        dist.barrier()


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Cadence:
    """When to save: every so many steps, or minutes by rank 0's clock. Its word comes with the window's flags."""

    def __init__(self, plan: CheckpointPlan) -> None:
        self._plan = plan
        self.start_clock()

    def start_clock(self) -> None:
        """At the beginning, and after each save."""
        self._since = time.monotonic()

    def by_clock(self) -> bool:
        """By this rank's: for ``Engine(save_due=...)``."""
        minutes = self._plan.every_minutes
        return self._plan.enabled and minutes is not None and time.monotonic() - self._since >= 60 * minutes

    def due(self, result: StepResult) -> bool:
        """The same on all ranks."""
        by_step = self._plan.every is not None and result.step % self._plan.every == 0
        return self._plan.enabled and (by_step or result.save_due)
