"""Run by torchrun in test_calibration.py: each line of the file in argv[1] is the overrides of a pair of runs.

Of each pair one is calibrated and the other is not. Prints one JSON object a pair: what differs in the end. Words of a
line without a dot in them are for this file: ``oom=N``: on rank 1 the N-th forward pass runs out of memory;
``oom_backward=N``: so does its backward pass, in the middle; ``too_large=1``: it has no memory to gather the model;
``reads=1``: the dtype of a unit's weight is read outside of it; ``own=N``: the loop calls engine.calibrate before
window N, and gives engine.windows no forward pass; ``resume=1``: another engine loads the state at the end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from launcher.plan.run_plan import RunPlan
from launcher.task import seed_everything
from launcher.train.data.randomness import random_state, restore_random_state
from launcher.train.engine import calibration
from launcher.train.engine.calibration import Calibrated
from launcher.train.engine.engine import Engine
from launcher.train.training_loop import losses_of
from launcher.train.world import World
from tests.helpers import make_plan
from tests.infra.workers import Calls, leave_group
from tests.train.engine.calibration_task import SAMPLES, Traced

torch.set_num_threads(1)
calibration.MAX_ROUNDS = 3
LONG_S = 1000.0


def plan_of(overrides: list[str], calibrate_s: float) -> RunPlan:
    return make_plan(
        "train.steps=5", "batch.global_size=32", "train.loader_workers=0", "optimizer.lr=0.05", *overrides,
        f"run.calibrate_s={calibrate_s}", f"cluster.workers_per_node={World.here().size}", samples=SAMPLES,
    )  # fmt: skip


def train(plan: RunPlan, words: dict[str, int]) -> tuple[dict[str, Any], Calibrated | None, str]:
    """Return what the run leaves, the calibration's result, and the order of reads (r) and training passes (F)."""
    task, counter, order = Traced(reads="reads" in words), Calls(), [""]

    def forward(model: Callable[..., Any], batch: Any) -> Any:
        calls = counter.count()
        if calls == words.get("oom") and engine.world.rank == 1:
            raise torch.OutOfMemoryError("as from the allocator")
        if calls == words.get("oom_backward") and engine.world.rank == 1:
            hook = module.middle.register_forward_hook(fail_in_backward)
            try:
                return losses_of(task, engine, model, batch)
            finally:
                hook.remove()
        return losses_of(task, engine, model, batch)

    calibration.fits_in_memory = lambda nbytes, _: nbytes == 0 or "too_large" not in words or engine.world.rank == 0
    seed_everything(3)
    engine = Engine(task.model, lambda p: torch.optim.AdamW(p, 0.05), plan, shard_units=task.shard_units, owner=task)
    seed_everything(4 + engine.world.rank)
    module: Any = engine.parallel.module
    losses, sent = [], []
    data, own = task.train_data(), words.get("own")
    if own == 0:
        engine.calibrate(forward, some_batches(data))
    for window in engine.windows(Recorded(data, order), forward=forward if own is None else None):
        for batch in window:
            order[0] += "F"
            engine.backward(losses_of(task, engine, engine.model, batch))
        result = engine.step()
        if own == result.window + 1:
            engine.calibrate(forward, some_batches(data))
        losses.append((result.loss, result.grad_norm, result.scale))
        sent.append((result.sync, {kind: traffic.payload_bytes for kind, traffic in result.comm.kinds.items()}))
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    state = engine.state_dict()
    for name in ("calibration", "gathered_by_every"):
        del state[name]
    left = {
        "tensors": {name: local(tensor).detach().clone() for name, tensor in tensors},
        "random": random_state(engine.device),
        "strategy": flat(engine.parallel.state_dict()),
        "losses": losses,
        "sent": sent,
        "state": state,
        "task": [task.calls, task.recent, task.state["mean"]],
    }
    if "resume" in words:
        resumed = Engine(task.model, lambda p: torch.optim.AdamW(p, 0.05), plan, shard_units=task.shard_units)
        resumed.load_state_dict(engine.state_dict())
        assert resumed.parallel.gradient_order() == []
    return left, engine.calibrated, order[0]


def out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("as from the allocator")


def fail_in_backward(module: Any, args: Any, output: Tensor) -> None:  # noqa: ARG001
    output.register_hook(out_of_memory)


class Recorded(torch.utils.data.Dataset[Any]):
    """``data``, whose reads are noted in ``order``: one r for all since the last training pass."""

    def __init__(self, data: Any, order: list[str]) -> None:
        self.data, self.order = data, order

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.order[0] = self.order[0].removesuffix("r") + "r"
        return self.data[index]


def some_batches(data: Any) -> list[Any]:
    """Return batches as the loop's own code makes them, with the random numbers that this takes put back."""
    state = random_state(torch.device("cpu"))
    batches = [torch.utils.data.default_collate([data[place] for place in range(4)]) for _ in range(3)]
    restore_random_state(state, torch.device("cpu"))
    return batches


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: found for part, inner in value.items() for key, found in flat(inner, f"{name}.{part}").items()}


def unlike(one: Any, other: Any, name: str = "") -> list[str]:
    """Names of what two runs do not have alike, bit by bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        gone = [f"{name}.{key}" for key in one.keys() ^ other.keys()]
        both = one.keys() & other.keys()
        return gone + [found for key in both for found in unlike(one[key], other[key], f"{name}.{key}")]
    same = torch.equal(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)
    return [] if same else [name]


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        overrides = [word for word in line.split() if "." in word or word.startswith(("strategy", "precision"))]
        words = {word.partition("=")[0]: int(word.partition("=")[2]) for word in line.split() if word not in overrides}
        plain, nothing, plain_order = train(plan_of(overrides, 0), {key: words[key] for key in words if key == "reads"})
        assert nothing is None
        left, calibrated, order = train(plan_of(overrides, LONG_S), words)
        assert calibrated is not None
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (sorted(unlike(plain, left)), dataclasses.asdict(calibrated)))
        if dist.get_rank() == 0:
            assert all(other[1] == found[0][1] for other in found), "all ranks have the same result"
            differs = sorted({name for names, _ in found for name in names})
            print(
                json.dumps({"unlike": differs, "plain_order": plain_order, "order": order, **found[0][1]}), flush=True
            )
    leave_group()


if __name__ == "__main__":
    main()
