"""Run by torchrun in test_saving.py: jobs as those of resume_worker.py, with trouble.

If they are there, by window (from 1): ``hold``: [step, window]: the write of that step's checkpoint begins in that
window; ``term``: rank 1 gets SIGTERM; ``fill``, ``free``: the disk of the checkpoints is full, and no more; ``limit``,
``unlimit``: rank 1 can write no file, and can again.

A window waits for the saves before it where its job says so: ``await``: {window: how many have ended by then}.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.process import StopRequest
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import async_save, save
from launcher.train.checkpoint.contents import Staging
from launcher.train.checkpoint.save import Snapshot
from launcher.train.trainer import train
from tests.helpers import patience
from tests.train.checkpoint.resume_worker import plan_of, run_all, say

RANK = int(os.environ["RANK"])
LEFT_FREE = 5 * 4096  # bytes of a full disk: whole pages
NO_LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)
WAIT_S = patience(60)


@dataclass
class Conduct:
    """Trouble that a job gets into."""

    job: dict[str, Any]
    asked: StopRequest = field(default_factory=StopRequest)
    window: int = 0
    ended: list[bool] = field(default_factory=list[bool])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self) -> bool:
        """Once a window, as ``stop``."""
        with self.changed:
            self.window += 1
            self.changed.notify_all()
            due = self.job.get("await", {}).get(str(self.window), 0)
            assert self.changed.wait_for(lambda: len(self.ended) >= due, WAIT_S)
        happens = {what for what in ("term", "fill", "free", "limit", "unlimit") if self.job.get(what) == self.window}
        filler = RunPaths(Path(self.job["run"])).checkpoints / "filler"
        if RANK == 1 and "term" in happens:
            os.kill(os.getpid(), signal.SIGTERM)
        if RANK == 1 and "limit" in happens:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, NO_LIMIT[1]))
        if RANK == 1 and "unlimit" in happens:
            resource.setrlimit(resource.RLIMIT_FSIZE, NO_LIMIT)
        if RANK == 0 and "fill" in happens:
            filler.write_bytes(bytes(shutil.disk_usage(filler.parent).free - LEFT_FREE))
        if RANK == 0 and "free" in happens:
            assert shutil.disk_usage(filler.parent).free >= LEFT_FREE, "what was written in vain is gone"
            filler.unlink()
        return self.asked()

    def write(self, snapshot: Snapshot, group: dist.ProcessGroup | None = None) -> Path:
        step, window = self.job.get("hold", (None, 0))
        with self.changed:
            assert step != snapshot.step or self.changed.wait_for(lambda: self.window >= window, WAIT_S)
        done = False
        try:
            path = write(snapshot, group)
            done = True
            return path
        finally:
            with self.changed:
                self.ended.append(done)
                self.changed.notify_all()
            if RANK == 0:
                say(f"{self.job['run']}: step {snapshot.step} is {'' if done else 'not '}written")


write = save.write


class Watched(Staging):
    """Says what it holds."""

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        copied = super().copy(state)
        places = sorted(buffer.data_ptr() for path, buffer in self._buffers.items() if "optimizer" in path)
        told = json.dumps(
            {"rank": RANK, "bytes": sum(buffer.nbytes for buffer in self._buffers.values()), "places": places}
        )
        say(f"copied {told}")
        return copied


def run(job: dict[str, Any]) -> None:
    if RANK == 0:
        say(f"begins {job['run']}")
    conduct = Conduct(job)
    save.write = conduct.write
    train(plan_of(job), conduct)


def restore(job: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, NO_LIMIT)
    dist.barrier()
    if RANK == 0 and "fill" in job:
        (RunPaths(Path(job["run"])).checkpoints / "filler").unlink(missing_ok=True)


if __name__ == "__main__":
    async_save.Staging = Watched
    run_all(run, restore)
