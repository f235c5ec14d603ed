"""Resume: a run goes on from its newest good checkpoint, and its record is cut back to that step."""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from launcher.config.schema import OnError
from launcher.errors import NoGoodCheckpoint, RecordFailed, WrongCheckpoint
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count
from launcher.rundir.fencing import Fence
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import file_format, load, save
from launcher.train.checkpoint.load import Restored
from launcher.train.engine.engine import Engine
from launcher.train.metrics import Record
from launcher.train.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Resumed:
    """``directory``: of the checkpoint that was loaded. ``restored``: what came of that."""

    directory: Path
    restored: Restored


def begin(paths: RunPaths, fence: Fence) -> None:
    """Clear away what this incarnation and older ones were writing when they ended. On rank 0, before it trains.

    Raises:
        Superseded: a newer incarnation has begun.
    """
    fence.check()
    save.clear(paths, fence)


def go_on(engine: Engine, paths: RunPaths, fence: Fence, commit: str | None = None) -> Resumed | None:
    """Load the newest checkpoint whose files are as they were written. All ranks call it, of a fresh engine.

    One that is damaged is said to be so, and moved aside once an older one was loaded in its place. None where there
    are no checkpoints: the run begins.

    Args:
        commit: of the task's code as it is now, where that is known.

    Raises:
        NoGoodCheckpoint: there are some, and all of them are damaged.
        WrongCheckpoint: the newest good one is not of this plan, is of a newer format, or closed to this user.
        Superseded: a newer incarnation has begun.
    """
    world = engine.world
    candidates: list[Path] = world.of_rank_0(paths.committed_checkpoints() if world.rank == 0 else [])
    refused: list[Path] = []
    for directory in candidates:
        if not (reasons := _problems(world, directory)):
            restored = load.load(engine, directory)
            if world.rank == 0:
                _move_aside(paths, fence, refused)
                print(f"Going on from {directory}: {_how(engine, restored)}", flush=True)
                if (saved_by := restored.other_commit(commit)) is not None:
                    print(f"The code is another one: {commit}; the checkpoint was saved by {saved_by}.", flush=True)
            return Resumed(directory, restored)
        refused.append(directory)
        if world.rank == 0:
            print(f"Checkpoint {directory} is damaged and not used: {'; '.join(reasons)}.", flush=True)
    if candidates:
        raise NoGoodCheckpoint(
            f"None of the {len(candidates)} checkpoints in {paths.checkpoints} can be used: all are damaged.\n"
            "  The log of rank 0 says how. "
            "Put one back from a copy; or, to begin at step 0 again, start a new run."
        )
    if world.rank == 0 and paths.metrics.exists() and paths.metrics.stat().st_size:
        print(
            f"{paths.checkpoints} holds no checkpoint: the run begins at step 0 again, and so does its record.",
            flush=True,
        )
    return None


def require_same_shards(engine: Engine, resumed: Resumed, dataset: Any) -> None:
    """Of a stream that shards itself, another number of ranks are other shares: in the middle of an epoch some samples
    would be lost, and others come twice.

    Raises:
        WrongCheckpoint: that is so.
    """
    ranks, here = resumed.restored.ranks, engine.world.size
    if ranks != here and engine.place.window and getattr(dataset, "sharded", False):
        raise WrongCheckpoint(
            f"{resumed.directory} lies within an epoch of a stream that shards itself for {ranks} ranks, and its "
            f"shares for {here} are others.\n  Go on with {ranks} ranks; or leave `sharded` out, so that every rank "
            "reads the stream and takes its part."
        )


def _how(engine: Engine, restored: Restored) -> str:
    batch, origin = engine.plan.batch, restored.origin
    said = f"{count(engine.steps, 'step')} done"
    if restored.ranks != batch.world_size:
        said += f", at {batch.world_size} rank{'' if batch.world_size == 1 else 's'} instead of {restored.ranks}"
    if (before := origin.get("strategy", engine.plan.strategy.kind)) != engine.plan.strategy.kind:
        said += f", with strategy={engine.plan.strategy.kind.value} instead of {before}"
    was = {name: origin.get(name, getattr(batch, name)) for name in ("accumulation", "micro_size", "global_size")}
    if (was["accumulation"], was["micro_size"]) != (batch.accumulation, batch.micro_size) or said.count(","):
        said += f": accumulation {batch.accumulation}, micro-batch {batch.micro_size}"
    if was["global_size"] != batch.global_size:
        said += f"; global batch {batch.global_size} instead of {was['global_size']}"
    elif ":" in said:
        said += f"; global batch {batch.global_size} as before"
    return f"{said}."


