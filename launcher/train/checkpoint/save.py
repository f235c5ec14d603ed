"""Checkpoints on torch.distributed.checkpoint: one directory a step, written aside and committed by rename, if the
disk takes it.

A directory called step_NNNNNN is whole: tensors and the optimizer's options as torch has them, everything else in
state.json, and in manifest.json what each file must be. The older ones that `checkpoint.keep` gives up go after that.
Whatever goes wrong on one rank is known to all of them before they go on: none waits for what another one cannot do.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from launcher.config.schema import Compress, OnError, OptimizerKind
from launcher.errors import CheckpointFailed, Superseded
from launcher.plan.run_plan import CheckpointPlan
from launcher.quantities import in_words
from launcher.rundir import paths
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import sync_directory, write_text
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import contents, file_format
from launcher.train.checkpoint.contents import own_share
from launcher.train.checkpoint.file_format import Writer
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.world import World

_PROBE_BYTES = 1 << 16
# state.json, the manifest and what describes the tensors
_BESIDE_BYTES = 1 << 17


def predicted_bytes(engine: Engine) -> int:
    """Of one checkpoint, all ranks' files together: parameters, buffers, and the optimizer's state of each trained
    parameter (AdamW: two moments; SGD: its momentum), and PowerSGD's residue, a whole gradient on each rank."""
    optimizer, module = engine.plan.optimizer, engine.parallel.module
    moments = 2 if optimizer.kind is OptimizerKind.adamw else int(optimizer.momentum > 0)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    residues = engine.world.size if engine.plan.strategy.compress is Compress.powersgd else 0
    whole = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    return whole + trained * (moments + residues) + _BESIDE_BYTES


def free_bytes(place: Path) -> int | None:
    """On the disk of ``place``, or of the nearest directory above that is there; None where that cannot be told."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return None
    return usage.free if usage.total else None  # some file systems of the network count nothing


def require(engine: Engine, directory: Path, *, has_one: bool) -> None:
    """Write a small file where checkpoints are to lie, for good, and take it away again. All ranks call it.

    Args:
        has_one: the run goes on from a checkpoint: then checkpoint.on_error has its say.

    Raises:
        CheckpointFailed: on all ranks, where that cannot be done, or where a checkpoint is larger than what is free.
    """
    world = engine.world
    problem = world.of_rank_0(_problem(directory, predicted_bytes(engine)) if world.rank == 0 else None)
    if problem is None:
        return
    said = f"Checkpoints cannot be written to {directory}: {problem}\n"
    if not has_one or engine.plan.checkpoint.on_error is OnError.stop:
        raise CheckpointFailed(
            f"{said}  No step was taken. Make room, choose another run.dir, or train without: checkpoint.enabled=false."
        )
    if world.rank == 0:
        print(f"{said}  Training goes on from what there is (checkpoint.on_error=continue).", flush=True)


def _problem(directory: Path, wanted: int) -> str | None:
    probe = directory / f".probe.{secrets.token_hex(4)}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"{error}."
    finally:
        with suppress(OSError):  # what it would say has been said
            probe.unlink(missing_ok=True)
    free = free_bytes(directory)
    if free is not None and free < wanted:
        return f"one needs about {in_words(wanted)}, and {in_words(free)} are free on that disk."
    return None


T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved, of one step, and where. ``tensors``: this rank's share; ``state``: the text of state.json;
    ``predicted_bytes``: of the whole checkpoint; ``staged``: the tensors are copies that training does not change."""

    step: int
    tensors: dict[str, Any]
    state: str
    world: World
    fence: Fence
    keep: int | None
    predicted_bytes: int
    staged: bool = False


def take_snapshot(engine: Engine, fence: Fence, keep: int | None = None, run: dict[str, Any] | None = None) -> Snapshot:
    """Of the engine as it is now. Its tensors are the engine's own. All ranks call it, between two windows.

    Args:
        keep: how many of the newest checkpoints stay; None: all.
        run: what the caller wants back from ``load``, as JSON has it; rank 0's is kept.
    """
    state = {"origin": contents.origin(engine.plan), "engine": engine.state_dict(), "run": run or {}}
    return Snapshot(
        step=engine.steps,
        tensors=own_share(contents.tensors(engine, engine.changing_buffers), engine.world),
        state=json.dumps(state, indent=2, allow_nan=False) + "\n",
        world=engine.world,
        fence=fence,
        keep=keep,
        predicted_bytes=predicted_bytes(engine),
    )


