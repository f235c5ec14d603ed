"""A loop that ends while a checkpoint is written, run by test_run_engine.py.

Arguments: the directory of runs, and how the loop ends; fails: it exits, and the checkpoint cannot be written.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher import Engine, make_plan
from launcher.errors import CheckpointFailed
from launcher.train.checkpoint import save

write = save.write


def write_slowly(snapshot: save.Snapshot, group: Any = None) -> Path:
    time.sleep(1)  # the loop ends first
    if sys.argv[2] == "fails":
        raise CheckpointFailed("The disk is full.")
    return write(snapshot, group)


def main() -> None:
    save.write = write_slowly
    plan = make_plan(
        [f"run.dir={sys.argv[1]}", "run.name=a", "batch.global_size=4", "train.steps=8", "cluster.device=cpu",
         "precision=fp32", "train.loader_workers=0", "checkpoint.every=2", "run.calibrate_s=0"], samples=8,
    )  # fmt: skip
    torch.manual_seed(0)
    engine = Engine(nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, 0.1), plan)
    engine.resume()
    for window in engine.windows(list(torch.ones(8, 2))):
        for batch in window:
            engine.backward(engine.model(batch).sum(), len(batch))
        engine.finish_step(engine.step())
        if engine.steps == 2:
            if sys.argv[2] == "raises":
                raise KeyError("a mistake")
            if sys.argv[2] != "breaks":
                sys.exit()
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
