"""Mistakes of loops that save, and an evaluation without them, run by test_run_engine.py.

Argument: the run's directory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher import Engine, Loss, make_plan
from launcher.errors import EngineMisuse
from tests.infra.workers import leave_group, print_on_rank_0

DATA = list(torch.arange(18.0).reshape(9, 2))


def engine_of(*overrides: str) -> Engine:
    torch.manual_seed(0)
    plan = make_plan(
        [f"run.dir={sys.argv[1]}", "batch.global_size=4", "train.steps=2", "cluster.device=cpu", "precision=fp32",
         "train.loader_workers=0", "run.calibrate_s=0", *overrides], samples=len(DATA),
    )  # fmt: skip
    return Engine(nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, 0.0), plan)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except EngineMisuse as refusal:
        return str(refusal)
    return ""


def square(model: Any, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum(), len(batch)


def with_metric(model: Any, batch: Tensor) -> Loss:
    total, items = square(model, batch)
    return Loss(total, items, metrics={"mean": (batch.sum(), batch.numel())})


def as_tuple(model: Any, batch: Tensor) -> tuple[Any, ...]:
    loss = with_metric(model, batch)
    return loss.total, loss.items, loss.metrics


def main() -> None:
    results: dict[str, Any] = {}
    engine = engine_of()
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward(*square(engine.model, batch))
        result = engine.step()
        results["not resumed"] = refused(lambda: engine.finish_step(result))  # noqa: B023
    evaluated = engine.evaluate({"one": DATA, "two": DATA[:3]}, with_metric)
    results["evaluated"] = [evaluated[name] for name in ("eval/loss", "eval/one/loss", "eval/two/mean")]
    results["as a tuple"] = engine.evaluate(DATA, as_tuple) == engine.evaluate(DATA, with_metric)
    with torch.no_grad():
        loss = engine.model(torch.stack(DATA)).square().mean().item()
    results["expected"] = [loss, loss, torch.stack(DATA[:3]).mean().item()]
    results["no loss"] = refused(lambda: engine_of("run.name=a").resume(eval_data=DATA))
    results["directories"] = refused(lambda: engine_of(f"run.name=r{dist.get_rank()}").resume())
    engine = engine_of("run.name=b")
    assert engine.resume() is None
    results["twice"] = refused(engine.resume)
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward(*square(engine.model, batch))
        result = engine.step()
        results["tensor"] = refused(lambda: engine.finish_step(result, extra={"x": torch.ones(2)}))  # noqa: B023
        results["number"] = refused(lambda: engine.finish_step(result, extra={"seen": [{3: 7}]}))  # noqa: B023
        break
    engine = engine_of("run.name=c")
    engine.resume()
    for number, window in enumerate(engine.windows(DATA)):
        for batch in window:
            engine.backward(*square(engine.model, batch))
        if number:
            results["not finished"] = refused(engine.step)
            break
        engine.step()
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
