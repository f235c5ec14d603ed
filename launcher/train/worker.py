"""Entry point of one rank, started by torchrun. plan.json is all that it reads from the control side."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from launcher.heartbeat import HEARTBEAT, Phase
from launcher.plan.run_plan import RunPlan
from launcher.process import (
    StopRequest,
    never_fail_to_print,
    prepare_worker,
    run_and_exit,
    show_stacks_when_asked,
)


def main(plan_path: str) -> None:
    prepare_worker()
    never_fail_to_print()
    show_stacks_when_asked()
    HEARTBEAT.open()
    HEARTBEAT.beat(Phase.starting, 1)
    stop = StopRequest()  # before torch is imported, which takes a second: until here a signal kills the process

    from torch.distributed.elastic.multiprocessing.errors import record

    run_and_exit(partial(record(_run), plan_path, stop), beat=lambda: HEARTBEAT.beat(Phase.ending))


def _run(plan_path: str, stop: StopRequest) -> None:
    plan = RunPlan.load(Path(plan_path))
    if plan.train.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when its handle is created

    from launcher.train.trainer import train
    from launcher.train.world import disband

    train(plan, stop)
    HEARTBEAT.beat(Phase.ending)
    disband()


if __name__ == "__main__":
    main(sys.argv[1])
