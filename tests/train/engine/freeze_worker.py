"""Parameters frozen and unfrozen between steps, run by test_engine.py.

Prints one JSON object from rank 0: by strategy and precision, how far the parameters are from those of plain PyTorch in
fp64 that toggles ``requires_grad``, with and without a resume from a checkpoint in between.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.rundir.fencing import Fence
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint import load, save
from launcher.train.data.randomness import Permutation
from tests.infra.workers import flat, leave_group, message_of, print_on_rank_0

SAMPLES, BATCH, WIDTH, STEPS, SAVED = 64, 16, 6, 8, 4
# the number of steps done before, and what is frozen from there on
PHASES = {0: "^late", 2: "^late|first", 5: "first", 7: None}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.late = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(torch.tanh(self.second(torch.tanh(self.first(x)))))


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.05, weight_decay=0.5)


def batch_of(indices: list[int]) -> Tensor:
    return torch.stack([torch.sin(torch.arange(1.0, WIDTH + 1) * (index + 1)) for index in indices])


def loss(model: Any, x: Tensor) -> Tensor:
    return (model(x).double() - 1).square().sum()


def by_hand(dtype: torch.dtype, *, autocast: bool) -> Tensor:
    model = build().to(dtype)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        for phase, names in PHASES.items():
            if step == phase:
                for name, parameter in model.named_parameters():
                    frozen = names is not None and any(name.startswith(n.strip("^")) for n in names.split("|"))
                    parameter.requires_grad_(not frozen)
        epoch, window = divmod(step, SAMPLES // BATCH)
        x = batch_of(list(Permutation(SAMPLES, 0, epoch).take(window * BATCH, BATCH))).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            total = loss(model, x)
        (total / BATCH).backward()
        trained = [p for p in model.parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.parameters())


def engine_of(*overrides: str) -> Engine:
    plan = make_plan(
        [
            f"batch.global_size={BATCH}", "batch.micro_size=2", f"train.steps={STEPS}", "train.clip_norm=0.5",
            "train.loader_workers=0", "run.calibrate_s=0", "cluster.device=cpu", "schedule=constant",
            "schedule.warmup_steps=0", "checkpoint.every=1", *overrides,
        ],
        samples=SAMPLES,
    )  # fmt: skip
    return Engine(build, optimizer_of, plan)


def run(engine: Engine, paths: RunPaths | None) -> None:
    """Train; with ``paths``, save a checkpoint at step SAVED."""
    apply_phase(engine)
    for window in engine.windows(range(SAMPLES), batch_of):
        for batch in window:
            engine.backward(loss(engine.model, batch), len(batch))
        engine.step()
        if paths is not None and engine.steps == SAVED:
            save.write(save.take_snapshot(engine, Fence.here(paths)))
        apply_phase(engine)


def apply_phase(engine: Engine) -> None:
    if engine.steps in PHASES:
        engine.unfreeze("")
        if (names := PHASES[engine.steps]) is not None:
            engine.freeze(names)


def main() -> None:
    where, results = Path(sys.argv[1]), dict[str, Any]()
    exact = {precision: by_hand(torch.float64, autocast=False) for precision in ("fp32", "bf16")}
    at_once = {kind: (by_hand(torch.float32, autocast=kind == "bf16") - exact[kind]).norm() for kind in exact}
    for strategy in ("ddp", "fsdp", "hsdp"):
        for precision, whole in exact.items():
            options = (
                f"strategy={strategy}",
                *["strategy.shard_size=2"] * (strategy == "hsdp"),
                f"precision={precision}",
            )
            engine, paths = engine_of(*options), RunPaths(where / f"{strategy}-{precision}")
            run(engine, paths)
            resumed = engine_of(*options)
            load.load(resumed, paths.checkpoint(SAVED))
            run(resumed, None)
            results[f"{strategy} {precision}"] = {
                "error": (flat(engine.model.parameters()) - whole).norm().item(),
                "at once": at_once[precision].item(),
                "resumed alike": torch.equal(flat(engine.model.parameters()), flat(resumed.model.parameters())),
            }
    results["refused"] = [message_of(lambda m=match: engine_of("strategy=ddp").freeze(m)) for match in ("fisrt", "")]
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
