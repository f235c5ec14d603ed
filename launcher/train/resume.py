"""A run that begins again in its directory goes on from its newest good checkpoint, and its record with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import NoGoodCheckpoint
from launcher.incarnation import Fence
from launcher.paths import RunPaths, write_text
from launcher.train import checkpoint, manifest, restore
from launcher.train.engine import Engine
from launcher.train.telemetry import Record
from launcher.train.world import World


@dataclass(frozen=True)
class Resumed:
    """``directory``: of the checkpoint that was loaded. ``run``: what was saved in it beside the engine."""

    directory: Path
    run: dict[str, Any]


def begin(paths: RunPaths, fence: Fence) -> None:
    """Clear away what this incarnation and older ones were writing when they ended. On rank 0, before it trains.

    Raises:
        Superseded: a newer incarnation has begun.
    """
    fence.check()
    checkpoint.clear(paths, fence)


def go_on(engine: Engine, paths: RunPaths, fence: Fence) -> Resumed | None:
    """Load the newest checkpoint whose files are as they were written. All ranks call it, of a fresh engine.

    One that is damaged is said to be so, and moved aside once an older one was loaded in its place. None where there
    are no checkpoints: the run begins.

    Raises:
        NoGoodCheckpoint: there are some, and all of them are damaged.
        Superseded: a newer incarnation has begun.
    """
    world = engine.world
    candidates: list[Path] = world.of_rank_0(paths.committed_checkpoints() if world.rank == 0 else [])
    refused: list[Path] = []
    for directory in candidates:
        if not (reasons := _problems(world, directory)):
            run = restore.load(engine, directory)
            if world.rank == 0:
                _move_aside(paths, fence, refused)
                print(f"Going on from {directory}: {engine.steps} steps are done.", flush=True)
            return Resumed(directory, run)
        refused.append(directory)
        if world.rank == 0:
            print(f"Checkpoint {directory} is damaged and not used: {'; '.join(reasons)}.", flush=True)
    if candidates:
        raise NoGoodCheckpoint(
            f"None of the {len(candidates)} checkpoints in {paths.checkpoints} can be used: all are damaged.\n"
            "  The log of rank 0 says how. "
            "Put one back from a copy; or, to begin at step 0 again, start a new run."
        )
    return None


def _problems(world: World, directory: Path) -> list[str]:
    """What is wrong with a checkpoint's files; every rank looks at its share of them, and all learn the same."""
    files: manifest.Files | str = world.of_rank_0(manifest.read(directory) if world.rank == 0 else "")
    if isinstance(files, str):
        return [files]
    own = manifest.problems(directory, dict(list(files.items())[world.rank :: world.size]))
    return [problem for problems in world.of_all(own) for problem in problems]


def _move_aside(paths: RunPaths, fence: Fence, refused: list[Path]) -> None:
    """The run comes to their steps again, and must find their places free."""
    if refused:
        fence.check()
    for directory in refused:
        directory.rename(paths.refused_checkpoint(directory))


def open_record(paths: RunPaths, fence: Fence, step: int, last: dict[str, Any] | None) -> Record:
    """metrics.jsonl, cut back to ``step``: what lies behind it will come again.

    It is a new file under the old name, so that a process of an older incarnation that still has the old one open
    writes where nobody reads.

    Args:
        last: the record of that very step, for when the run ended between the checkpoint and its record.

    Raises:
        Superseded: a newer incarnation has begun.
    """
    fence.check()
    kept = _records_until(paths.metrics, step)
    if last is not None and (not kept or json.loads(kept[-1])["step"] < last["step"]):
        kept.append(json.dumps(last))
    write_text(paths.metrics, "".join(f"{line}\n" for line in kept))
    return Record(paths.metrics)


def _records_until(path: Path, step: int) -> list[str]:
    """Whole lines only: the last one may be torn, where the machine went down."""
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            if json.loads(line)["step"] > step:
                break
        except (ValueError, TypeError, LookupError):
            break
        kept.append(line)
    return kept
