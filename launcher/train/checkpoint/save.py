"""Checkpoint writing with torch.distributed.checkpoint: one directory per step, written under a temporary name and
committed by rename.

A directory named step_NNNNNN is complete: tensors and the optimizer's options in torch's format, everything else in
state.json, and size and checksum of each file in manifest.json. Checkpoints beyond `checkpoint.keep` are deleted after
the commit, except for that of the best evaluation. Ranks exchange their errors before they continue, so that none waits
for a rank that has failed.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from launcher.config.key_facts import EPOCH
from launcher.config.schema import CheckpointConfig, OnError, OptimizerKind
from launcher.errors import CheckpointFailed, Superseded
from launcher.plan.run_plan import is_due
from launcher.quantities import bytes_text
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import sync_directory, write_text
from launcher.rundir.paths import STATE, RunPaths
from launcher.train.checkpoint import contents, file_format
from launcher.train.checkpoint.contents import own_share
from launcher.train.checkpoint.file_format import SavePlanner, Writer
from launcher.train.checkpoint.optimizer_parts import class_names
from launcher.train.checkpoint.origin import origin_of
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.world import World

_PROBE_BYTES = 1 << 16
# allowance for state.json, the manifest and torch's metadata
_BESIDE_BYTES = 1 << 17


def predicted_bytes(engine: Engine) -> int:
    """Return the predicted size of one checkpoint, the files of all ranks together, in bytes.

    It is the sum of parameters, buffers, the optimizer's state of each trained parameter (SGD: momentum, if used;
    AdamW: two moments; also assumed of any other), the residue of a compression, which has the size of all gradients
    on each rank, and the callbacks' state.
    """
    optimizer, module = engine.plan.optimizer, engine.parallel.module
    moments = int(optimizer.momentum > 0) if optimizer.kind is OptimizerKind.sgd else 2
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    residues = engine.world.size if engine.plan.strategy.compress.keeps_residue else 0
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    callbacks = sum(tensor.numel() * tensor.element_size() for tensor in engine.callbacks.state_dict()[0].values())
    return model_bytes + trained * (moments + residues) + callbacks + _BESIDE_BYTES


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the disk of ``path``, or of its nearest existing parent; None if not known."""
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free if usage.total else None  # some network file systems report zeros


def require_writable(engine: Engine, directory: Path, *, resumed: bool) -> None:
    """Check that checkpoints can be written: write, sync and delete a small file in ``directory``, and compare a
    checkpoint's size with the free space. All ranks call it.

    Args:
        resumed: the run has a checkpoint: checkpoint.on_error=continue then prints the problem instead.

    Raises:
        CheckpointFailed: on all ranks, if the file cannot be written, or the free space is too small.
    """
    world = engine.world
    problem = world.of_rank_0(_problem(directory, predicted_bytes(engine)) if world.rank == 0 else None)
    if problem is None:
        return
    message = f"Checkpoints cannot be written to {directory}: {problem}\n"
    if not resumed or engine.plan.checkpoint.on_error is OnError.stop:
        raise CheckpointFailed(
            f"{message}  No step was taken. Free space, choose another run.dir, or train without checkpoints: "
            "checkpoint.enabled=false."
        )
    if world.rank == 0:
        print(f"{message}  Training continues without saving (checkpoint.on_error=continue).", flush=True)


def _problem(directory: Path, needed: int) -> str | None:
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
        with suppress(OSError):  # an error of the disk is returned already
            probe.unlink(missing_ok=True)
    free = free_bytes(directory)
    if free is not None and free < needed:
        return f"one needs about {bytes_text(needed)}, and {bytes_text(free)} are free on that disk."
    return None


T = TypeVar("T")


@dataclass(frozen=True)
class Retention:
    """Checkpoints to keep.

    Args:
        keep: number of the newest ones; None: all.
        best: step of one that is kept in addition.
        superseded: steps of those that were saved only because they were the best so far, and are not any more.
        common: newest step of which all sites have a checkpoint: it and newer ones are kept. None: there is one site.
    """

    keep: int | None = None
    best: int | None = None
    superseded: tuple[int, ...] = ()
    common: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """Content of one step's checkpoint, and where it is to be written.

    Args:
        tensors: this rank's share.
        state: text of state.json.
        retention: earlier checkpoints to keep.
        predicted_bytes: predicted size of the whole checkpoint.
        staged: the tensors are copies, which training does not change.
        parts: snapshots of further engines of the same process, each in a directory of its name inside the checkpoint.
    """

    step: int
    tensors: dict[str, Any]
    state: str
    world: World
    fence: Fence
    retention: Retention
    predicted_bytes: int
    staged: bool = False
    parts: Mapping[str, Snapshot] = field(default_factory=dict)


