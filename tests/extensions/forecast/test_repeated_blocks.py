"""Forecasts from shortened models: the same, to the byte, as those from a trace of the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import launcher
from launcher.config.hydra import compose
from launcher.config.schema import Sync
from launcher.extensions.forecast import memory_forecast
from launcher.extensions.forecast.memory_forecast import tracing
from launcher.extensions.forecast.repeated_blocks import block_runs
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import Forecast, NoForecast, RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.plan.sync_policy import POLICIES

RUN = RunInfo(name="run", id="abcd1234", dir="/nowhere/run", created="2024-01-01T00:00:00+00:00", version="0")
WIDTH, CLASSES, DEPTH = 12, 5, 10
MIDDLE = (5, 6, 7, 8)  # blocks that no trace of a shortened model contains
GPT = "launcher.tasks.bytes_gpt.BytesGPT"


class Block(nn.Module):
    """Rows that few groups of ranks shard evenly."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.kept: list[Tensor] | None = None
        self.up, self.down, self.norm = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH), nn.LayerNorm(WIDTH)
        self.config = SimpleNamespace(wide=False)

    def forward(self, x: Tensor, *, wide: bool = False) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        if self.kept is not None:
            self.kept.append(F.gelu(x.repeat(1, 4)))
        return widened(x) if wide or self.config.wide else x


class Mlp(nn.Module):
    def __init__(self, hidden: list[int], how: str = "iterate") -> None:
        super().__init__()
        self.first, self.how = nn.Linear(10, WIDTH), how
        self.blocks = nn.ModuleList(Block(width) for width in hidden)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = x
        for number, block in enumerate(self.blocks):
            if self.how == "index":
                block = self.blocks[number]
            if self.how == "every second" and number % 2:
                continue
            if self.how == "depth" and number == len(self.blocks) // 2:
                kept = x.repeat(3, 1)
            x = checkpoint(block, x, use_reentrant=False) if self.how == "checkpoint" else block(x)
        return self.head(x + kept[: len(x)])


class TwoLists(nn.Module):
    """Two lists of different blocks, of which the second has another depth."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Mlp([7] * 13), nn.Sequential(*(Block(9) for _ in range(14)))
        self.encoder.head = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decoder(self.encoder(x)))


class Tied(Mlp):
    """The weight of the first layer is that of the last one."""

    def __init__(self) -> None:
        super().__init__([7] * DEPTH)
        self.first = nn.Linear(10, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = nn.Parameter(torch.zeros(10, WIDTH))
        del self.first
        self.embedding = nn.Embedding(10, WIDTH)
        self.embedding.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(torch.zeros(len(x), dtype=torch.long, device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Unequal(nn.Module):
    """Equal blocks that are not used alike: what ``how`` names happens to the blocks in the middle only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.head, self.how = nn.Linear(10, WIDTH), nn.Linear(WIDTH, CLASSES), how
        self.blocks = nn.ModuleList(Block() for _ in range(12))
        self.kept: list[Tensor] = []
        for number in MIDDLE if how == "a hook" else ():
            self.blocks[number].register_forward_hook(lambda _block, _args, output: widened(output))
        for number, block in enumerate(self.blocks):
            block.config = SimpleNamespace(wide=how == "a setting" and number in MIDDLE)
            block.kept = self.kept if how == "a shared list" else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.kept.clear()
        for number, block in enumerate(self.blocks):
            middle = number in MIDDLE
            if self.how == "recomputation" and middle:
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "autocast":
                with torch.autocast("cpu", torch.bfloat16, enabled=middle):
                    x = block(x).float()
            else:
                x = block(x, wide=self.how == "an argument" and middle)
            if self.how == "a kept output" and middle:
                self.kept.append(x)
        x = x + sum(F.gelu(each).mean() for each in self.kept)
        self.kept.clear()
        return self.head(x)


def widened(x: Tensor) -> Tensor:
    return x + F.gelu(x.repeat(1, 64)).view(len(x), 64, WIDTH).sum(1)


