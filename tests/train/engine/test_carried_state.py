"""State that forward passes write and later ones read is named, and so is state that no checkpoint has; other
attributes and buffers are not."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Loss
from launcher.train.engine.carried_state import MAX_READ
from launcher.train.trainer import train
from tests.helpers import make_plan

DATA = list(torch.sin(torch.arange(96.0)).reshape(24, 4))


class Net(nn.Module):
    hits: Tensor
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm, self.drop = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.2)
        self.register_buffer("hits", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.hits += 1  # counted, not read
        return self.drop(self.norm(self.out(x)))


class Plain:
    """A loss without state. Other cases change what is added to it."""

    def model(self) -> nn.Module:
        return Net()

    def train_data(self) -> list[Tensor]:
        return DATA

    def loss(self, model: Any, batch: Tensor) -> Loss:
        rows = model(batch)
        return Loss((rows - self.aim(model, rows.detach())).square().sum(), len(batch))

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        return torch.ones(())


class Recomputed(Plain):
    """Attributes that each pass computes from its inputs alone, attributes that are only logged, and a cache."""

    def __init__(self) -> None:
        self.last, self.weights, self.scale, self.kept = None, None, 1.0, dict[int, Tensor]()

    def aim(self, model: Any, rows: Tensor) -> Tensor:
        self.last, model.out.seen = rows, rows.mean()
        self.scale = 1.0 + float(rows.mean())
        if self.weights is None:
            self.weights = torch.linspace(0, 1, 3)
        self.kept.setdefault(len(rows), torch.ones(len(rows), 1))
        return self.weights * self.scale + self.last * model.out.seen + self.kept[len(rows)]


class Counter(Plain):
    calls = 0

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        self.calls += 1
        return torch.tensor(min(1.0, self.calls / 100))


class Logged(Counter):
    def aim(self, model: Any, rows: Tensor) -> Tensor:
        super().aim(model, rows)
        return torch.ones(())


class Collected(Plain):
    """A list and a counter that nothing reads, and a number that each pass sets before it reads it."""

    def __init__(self) -> None:
        self.history, self.passes, self.largest = list[float](), 0, 0.0

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        self.history.append(float(rows.mean()))
        self.passes += 1
        print("passes", self.passes)
        self.largest = float(rows.max())
        return torch.tensor(self.largest)


class Saved(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class ModuleCounter(Counter, nn.Module):
    """Checkpoints have the buffers of a task that is a module, and no attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def aim(self, model: Any, rows: Tensor) -> Tensor:
        self.seen += 1
        return super().aim(model, rows)


class Running:
    numbers = itertools.count()  # no pass takes one

    def __init__(self) -> None:
        self.number = next(self.numbers)
        self.rows = deque([torch.zeros(3)], maxlen=3)


class Queue(Plain):
    """State in an object of the task."""

    def __init__(self) -> None:
        self.past = Running()

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        mean = torch.stack([*self.past.rows]).mean(0)
        self.past.rows.append(rows.mean(0))
        return mean


class Hidden(Plain):
    """State in an attribute of the model."""

    def model(self) -> nn.Module:
        model = Net()
        model.out.hidden = torch.zeros(3)  # pyright: ignore
        return model

    def aim(self, model: Any, rows: Tensor) -> Tensor:
        before, model.out.hidden = model.out.hidden, 0.5 * model.out.hidden + rows.mean(0)
        return before


class Centre(Plain):
    """State in a buffer."""

    def model(self) -> nn.Module:
        model = Net()
        model.register_buffer("centre", torch.zeros(3))
        return model

    def aim(self, model: Any, rows: Tensor) -> Tensor:
        model.centre.mul_(0.9).add_(rows.mean(0), alpha=0.1)
        return model.centre.clone()


class Whitened(Plain):
    """Averages that only evaluations read."""

    def model(self) -> nn.Module:
        model = Net()
        model.norm = nn.InstanceNorm1d(3, track_running_stats=True)  # pyright: ignore[reportAttributeAccessIssue]
        return model

    def loss(self, model: Any, batch: Tensor) -> Loss:
        rows = model.norm(model.out(batch).unsqueeze(2) * torch.tensor([1.0, 2.0]))
        return Loss((rows - 1).square().sum(), len(batch))


def followed(teacher: Any, model: Any) -> Tensor:
    """Average the parameters into a teacher, and return its aim."""
    with torch.no_grad():
        teacher.weight.lerp_(model.out.weight, 0.1)
        return teacher.weight.sum(1)


