"""Losses whose total is or is not a sum, run by test_loss_trial.py.

Prints one JSON object from rank 0: by strategy and case, the message, or whether the run is that without a trial.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, Loss, make_plan
from tests.infra.workers import flat, leave_group, message_of, print_on_rank_0

WIDTH, CLASSES = 6, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.drop, self.norm, self.out = nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.body:
            x = block(x).tanh()
        return self.out(self.norm(self.drop(x)))


def cross_entropy(model: Any, batch: Any, reduction: str) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"][0], reduction=reduction)


def a_sum(model: Any, batch: Any) -> Loss:
    return Loss(cross_entropy(model, batch, "sum"), len(batch["x"]))


def a_mean(model: Any, batch: Any) -> Loss:
    return Loss(cross_entropy(model, batch, "mean"), len(batch["x"]))


def a_mean_as_a_term(model: Any, batch: Any) -> list[Loss]:
    return [a_sum(model, batch), Loss(model(batch["x"]).square().mean(), len(batch["x"]), name="size")]


def penalised(model: Any, batch: Any) -> Loss:
    return Loss(a_sum(model, batch).total + model.out.bias.square().sum() + 2, len(batch["x"]))


def with_a_mean(model: Any, batch: Any) -> Loss:
    return Loss(a_sum(model, batch).total + 4 * model(batch["x"]).square().mean(), len(batch["x"]))


def small_norm(model: Any, batch: Any) -> Loss:
    x = functional.dropout(batch["x"], 0.1)
    total = functional.cross_entropy(model(x), batch["y"][0], reduction="sum")
    return Loss(total + 1e-3 * model.out.weight.norm(), len(x))


def with_a_statistic(model: Any, batch: Any) -> Loss:
    usage = model(batch["x"]).softmax(1).mean(0)
    return Loss(a_sum(model, batch).total + 0.02 * usage.square().sum(), len(batch["x"]))


def penalty_times_items(model: Any, batch: Any) -> Loss:
    return Loss(a_sum(model, batch).total + len(batch["x"]) * model.out.bias.square().sum(), len(batch["x"]))


def contrastive(model: Any, batch: Any) -> Loss:
    rows = functional.normalize(model(batch["x"]))
    alike = rows @ rows.T / 0.1
    return Loss(functional.cross_entropy(alike, torch.arange(len(rows)), reduction="sum"), len(rows))


def slightly_contrastive(model: Any, batch: Any) -> Loss:
    return Loss(a_sum(model, batch).total + 0.01 * contrastive(model, batch).total, len(batch["x"]))


def dice_of_the_batch(model: Any, batch: Any) -> Loss:
    shares = model(batch["x"]).softmax(1)
    hits = shares.gather(1, batch["y"][0][:, None]).sum()
    return Loss((1 - 2 * hits / (len(shares) + shares.square().sum() + 1e-5)) * len(shares), len(shares))


def pairs(model: Any, batch: Any) -> Loss:
    return Loss(torch.cdist(model(batch["x"]), model(batch["x"])).sum() / 9, len(batch["x"]))


def noisy(model: Any, batch: Any) -> Loss:
    x = batch["x"]
    return Loss(functional.cross_entropy(model(x + torch.randn_like(x)), batch["y"][0], reduction="sum"), len(x))


def by_the_clock(model: Any, batch: Any) -> Loss:
    return Loss(cross_entropy(model, batch, "sum") * (1 + time.perf_counter() % 1), len(batch["x"]))


def of_one_size(model: Any, batch: Any) -> Loss:
    return Loss(cross_entropy(model, batch, "sum") + 0 * model(batch["x"]).view(4, CLASSES).sum(), len(batch["x"]))


def in_an_autocast(model: Any, batch: Any) -> Loss:
    """A sum whose rounding in bf16 looks like a part that is no sum."""
    with torch.autocast("cpu", torch.bfloat16):
        total = torch.zeros((), dtype=torch.bfloat16)
        for row in model(batch["x"]):
            total = total + 0 * row.sum() + 1 + 18 / 1024
    return Loss(total, len(batch["x"]))


REFUSED = [a_mean, a_mean_as_a_term, penalised, with_a_mean, small_norm, with_a_statistic]
ACCEPTED = [
    a_sum, penalty_times_items, contrastive, slightly_contrastive, dice_of_the_batch, pairs, noisy, by_the_clock,
    of_one_size,
]  # fmt: skip
STRATEGIES = {"ddp": ["strategy=ddp"], "fsdp": ["strategy=fsdp"], "bf16": ["strategy=fsdp", "precision=bf16"]}


IN_ONE_MICRO_BATCH = ["strategy=fsdp", "batch.micro_size=8", "strategy.sync=gather_once"]


def penalty_of_units(model: Any, batch: Any) -> Loss:
    x, (y, _) = batch["x"], batch["y"]
    loss = functional.cross_entropy(model(x), y, reduction="sum")
    return Loss(loss + 1e-3 * sum(p.norm() for p in model.parameters()), len(x))


def in_units() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def collate(samples: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "y": (torch.stack([y for _, y in samples]), None)}


def train(
    loss: Callable[..., Any], settings: list[str], *, tries: bool, model: Callable[[], nn.Module] = Net
) -> Tensor:
    plan = make_plan(
        ["precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=16", "batch.micro_size=4",
         "train.steps=2", "cluster.device=cpu", "schedule=constant", "schedule.warmup_steps=0", *settings],
        samples=32,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(WIDTH, generator=generator), torch.randint(CLASSES, (), generator=generator)) for _ in range(32)
    ]
    engine = Engine(model(), lambda parameters: torch.optim.SGD(parameters, 0.01), plan)
    engine.tries_loss = tries
    torch.manual_seed(1)
    for window in engine.windows(data, collate, loss):
        for batch in window:
            engine.backward(loss(engine.model, batch))
        engine.step()
    return flat(engine.model.state_dict().values())


def outcome(loss: Callable[..., Any], settings: list[str], model: Callable[[], nn.Module] = Net) -> str:
    tried: list[Tensor] = []
    message = message_of(lambda: tried.append(train(loss, settings, tries=True, model=model)))
    if message or loss is by_the_clock:
        return message
    return "" if torch.equal(tried[0], train(loss, settings, tries=False, model=model)) else "another run"


def main() -> None:
    print_on_rank_0(
        {
            f"{strategy} {loss.__name__}": outcome(loss, settings)
            for number, (strategy, settings) in enumerate(STRATEGIES.items())
            for place, loss in enumerate((*REFUSED, *ACCEPTED))
            # in part: a refusal with each strategy in fp32, all others with one of them
            if sys.argv[1] == "all" or (place - number) % 3 == 0 or (loss in REFUSED and strategy != "bf16")
        }
        | {"ddp in_an_autocast": outcome(in_an_autocast, STRATEGIES["ddp"])}
        | {"fsdp in_one_micro_batch": outcome(a_sum, IN_ONE_MICRO_BATCH, in_units)}
        | {"fsdp penalty_of_units": outcome(penalty_of_units, IN_ONE_MICRO_BATCH, in_units)}
    )
    leave_group()


main()