def take_snapshot(
    engine: Engine,
    fence: Fence,
    retention: Retention | None = None,
    run: dict[str, Any] | None = None,
    parts: Mapping[str, Engine] | None = None,
) -> Snapshot:
    """Return a snapshot of the engine; its tensors are the engine's own, not copies. All ranks call it, between two
    windows.

    Args:
        retention: earlier checkpoints to keep; None: all.
        run: JSON data that ``load`` returns to the caller; rank 0's is stored.
        parts: further engines of this process, by name.
    """
    snapshots = {name: take_snapshot(part, fence) for name, part in (parts or {}).items()}
    _, callbacks = engine.callbacks.state_dict()
    state = {
        "origin": origin_of(engine.plan), "engine": engine.state_dict(), "run": run or {}, "callbacks": callbacks,
        "optimizers": class_names(engine),
    }  # fmt: skip
    return Snapshot(
        step=engine.steps,
        tensors=own_share(contents.checkpoint_tensors(engine, engine.buffers.changing), engine.world),
        state=json.dumps(state, indent=2, allow_nan=False) + "\n",
        world=engine.world,
        fence=fence,
        retention=dataclasses.replace(retention or Retention(), common=_common_step(engine, fence.paths)),
        predicted_bytes=predicted_bytes(engine) + sum(part.predicted_bytes for part in snapshots.values()),
        parts=snapshots,
    )


def _common_step(engine: Engine, paths: RunPaths) -> int | None:
    """Return the newest step of which all sites have a checkpoint, on rank 0. All ranks call it."""
    if engine.sites.count == 1:
        return None
    own = [path.name for path in paths.committed_checkpoints()] if engine.world.rank == 0 else []
    first, *others = engine.sites.of_all([int(name.removeprefix("step_")) for name in own])
    return max(set(first).intersection(*others), default=0)