def frozen() -> nn.Module:
    model = Mlp([7] * (DEPTH + 4))
    model.first.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)
    for block in model.blocks:
        block.norm.requires_grad_(False)
    return model


MODELS: dict[str, Any] = {
    "mlp": lambda: Mlp([7] * DEPTH),
    "index": lambda: Mlp([7] * DEPTH, "index"),
    "checkpoint": lambda: Mlp([7] * DEPTH, "checkpoint"),
    "every second": lambda: Mlp([7] * DEPTH, "every second"),
    "depth": lambda: Mlp([7] * (DEPTH + 3), "depth"),
    "irregular": lambda: Mlp([5, 6, 7, 8, 9, 10, 11, 12]),
    "shallow": lambda: Mlp([7] * 6),
    "two lists": TwoLists,
    "tied": Tied,
    "frozen": frozen,
}
UNEQUAL = ("recomputation", "an argument", "a setting", "a hook", "autocast", "a kept output", "a shared list")


class Task:
    def __init__(self, model: str) -> None:
        self._model = model

    def model(self) -> nn.Module:
        return Unequal(self._model) if self._model in UNEQUAL else MODELS[self._model]()

    def train_data(self) -> Any:
        return torch.utils.data.TensorDataset(torch.randn(4096, 10), torch.randint(CLASSES, (4096,)))

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> launcher.Loss:
        x, y = batch
        return launcher.Loss(total=F.cross_entropy(model(x), y, reduction="sum"), items=len(y))


class WrongUnits(Task):
    def shard_units(self, model: nn.Module) -> list[nn.Module]:  # noqa: ARG002
        return [nn.Linear(1, 1)]


def plan_of(ranks: int, *overrides: str, target: str = f"{__name__}.Task", **params: Any) -> RunPlan:
    words = ["batch.micro_size=2", "train.steps=1", f"cluster.workers_per_node={ranks}", "precision=fp32", *overrides]
    task = TaskPlan(
        target=target, params=params, samples=4096, parameters=None, gradient_bytes=None, unit_parameters=None
    )
    return solve(compose(words), Site(gpus=0, cores=2, cwd="/nowhere"), task, RUN)


def traced(plan: RunPlan, *, shorten: bool) -> tuple[list[Forecast], bool]:
    """Return the forecasts of all policies, and whether the model was shortened."""
    with tracing(plan, shorten=shorten) as tracer:
        results = [tracer.forecast(sync) for sync in POLICIES[plan.strategy.kind]]
        assert not [problem for _, problem in results if problem]
        return [forecast for forecast, _ in results], tracer.shortens


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as launcher.extensions.forecast.memory_forecast does when it runs by itself
        yield


CASES: list[Any] = [
    (64, "mlp", "strategy=fsdp batch.accumulation=1 strategy.recompute=blocks"),
    (3, "checkpoint", "strategy=ddp batch.accumulation=2"),
    *(
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in (
            (2, "mlp", "strategy=ddp batch.accumulation=3"),
            (2, "index", "strategy=ddp batch.accumulation=2"),
            (3, "checkpoint", "strategy=ddp batch.accumulation=3"),
            (2, "frozen", "strategy=ddp batch.accumulation=3"),
            (8, "mlp", "strategy=ddp batch.accumulation=1 optimizer=sgd precision=bf16 strategy.recompute=blocks"),
            (2, "two lists", "strategy=ddp batch.accumulation=2"),
            (3, "mlp", "strategy=fsdp batch.accumulation=3"),
            (8, "mlp", "strategy=hsdp strategy.shard_size=4 batch.accumulation=3 optimizer=sgd precision=bf16"),
            (8, "two lists", "strategy=hsdp strategy.shard_size=2 batch.accumulation=3"),
            (3, "frozen", "strategy=fsdp batch.accumulation=3"),
            (3, "tied", "strategy=fsdp batch.accumulation=1"),
            (3, "tied", "strategy=fsdp batch.accumulation=3"),
        )
    ),
]


