"""Run by test_save_killed.py: ranks that only save are killed at random moments, and what is left is looked at.

    python -m tests.train.checkpoint.kill_worker EMPTY_DIRECTORY TRIES SEED

torch is imported once; each try forks two ranks, which go on from the newest checkpoint. In the checkpoint of step n
every parameter, and every number of the optimizer's state, is n: what comes of two steps would show.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launcher.plan.run_plan import RunPlan
from launcher.rundir.fencing import Fence
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import file_format, load, save
from launcher.train.checkpoint.async_save import Saver
from launcher.train.checkpoint.file_format import Planner, Reader
from launcher.train.checkpoint.run_totals import RunTotals
from launcher.train.engine.engine import Engine
from tests.helpers import make_plan

RANKS, KEEP = 2, 2
torch.set_num_threads(1)


def save_for_ever(plan: RunPlan, rank: int, meeting: Path, told: int) -> None:
    """``told``: where rank 0 writes which steps are committed, and first with which it begins."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = nn.Linear(40, 50)
    engine = Engine(model, torch.optim.AdamW(model.parameters(), 0.01), plan)
    fence = Fence.here(plan.paths)
    if rank == 0:
        save.delete_partial(plan.paths, fence)
    resumed = load.load_newest(engine, plan.paths, fence)
    assert resumed is None or {p.unique().item() for p in model.parameters()} == {float(engine.steps)}
    totals = RunTotals(engine)
    saver = Saver(engine, totals, fence, threading.Event())
    model(torch.ones(1, 40)).sum().backward()
    engine.optimizer.step()  # for a state to save
    if rank == 0:
        os.write(told, f"{engine.steps}\n".encode())
    while True:
        engine.counters.steps += 1  # as if a step had been taken
        with torch.no_grad():
            for tensor in (*model.parameters(), *(t for s in engine.optimizer.state.values() for t in s.values())):
                tensor.fill_(engine.steps)
        # one in three is written at once
        saver.save({}, next_due=None if engine.steps % 3 == 0 else "soon")
        if rank == 0 and totals.checkpoint is not None:
            os.write(told, f"{int(totals.checkpoint[-6:])}\n".encode())


def check(paths: RunPaths, at_least: int) -> int:
    """Check the checkpoints that a kill has left, and return the newest step."""
    whole = paths.committed_checkpoints()
    for directory in whole:
        files = file_format.read_manifest(directory)
        assert not isinstance(files, str), files
        assert not file_format.problems(directory, files)
    newest = paths.newest_step()
    assert newest >= at_least, f"step {at_least} was committed, and {newest} is the newest"
    assert len(whole) >= min(KEEP, at_least), "none is given up before there is another one"
    if whole:
        entries = Reader(whole[0]).read_metadata().state_dict_metadata.items()
        state: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata) and name.startswith(("model.", "optimizer."))
        }
        assert len(state) == 8
        dcp.load(state, storage_reader=Reader(whole[0]), planner=Planner(), no_dist=True)
        assert {value for tensor in state.values() for value in tensor.unique().tolist()} == {float(newest)}
        latest = paths.latest.read_text().strip() if paths.latest.exists() else None
        assert latest in {directory.name for directory in whole} or (latest is None and newest == 1)
    return newest


class Told:
    """Steps that rank 0 writes to a pipe: the one it starts from, then each one committed."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._text = pipe, b""

    def wait_for(self, lines: int) -> bool:
        """Return whether the process committed this many steps before its end."""
        while self._text.count(b"\n") < lines:
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                return False
            self._text += piece
        return True

    def all(self) -> list[int]:
        """Once nobody is left who writes."""
        while piece := os.read(self._pipe, 1 << 16):
            self._text += piece
        os.close(self._pipe)
        return [int(line) for line in self._text.split(b"\n")[:-1]]


def attempt(plan: RunPlan, meeting: Path, chance: random.Random) -> list[int]:
    """Begin, kill, and what was told."""
    ours, theirs = os.pipe()
    children: list[int] = []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            try:
                save_for_ever(plan, rank, meeting, theirs)
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        children.append(child)
    os.close(theirs)
    told = Told(ours)
    assert told.wait_for(1), "they began"
    began = time.monotonic()
    assert told.wait_for(2), "they saved"
    # within the next saves, of which each takes about as long as the first
    time.sleep(chance.uniform(0, 2 * (time.monotonic() - began)))
    chance.shuffle(children)
    for child in children:  # all at once, or one a little before the other
        os.kill(child, signal.SIGKILL)
        time.sleep(chance.choice([0, 0, 0.01]))
    killed = [-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert killed[0] == signal.SIGKILL, "they saved until they were killed"
    return told.all()


def kill_and_look(root: Path, tries: int, seed: int) -> None:
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    plan = make_plan(
        "cluster.workers_per_node=2", "precision=fp32", "train.loader_workers=0", f"checkpoint.keep={KEEP}",
        "run.calibrate_s=0", run_dir=str(root),
    )  # fmt: skip
    chance, newest, left_over = random.Random(seed), 0, 0
    for number in range(tries):
        began, *committed = attempt(plan, root / f"meeting.{number}", chance)
        assert began == newest, "it went on from the newest one"
        left_over += bool(plan.paths.partial_checkpoints())
        newest = check(plan.paths, max([began, *committed]))
    print(f"{tries} tries, {newest} checkpoints, {left_over} kills left a part of one")


if __name__ == "__main__":
    kill_and_look(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]))
