"""Resume of a run from its newest intact checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from launcher.errors import NoGoodCheckpoint, WrongCheckpoint
from launcher.quantities import count
from launcher.rundir.fencing import Fence
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import file_format, load, save
from launcher.train.checkpoint.load import Restored
from launcher.train.engine.engine import Engine
from launcher.train.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Resumed:
    """Directory of the checkpoint that was loaded, and the result of loading it."""

    directory: Path
    restored: Restored


def begin(paths: RunPaths, fence: Fence) -> None:
    """Delete partial checkpoints of this attempt and older ones. Only rank 0 calls it, before training.

    Raises:
        Superseded: a newer attempt has started.
    """
    fence.check()
    save.clear(paths, fence)


def go_on(engine: Engine, paths: RunPaths, fence: Fence, commit: str | None = None) -> Resumed | None:
    """Load the newest checkpoint whose files match its manifest, and return it; None if the run has no checkpoint. All
    ranks call it, with a fresh engine.

    Damaged checkpoints are reported, and moved aside once an older one was loaded instead.

    Args:
        commit: commit of the task's present code, if known.

    Raises:
        NoGoodCheckpoint: the run has checkpoints, and all of them are damaged.
        WrongCheckpoint: the newest intact one does not fit this plan, or has a newer format, or this user may not read
            it.
        Superseded: a newer attempt has started.
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
    """Check that a stream that shards itself has the same number of ranks as before, if an epoch is in progress. With
    another number, its shares change: some samples would be lost, and others read twice.

    Raises:
        WrongCheckpoint: the number of ranks differs.
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
    """Return what is wrong with a checkpoint's files: the same on all ranks, each of which checks a share of them."""
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
    """Call ``look``, and return a WrongCheckpoint that it raises, so that it can be sent to all ranks."""
    try:
        return look(*arguments)
    except WrongCheckpoint as error:
        return error


def _move_aside(paths: RunPaths, fence: Fence, refused: list[Path]) -> None:
    """Rename damaged checkpoints: the run will reach their steps again, and save under their names."""
    if refused:
        fence.check()
    for directory in refused:
        directory.rename(paths.refused_checkpoint(directory))
