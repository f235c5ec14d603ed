"""Models whose ``train`` and ``eval`` do more than to set a mode, trained with evaluations, run by test_modes.py.

Prints one JSON object from rank 0: by strategy and model, how far parameters, buffers and held-out losses are from
those of a plain loop that calls ``model.train()`` and ``model.eval()``, and the modules in eval mode at the end.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.train.data.randomness import Permutation
from launcher.train.world import World
from tests.infra.workers import flat, leave_group, print_on_rank_0

SAMPLES, BATCH, WIDTH, STEPS, HELD_OUT = 32, 16, 6, 4, 12


class NormEval(nn.Module):
    """Layer of BatchNorm that stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.norm.running_mean += 0.3  # pyright: ignore[reportOperatorIssue]
        self.norm.running_var *= 2  # pyright: ignore[reportOperatorIssue]

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Adapter(nn.Module):
    """Layer that merges its adapter into the weight for evaluations. ``assigned``: by assignment to ``.data``."""

    def __init__(self, *, assigned: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.zeros(WIDTH, 2))
        self.assigned, self.merged = assigned, False

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.merged == mode:
            update = (-1.0 if mode else 1.0) * self.b @ self.a
            if self.assigned:
                self.weight.data = self.weight.data + update.data
            else:
                self.weight.data += update
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = functional.linear(x, self.weight)
        return out if self.merged else out + x @ self.a.T @ self.b.T


class Fused(nn.Module):
    """Layer that has its weights fused in eval mode, and drops the fused ones when it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused: tuple[Tensor, Tensor] | None = None

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        weight, bias = self.one.weight + self.other.weight + torch.eye(WIDTH), self.one.bias + self.other.bias
        self.fused = None if mode else (weight, bias)
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.fused is not None:
            return functional.linear(x, *self.fused)
        return self.one(x) + self.other(x) + x


class FrozenStage(nn.Module):
    """Layer that ``train`` freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.layer.eval()
        for parameter in self.layer.parameters():
            parameter.requires_grad = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def kept_in_eval_mode() -> nn.Module:
    """Dropout and a frozen adapter that the task has put into eval mode, the latter merged."""
    return nn.Sequential(nn.Dropout(0.5), Adapter(assigned=False).requires_grad_(False)).eval()


PARTS = {
    "norm": NormEval,
    "adapter": lambda: Adapter(assigned=False),
    "assigned": lambda: Adapter(assigned=True),
    "fused": Fused,
    "frozen": FrozenStage,
    "kept": kept_in_eval_mode,
}


def build(part: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), PARTS[part](), nn.Linear(WIDTH, WIDTH))


def sample(index: int) -> Tensor:
    return torch.sin(torch.arange(1.0, WIDTH + 1) * (index + 1))


def loss(model: Any, x: Tensor) -> tuple[Tensor, int]:
    return (model(x) - 1).square().sum(), len(x)


def by_hand(part: str) -> tuple[Tensor, list[float], list[str]]:
    model = build(part)
    kept = model[2] if part == "kept" else None
    losses = list[float]()

    def train() -> None:
        model.train()
        if kept is not None:
            kept.eval()

    train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    held_out = torch.stack([sample(100 + index) for index in range(HELD_OUT)])
    for step in range(STEPS):
        epoch, window = divmod(step, SAMPLES // BATCH)
        x = torch.stack([sample(i) for i in list(Permutation(SAMPLES, 0, epoch).take(window * BATCH, BATCH))])
        (loss(model, x)[0] / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(float(loss(model, held_out)[0]) / HELD_OUT)
        train()
    return flat(model.state_dict().values()), losses, in_eval_mode(model)


def in_eval_mode(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not module.training]


def train(part: str, *settings: str) -> dict[str, Any]:
    plan = make_plan(
        ["precision=fp32", f"batch.global_size={BATCH}", "batch.accumulation=2", f"train.steps={STEPS}",
         "run.calibrate_s=0", "schedule=constant", "schedule.warmup_steps=0", "train.clip_norm=null",
         "train.loader_workers=0", "cluster.device=cpu", *settings],
        samples=SAMPLES,
    )  # fmt: skip
    model = build(part)
    engine = Engine(
        model, lambda parameters: torch.optim.SGD(parameters, 0.01), plan, shard_units=lambda model: [model[2]]
    )
    losses = list[float]()
    for window in engine.windows([sample(index) for index in range(SAMPLES)]):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        engine.step()
        held_out = [sample(100 + index) for index in range(HELD_OUT)]
        losses.append(engine.evaluate(held_out, loss)["eval/loss"])
    expected, wanted, modes = by_hand(part)
    return {
        "error": (flat(engine.model.state_dict().values()) - expected).abs().max().item(),
        "held out": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
        "modes": [in_eval_mode(engine.model), modes],
    }


def main() -> None:
    strategies = {
        "ddp": ["strategy=ddp"],
        "fsdp": ["strategy=fsdp"],
        "fsdp gather_once": ["strategy=fsdp", "strategy.sync=gather_once"],
    } | ({"hsdp": ["strategy=hsdp", "strategy.shard_size=2"]} if World.here().size == 4 else {})
    print_on_rank_0(
        {f"{strategy} {part}": train(part, *settings) for strategy, settings in strategies.items() for part in PARTS}
    )
    leave_group()


main()
