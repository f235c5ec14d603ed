"""Loop of a user's own, which dies and is stopped at given steps, run by test_own_loop.py.

Arguments: names and steps of what happens to it, each once: kill=7 (rank 1 kills itself), stop=13 (the agent gets
SIGTERM); and overrides of the plan.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher import Engine, current, make_plan

events = dict(word.split("=") for word in sys.argv[1:] if word.split("=")[0] in ("kill", "stop"))
overrides = [word for word in sys.argv[1:] if word.split("=")[0] not in events]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 1))


def loss(model: Any, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch[:, :5])[:, 0].float() - batch[:, 5]).square().sum(), len(batch)


def happens(event: str, step: int) -> bool:
    """Return whether ``event`` is due, for the first time in the run."""
    marker = Path(f"{event}.happened")
    if events.get(event) != str(step) or marker.exists():
        return False
    marker.touch()
    return True


torch.manual_seed(3)
data, held_out = list(torch.randn(150, 6)), list(torch.randn(21, 6))
plan = make_plan(
    ["batch.global_size=20", "batch.micro_size=5", "train.steps=20", "checkpoint.every=5", "train.eval_every=4",
     "train.loader_workers=0", "run.calibrate_s=0", "checkpoint.keep=null", *overrides], samples=len(data),
)  # fmt: skip
engine = Engine(model, lambda parameters: torch.optim.AdamW(parameters, 0.02), plan)
extra = engine.resume(eval_data={"one": held_out, "other": data[:10]}, loss=loss)
print(f"rank {engine.world.rank} resumes at {engine.steps} with {extra}", flush=True)
total = 0.0 if extra is None else extra["total"]
for window in engine.windows(data):
    for batch in window:
        engine.backward(*loss(engine.model, batch))
    result = engine.step()
    total += result.loss
    current().log("total", total)
    engine.finish_step(result, extra={"total": total})
    if engine.world.rank == 1 and happens("kill", result.step):
        os.kill(os.getpid(), signal.SIGKILL)
    if engine.world.rank == 0 and happens("stop", result.step):
        os.kill(int(os.environ["LAUNCHER_AGENT_PID"]), signal.SIGTERM)
        while engine._requested is None or not engine._requested.received:
            time.sleep(0.01)
