"""Losses of several terms, and with metrics, in loops of their own; run by torchrun in test_loss_terms.py.

argv: names of the functions below that return something. Prints one JSON object from rank 0 for each.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, Loss, StepResult, make_plan
from launcher.train.data.randomness import Permutation
from launcher.train.engine import window as window_of_engine
from launcher.train.world import World
from tests.infra.workers import Calls, flat, leave_group, message_of, print_on_rank_0

COMMON = (
    "precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=12", "train.clip_norm=null",
    "optimizer=sgd", "schedule=constant", "schedule.warmup_steps=0",
)  # fmt: skip
SAMPLES, CLASSES = 40, 5
LEARNING_RATE = 0.1
MICRO = "batch.micro_size=2"
Batch = list[Tensor]
Forward = Callable[[Any, Batch], Any]


def samples() -> list[tuple[Tensor, Tensor, Tensor]]:
    """(features, class, box): a sample of class 0 has no box. The second window has none at all."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(SAMPLES, 6, generator=generator)
    classes = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    boxes = torch.randn(SAMPLES, 2, generator=generator)
    classes[order(1)] = 0
    return list(zip(features, classes, boxes, strict=True))


def order(window: int) -> list[int]:
    """Samples of a window of the first epoch."""
    return [*Permutation(SAMPLES, 0, 0).take(window * 12, min(12, SAMPLES - window * 12))]


