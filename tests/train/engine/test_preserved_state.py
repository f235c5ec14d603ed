"""State that passes without training must restore: attributes of the model and of the task, and what they refer to."""

from __future__ import annotations

import array
import copy
import itertools
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from launcher import Engine
from launcher.errors import TaskError
from launcher.plan.run_plan import RunPlan
from launcher.train.engine import preserved_state
from launcher.train.engine.preserved_state import ChangingParameters, PreservedState, SavedAttributes
from tests.helpers import make_plan
from tests.infra.workers import run_shrinking
from tests.train.engine import clocks
from tests.train.engine.clocks import WIDTH, Clocks, Counting, OfWindow


class Part:
    count = 0


class Model(nn.Module):
    data: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps, self.mean = nn.Linear(2, 2), 0, torch.zeros(3)


class Task:
    samples: Any
    data: Any
    same: Any
    slotted: Any
    space: Any
    mapped: Any
    tensor: Any
    expanded: Any
    meta: Any
    system: Any
    complex: Any
    shared: ClassVar[Any]

    def __init__(self) -> None:
        self.calls, self.part, self.itself = 0, Part(), self
        self.lists = [[1, 2], deque([3], maxlen=2), {"a": {4}}, (Part(),)]
        self.generators = torch.Generator().manual_seed(1), random.Random(2), np.random.default_rng(3)
        self.legacy = np.random.RandomState(4)
        self.array, self.view = np.zeros(3), torch.ones(1).expand(4)
        self.model = Model()

    def numbers(self) -> list[float]:
        torch_generator, python, numpy = self.generators
        drawn = [float(torch.rand((), generator=torch_generator)), python.random(), numpy.random(), self.legacy.rand()]
        return [*drawn, float(self.array.sum()), float(self.view.sum()), float(self.model.mean.sum())]

    def change(self) -> None:
        lists: Any = self.lists
        lists[0].append(5)
        lists[1].extend([6, 7])
        lists[2]["a"].add(8)
        lists[2]["b"] = 9
        lists[3][0].count = 10
        self.calls += 1
        self.part.count += 1
        self.part, self.new = Part(), 11
        self.array += 1
        self.model.steps += 1
        self.model.mean.data.add_(1)
        self.model.mean = torch.ones(2)


def test_attributes_and_what_they_refer_to_are_restored() -> None:
    task = Task()
    part, lists, mean = task.part, task.lists, task.model.mean
    saved = SavedAttributes(task.model, task)
    wanted = task.numbers()
    for _ in range(2):
        task.change()
        saved.restore()
        assert task.numbers() == wanted
        task.numbers()
        saved.restore()
        assert task.lists is lists
        assert lists[:3] == [[1, 2], deque([3]), {"a": {4}}]
        assert (task.part, task.model.mean) == (part, mean)
        assert (task.calls, part.count, lists[3][0].count, task.model.steps) == (0, 0, 0, 0)
        assert not hasattr(task, "new")


def test_iterators_go_back_and_stay_what_they_are() -> None:
    data: Any = [*range(6)]
    task, echoed = Task(), list[str]()

    def rows() -> Generator[int, str, None]:
        for number in itertools.count():
            echoed.append((yield number))

    task.samples = loaded = iter(torch.utils.data.DataLoader(data, batch_size=2))
    task.data, task.space, task.mapped = iter(data), rows(), zip(data, data, strict=True)
    task.same, Task.shared = task.data, itertools.count()
    next(task.space)
    for _ in range(2):
        saved = SavedAttributes(task)
        before = task.data, task.space
        for _ in range(2):
            taken = [next(task.data), next(task.same), next(task.mapped)[0]]
            assert taken == [0, 1, 0]
            assert next(Task.shared) == 0
            assert next(task.samples).tolist() == [0, 1]
            assert next(task.space) == 1
            saved.restore()
            assert (task.data, task.space) == before
    assert len(task.samples) == len(loaded) == 3
    assert task.samples._num_workers == 0
    assert task.samples._num_workers == 0
    assert task.space.send("more") == 2
    assert echoed[-1] == "more"
    assert bool(task.data), "an iterator without a length is true"
    task.space.close()
    assert task.space.gi_frame is None
    assert [*copy.deepcopy(task.data)] == data


def test_the_models_own_parts_and_data_sets_stay_as_they_are() -> None:
    model = Model()
    model.data = data = torch.utils.data.TensorDataset(torch.zeros(2))
    saved = SavedAttributes(model)
    with torch.no_grad():
        model.layer.weight.fill_(5)
    model.register_buffer("more", torch.ones(1))
    data.tensors[0].fill_(3)
    saved.restore()
    assert float(model.layer.weight.detach().sum()) == 20
    assert float(data.tensors[0].sum()) == 6
    assert [name for name, _ in model.named_buffers()] == ["more"]


