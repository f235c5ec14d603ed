"""Evaluations and checkpoints at an epoch's end, lines that rank 0 prints between the steps, and errors of the loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from launcher.config.schema import StrategyKind
from launcher.errors import OutOfMemory, TaskError
from launcher.loss import Loss
from launcher.train.trainer import train
from launcher.train.training_loop import MAX_STRAGGLER_LINES, TrainingLoop
from tests.helpers import make_plan
from tests.infra.runs import records

SAMPLES = 10
EPOCH = ("train.eval_every=epoch", "checkpoint.every=epoch", "checkpoint.async_save=false", "batch.global_size=4",
         "cluster.device=cpu", "cluster.workers_per_node=1", "strategy=single", "precision=fp32", "run.calibrate_s=0",
         "train.shuffle=false", "train.loader_workers=0")  # fmt: skip


class Read(IterableDataset[Tensor]):
    def __init__(self, samples: list[Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.samples)


class Epochs:
    """Three windows an epoch, the last one short. ``kind``: stream; or last, whose last window is not finite."""

    def __init__(self, kind: str = "") -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def train_data(self) -> Any:
        samples = [*torch.ones(SAMPLES, 3)]
        if self.kind == "last":
            samples[-1] = samples[-1] * torch.nan
        return Read(samples) if self.kind == "stream" else samples

    def eval_data(self) -> Any:
        return [*torch.ones(2, 3)]

    def loss(self, model: Any, batch: Tensor) -> Loss:
        if self.kind == "memory" and not model.training:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Loss(model(batch).square().sum(), len(batch))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "length", "stop", "due", "saved"),
    [
        ("", "train.steps=8", 0, [3, 6, 8], [3, 6, 8]),
        ("", "train.steps=8", 3, [3, 6, 8], [3, 6, 8]),  # stopped before the evaluation
        ("stream", "train.epochs=2", 4, [3, 6], [3, 4, 6]),
        ("last", "train.steps=5", 0, [3, 5], [3, 5]),  # after the first step of the epoch that follows
        ("last", "train.steps=5", 3, [3, 5], [2, 3, 5]),  # stopped before it, at the skipped window
        ("last", "train.steps=5", 4, [3, 5], [3, 5]),  # stopped at that step
    ],
)
def test_what_is_due_at_the_end_of_an_epoch(
    kind: str, length: str, stop: int, due: list[int], saved: list[int], tmp_path: Path
) -> None:
    words = (*EPOCH, length, "train.on_nonfinite=skip", "schedule=constant")
    plan = make_plan(*words, samples=None if kind == "stream" else SAMPLES, run_dir=str(tmp_path))
    task = dataclasses.replace(plan.task, target=f"{__name__}.Epochs", params={"kind": kind})
    plan, asked = dataclasses.replace(plan, task=task), iter(range(1, 99))
    if stop:
        train(plan, lambda: next(asked) == stop)
    train(plan, lambda: False)
    assert [line["step"] for line in records(tmp_path) if "eval/loss" in line] == due
    assert sorted(int(path.name[-6:]) for path in (tmp_path / "checkpoints").glob("step_*")) == saved


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("on_oom", ["stop", "shrink"])
def test_an_evaluation_out_of_memory_names_the_size_of_evaluations(on_oom: str, tmp_path: Path) -> None:
    words = (*EPOCH, "train.steps=4", f"batch.on_oom={on_oom}")
    plan = make_plan(*words, samples=SAMPLES, run_dir=str(tmp_path))
    task = dataclasses.replace(plan.task, target=f"{__name__}.Epochs", params={"kind": "memory"})
    with pytest.raises(OutOfMemory, match=r"(?s)held-out data was evaluated.*train\.eval_micro_size"):
        train(dataclasses.replace(plan, task=task), lambda: False)


def loop_and_result(news: Any, samples: int = 8, window: int = 1) -> tuple[Any, Any]:
    """Return a loop whose job reads 4 shards in windows of 8 samples, and the result of a step. ``window``: number in
    its epoch of the next window."""
    plan = SimpleNamespace(
        batch=SimpleNamespace(global_size_at=lambda index: 8),  # noqa: ARG005
        train=SimpleNamespace(data_shards=4),
    )
    position = SimpleNamespace(window=window)
    engine = SimpleNamespace(world=SimpleNamespace(rank=0), stragglers=news, steps=7, plan=plan, position=position)
    loop: Any = SimpleNamespace(engine=engine, straggler_lines=0, smaller_windows=False)
    return loop, SimpleNamespace(skipped=False, nonfinite=None, samples=samples, window=6)


@pytest.mark.parametrize(("samples", "window", "lines"), [(8, 1, 0), (6, 1, 1), (6, 0, 0)])
def test_windows_are_reported_once_that_are_smaller_before_the_end_of_an_epoch(
    samples: int, window: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, result = loop_and_result(SimpleNamespace(news=None), samples, window)
    for _ in range(3):
        TrainingLoop.print_events(loop, result)
    assert capsys.readouterr().out.count("train.data_shards=1, keep them whole") == lines


def test_ranks_that_take_turns_as_stragglers_do_not_fill_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, result = loop_and_result(SimpleNamespace(news="Straggler: no more."))
    for _ in range(MAX_STRAGGLER_LINES + 3):
        TrainingLoop.print_events(trainer, result)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MAX_STRAGGLER_LINES
    assert [("metrics.jsonl" in line) for line in lines] == [False] * (MAX_STRAGGLER_LINES - 1) + [True]


@pytest.mark.parametrize(("kind", "expected"), [(StrategyKind.fsdp, TaskError), (StrategyKind.ddp, RuntimeError)])
def test_only_a_sharded_model_has_parameters_that_are_freed(kind: StrategyKind, expected: type[Exception]) -> None:
    plan = SimpleNamespace(strategy=SimpleNamespace(kind=kind), batch=None)
    position, parallel = SimpleNamespace(index=0), SimpleNamespace(module=None)
    engine = SimpleNamespace(plan=plan, shrinks=lambda _: False, place="step 1", parallel=parallel, position=position)
    loop: Any = SimpleNamespace(engine=engine, plan=plan)
    with pytest.raises(expected) as caught:
        TrainingLoop.shrink_or_raise(loop, RuntimeError("setStorage: out of bounds for storage of size 0"))
    assert type(caught.value) is expected