def write(snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
    """Write and commit a snapshot, and return the committed directory. All ranks call it, with the same outcome.

    Args:
        group: a gloo group of all ranks, required in a background thread.

    Raises:
        CheckpointFailed: a rank could not write. Earlier checkpoints are untouched, and the partial one is deleted.
        Superseded: a newer attempt of the run has started.
    """
    return _CheckpointWrite(snapshot, group).run()


# errors of a path; no space on the disk would cure them
_OF_THE_PATH = frozenset({errno.ENOTDIR, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR})


@dataclass(frozen=True)
class _RankError:
    """Error of one rank, and the free bytes on its disk at that time. ``of_path``: the path is wrong, not the disk."""

    rank: int
    text: str
    free: int | None
    of_path: bool


class _CheckpointWrite:
    """Write of one snapshot. ``name``: of the directory inside the checkpoint, for a part of one."""

    def __init__(self, snapshot: Snapshot, group: dist.ProcessGroup | None, name: str = "") -> None:
        self._snapshot, self._world, self._group = snapshot, snapshot.world, group
        self._fence, self._paths = snapshot.fence, snapshot.fence.paths
        self._target = self._paths.checkpoint(snapshot.step)
        self._partial = self._paths.partial_checkpoint(snapshot.step, self._fence.own)
        self._directory = self._partial / name

    def run(self) -> Path:
        if self._on_rank_0(self._create):
            for name, part in self._snapshot.parts.items():
                part = dataclasses.replace(part, step=self._snapshot.step)
                _CheckpointWrite(part, self._group, name).write_part()
            files = self._write_tensors()
            self._on_rank_0(lambda: self._commit(files))
        return self._target

    def write_part(self) -> None:
        """Write the snapshot into its directory, which is committed with the whole checkpoint."""
        self._on_rank_0(self._directory.mkdir)
        files = self._write_tensors()
        self._on_rank_0(lambda: self._complete(files))

    def _create(self) -> bool:
        """Create the directory. Return False if a checkpoint of this step exists: writing it again would put it at
        risk."""
        if self._target.exists():
            return False
        if self._partial.exists():  # left over from a failed save
            self._partial.rename(self._paths.discarded_checkpoint(self._snapshot.step, self._fence.own))
        self._partial.mkdir(parents=True)
        return True

    def _write_tensors(self) -> file_format.Files:
        """Write this rank's share; return the files of all ranks."""
        writer = Writer(self._directory, staged=self._snapshot.staged)
        try:
            dcp.save(self._snapshot.tensors, storage_writer=writer, planner=SavePlanner(), process_group=self._group)
        except dcp.CheckpointException as error:  # torch raises it on all ranks, whichever rank failed
            own = error.failures.get(self._world.rank)
            self._fail(writer.files.error or (own[0] if own else None))
        return {
            name: file
            for files in self._world.of_all(writer.files.written, self._group)
            for name, file in files.items()
        }

    def _complete(self, files: file_format.Files) -> None:
        """Write what the directory has beside the tensors, the manifest last."""
        state = self._directory / STATE
        write_text(state, self._snapshot.state)
        file_format.write_manifest(self._directory, files | file_format.checksums([state]))
        sync_directory(self._directory)

    def _commit(self, files: file_format.Files) -> None:
        self._complete(files)
        self._fence.check()
        self._partial.rename(self._target)
        try:
            sync_directory(self._target.parent)
            write_text(self._paths.latest, f"{self._target.name}\n")
            sync_directory(self._target.parent)
        except OSError as error:  # the checkpoint is committed, and the rest is a convenience
            print(f"{self._target.name} is complete, but {self._paths.latest} does not name it: {error}", flush=True)
        delete_old(self._paths, self._fence, self._snapshot.retention)

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and return its result on all ranks; if it fails, its error is raised on all ranks."""
        result: T | OSError | Superseded | None = None
        if self._world.rank == 0:
            try:
                result = work()
            except (OSError, Superseded) as error:
                result = error
        result = self._world.of_rank_0(result, self._group)
        if isinstance(result, Superseded):
            raise result
        if isinstance(result, OSError):
            self._fail(result if self._world.rank == 0 else None)
        return result  # pyright: ignore[reportReturnType]

    def _fail(self, error: BaseException | None) -> NoReturn:
        """Raise CheckpointFailed with the errors of all ranks. All ranks call it. ``error``: this rank's; None if it
        had none."""
        own = None
        if error is not None:
            text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            of_path = isinstance(error, OSError) and error.errno in _OF_THE_PATH
            own = _RankError(self._world.rank, text, free_bytes(self._paths.checkpoints), of_path)
        errors = [each for each in self._world.of_all(own, self._group) if each is not None]
        if self._world.rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)  # no rank writes to it any more
        text = "; ".join(f"rank {each.rank}: {each.text}" for each in errors)
        free = min((each.free for each in errors if each.free is not None), default=None)
        if all(each.of_path for each in errors):
            cause = "That must be a directory to which this user may write."
        else:
            room = "an unknown number of bytes" if free is None else bytes_text(free)
            cause = f"It needs about {bytes_text(self._snapshot.predicted_bytes)}, and {room} were free."
        raise CheckpointFailed(
            f"The checkpoint of step {self._snapshot.step} could not be written to {self._paths.checkpoints}: {text}.\n"
            f"  {cause} {self._newest()}"
        ) from None

    def _newest(self) -> str:
        """Return a sentence that names the newest complete checkpoint."""
        try:
            newest = next((path.name for path in self._paths.committed_checkpoints()), None)
        except OSError:
            return "The checkpoints that exist cannot be listed."
        return "There is no complete checkpoint yet." if newest is None else f"The newest complete one is {newest}."


def delete_old(paths: RunPaths, fence: Fence, retention: Retention) -> None:
    """Delete the checkpoints that are not to be kept. Only rank 0 calls it; failures are ignored."""
    steps = [int(path.name.removeprefix("step_")) for path in paths.committed_checkpoints()]
    superseded = {*retention.superseded} if retention.best in steps else set[int]()  # its save may have failed
    superseded -= {*steps[:1]}
    others = [step for step in steps if step not in superseded]
    needed = {step for step in steps if retention.common is not None and step >= retention.common}
    for step in {*steps, *superseded} - {*others[: retention.keep], retention.best} - needed:
        with suppress(OSError):  # renamed first, so that a partly deleted one never has a checkpoint's name
            paths.checkpoint(step).rename(paths.discarded_checkpoint(step, fence.own))
    delete_partial(paths, fence)


def delete_partial(paths: RunPaths, fence: Fence) -> None:
    """Delete partial and discarded checkpoints of this attempt and older ones. Only rank 0 calls it. On NFS a file that
    a process has open remains, and is deleted by a later call."""
    for attempt, partial in paths.partial_checkpoints():
        if Incarnation.parse(attempt) <= fence.own:
            shutil.rmtree(partial, ignore_errors=True)


class Cadence:
    """Schedule of checkpoints: by steps, or by minutes.

    Minutes are counted on rank 0's clock, whose decision reaches the other ranks with the window's totals.
    """

    def __init__(self, plan: CheckpointConfig) -> None:
        self._plan = plan
        self.start_clock()

    def start_clock(self) -> None:
        """Restart the clock: at the start, and after each save."""
        self._since = time.monotonic()

    def by_clock(self) -> bool:
        """Return whether a checkpoint is due by this rank's clock: for ``Engine(save_due=...)``."""
        minutes = self._plan.every_minutes
        return self._plan.enabled and minutes is not None and time.monotonic() - self._since >= 60 * minutes

    def due(self, result: StepResult, *, epoch_over: bool) -> bool:
        """Return whether a checkpoint is due after this step: the same on all ranks."""
        by_step = is_due(self._plan.every, result.step, epoch_over=epoch_over)
        return self._plan.enabled and (by_step or result.save_due)

    def next(self, step: int) -> str:
        """Return a phrase that says when the next checkpoint after that of ``step`` is due."""
        every, minutes = self._plan.every, self._plan.every_minutes
        due = [f"at step {(step // every + 1) * every}"] if isinstance(every, int) else []
        due += ["at the end of the epoch"] if every == EPOCH else []
        due += [f"in {minutes:g} minutes"] if minutes else []
        return ", or ".join([*due, "when the run ends"])
