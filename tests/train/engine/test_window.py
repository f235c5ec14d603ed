"""Passes of the loop's own before the first micro-batch of a window, and the place of an error in a window."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy
import pytest
import torch
from torch import Tensor, nn

from launcher import Engine, Loss, make_plan
from launcher.errors import EngineMisuse, NotFinite
from launcher.train.run_engine import RunEngine
from tests.helpers import printed_by

WORKER = Path(__file__).parent / "stray_gradients_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "policies"),
    [(1, ["single/boundary"]), (2, ["ddp/boundary", "ddp/every", "fsdp/boundary", "fsdp/gather_once"])],
)
def test_gradients_of_passes_before_the_first_micro_batch_are_discarded(
    ranks: int, policies: list[str], tmp_path: Path
) -> None:
    (errors,) = printed_by(WORKER, policies, ranks, tmp_path)
    assert errors.keys() == set(policies)
    assert max(errors.values()) < 1e-6, errors


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(12, 3))


E = TypeVar("E", bound=Engine)


def engine_of(samples: int | None, *overrides: str, kind: type[E] = Engine) -> E:
    plan = make_plan(
        ["batch.global_size=6", "batch.micro_size=2", "train.loader_workers=0", "train.shuffle=false", "train.steps=2",
         "precision=fp32", "strategy=single", "cluster.device=cpu", "cluster.workers_per_node=1",
         "run.calibrate_s=0", *overrides],
        samples=samples,
    )  # fmt: skip
    return kind(nn.Linear(3, 1), lambda parameters: torch.optim.SGD(parameters, 0.1), plan)


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


class Reusing:
    """Task that writes each micro-batch, its number of items and its metrics into the same tensors and array."""

    def __init__(self, terms: int) -> None:
        self.batch, self.weights, self.items = torch.zeros(2, 3), numpy.zeros(2), torch.zeros(())
        self.terms = terms

    def collate(self, samples: list[tuple[Tensor, float]]) -> tuple[Tensor, Any]:
        self.batch.copy_(torch.stack([x for x, _ in samples]))
        self.weights[:] = [weight for _, weight in samples]
        return self.batch, self.weights

    def loss(self, model: Callable[..., Tensor], batch: tuple[Tensor, Any]) -> Any:
        x, weights = batch[0], torch.from_numpy(batch[1]).float()
        self.items.copy_(weights.sum())
        total = (model(x).squeeze(1).square() * weights).sum()
        losses = [Loss(total, self.items, {"weight": (self.items, len(x))}), Loss(total * 0.5, self.items)]
        return losses[: self.terms] if self.terms > 1 else losses[0]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("calibrate_s", [0, 0.01])
def test_tensors_that_a_task_reuses_count_in_each_micro_batch(terms: int, calibrate_s: float) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, generator=generator), float(number + 1)) for number in range(6)]
    engine = engine_of(
        6, f"run.calibrate_s={calibrate_s}", "train.clip_norm=null", "schedule=constant", "schedule.warmup_steps=0"
    )
    task, reference = Reusing(terms), copy.deepcopy(engine.model)
    x, weights = torch.stack([x for x, _ in data]), torch.tensor([weight for _, weight in data])
    loss = (reference(x).squeeze(1).square() * weights).sum() / weights.sum() * (1.5 if terms > 1 else 1)
    loss.backward()
    torch.optim.SGD(reference.parameters(), 0.1).step()
    for window in engine.windows(data, collate=task.collate, forward=task.loss):
        for batch in window:
            engine.backward(task.loss(engine.model, batch))
        result = engine.step()
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert result.metrics["weight"] == pytest.approx(weights.mean().item())
        break
    torch.testing.assert_close(engine.model.state_dict(), reference.state_dict())


# a loop that leaves a window early, by an exception that it catches or by a break


class Broken(torch.utils.data.Dataset[Tensor]):
    """``at``: the read that fails."""

    def __init__(self, at: int) -> None:
        self.at, self.reads = at, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        if self.reads == self.at:
            raise ValueError("a broken file")
        return torch.full((3,), index / 64)


BF16 = ("precision=bf16", "batch.global_size=8", "train.steps=4")


def caught(engine: Engine, data: Broken, fails: Callable[[int], bool] = lambda _: False) -> None:
    """A loop that swallows every exception of a window. ``fails``: by number, the micro-batches that raise."""
    for window in engine.windows(data):
        try:
            for number, batch in enumerate(window):
                if fails(number):
                    raise ValueError("a bad batch")
                engine.backward(engine.model(batch).float().sum(), len(batch))
            engine.step()
        except ValueError:
            continue


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("reads_at", "fails_at", "words"), [(0, 2, "after 3 of its 4"), (5, -1, "after 2 of its 4"), (1, -1, "after 0 of")]
)
def test_a_caught_exception_does_not_train_on(reads_at: int, fails_at: int, words: str) -> None:
    """The data's reader ends with its first error: what came after it would be no window."""
    engine = engine_of(64, *BF16)
    before = [p.detach().clone() for p in engine.model.parameters()]
    with pytest.raises(EngineMisuse, match=rf"left without engine\.step\(\), {words}"):
        caught(engine, Broken(reads_at), lambda number: number == fails_at)
    assert not torch.is_autocast_enabled("cpu"), "the micro-batch's contexts are left"
    assert all(map(torch.equal, before, engine.model.parameters())), "nothing of it is applied"
    with pytest.raises(EngineMisuse, match=r"left without engine\.step\(\)"):  # old gradients would be added to
        caught(engine, Broken(0))


@pytest.mark.usefixtures("alone")
def test_a_break_leaves_no_context() -> None:
    engine = engine_of(64, *BF16)
    for window in engine.windows(Broken(0)):
        next(window)
        assert torch.is_autocast_enabled("cpu")
        break
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("alone")
def test_an_evaluation_within_a_window_is_refused() -> None:
    engine, data = engine_of(64, *BF16, kind=RunEngine), Broken(0)
    windows = engine.windows(data)
    for batch in next(windows):
        with pytest.raises(EngineMisuse, match="between two windows"):
            engine.evaluate(data, lambda model, batch: (model(batch).float().sum(), len(batch)))
        engine.backward(engine.model(batch).float().sum(), len(batch))
    engine.step()
    assert "eval/loss" in engine.evaluate(data, lambda model, batch: (model(batch).float().sum(), len(batch)))