class Detector(nn.Module):
    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.classes, self.boxes = nn.Linear(16, CLASSES), nn.Linear(16, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        hidden = self.dropout(self.norm(self.body(features)).tanh())
        return self.classes(hidden), self.boxes(hidden)


def detection(model: Any, batch: Batch) -> list[Loss]:
    """Class-weighted classification, and boxes over the samples that have one."""
    features, classes, boxes = batch
    scores, found = model(features)
    weights = (torch.arange(CLASSES) / 3 + 0.25).to(scores.dtype)
    positive = classes > 0
    off = (found - boxes)[positive]
    kinds = {
        "accuracy": ((scores.argmax(1) == classes).sum(), len(classes)),
        "positive": (int(positive.sum()), float(len(classes))),
    }
    total = functional.cross_entropy(scores, classes, weight=weights, reduction="sum")
    return [
        Loss(total, weights[classes].sum(), kinds, "classes"),
        Loss(
            off.square().sum(), int(positive.sum()), {"far": ((off.abs().amax(1) > 1).sum(), positive.sum())}, "boxes"
        ),
    ]


def counted(batch: Batch) -> list[Any]:
    _, classes, _ = batch
    return [(classes / 3 + 0.25).sum(), int((classes > 0).sum())]


def one_batch(model: nn.Module, indices: list[int], data: list[Any]) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics of the samples as one batch, in plain PyTorch."""
    terms = detection(model, [torch.stack(column) for column in zip(*(data[i] for i in indices), strict=True)])
    # a term without items has gradients of zero, not none: momentum moves its parameters on
    loss = sum((term.total / (term.items or torch.inf) for term in terms), torch.zeros(()))
    means = {f"loss_{term.name}": term.total.item() / float(term.items) for term in terms if term.items}
    pairs = {name: pair for term in terms for name, pair in term.metrics.items()}
    return loss, means | {name: float(total) / float(count) for name, (total, count) in pairs.items() if count}


def engine_of(*options: str, model: nn.Module | None = None, dropout: float = 0.0, norm: bool = False) -> Engine:
    plan, model = make_plan([*COMMON, *options], samples=SAMPLES), model or Detector(dropout, norm=norm)
    assert plan.train.seed == 0
    return Engine(model, lambda p: torch.optim.SGD(p, LEARNING_RATE, momentum=0.9), plan)


def run(
    engine: Engine, forward: Forward = detection, *, known: bool = True, windows: int | None = None, items: Any = None
) -> list[StepResult]:
    """``known``: the engine is given the forward pass, unless it is given ``items``."""
    results: list[StepResult] = []
    for window in engine.windows(samples(), forward=forward if known and items is None else None, items=items):
        try:
            for batch in window:
                engine.backward(forward(engine.model, batch))
        except Exception as error:
            if engine.shrinks(error):
                continue
            raise
        results.append(engine.step())
        if len(results) == windows:
            break
    return results


def parameters(engine: Engine) -> Tensor:
    return flat(engine.model.parameters())


def exact() -> Any:
    """Losses, metrics and parameters against one big batch; the items are counted by forward passes, by items(batch),
    or not ahead at all."""
    worst = {"loss": 0.0, "parameters": 0.0, "metrics": 0.0}
    names: list[list[str]] = []
    for micro, items in ((2, None), (2, counted), (6, None)):
        engine, reference = engine_of("train.epochs=1", f"batch.micro_size={micro}"), Detector()
        optimizer = torch.optim.SGD(reference.parameters(), LEARNING_RATE, momentum=0.9)
        for result in run(engine, items=items):
            loss, means = one_batch(reference, order(result.window), samples())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            worst["loss"] = max(worst["loss"], abs(result.loss - loss.item()))
            assert result.metrics.keys() == means.keys(), (result.metrics, means)
            worst["metrics"] = max(worst["metrics"], *(abs(result.metrics[name] - means[name]) for name in means))
            names.append(sorted(means))
        worst["parameters"] = max(
            worst["parameters"], (parameters(engine) - flat(reference.parameters())).norm().item()
        )
    return worst | {"names": names}


class Deep(Detector):
    """With shard units."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16))  # pyright: ignore


def sharded() -> dict[str, list[float]]:
    """By sync policy of FSDP, distances of the parameters after an epoch from those of one big batch: the items are
    counted by items(batch), by forward passes, or by items(batch) with the forward pass known."""
    reference, indices = Deep(), [order(window) for window in range(4)]
    optimizer = torch.optim.SGD(reference.parameters(), LEARNING_RATE, momentum=0.9)
    for each in indices:
        optimizer.zero_grad()
        one_batch(reference, each, samples())[0].backward()
        optimizer.step()
    found: dict[str, list[float]] = {}
    ways: list[dict[str, Any]] = [{"items": counted}, {"forward": detection}, {"items": counted, "forward": detection}]
    for policy, how in itertools.product(("gather_once", "boundary", "every"), ways):
        engine = engine_of("strategy=fsdp", f"strategy.sync={policy}", "train.epochs=1", MICRO, model=Deep())
        for window in engine.windows(samples(), **how):
            for batch in window:
                engine.backward(detection(engine.model, batch))
            engine.step()
        distance = (parameters(engine) - flat(reference.parameters())).norm().item()
        found.setdefault(policy, []).append(distance)
    return found


def resumed() -> Any:
    """With dropout, a run of four windows, and one that a new engine completes after two: the same bits, although each
    engine counts the items of its first window after that window's first micro-batch has run."""

    def new() -> Engine:
        engine = engine_of("train.epochs=1", MICRO, dropout=0.5)
        torch.manual_seed(5 + dist.get_rank())
        return engine

    whole, first = new(), new()
    torch.manual_seed(5 + dist.get_rank())
    run(whole)
    torch.manual_seed(5 + dist.get_rank())
    run(first, windows=2)
    random, second = torch.get_rng_state(), new()
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()))
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    torch.set_rng_state(random)
    run(second)
    calls: Any = whole.model.calls
    return {"same": torch.equal(parameters(whole), parameters(second)), "calls": calls.item()}


def unlogged() -> Any:
    """Metrics only where the step is recorded; the terms' means always."""
    return [sorted(r.metrics) for r in run(engine_of("train.epochs=1", MICRO, "train.log_every=2"))]


def window_norm() -> Any:
    """batch.norm=window with several terms, against BatchNorm over one big batch."""
    engine, reference = engine_of("train.epochs=1", MICRO, "batch.norm=window", norm=True), Detector(norm=True)
    optimizer = torch.optim.SGD(reference.parameters(), LEARNING_RATE, momentum=0.9)
    for result in run(engine):
        optimizer.zero_grad()
        one_batch(reference, order(result.window), samples())[0].backward()
        optimizer.step()
    return (parameters(engine) - flat(reference.parameters())).norm().item()


def half() -> Any:
    """fp16: the first gradient against fp64, relative."""
    engine = engine_of("train.steps=1", MICRO, "precision=fp16", "precision.init_scale=1024")
    (result,) = run(engine)
    wide, before = Detector().double(), flat(Detector().parameters())
    one_batch(wide, order(0), [(x.double(), c, b.double()) for x, c, b in samples()])[0].backward()
    wanted = -LEARNING_RATE * flat([p.grad for p in wide.parameters()])
    moved = (parameters(engine) - before).double()
    return {"skipped": result.skipped, "error": ((moved - wanted).norm() / wanted.norm()).item()}


