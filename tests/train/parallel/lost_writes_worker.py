"""Parameters written from a rank's own samples, and after the step, run by test_lost_writes.py.

Prints one JSON object from rank 0: by case, the error on each rank and the sum of the parameters' magnitudes.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from launcher import make_plan
from launcher.train.world import World, device_of, join
from tests.infra.workers import flat, leave_group, message_of, print_on_rank_0
from tests.train.parallel.lost_writes_models import (
    OPTIONS,
    SAMPLES,
    divide_by_norm,
    divide_by_whole_norm,
    follow,
    normalise,
    plain,
    read_rows,
    train,
    writing,
    zero_row,
    zero_row_of_whole,
    zero_rows_of_gradient,
)

RANKS = int(sys.argv[1])


def outcome(*arguments: Any, **more: Any) -> list[Any]:
    left = list[Tensor]()
    per_node = f"cluster.workers_per_node={RANKS}"
    message = message_of(lambda: left.extend(train(*arguments, per_node, **more).model.parameters()))
    return [World.here().of_all(message), flat(left).abs().sum().item() if left else 0.0]


def main() -> None:
    plan = make_plan([*OPTIONS, "train.steps=1", f"cluster.workers_per_node={RANKS}"], samples=SAMPLES)
    join(World.here(), device_of(World.here(), plan.cluster.device), None)
    results: dict[str, Any] = {}
    hsdp = ("strategy=hsdp", f"strategy.shard_size={RANKS // 2}", "strategy.sync=replicas_at_boundary")
    for strategy in (("strategy=ddp",), ("strategy=fsdp",), hsdp):
        for name, case in {
            "samples": lambda options: outcome(plain, 4, *options, max_norm=1.0),
            "follow": lambda options: outcome(writing(follow), 4, *options),
            "on_step": lambda options: outcome(plain, 4, *options, on_step=lambda model: normalise(model, 0)),
            "row": lambda options: outcome(plain, 4, *options, on_step=zero_row),
            "whole": lambda options: outcome(plain, 4, *options, on_step=zero_row_of_whole),
            "gradient": lambda options: outcome(plain, 4, *options, before_step=zero_rows_of_gradient),
            "number": lambda options: outcome(plain, 4, *options, on_step=divide_by_norm),
            "whole_number": lambda options: outcome(plain, 4, *options, on_step=divide_by_whole_norm),
            "read": lambda options: outcome(plain, 4, *options, on_step=read_rows),
        }.items():
            results[f"{name} {strategy[0]}"] = case(strategy)
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