@pytest.mark.parametrize(("ranks", "model", "options"), CASES)
def test_a_shortened_model_has_the_forecast_of_the_whole_one(ranks: int, model: str, options: str) -> None:
    plan = plan_of(ranks, *options.split(), model=model)
    found, shortened = traced(plan, shorten=True)
    assert shortened
    assert found == traced(plan, shorten=False)[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, "strategy=fsdp batch.accumulation=1 precision=bf16"),
        (2, "strategy=fsdp batch.accumulation=3 precision=bf16"),
        (64, "strategy=hsdp strategy.shard_size=8 batch.accumulation=1 optimizer=sgd"),
        (3, "strategy=ddp batch.accumulation=3 precision=bf16"),
    ],
)
def test_a_transformer(ranks: int, options: str) -> None:
    plan = plan_of(ranks, *options.split(), target=GPT, width=64, depth=10, heads=2, seq_len=16)
    found, shortened = traced(plan, shorten=True)
    assert shortened
    assert found == traced(plan, shorten=False)[0]


@pytest.mark.parametrize(
    "model",
    ["depth", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("irregular", "every second", "shallow"))],
)
def test_an_irregular_model_is_traced_as_a_whole(model: str) -> None:
    options = ["strategy=ddp", "batch.accumulation=2", "strategy.find_unused_parameters=true", "strategy.sync=every"]
    plan = plan_of(2, *options, model=model)
    found, shortened = traced(plan, shorten=True)
    assert not shortened
    assert found == traced(plan, shorten=False)[0]


@pytest.mark.parametrize(
    "model", [name if name.startswith("a ") else pytest.param(name, marks=pytest.mark.nightly) for name in UNEQUAL]
)
def test_blocks_that_are_used_differently_are_not_shortened(model: str) -> None:
    plan = plan_of(2, "strategy=ddp", "batch.accumulation=1", "batch.micro_size=64", model=model)
    with tracing(plan) as tracer:
        assert tracer.irregular is not None
        assert tracer.forecast(Sync.every)[0].peak_bytes


def test_a_limit_leaves_the_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_forecast, "LIMIT_S", 0.0)
    task = TaskPlan(
        target=f"{__name__}.Task", params={"model": "shallow"}, samples=4096, parameters=1000, gradient_bytes=4000,
        unit_parameters=100,
    )  # fmt: skip
    words = ["batch.micro_size=2", "batch.accumulation=2", "train.steps=1", "cluster.workers_per_node=2"]
    plan = solve(compose([*words, "strategy=ddp"]), Site(gpus=0, cores=2, cwd="/nowhere"), task, RUN)
    found = memory_forecast.forecast(plan)
    assert isinstance(found, NoForecast)
    assert found.reason == "the trace of the whole model takes more than 0 s"
    assert {each.peak_bytes for each in found.traffic} == {None}
    assert {each.sync: each.payload_bytes for each in found.traffic} == {
        each.sync: each.payload_bytes for each in plan.strategy.forecasts
    }


def test_shard_units_that_the_strategy_does_not_use_may_be_wrong() -> None:
    plan = plan_of(2, "strategy=ddp", "batch.accumulation=1", target=f"{__name__}.WrongUnits", model="mlp")
    with tracing(plan) as tracer:
        assert tracer.forecast(Sync.every)[1] is None
        assert tracer.shortens
        assert tracer.irregular is None


def test_blocks_are_alike_if_their_classes_and_parameters_are() -> None:
    model = Mlp([7] * DEPTH)
    assert [len(run.names) for run in block_runs(model)] == [DEPTH]
    for number, block in enumerate(model.blocks):
        block.index = number
    assert [len(run.names) for run in block_runs(model)] == [DEPTH]
    model.blocks[6].norm.bias.requires_grad_(False)
    assert [len(run.names) for run in block_runs(model)] == [6]
    model.blocks[2].up.weight = model.blocks[1].up.weight
    assert not block_runs(model), "shared parts"