def _problems(world: World, directory: Path) -> list[str]:
    """What is wrong with a checkpoint's files; every rank looks at its share of them, and all learn the same."""
    files: file_format.Files | str | WrongCheckpoint = world.of_rank_0(
        _said(file_format.read_manifest, directory) if world.rank == 0 else ""
    )
    if isinstance(files, WrongCheckpoint):
        raise files
    if isinstance(files, str):
        return [files]
    share = dict(list(files.items())[world.rank :: world.size])
    found = world.of_all(_said(file_format.problems, directory, share))
    for each in found:
        if isinstance(each, WrongCheckpoint):
            raise each
    told = [problem for each in found if isinstance(each, list) for problem in each]
    return [f"{len(told)} of its {len(files)} files are not as they were written", *told] if len(told) > 1 else told


def _said(look: Callable[..., T], *arguments: Any) -> T | WrongCheckpoint:
    """What one rank finds out, in a form that all can be told."""
    try:
        return look(*arguments)
    except WrongCheckpoint as error:
        return error


def _move_aside(paths: RunPaths, fence: Fence, refused: list[Path]) -> None:
    """The run comes to their steps again, and must find their places free."""
    if refused:
        fence.check()
    for directory in refused:
        directory.rename(paths.refused_checkpoint(directory))


def open_record(
    plan: RunPlan, fence: Fence, step: int, last: dict[str, Any] | None, *, amended: bool = False
) -> Record:
    """metrics.jsonl, cut back to ``step``: what lies behind it will come again.

    It is a new file under the old name, so that a process of an older incarnation that still has the old one open
    writes where nobody reads.

    Args:
        last: the record of that very step, for when the run ended between the checkpoint and its record.
        amended: whether ``last`` takes the place of the one that is there.

    Raises:
        RecordFailed: the disk has no room for the new file.
        Superseded: a newer incarnation has begun.
    """
    fence.check()
    try:
        cut_back(plan.paths.metrics, step - amended, last)
    except OSError as error:
        raise RecordFailed(
            f"{plan.paths.metrics} cannot be cut back to step {step}: {error.strerror}.\n  Make room on that disk."
        ) from None
    return Record(plan.paths.metrics, waits=plan.checkpoint.on_error is not OnError.stop)


# as launcher/train/metrics.py writes them: the step comes first
_STEP = re.compile(rb'\{"step": ([0-9]+)[,}]')


def cut_back(path: Path, step: int, last: dict[str, Any] | None) -> None:
    """Put a new file under the record's name, with what of it is to be kept, on the disk when this returns.

    Kept is all up to the last whole line of ``step`` or of one before it. What lies behind is later, torn, or garbage
    that a machine left when it went down: up to a checkpoint the record was on the disk before that was committed.

    Args:
        last: the record of that very step, in case its line is missing.
    """
    for left in path.parent.glob(f".{path.name}.*"):  # by a start that was killed here
        left.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as kept:
            newest = None
            if path.exists():
                with path.open("rb") as record:
                    end, newest = _end(record, step)
                    _copy(record, kept, end)
                kept.seek(end)
            if last is not None and (newest is None or newest < last["step"]):
                kept.write(f"{json.dumps(last)}\n".encode())
            kept.flush()
            os.fsync(kept.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def record_of(path: Path, step: int) -> dict[str, Any] | None:
    """Return the record of ``step``; None where there is no line for it."""
    if not path.exists():
        return None
    with path.open("rb") as record:
        end, newest = _end(record, step)
        if newest != step:
            return None
        record.seek(0)
        return json.loads(record.read(end).splitlines()[-1])


def _end(record: IO[bytes], step: int) -> tuple[int, int | None]:
    """Where the last line that is kept ends, and its step."""
    if not os.fstat(record.fileno()).st_size:  # which mmap refuses
        return 0, None
    with mmap.mmap(record.fileno(), 0, access=mmap.ACCESS_READ) as text:
        newline = text.rfind(b"\n")  # what follows the last one is torn
        while newline >= 0:
            begin = text.rfind(b"\n", 0, newline) + 1
            found = _STEP.match(text, begin, newline)
            if found is None or int(found[1]) <= step:
                own = _step_of(text[begin:newline])
                if own is not None and own <= step:
                    return newline + 1, own
            newline = begin - 1
    return 0, None


def _step_of(line: bytes) -> int | None:
    """None for what is no record."""
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    step: Any = cast("dict[str, Any]", record).get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """The first ``size`` bytes, by the operating system; on some file systems that costs nothing."""
    source.seek(0)
    at = 0
    while at < size:
        try:
            copied = os.copy_file_range(source.fileno(), target.fileno(), size - at, at, at)
        except OSError:  # between two file systems, or one that does not have it
            os.lseek(target.fileno(), at, os.SEEK_SET)
            copied = os.sendfile(target.fileno(), source.fileno(), at, size - at)
        if not copied:
            raise OSError(f"{source.name} has become shorter while it was copied")
        at += copied