def test_what_is_too_large_to_copy_is_named_if_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preserved_state, "MAX_COPY_BYTES", 8)
    model = Model()
    saved = SavedAttributes(model)
    assert saved.restore() == ""
    model.mean += 1
    assert saved.restore() == "a tensor of shape (3,)"


class Counted(type):
    of_all = 0


class Named(metaclass=Counted):
    calls, turns = 0, itertools.count()

    class Inner:
        calls = 0

    @classmethod
    def call(cls) -> int:
        from tests.train.engine import clocks as imported

        imported.Tally.passes += 1
        cls.calls += 1
        cls.Inner.calls += 1
        Counted.of_all += 1
        return next(cls.turns)


def test_classes_that_code_only_names_are_restored() -> None:
    def loss() -> tuple[int, ...]:
        return Named.call(), Named.calls, Named.Inner.calls, Counted.of_all, clocks.Tally.passes

    Named.call()
    clocks.Tally.passes = 0
    saved = SavedAttributes(loss)
    assert {"Named.calls", "Inner.calls", "Counted.of_all", "Tally.passes"} <= saved.variables.keys()
    for _ in range(2):
        assert loss() == (1, 2, 2, 2, 1)
        saved.restore()


class OfThread(threading.local):
    calls = 0


CALLS, NOTES = ContextVar("calls", default=0), ContextVar[list[int]]("notes")


def test_variables_of_threads_and_contexts_are_restored() -> None:
    task = SimpleNamespace(plain=threading.local(), own=OfThread(), unset=ContextVar[int]("unset"))
    task.plain.seen = [0]
    NOTES.set([0])

    def loss() -> tuple[Any, ...]:
        task.plain.seen.append(1)
        task.plain.new = 2
        task.own.calls += 1
        CALLS.set(CALLS.get() + 1)
        NOTES.get().append(3)
        return [*task.plain.seen], task.own.calls, CALLS.get(), [*NOTES.get()]

    saved = SavedAttributes(task, loss)
    for _ in range(2):
        assert loss() == ([0, 1], 1, 1, [0, 3])
        saved.restore()
    assert vars(task.plain).keys() == {"seen"}


