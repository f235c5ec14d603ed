"""Callbacks that make replicas differ, and others that do not, run by test_replica_check.py on four ranks.

Argument: a directory. Prints one JSON object from rank 0: by case, what each rank was told at the end of its job ("" if
it was trained to the end), and the checkpoints that were saved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.train.world import World
from tests.infra.workers import leave_group, message_of, print_on_rank_0

SAMPLES, BATCH = 32, 8
DATA = list(torch.sin(torch.arange(SAMPLES * 3.0)).reshape(SAMPLES, 3))
SAVED = 4


class Noise:
    """Changes the parameters from step ``at`` on; with ``seed``, by the same numbers on all ranks."""

    def __init__(self, at: int = 1, seed: int | None = None) -> None:
        self.at, self.random = at, None if seed is None else torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def on_step(self, engine: Any, result: Any) -> None:
        if result.step >= self.at:
            for parameter in engine.model.parameters():
                parameter.mul_(1 + 0.01 * torch.randn((), generator=self.random).item())


class OnLastRank:
    """Does ``change`` on the last rank only, after step SAVED + 1."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def on_step(self, engine: Any, result: Any) -> None:
        if result.step == SAVED + 1 and engine.world.rank == engine.world.size - 1:
            self.change(engine)


class OwnState:
    """Has state that differs between ranks."""

    def __init__(self, tensor: bool) -> None:
        self.tensor = tensor

    def on_step(self, engine: Any, result: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        rank = dist.get_rank()
        return {"same": 1, "inner": {"sum": torch.full((5,), rank)} if self.tensor else {"rank": rank}}

    def load_state_dict(self, state: Any) -> None: ...


class Watching:
    """Does nothing."""

    def on_window(self, engine: Any) -> None: ...


def set_rate(engine: Any) -> None:
    engine.optimizer.param_groups[1]["lr"] *= 2


def set_data(engine: Any) -> None:
    """A change that does not count as one of the parameter: torch keeps no version of it."""
    next(iter(engine.model.parameters())).data[0] += 1


def swap(engine: Any) -> None:
    weight = engine.model[1].weight.data
    weight[:, :2] = weight[:, :2].flip(1)


class Model(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 9, bias=False), nn.Linear(9, 1))
        self[4].bias.requires_grad_(False)


class Plain(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 8), nn.Linear(8, 9, bias=False), nn.Tanh(), nn.Linear(9, 1))


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:1]}, {"params": every[1:], "betas": (0.8, 0.9)}], 0.05)


def train(where: Path, callback: Any, *overrides: str, model: Any = Plain, saves: bool = True) -> Engine:
    plan = make_plan(
        [f"run.dir={where}", f"batch.global_size={BATCH}", "batch.micro_size=1", "train.steps=6", "cluster.device=cpu",
         "train.loader_workers=0", "run.calibrate_s=0", f"checkpoint.every={SAVED}", "checkpoint.async_save=false",
         "schedule=constant", "schedule.warmup_steps=0", *overrides], samples=SAMPLES,
    )  # fmt: skip
    engine = Engine(model, optimizer_of, plan, callbacks=[callback, Watching()])

    def loss(model: Any, x: Tensor) -> tuple[Tensor, int]:
        return (model(x).float() - 1).square().sum(), len(x)

    if saves:
        engine.resume(eval_data=DATA[:9], loss=loss)
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        result = engine.step()
        if saves:
            engine.finish_step(result)
    return engine


HSDP = ("strategy=hsdp", "strategy.shard_size=2")
CASES: dict[str, Any] = {
    "noise": (lambda: Noise(), ("strategy=ddp",)),
    "late noise": (lambda: Noise(4), ("strategy=ddp",)),
    "noise hsdp": (lambda: Noise(), HSDP),
    "freeze": (lambda: OnLastRank(lambda engine: engine.freeze("0.weight")), ("strategy=ddp",)),
    "freeze fsdp": (lambda: OnLastRank(lambda engine: engine.freeze("0.weight")), ("strategy=fsdp",)),
    "rate": (lambda: OnLastRank(set_rate), ("strategy=ddp",)),
    "rate fsdp": (lambda: OnLastRank(set_rate), ("strategy=fsdp",)),
    "data": (lambda: OnLastRank(set_data), ("strategy=ddp", "checkpoint.enabled=false", "train.eval_every=null")),
    "swap": (lambda: OnLastRank(swap), ("strategy=ddp",)),
    "state": (lambda: OwnState(False), ("strategy=ddp",)),
    "state of tensors": (lambda: OwnState(True), ("strategy=ddp",)),
}
RIGHT: dict[str, Any] = {
    "same noise": (lambda: Noise(1, 3), ("strategy=ddp",)),
    "same noise hsdp": (lambda: Noise(1, 3), HSDP),
    "shards of one model": (lambda: Noise(1, 3), ("strategy=fsdp",)),
    "powersgd": (Watching, ("strategy=ddp", "strategy.compress=powersgd", "powersgd.start=2")),
    "bf16": (Watching, ("strategy=ddp", "strategy.sync=every", "precision=bf16", "strategy.compress=bf16")),
    "fp16": (Watching, ("strategy=ddp", "precision=fp16")),
    "fp16 hsdp": (Watching, (*HSDP, "precision=fp16", "strategy.sync=every")),
}


def outcome(where: Path, name: str, make: Any, options: Any, **more: Any) -> list[Any]:
    run = name.replace(" ", "-")
    told = message_of(lambda: train(where, make(), f"run.name={run}", *options, **more))
    saved = sorted(path.name for path in (where / run).glob("checkpoints/step_*"))
    return [World.here().of_all(told), saved]


def main() -> None:
    where = Path(sys.argv[1])
    results = {name: outcome(where, name, *case) for name, case in (CASES | RIGHT).items()}
    norm = ("strategy=ddp", "batch.norm=leave", "batch.micro_size=2")
    results["norm"] = outcome(where, "norm", Watching, norm, model=Model)
    results["not resumed"] = outcome(where, "not-resumed", lambda: OnLastRank(set_data), ("strategy=ddp",), saves=False)
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
