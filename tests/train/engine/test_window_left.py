"""A loop that leaves a window early, by an exception that it catches or by a break: refused, and no context stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import EngineMisuse
from launcher.train.engine.engine import Engine
from launcher.train.run_engine import RunEngine
from tests.helpers import make_plan


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


E = TypeVar("E", bound=Engine)


def engine_of(model: nn.Module, kind: type[E] = Engine) -> E:
    plan = make_plan(
        "cluster.workers_per_node=1", "batch.global_size=8", "batch.micro_size=2", "train.loader_workers=0",
        "train.steps=4", "precision=bf16", samples=64,
    )  # fmt: skip
    return kind(model, torch.optim.SGD(model.parameters(), 0.1), plan)


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
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    engine = engine_of(model)
    with pytest.raises(EngineMisuse, match=rf"left without engine\.step\(\), {words}"):
        caught(engine, Broken(reads_at), lambda number: number == fails_at)
    assert not torch.is_autocast_enabled("cpu"), "the micro-batch's contexts are left"
    assert all(map(torch.equal, before, model.parameters())), "nothing of it is applied"
    with pytest.raises(EngineMisuse, match=r"left without engine\.step\(\)"):  # old gradients would be added to
        caught(engine, Broken(0))


@pytest.mark.usefixtures("alone")
def test_a_break_leaves_no_context() -> None:
    engine = engine_of(nn.Linear(3, 2))
    for window in engine.windows(Broken(0)):
        next(window)
        assert torch.is_autocast_enabled("cpu")
        break
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("alone")
def test_an_evaluation_within_a_window_is_refused() -> None:
    model, data = nn.Linear(3, 2), Broken(0)
    engine = engine_of(model, RunEngine)
    windows = engine.windows(data)
    for batch in next(windows):
        with pytest.raises(EngineMisuse, match="between two windows"):
            engine.evaluate(data, lambda model, batch: (model(batch).float().sum(), len(batch)))
        engine.backward(engine.model(batch).float().sum(), len(batch))
    engine.step()
    assert "eval/loss" in engine.evaluate(data, lambda model, batch: (model(batch).float().sum(), len(batch)))
