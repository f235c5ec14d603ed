"""Profile of one optimizer step of a plain DDP job, run by test_ratchets.py: two ranks, four micro-batches.

Rank 0 prints a JSON object: the modules, functions and calls of the launcher that a window from the third on enters.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import launcher
from launcher import Engine, make_plan
from tests.infra.workers import leave_group, print_on_rank_0

ROOT = str(Path(launcher.__file__).parent)
SIZES = ("batch.global_size=8", "batch.accumulation=4", "train.steps=7", "train.loader_workers=0", "run.calibrate_s=0")
PROFILED = 3  # the first window: what happens in the first ones only is over


def main() -> None:
    torch.manual_seed(0)  # a process of the warm pool has the generator's state of the pool
    data = [torch.randn(8) for _ in range(32)]
    plan = make_plan([*SIZES, "precision=fp32", "strategy=ddp"], samples=len(data))
    engine = Engine(nn.Linear(8, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.1), plan)
    entered: dict[CodeType, int] = {}
    figures: list[tuple[int, int, int]] = []  # modules, functions and calls of each window

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            entered[code] = entered.get(code, 0) + 1

    for number, window in enumerate(engine.windows(data), 1):
        if number >= PROFILED:
            entered.clear()
            sys.setprofile(note)
        for batch in window:
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
        sys.setprofile(None)
        if number >= PROFILED:
            files = {code.co_filename for code in entered}
            figures.append((len(files), len(entered), sum(entered.values())))
    # the least: in a window that waits for another rank, or in which garbage is collected, more is entered
    print_on_rank_0(dict(zip(("modules", "functions", "calls"), map(min, zip(*figures, strict=True)), strict=True)))
    leave_group()


if __name__ == "__main__":
    main()
