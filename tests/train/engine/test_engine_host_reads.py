"""How often a window makes the host wait for a GPU, counted on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher import Engine
from launcher.loss import Loss
from launcher.train.engine import window as window_of_engine
from tests.helpers import make_plan
from tests.infra.pretended_gpu import GPU, PretendedGpu


def one_term(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).square().sum(), len(batch))


def two_terms(model: nn.Module, batch: Tensor) -> list[Loss]:
    out = model(batch)
    return [Loss(out.square().sum(), len(batch), name="one"), Loss(out.abs().sum(), 2 * len(batch), name="two")]


def items_of_two(batch: Tensor) -> list[int]:
    return [len(batch), 2 * len(batch)]


def places(
    loss: Callable[..., Any], *overrides: str, items: Any = None, windows: int = 7
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield for each window the places that read a number during its micro-batches, and during its step."""
    plan = make_plan(
        "cluster.workers_per_node=1", "batch.global_size=16", "batch.micro_size=4", "train.loader_workers=0",
        f"train.steps={windows}", "run.calibrate_s=0", *overrides, samples=16 * windows,
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    engine: Any = Engine(model, torch.optim.AdamW(model.parameters(), 1e-3, foreach=True), plan)
    if "batch.on_oom=shrink" in overrides:  # only several ranks have to agree
        engine.world, engine._current._settles = dataclasses.replace(engine.world, size=2), True
    step = (engine._totals, engine._loss, engine._current, engine._optimizer_step)
    for part in (*step, engine.buffers, engine.noise_scale):
        part._device = GPU
    data = [*torch.randn(16 * windows, 5, generator=torch.Generator().manual_seed(1))]
    for window in engine.windows(data, torch.stack, items=items):
        with PretendedGpu() as gpu:
            for batch in window:
                engine.backward(loss(engine.model, batch))
            before = len(gpu.reads.places)
            engine.step()
        yield gpu.reads.places[:before], gpu.reads.places[before:]


@contextmanager
def shown(found: list[str]) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note("read at " + ", ".join(found))
        raise


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("loss", "overrides", "items", "ahead", "step"),
    [
        (one_term, ["precision=fp32"], None, [0] * 3, 2),
        (one_term, ["precision=bf16"], None, [0] * 3, 2),
        (one_term, ["precision=fp16", "precision.init_scale=8"], None, [0] * 3, 4),
        (two_terms, ["precision=fp32"], items_of_two, [1] * 3, 2),
        (one_term, ["precision=fp32", "batch.on_oom=shrink"], None, [1, 0, 0], 2),
    ],
    ids=["fp32", "bf16", "fp16", "terms", "shrink"],
)
def test_a_window_reads_few_numbers(
    loss: Callable[..., Any],
    overrides: list[str],
    items: Any,
    ahead: list[int],
    step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step reads the window's totals and the norm, in fp16 the scale and whether a gradient overflowed. Before the
    last backward pass several terms need their items, and ranks that may run out of memory the word of the others."""
    monkeypatch.setattr(window_of_engine, "SETTLING", 4)
    # the first windows agree on the loss, find what changes, and build the optimizer's state; the last compares ranks
    for (in_micro_batches, in_step), before in zip([*places(loss, *overrides, items=items)][3:6], ahead, strict=True):
        with shown(in_micro_batches + in_step):
            assert len(in_micro_batches) == before
            assert len(in_step) == step
