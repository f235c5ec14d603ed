"""Two models trained against each other, each by an engine of its own, run by test_run_engine.py.

Argument: the run's directory. Prints one JSON object from rank 0: by strategy, how far the parameters of both models
are from those of plain PyTorch in fp64 with one big batch, and whether a resumed run is bit by bit the whole one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.errors import LauncherError
from launcher.train.data.randomness import Permutation
from launcher.train.world import World
from tests.infra.workers import leave_group

SAMPLES, BATCH, STEPS, SAVED = 48, 12, 8, 5


def generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))


def critic() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch_of(indices: list[int]) -> Tensor:
    """Four columns of data, and three of the noise that belongs to them."""
    return torch.stack([torch.sin(torch.arange(1.0, 8) * (index + 1)) for index in indices])


def judged(judge: Any, x: Tensor, real: float) -> Tensor:
    logits = judge(x).double()
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="sum")


def critic_loss(judge: Any, maker: Any, batch: Tensor) -> Tensor:
    with torch.no_grad():
        made = maker(batch[:, 4:])
    return judged(judge, batch[:, :4], 1.0) + judged(judge, made, 0.0)


def generator_loss(judge: Any, maker: Any, batch: Tensor) -> Tensor:
    return judged(judge, maker(batch[:, 4:]), 1.0)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.02)


def flat(*models: nn.Module) -> Tensor:
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for model in models for p in model.parameters())
    return torch.cat([p.detach().double().flatten() for p in whole])


def by_hand(dtype: torch.dtype, *, autocast: bool) -> Tensor:
    judge, maker = critic().to(dtype), generator().to(dtype)
    judges, makes = optimizer_of(judge.parameters()), optimizer_of(maker.parameters())
    for step in range(STEPS):
        epoch, window = divmod(step, SAMPLES // BATCH)
        batch = batch_of(list(Permutation(SAMPLES, 0, epoch).take(window * BATCH, BATCH))).to(dtype)
        for loss, optimizer in ((critic_loss, judges), (generator_loss, makes)):
            judges.zero_grad()
            makes.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                total = loss(judge, maker, batch)
            (total / BATCH).backward()
            optimizer.step()
    return flat(judge, maker)


def plan_of(name: str, *overrides: str) -> Any:
    return make_plan(
        [
            f"run.name={name}", f"run.dir={sys.argv[1]}", f"batch.global_size={BATCH}", "batch.micro_size=2",
            f"train.steps={STEPS}", "train.clip_norm=null", "train.loader_workers=0", "run.calibrate_s=0",
            "cluster.device=cpu", "schedule=constant", "schedule.warmup_steps=0", "checkpoint.every=1", *overrides,
        ],
        samples=SAMPLES,
    )  # fmt: skip


def train(name: str, *overrides: str, until: int = STEPS) -> Tensor:
    """Train both, from the run's newest checkpoint, until a step; return the parameters."""
    plan = plan_of(name, *overrides)
    judge, maker = Engine(critic, optimizer_of, plan), Engine(generator, optimizer_of, plan)
    maker.resume(parts={"critic": judge})
    data, gradients_are_left = range(SAMPLES), "strategy.sync=every" in overrides
    windows = maker.windows(data, batch_of)
    for judges in judge.windows(data, batch_of):
        for batch in judges:
            judge.backward(critic_loss(judge.model, maker.model, batch), len(batch))
        judge.step()
        judge.model.requires_grad_(gradients_are_left)  # otherwise the critic gets gradients, which must not count
        for batch in next(windows):
            maker.backward(generator_loss(judge.model, maker.model, batch), len(batch))
        judge.model.requires_grad_(True)
        maker.finish_step(maker.step())
        if maker.steps == until:
            break
    return flat(judge.model, maker.model)


def refused(name: str) -> str:
    plan = plan_of(name)
    engine = Engine(generator, optimizer_of, plan)
    try:
        engine.resume()
    except LauncherError as refusal:
        return str(refusal)
    return ""


def main() -> None:
    results: dict[str, Any] = {}
    exact = by_hand(torch.float64, autocast=False)
    for number, options in enumerate(
        (kind, *sync) for kind in ("strategy=ddp", "strategy=fsdp") for sync in ((), ("strategy.sync=every",))
    ):
        if sys.argv[2] == "some" and number in (1, 2):
            continue
        precision = ("bf16", "fp32")[number // 2 if number % 2 else 1 - number // 2]
        at_once = (by_hand(torch.float32, autocast=precision == "bf16") - exact).norm().item()
        options = (*options, f"precision={precision}", f"checkpoint.async_save={str(number % 2 == 0).lower()}")
        whole = train(f"whole{number}", *options)
        train(f"part{number}", *options, until=SAVED)
        resumed = train(f"part{number}", *options)
        results[" ".join(options)] = {
            "error": (whole - exact).norm().item(), "at once": at_once, "resumed alike": torch.equal(whole, resumed),
        }  # fmt: skip
    results["refused"] = refused("whole0")
    if World.here().rank == 0:
        assert (Path(sys.argv[1]) / "whole0" / "checkpoints" / f"step_{STEPS:06d}" / "critic").is_dir()
        print(json.dumps(results), flush=True)
    leave_group()


if __name__ == "__main__":
    main()
