"""Windows that are not finite with train.on_nonfinite=skip, run by torchrun in test_optimizer_step.py.

A job whose stream has bad windows is compared, bit by bit, with one whose stream lacks them. Prints one JSON object
from rank 0 for each line of arguments.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import IterableDataset

from launcher import Engine, make_plan
from launcher.errors import NotFinite
from launcher.train.engine.optimizer_step import MAX_NONFINITE_WINDOWS
from launcher.train.optimizers import members_of

GLOBAL, STEPS = 16, 6
COMMON = (f"batch.global_size={GLOBAL}", "batch.micro_size=2", "train.loader_workers=0", "run.calibrate_s=0")


class Stream(IterableDataset[Tensor]):
    """Windows of rows; a bad window has one bad row, which rank 1 reads in its third micro-batch."""

    def __init__(self, bad: list[bool], value: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows: list[Tensor] = []
        for number in range(len(bad)):
            rows = torch.randn(GLOBAL, 6, generator=generator)
            if bad[number]:
                rows[10, 2] = value
            self.rows += rows

    def without(self, bad: list[bool]) -> Stream:
        self.rows = [row for n, row in enumerate(self.rows) if not bad[n // GLOBAL]]
        return self

    def __iter__(self) -> Any:
        return iter(self.rows)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def loss_of(model: Any, batch: Tensor, where: str) -> Tensor:
    if where == "input":  # into the running statistics, too
        return model(batch).float().square().sum()
    marks = batch[:, 2].isnan()
    result = model(batch.nan_to_num()).float()
    if where == "loss":
        return torch.where(marks[:, None], torch.inf, result).square().sum()
    # at 0 the derivative of a root is infinite
    return result.square().sum() + (result.square().sum(1) * ~marks).sqrt().sum()


def run(words: list[str], where: str, data: Stream, optimizers: str) -> tuple[Engine, list[str], list[Any]]:
    plan = make_plan([*COMMON, *words], samples=None)
    torch.manual_seed(0)

    def make(parameters: Any) -> Any:
        listed = list(parameters)
        if optimizers == "one":
            return torch.optim.AdamW(listed, 1e-2)
        few = [p for p in listed if p.ndim == 2]
        return [torch.optim.SGD([p for p in listed if p.ndim != 2], 1e-2, momentum=0.9), torch.optim.AdamW(few, 1e-2)]

    engine = Engine(Model, make, plan)
    torch.manual_seed(10 + engine.world.rank)
    reasons: list[str] = []
    results: list[Any] = []
    for window in engine.windows(data):
        for batch in window:
            engine.backward(loss_of(engine.model, batch, where), len(batch))
        result = engine.step()
        if result.nonfinite is not None:
            assert result.skipped
            reasons.append(result.nonfinite)
        else:
            results.append((result.step, result.loss, result.grad_norm, result.lr))
    return engine, reasons, results


def whole(engine: Engine) -> list[Any]:
    engine.share_buffers()
    module = engine.parallel.module
    state = [dict(module.named_parameters()), dict(module.named_buffers())]
    state.append(get_optimizer_state_dict(module, members_of(engine.optimizer)))
    leaves, _ = tree_flatten(state)
    return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves]


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def compare(line: str) -> dict[str, Any]:
    where, optimizers, *words = line.split()
    bad = [False, False, True, False, True, True, False, False, False]
    value = {"input": torch.inf, "loss": torch.nan, "gradient": torch.nan}[where]
    words = [*words, f"train.steps={STEPS}", "schedule.warmup_steps=3"]
    a, reasons, of_a = run([*words, "train.on_nonfinite=skip"], where, Stream(bad, value), optimizers)
    random = torch.get_rng_state()
    b, none, of_b = run(words, where, Stream(bad, value).without(bad), optimizers)
    assert not none
    return {
        "equal": same(whole(a), whole(b)), "random": torch.equal(random, torch.get_rng_state()),
        "results": of_a == of_b, "reasons": reasons, "skipped": a.nonfinite_windows, "steps": a.steps,
        "window": a.window_index, "finite": all(leaf.isfinite().all() for leaf in whole(a) if isinstance(leaf, Tensor)),
        "counters": [a.skipped_steps, a.empty_windows], "samples": a.samples,
    }  # fmt: skip


def end() -> dict[str, Any]:
    """Windows that are never finite, after one that is."""
    words = ["train.steps=3", "train.on_nonfinite=skip", "precision=fp32"]
    try:
        run(words, "loss", Stream([False] + [True] * (MAX_NONFINITE_WINDOWS + 5), torch.nan), "one")
    except NotFinite as error:
        return {"error": str(error)}
    return {}


def main() -> None:
    for line in sys.argv[1:]:
        seen = end() if line == "end" else compare(line)
        if int(os.environ["RANK"]) == 0:
            print(json.dumps(seen), flush=True)


main()