class Teacher(Plain):
    """Averages of the parameters in a module of the task."""

    def __init__(self) -> None:
        self.teacher = nn.Linear(4, 3).requires_grad_(False)

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        return followed(self.teacher, model)


class Momentum(Plain):
    """Averages of the parameters in the model."""

    def model(self) -> nn.Module:
        model = Net()
        model.teacher = nn.Linear(4, 3).requires_grad_(False)
        return model

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        return followed(model.teacher, model)


class Spectral(Plain):
    def model(self) -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(4, 3))


class ReadsGradients(Plain):
    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        gradient = model.out.weight.grad
        return torch.zeros(()) if gradient is None else functional.normalize(gradient, dim=1).sum(1)


class Noise(Plain):
    """A random generator of the task's own."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        return torch.randn(3, generator=self.random)


class Shaken(Plain):
    """Generators of Python and NumPy, in the model and in an object of the task."""

    def __init__(self) -> None:
        self.past = Running()
        self.past.random = random.Random(1)  # pyright: ignore[reportAttributeAccessIssue]

    def model(self) -> nn.Module:
        model = Net()
        model.out.random = np.random.default_rng(1)  # pyright: ignore
        return model

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        drawn: Any = self.past
        return torch.full((3,), drawn.random.random() + model.out.random.random())


class Reseeded(Noise):
    """A generator that each pass seeds, and one that nothing draws from."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = random.Random(1)

    def aim(self, model: Any, rows: Tensor) -> Tensor:
        self.random.manual_seed(7)
        return super().aim(model, rows)


class Annealed(Plain):
    """A number that a callback writes once for each step."""

    def __init__(self) -> None:
        self.alpha = 0.0

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        return torch.tensor(self.alpha)


class Anneal:
    def on_step(self, engine: Any, result: Any) -> None:
        engine.owner.alpha = 0.1 * result.step


CALLS = 0


class GlobalCounter(Plain):
    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        global CALLS
        CALLS += 1
        return torch.tensor(CALLS / 100)


class Shared:
    calls = 0


class ClassCounter(Plain):
    """A counter in a class that has no objects."""

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        Shared.calls += 1
        return torch.tensor(Shared.calls / 100)


class SecondData(Plain):
    """Passes without training must take nothing from an iterator."""

    taken: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.rows = (float(number) for number in itertools.count())

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        value = next(self.rows)
        if torch.is_grad_enabled():
            self.taken.append(value)
        return torch.tensor(value / 100)


class Lookahead(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.slow, self.steps, self.norms = None, 0, list[float]()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        parameters = self.param_groups[0]["params"]
        self.slow = self.slow or [p.clone() for p in parameters]
        super().step()
        self.steps += 1
        self.norms.append(float(parameters[0].norm()))
        if self.steps % 10 == 0:
            torch._foreach_copy_(parameters, self.slow)


class SavesHalf(Lookahead):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.slow = state_dict["slow"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "slow"})