def test_classes_functions_and_modules_of_unknown_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is made by ``exec`` or ``type()`` may name no module, and an import may be blocked."""
    monkeypatch.setitem(sys.modules, "blocked", None)
    kind: Any = type("Made", (), {"__module__": None, "calls": 0})
    task = SimpleNamespace(kind=kind, made=kind())

    def loss() -> None:
        blocked = kind  # the name of a module, and a class by itself
        blocked.calls += 1
        task.made.last = iter([blocked])
        task.blocked = Foreign.calls

    loss.__module__ = None  # pyright: ignore[reportAttributeAccessIssue]
    loss()
    saved = SavedAttributes(loss, kind())
    loss()
    saved.restore()
    assert kind.calls == 1


class Foreign:
    calls = 0
    __module__ = None  # pyright: ignore[reportAssignmentType]


@dataclass(slots=True)
class Slotted:
    count: int = 0


def test_long_data_does_not_hide_what_lies_deep() -> None:
    task, inner = Task(), Model()
    model = nn.Sequential(nn.Sequential(nn.Sequential(inner)))
    task.samples = [(str(n), n) for n in range(20_000)]
    task.slotted, task.space = Slotted(), SimpleNamespace(count=0)
    saved = SavedAttributes(model, task)
    inner.steps, task.slotted.count, task.space.count = 5, 6, 7
    task.samples.append(("more", 0))
    saved.restore()
    assert (inner.steps, task.slotted.count, task.space.count, len(task.samples)) == (0, 0, 0, 20_000)


def test_torchs_own_objects_are_left_alone() -> None:
    """An optimizer that the task holds has its state in dicts."""
    task, model = Task(), nn.Sequential(Model())
    task.space = torch.optim.SGD(model.parameters(), 0.1)
    saved = SavedAttributes(model, task)
    task.space.param_groups[0]["lr"] = 0.5
    saved.restore()
    assert task.space.param_groups[0]["lr"] == 0.5


def test_a_module_of_the_task_and_its_optimizer() -> None:
    task, model = Task(), nn.Sequential(Model())
    task.space, task.tensor = torch.optim.Adam((critic := nn.Linear(3, 1)).parameters(), 0.1), critic
    saved = SavedAttributes(model, task)
    before = critic.weight.detach().clone()
    for _ in range(2):
        critic(torch.ones(3)).sum().backward()
        task.space.step()
        assert not critic.weight.equal(before)
        assert saved.restore() == ""
        assert critic.weight.equal(before)
        assert not task.space.state


def test_what_no_pass_has_changed_is_not_written_to(tmp_path: Path) -> None:
    """Memory that is mapped from a file may be read-only, and NaN is not equal to itself."""
    np.save(tmp_path / "data.npy", np.full(8, np.nan))
    task = Task()
    task.mapped = np.load(tmp_path / "data.npy", mmap_mode="r")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        task.tensor = torch.from_numpy(np.load(tmp_path / "data.npy", mmap_mode="r"))
    task.expanded, task.meta = torch.full((1,), torch.nan).expand(4), torch.ones(2, device="meta")
    task.system, task.complex = random.SystemRandom(), torch.ones(2, dtype=torch.complex128)
    SavedAttributes(task).restore()


def plan_of(*overrides: str) -> RunPlan:
    return make_plan(
        "cluster.workers_per_node=1", "batch.global_size=8", "train.loader_workers=0", "precision=fp32",
        "batch.micro_size=4", "train.steps=3", *overrides, samples=24,
    )  # fmt: skip


def trained(task: Counting, overrides: list[str], *, terms: bool = False, fails_at: int | None = None) -> Clocks:
    """Train on one rank, and return the model. ``fails_at``: the pass in which memory does not suffice."""
    model, plan = Clocks(norm="batch.norm=window" in overrides), plan_of(*overrides)
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, 0.05), plan, owner=task)
    of_window = isinstance(task, OfWindow)
    forward: Any = None if of_window else task.terms if terms else task.loss
    data = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))

    def loss(batch: torch.Tensor) -> Any:
        return engine.outputs.loss(engine.model, batch, len(batch)) if of_window else forward(engine.model, batch)

    run_shrinking(engine, engine.windows(list(data), forward=forward), loss, fails_at)
    return model


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("task", "overrides", "options", "passes"),
    [
        pytest.param(Counting, [], {"terms": True}, 6, id="count of the terms' items"),
        pytest.param(Counting, ["batch.norm=window"], {}, 6, id="window's BatchNorm"),
        pytest.param(OfWindow, [], {}, 6, id="window's loss"),
        pytest.param(Counting, ["batch.on_oom=shrink"], {"fails_at": 3}, 2 + 4 + 4, id="window that runs again"),
    ],
)
def test_each_training_pass_is_counted_once(
    task: type[Counting], overrides: list[str], options: dict[str, Any], passes: int
) -> None:
    made = task()
    assert trained(made, overrides, **options).numbers() == [passes] * 6
    assert made.calls == len(clocks.SEEN) == passes


class Ring(list[int]):
    """A list whose elements are read by number only."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index % len(self))


def test_lists_that_have_no_slices_and_arrays_are_restored() -> None:
    ring, numbers, content = Ring([1, 2, 3]), array.array("d", [1e3, 2e3]), bytearray(b"some")
    state = SavedAttributes(SimpleNamespace(ring=ring, numbers=numbers, content=content))
    ring.append(4)
    numbers[0], content[0] = 5.0, 0
    state.restore()
    assert (list(ring), list(numbers), bytes(content)) == ([1, 2, 3], [1e3, 2e3], b"some")


class Late(nn.Module):
    """Changes a parameter in its second pass only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(2, 2), nn.Parameter(torch.zeros(3), requires_grad=False)

    def write(self) -> None:
        with torch.no_grad():
            self.frozen += 1


def test_parameters_that_change_late_are_restored_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, changing = Late(), ChangingParameters(ranks=1)

    def save() -> PreservedState:
        return PreservedState(model, torch.device("cpu"), [], changing)

    save().restore("the pass", "Use none.")
    assert changing.known and not changing.names  # noqa: PT018
    late = save()
    model.write()
    model.layer = nn.Linear(3, 3)
    model.frozen.requires_grad_(True)
    late.restore("the pass", "Use none.")
    assert (model.frozen.tolist(), model.frozen.requires_grad, model.layer.in_features) == ([0] * 3, False, 2)
    assert changing.names == {"frozen"}
    changing.names.clear()
    monkeypatch.setattr(preserved_state, "MAX_COPY_BYTES", 4)
    large = save()
    model.write()
    with pytest.raises(TaskError, match=r"changes the parameters frozen, too large .* after the pass\.\n  Use none"):
        large.restore("the pass", "Use none.")
    known = save()
    model.write()
    known.restore("the pass", "Use none.")
    assert model.frozen.tolist() == [1] * 3, "a parameter that is known to change is always copied"
