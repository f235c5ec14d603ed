"""Models that differ between ranks, and what evaluations must not change; run by torchrun in test_replicas.py.

Prints one JSON object from rank 0.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from launcher import Engine, make_plan
from launcher.train.trainer import train
from launcher.train.world import World
from tests.helpers import make_plan as plan_of
from tests.infra.workers import leave_group, print_on_rank_0
from tests.train.parallel import replicas_tasks

torch.set_num_threads(1)
QUIET = ("run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=8", "batch.micro_size=2")
DATA = list(torch.randn(48, 6, generator=torch.Generator().manual_seed(3)))


def rank() -> int:
    return World.here().rank


def drawn(*shape: int, by: int) -> Tensor:
    """Return numbers as an unseeded generator draws them: different on each rank, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank() + by))


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.layer.weight.data.copy_(drawn(6, 6, by=number))  # torch's, of a generator of its own
        self.bias = nn.Parameter(torch.from_numpy(np.random.default_rng(7 * rank() + number).normal(size=6)).float())
        self.register_buffer("order", torch.from_numpy(np.random.default_rng(rank() + number).permutation(6)))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x) + self.bias)[:, self.order]


class Unseeded(nn.Module):
    asks = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number) for number in range(3))
        self.frozen = nn.Parameter(drawn(6, by=9), requires_grad=False)
        self.head = nn.Linear(6, 1)
        if self.asks:  # then it cannot be recorded, and is built whole
            self.scale = float(self.head.weight.abs().max())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.frozen)


class Whole(Unseeded):
    asks = True


class OtherCode(Unseeded):
    """Constructed otherwise on rank 0, as where only that loads pretrained values."""

    def __init__(self) -> None:
        super().__init__()
        if rank() == 0:
            self.head.weight.data.mul_(2)


class OtherShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1 + rank())


def engine_of(model: Any, *options: str, seed: int = 0) -> Engine:
    torch.manual_seed(seed)
    plan = make_plan([*QUIET, "train.steps=4", *options], samples=len(DATA))
    return Engine(model, lambda p: torch.optim.SGD(p, 0.05), plan)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().double().flatten()


def values(engine: Engine) -> list[float]:
    module = engine.parallel.module
    return torch.cat([whole(t) for t in (*module.parameters(), *module.buffers())]).tolist()


def run(model: Any, *options: str) -> dict[str, Any]:
    engine = engine_of(model, *options)
    losses = []
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward(engine.model(batch).square().sum(), len(batch))
        losses.append(engine.step().loss)
    found = torch.tensor(values(engine))
    replicas = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(replicas, found)
    return {"losses": losses, "values": found.tolist(), "alike": all(torch.equal(each, found) for each in replicas)}


def starts() -> dict[str, Any]:
    """Compare models that differ between ranks."""
    sharded = ["strategy=fsdp", *(["strategy=hsdp strategy.shard_size=2"] if dist.get_world_size() == 4 else [])]
    found: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        common = (f"precision={precision}",)
        found[f"{precision} ddp"] = run(Unseeded, "strategy=ddp", *common)
        for strategy in sharded:
            makes: dict[str, Any] = {"deferred": Unseeded, "whole": Whole}
            if precision == "fp32":
                torch.manual_seed(0)
                makes |= {"ready": Unseeded()}
            for how, make in makes.items():
                found[f"{precision} {strategy.split()[0]} {how}"] = run(make, *strategy.split(), *common)
    found["other code"] = run(OtherCode, "strategy=fsdp", "precision=fp32")
    return found


def words(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def thaws(strategy: str, *, unfreezes: bool, inside: bool) -> None:
    """A parameter changes sides after two steps, between two windows or inside one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    model[0].bias.requires_grad_(not unfreezes)
    engine = engine_of(model, f"strategy={strategy}", "precision=fp32")
    for number, window in enumerate(engine.windows(DATA)):
        for batch in window:
            loss = engine.model(batch).square().sum()
            if number == 2 and inside:
                model[0].bias.requires_grad_(unfreezes)
            engine.backward(loss, len(batch))
        engine.step()
        if number == 1 and not inside:
            model[0].bias.requires_grad_(unfreezes)


class RegistersLate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.body, "scale"):
            self.body.register_parameter("scale", nn.Parameter(torch.ones(6), requires_grad=False))
        return self.out(self.body(x) * self.body.get_parameter("scale"))


def toggles() -> None:
    """Frozen and unfrozen again within a window, as adversarial training does: no fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    engine = engine_of(model, "strategy=ddp", "precision=fp32")
    for window in engine.windows(DATA):
        for batch in window:
            model.requires_grad_(False)
            model(batch)
            model.requires_grad_(True)
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()


def trained(name: str, *options: str, resumes: bool = False) -> dict[str, Any]:
    """The record, the parameters and the evaluations of a run of `launch train`."""
    with tempfile.TemporaryDirectory() as place:
        shared = World.here().of_rank_0(place)
        plan = plan_of(
            *QUIET, "train.steps=6", "checkpoint.every=100", "precision=fp32", "cluster.workers_per_node=2",
            *options, samples=len(DATA), run_dir=shared,
        )  # fmt: skip
        task = dataclasses.replace(plan.task, target=f"{replicas_tasks.__name__}.{name}")
        plan = dataclasses.replace(plan, task=task)
        replicas_tasks.fails = True
        error = words(lambda: train(plan, lambda: False))
        saved = sorted(path.name for path in Path(shared, "checkpoints").glob("step_*"))
        first = lines(Path(shared))
        replicas_tasks.fails = False
        again = words(lambda: train(plan, lambda: False)) if resumes else ""
        made = replicas_tasks.MADE[-1]
        found = {
            "error": error, "saved": saved, "again": again, "log": made.log,
            "first": first, "record": lines(Path(shared)),
            "values": [whole(p).tolist() for p in tree_leaves(list(made.built.parameters()))] if made.built else [],
        }  # fmt: skip
        dist.barrier()
        return found


def lines(place: Path) -> list[dict[str, Any]]:
    record = place / "metrics.jsonl"
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def evaluations() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for every in (0, 1):
            found[f"{strategy} {every}"] = trained("Restless", f"strategy={strategy}", f"train.eval_every={every}")
    found["fails"] = trained("FailsAtTheEnd", resumes=True)
    found["broken"] = trained("Broken", "strategy=fsdp")
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    seen: dict[str, Any] = {}
    engine_of(nn.Linear(6, 1))  # which joins the ranks
    seen["starts"] = starts()
    seen["other shape"] = words(lambda: engine_of(OtherShape, "strategy=fsdp"))
    if dist.get_world_size() == 2:
        seen["thaws"] = {
            f"{strategy} {unfreezes:d} {inside:d}": words(
                lambda s=strategy, u=unfreezes, i=inside: thaws(s, unfreezes=u, inside=i)
            )
            for strategy in ("ddp", "fsdp")
            for unfreezes, inside in ((True, False), (False, False), (True, True))
        }
        seen["toggles"] = words(toggles)
        seen["late"] = words(lambda: run(RegistersLate, "strategy=ddp", "precision=fp32"))
        seen["evaluations"] = evaluations()
    print_on_rank_0(seen)
    leave_group()


if __name__ == "__main__":
    main()