class Lazy(torch.optim.SGD):
    """With a flag and caches of its first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.initialized, self.names, self.size = False, dict[int, str](), 0

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        if not self.initialized:
            self.names = {number: str(number) for number, _ in enumerate(self.param_groups[0]["params"])}
            self.size, self.initialized = len(self.names), True
        if self.names and self.size:
            super().step()


class Cached(Plain):
    def optimizer(self, model: nn.Module) -> Any:
        return Lazy(model.parameters())

    def schedule(self, optimizer: Any, steps: int) -> Any:  # noqa: ARG002
        return torch.optim.lr_scheduler.StepLR(optimizer, 1)


class SlowWeights(Plain):
    def optimizer(self, model: nn.Module) -> Any:
        return Lookahead(model.parameters())


class HalfSaved(Plain):
    def optimizer(self, model: nn.Module) -> Any:
        return SavesHalf(model.parameters())


class CountingSchedule(Plain):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), 0.1)

    def schedule(self, optimizer: Any, steps: int) -> Any:  # noqa: ARG002
        calls = 0

        def factor(step: int) -> float:  # noqa: ARG001
            nonlocal calls
            calls += 1
            return 1 / calls

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Decayed(Plain):
    pass


class Decay:
    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, engine: Any, result: Any) -> None:  # noqa: ARG002
        self.steps += 1
        with torch.no_grad():
            engine.model.out.weight.mul_(1 - self.steps / 1000)


class Reports:
    """A callback that changes no training."""

    def __init__(self) -> None:
        self.best = float("inf")

    def on_step(self, engine: Any, result: Any) -> None:  # noqa: ARG002
        self.best = min(self.best, result.loss)


class Timed(Plain):
    """A value that differs each time, and tensors and arrays of special kinds."""

    def __init__(self) -> None:
        self.taken_s, self.critic = 0.0, nn.LazyLinear(3)
        with torch.inference_mode():
            self.outputs = torch.zeros(MAX_READ + 1)
        self.arrays = [np.arange(4)[::-1], np.arange(4).astype(">f4"), np.broadcast_to(1.0, 3)]

    def aim(self, model: Any, rows: Tensor) -> Tensor:  # noqa: ARG002
        self.taken_s = random.SystemRandom().random()
        return torch.ones(())


# what each micro-batch changes for the next one, and what a resume loses
CASES: dict[type, tuple[str, str]] = {
    Plain: ("", ""), Recomputed: ("", ""), Logged: ("", "task.calls"), Saved: ("task.calls", ""),
    Counter: ("task.calls", "task.calls"), Queue: ("task.past", "task.past"),
    Hidden: ("model.out.hidden", "model.out.hidden"), Centre: ("model.centre", ""),
    Teacher: ("task.teacher", "task.teacher"), Momentum: ("model.teacher.weight", ""),
    Spectral: ("model.weight_u", ""), ReadsGradients: ("the parameters' .grad", ""), Annealed: ("", "task.alpha"),
    ModuleCounter: ("task.calls", "task.calls"), Timed: ("", ""),
    Collected: ("", ""), GlobalCounter: (f"{__name__}.CALLS", f"{__name__}.CALLS"),
    ClassCounter: ("Shared.calls", "Shared.calls"),
    SecondData: ("task.rows", "task.rows"), SlowWeights: ("", "optimizer.slow, optimizer.steps"),
    HalfSaved: ("", "optimizer.steps"), Cached: ("", ""), Decayed: ("", "Decay.steps"),
    CountingSchedule: ("", "CountingSchedule.schedule.factor: calls"),
    Noise: ("", "task.random"), Shaken: ("", "model.out.random, task.past"), Reseeded: ("", ""),
}  # fmt: skip


def run(place: Path, kind: type, *keys: str) -> None:
    plan = make_plan(
        "batch.global_size=6", "train.loader_workers=0", "precision=fp32", "run.calibrate_s=0", "strategy=single",
        "cluster.device=cpu", "cluster.workers_per_node=1", "train.steps=4", "checkpoint.enabled=false", *keys,
        samples=len(DATA), run_dir=str(place),
    )  # fmt: skip
    names = {Annealed: ["Anneal"], Decayed: ["Decay", "Reports"]}.get(kind, [])
    callbacks = tuple({"_target_": f"{__name__}.{name}"} for name in names)
    own = {"own_optimizer": hasattr(kind, "optimizer"), "own_schedule": hasattr(kind, "schedule")}
    task = dataclasses.replace(plan.task, target=f"{__name__}.{kind.__name__}", **own)
    train(dataclasses.replace(plan, task=task, callbacks=callbacks), bool)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", CASES)
def test_state_of_forward_passes_is_named(tmp_path: Path, kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    read, lost = CASES[kind]
    run(tmp_path, kind, "batch.accumulation=2")
    out = capsys.readouterr().out
    assert (f"The loss reads state that forward passes write: {read}.\n" in out) == bool(read), out
    assert ("The loss reads state" in out) == bool(read)
    assert (f"State that checkpoints do not have: {lost}.\n" in out) == bool(lost), out
    assert ("State that checkpoints" in out) == bool(lost)
    assert "Evaluations read" not in out
    if kind is SecondData:  # 4 steps of 2 micro-batches
        assert SecondData.taken == [float(number) for number in range(8)]
    if kind in (Counter, Centre, Spectral, ReadsGradients):
        run(tmp_path, kind, "batch.accumulation=1")
        assert ("The loss reads state" in capsys.readouterr().out) == (kind is ReadsGradients)


@pytest.mark.usefixtures("alone")
def test_state_that_only_evaluations_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for micro_batches in (2, 1):
        run(tmp_path, Whitened, f"batch.accumulation={micro_batches}")
        out = capsys.readouterr().out
        named = "Evaluations read state that forward passes write: model.norm.running_mean, model.norm.running_var.\n"
        assert (named in out) == (micro_batches > 1), out
        assert ("Evaluations read" in out) == (micro_batches > 1)
        assert "The loss reads state" not in out
