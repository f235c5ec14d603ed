"""Passes of the loop's own before the first micro-batch of a window, and the place of an error in a window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.errors import NotFinite
from tests.helpers import torchrun

WORKER = Path(__file__).parent / "stray_gradients_worker.py"


@pytest.mark.parametrize(
    ("strategy", "sync"),
    [("single", "boundary"), ("ddp", "boundary"), ("ddp", "every"), ("fsdp", "boundary"), ("fsdp", "gather_once")],
)
def test_gradients_of_passes_before_the_first_micro_batch_are_discarded(
    strategy: str, sync: str, tmp_path: Path
) -> None:
    ranks = 1 if strategy == "single" else 2
    output = torchrun(WORKER, [f"strategy={strategy}", f"strategy.sync={sync}"], ranks, tmp_path)
    assert json.loads(output.splitlines()[-1])["error"] < 1e-6


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(12, 3))


def engine_of(samples: int | None) -> Engine:
    plan = make_plan(
        ["batch.global_size=6", "batch.micro_size=2", "train.loader_workers=0", "train.shuffle=false", "train.steps=2",
         "precision=fp32", "strategy=single", "cluster.device=cpu", "cluster.workers_per_node=1",
         "run.calibrate_s=0"],
        samples=samples,
    )  # fmt: skip
    return Engine(nn.Linear(3, 1), lambda parameters: torch.optim.SGD(parameters, 0.1), plan)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("data", "places"),
    [
        (list(torch.ones(12, 3)), [f", with samples {n}, {n + 1} of the training data" for n in (0, 2, 4)]),
        (Stream(), [f", in micro-batch {n}" for n in (1, 2, 3)]),
    ],
)
def test_an_error_has_the_place_of_its_micro_batch(data: Any, places: list[str]) -> None:
    engine = engine_of(None if isinstance(data, Stream) else len(data))

    def place() -> str:
        return f"In {engine.place}."

    for window in engine.windows(data):
        seen = [place()]
        for batch in window:
            seen.append(place())
            engine.backward(engine.model(batch).sum(), len(batch))
        engine.step()
        assert seen == [f"In step {engine.steps} on rank 0{text}." for text in ("", *places)]
        break


@pytest.mark.usefixtures("alone")
def test_the_samples_of_a_loss_that_is_not_finite_are_those_of_its_micro_batch() -> None:
    engine = engine_of(12)
    for window in engine.windows(list(torch.ones(12, 3))):
        for number, batch in enumerate(window):
            engine.backward(engine.model(batch).sum() * (1.0 if number == 0 else float("nan")), len(batch))
        with pytest.raises(NotFinite, match=r"inf or nan\): rank 0, micro-batch 2 \(samples 2, 3\), 3\.\n"):
            engine.step()
        break