def write(snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
    """Write and commit a snapshot. All ranks call it, and all end alike. Returns the committed directory.

    Args:
        group: for a thread beside the steps, one of all ranks on gloo.

    Raises:
        CheckpointFailed: the disk of some rank refuses. What was there before is untouched, and nothing is left over.
        Superseded: a newer incarnation of the run has begun.
    """
    return _Writing(snapshot, group).run()


@dataclass(frozen=True)
class _Trouble:
    """Of one rank. ``free``: bytes on its disk then."""

    rank: int
    what: str
    free: int | None


class _Writing:
    def __init__(self, snapshot: Snapshot, group: dist.ProcessGroup | None) -> None:
        self._of, self._world, self._group = snapshot, snapshot.world, group
        self._fence, self._paths = snapshot.fence, snapshot.fence.paths
        self._target = self._paths.checkpoint(snapshot.step)
        self._partial = self._paths.partial_checkpoint(snapshot.step, self._fence.own)

    def run(self) -> Path:
        if self._on_rank_0(self._begin):
            return self._target
        written = self._write_tensors()
        self._on_rank_0(lambda: self._commit(written))
        return self._target

    def _begin(self) -> bool:
        """Whether there is nothing to do: of this very step there is a whole one, and saving over it would risk it."""
        if self._target.exists():
            return True
        if self._partial.exists():  # of a save that failed
            self._partial.rename(self._paths.discarded_checkpoint(self._of.step, self._fence.own))
        self._partial.mkdir(parents=True)
        return False

    def _write_tensors(self) -> file_format.Files:
        """The files of all ranks."""
        writer = Writer(self._partial, staged=self._of.staged)
        try:
            dcp.save(self._of.tensors, storage_writer=writer, process_group=self._group)
        except dcp.CheckpointException as error:  # the same on all ranks, whichever it was
            own = error.failures.get(self._world.rank)
            self._fail(writer.error or (own[0] if own else None))
        return {name: file for files in self._world.of_all(writer.written, self._group) for name, file in files.items()}

    def _commit(self, written: file_format.Files) -> None:
        state = self._partial / paths.STATE
        write_text(state, self._of.state)
        file_format.write_manifest(self._partial, written | file_format.checksums([state]))
        sync_directory(self._partial)
        self._fence.check()
        self._partial.rename(self._target)
        try:
            sync_directory(self._target.parent)
            write_text(self._paths.latest, f"{self._target.name}\n")
            sync_directory(self._target.parent)
        except OSError as error:  # it is committed: nobody needs what follows
            print(f"{self._target.name} is whole, but {self._paths.latest} does not name it: {error}", flush=True)
        give_up(self._paths, self._fence, self._of.keep)

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        answer: T | OSError | Superseded | None = None
        if self._world.rank == 0:
            try:
                answer = work()
            except (OSError, Superseded) as error:
                answer = error
        answer = self._world.of_rank_0(answer, self._group)
        if isinstance(answer, Superseded):
            raise answer
        if isinstance(answer, OSError):
            self._fail(answer if self._world.rank == 0 else None)
        return answer  # pyright: ignore[reportReturnType]

    def _fail(self, error: BaseException | None) -> NoReturn:
        """All ranks call it. ``error``: this one's, None where it had none."""
        own = None
        if error is not None:
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            own = _Trouble(self._world.rank, what, free_bytes(self._paths.checkpoints))
        troubles = [trouble for trouble in self._world.of_all(own, self._group) if trouble is not None]
        newest = next((path.name for path in self._paths.committed_checkpoints()), None)
        if self._world.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)  # no rank writes in it any more
        said = "; ".join(f"rank {trouble.rank}: {trouble.what}" for trouble in troubles)
        free = min((trouble.free for trouble in troubles if trouble.free is not None), default=None)
        raise CheckpointFailed(
            f"The checkpoint of step {self._of.step} could not be written to {self._paths.checkpoints}: {said}.\n"
            f"  It needs about {in_words(self._of.predicted_bytes)}, "
            f"and {'an unknown number of bytes' if free is None else in_words(free)} were free. "
            f"{'There is no whole checkpoint yet.' if newest is None else f'The newest whole one is {newest}.'}"
        ) from None


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

    def next(self, step: int) -> str:
        """When the next one is due after that of ``step``, in words."""
        every, minutes = self._plan.every, self._plan.every_minutes
        due = [f"at step {(step // every + 1) * every}"] if every else []
        due += [f"in {minutes:g} minutes"] if minutes else []
        return ", or ".join([*due, "when the run ends"])
