"""Wrong return values of a task, and windows without items; run by torchrun in test_engine.py.

Prints one JSON object from rank 0: by case, what every rank raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.train.world import World
from tests.infra.workers import leave_group, message_of, print_on_rank_0
from tests.train.checkpoint.stateful_optimizers import KeepsGradient, ReadsNumbers

COMMON = ("precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=8", "batch.micro_size=2")
SAMPLES, EMPTY = 24, (1, 4)  # three windows an epoch
Answer = Callable[[Tensor, Tensor], tuple[Any, Any]]  # values [samples, 2] and mask [samples] -> loss, items


def right(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (values.square().sum(1) * mask).sum(), mask.sum()


def on_rank_1(wrong: float) -> Answer:
    def answer(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        loss, items = right(values, mask)
        return loss, torch.full_like(items, wrong) if dist.get_rank() else items

    return answer


ANSWERS: dict[str, Answer] = {
    "one loss a sample": lambda values, mask: (values.square().sum(1), mask.sum()),
    "a number": lambda values, mask: (right(values, mask)[0].item(), mask.sum()),
    "a mask": lambda values, mask: (right(values, mask)[0], mask),
    "items of the model": lambda values, mask: (right(values, mask)[0], values.sum()),
    "negative": lambda values, mask: (right(values, mask)[0], -3),
    "nan": lambda values, mask: (right(values, mask)[0], math.nan),
    "a list": lambda values, mask: (right(values, mask)[0], [3]),
    "negative on one rank": on_rank_1(-3.0),
    "nan items on one rank": on_rank_1(torch.nan),
    "inf items on one rank": on_rank_1(torch.inf),
    "a sum in fp16": lambda values, mask: (right(values.half() * 250, mask.half())[0], mask.sum()),
}


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def train(
    answer: Answer, *options: str, empty: Callable[[int], bool] = lambda _: False, kind: Callable[..., Any] = sgd
) -> tuple[Engine, list[Any], Tensor]:
    """The engine at its end, its results, and its parameters. ``empty``: which windows hold no item."""
    torch.manual_seed(0)
    plan = make_plan([*COMMON, *options], samples=SAMPLES)
    model = nn.Linear(4, 2)
    engine = Engine(model, kind(model.parameters()), plan)
    data = [(torch.full((4,), 1.0 + index / SAMPLES), 1.0) for index in range(SAMPLES)]
    results: list[Any] = []
    for number, window in enumerate(engine.windows(data)):
        for inputs, mask in window:
            engine.backward(*answer(engine.model(inputs), mask * (not empty(number))))
        results.append(engine.step())
    return engine, results, torch.cat([p.detach().flatten() for p in model.parameters()])


def empty_windows_move_nothing() -> None:
    for options in (
        ("train.steps=6",),
        ("train.steps=6", "precision=fp16", "precision.init_scale=8", "precision.growth_interval=2"),
    ):
        engine, results, _ = train(right, *options, empty=lambda window: window in EMPTY)
        assert [result.skipped for result in results] == [number in EMPTY for number in range(8)]
        assert [result.items for result in results] == [0 if number in EMPTY else 8 for number in range(8)]
        assert [result.step for result in results] == [1, 1, 2, 3, 3, 4, 5, 6]
        assert (engine.empty_windows, engine.skipped_steps, engine.samples) == (2, 0, 64)
        rates = [result.lr for result in results]
        assert all(rates[number] == rates[number + 1] for number in EMPTY), "the schedule waits"
        if "precision=fp16" in options:  # growth after each second step, and windows without items count for none
            assert [result.scale for result in results] == [8 * 2**n for n in (0, 0, 0, 1, 1, 1, 2, 2)]
        assert engine.state_dict()["progress"]["empty_windows"] == 2


def empty_windows_leave_no_trace() -> None:
    """Momentum and weight decay do not work on in them."""
    constant = ("schedule=constant", "schedule.warmup_steps=0")
    _, three, with_it = train(right, *constant, "train.epochs=1", empty=lambda window: window == 2)
    _, two, without = train(right, *constant, "train.steps=2")
    assert (len(three), len(two)) == (3, 2)
    assert torch.equal(with_it, without)


def main() -> None:
    seen = {name: message_of(lambda a=answer: train(a, "train.steps=2")) for name, answer in ANSWERS.items()}
    seen["no item anywhere"] = message_of(lambda: train(right, "train.epochs=2", empty=lambda _: True))
    powersgd = ("train.steps=2", "strategy.compress=powersgd")
    seen["powersgd"] = message_of(lambda: train(right, *powersgd, empty=lambda window: window == 0))
    for kind in (torch.optim.Adafactor, ReadsNumbers):
        seen[kind.__name__] = message_of(lambda k=kind: train(right, "train.steps=2", "strategy=fsdp", kind=k))
    train(right, "train.steps=2", kind=ReadsNumbers)  # whole gradients
    seen["KeepsGradient"] = message_of(lambda: train(right, "train.steps=2", "strategy=ddp", kind=KeepsGradient))
    empty_windows_move_nothing()
    empty_windows_leave_no_trace()
    print_on_rank_0({name: World.here().of_all(said) for name, said in seen.items()})
    leave_group()


if __name__ == "__main__":
    main()