def shrunk() -> Any:
    """Out of memory on one rank: in the first micro-batch, in the count, and in later micro-batches."""
    wanted = engine_of("train.epochs=1", "batch.micro_size=1")
    run(wanted)
    drifts: list[float] = []
    for failing in (1, 2, 4, 9):
        calls = Calls()

        def forward(model: Any, batch: Batch, failing: int = failing, calls: Calls = calls) -> list[Loss]:
            if calls.count() == failing and dist.get_rank() == 1:
                raise torch.OutOfMemoryError("as from the allocator")
            return detection(model, batch)

        engine = engine_of("train.epochs=1", MICRO, "batch.on_oom=shrink")
        with mock.patch.object(window_of_engine, "SETTLING", 0):  # a loop of the user's own may shrink in any window
            run(engine, forward)
        assert engine.plan.batch.micro_size == 1
        drifts.append((parameters(engine) - parameters(wanted)).norm().item())
    return drifts


Change = Callable[[Loss, Loss], Any]
replaced = dataclasses.replace


def changed(change: Change, *, rank: int | None = None, after: int = 0) -> Forward:
    """The loss with other terms or metrics: on one rank or on all, after a number of calls."""
    calls = 0

    def forward(model: Any, batch: Batch) -> Any:
        nonlocal calls
        calls += 1
        terms = detection(model, batch)
        return change(*terms) if rank in (None, dist.get_rank()) and calls > after else terms

    return forward


CALLS = Calls()


def different(first: Loss, second: Loss) -> list[Loss]:
    """Another number of items at each call, which no state of the model explains."""
    return [first, replaced(second, items=CALLS.count())]


def accuracy(value: Any) -> Forward:
    return changed(lambda a, b: [replaced(a, metrics={"accuracy": value}), b])


WRONG: dict[str, Forward] = {
    "a rank lacks a metric": changed(lambda a, b: [a, replaced(b, metrics={})], rank=1),
    "a rank has one term": changed(lambda a, _: a, rank=1),
    "a micro-batch lacks a metric": changed(lambda a, b: [a, replaced(b, metrics={})], after=4),
    "a micro-batch has another term": changed(lambda a, b: [a, b, replaced(b, name="more", metrics={})], after=4),
    "reserved": changed(lambda a, b: [replaced(a, metrics={"grad_norm": (1, 1)}), b]),
    "slash": changed(lambda a, b: [replaced(a, metrics={"/top": (1, 1)}), b]),
    "twice": changed(lambda a, b: [a, replaced(b, metrics={"accuracy": (1, 1)})]),
    "clash with a term": changed(lambda a, b: [replaced(a, metrics={"loss_boxes": (1, 1)}), b]),
    "no pair": accuracy(0.5),
    "a vector": accuracy((torch.ones(2), 2)),
    "a text": accuracy(("1", 2)),
    "a negative count": accuracy((1, -2)),
    "a nan count": accuracy((1, torch.tensor(torch.nan))),
    "nan items of a term": changed(lambda a, b: [a, replaced(b, items=torch.tensor(torch.nan))], rank=1),
    "items that change": changed(different),
    "an empty list": lambda *_: [],
}


def messages() -> Any:
    """By case, the message on every rank."""

    def of(forward: Forward, *options: str, **how: Any) -> str:
        return message_of(lambda: run(engine_of("train.steps=3", *(options or (MICRO,))), forward, **how))

    found = {name: of(forward) for name, forward in WRONG.items()}
    whole = "batch.micro_size=6"
    found["nan items of a term, one micro-batch"] = of(WRONG["nan items of a term"], whole)
    found["not known"] = of(detection, known=False)
    found["not needed"] = of(detection, whole, known=False)
    found["items(batch) of one term"] = of(detection, items=lambda _: [3])
    found["items(batch) is a number"] = of(detection, items=lambda _: 3)
    found["items(batch) is wrong"] = of(detection, items=lambda batch: [3.0, len(batch[0])])
    return World.here().of_all(found)


def main() -> None:
    for name in sys.argv[1:]:
        seen = {name: globals()[name]()}
        print_on_rank_0(seen)
    leave_group()


if __name__ == "__main__":
    main()
