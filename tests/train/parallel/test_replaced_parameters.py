"""Attributes, hooks and references of parameters that FSDP replaces by shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher import Engine, make_plan
from launcher.errors import TaskError

OPTIONS = (
    "cluster.workers_per_node=1", "batch.global_size=4", "batch.micro_size=2", "train.steps=2", "precision=fp32",
    "wandb.mode=disabled", "run.calibrate_s=0",
)  # fmt: skip


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(6, 6), nn.ModuleList([nn.Sequential(nn.Linear(6, 6)) for _ in range(2)])
        self.recurrent = nn.LSTM(6, 6)  # has a list of its parameters, and keeps it up to date
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.recurrent(x)[0])


class Task:
    """A task that keeps what ``attach`` returns."""

    def __init__(self, attach: Callable[[Any], object]) -> None:
        self._attach = attach
        self.kept: object = None

    def model(self) -> nn.Module:
        model = Model()
        self.kept = self._attach(model)
        return model


@pytest.fixture
def engine_with(alone: None) -> Callable[..., Engine]:  # noqa: ARG001
    """The engine of a sharded model to which a function attaches something."""

    def make(attach: Callable[[Any], object], strategy: str = "fsdp", optimizer: Any = None) -> Engine:
        task = Task(attach)
        plan = make_plan([*OPTIONS, f"strategy={strategy}"], samples=8)
        return Engine(task.model, optimizer or (lambda parameters: torch.optim.SGD(parameters, 0.1)), plan, owner=task)

    return make


def attach_to_all(attribute: str) -> Callable[[Model], None]:
    def attach(model: Model) -> None:
        for name, parameter in model.named_parameters():
            setattr(parameter, attribute, name)

    return attach


def test_attributes_are_there_when_the_optimizer_is_made(engine_with: Callable[..., Engine]) -> None:
    """Parameter groups may follow from them (no weight decay)."""
    seen: list[tuple[str, bool]] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        own = list(parameters)
        seen.extend((parameter.name_of_mine, isinstance(parameter, DTensor)) for parameter in own)
        return torch.optim.SGD(own, 0.1)

    engine = engine_with(attach_to_all("name_of_mine"), optimizer=optimizer)
    assert seen == [(name, True) for name, _ in engine.model.named_parameters()]


@pytest.mark.parametrize(
    ("attach", "place"),
    [
        (lambda model: setattr(model, "penalised", [model.embed.weight, model.blocks[0][0].weight]), "Model.penalised"),
        (lambda model: setattr(model.blocks[0], "other", {"a": [model.embed.weight]}), "Sequential.other"),
        (lambda model: model.embed.weight, "Task.kept"),
        (lambda model: tuple(model.embed.parameters()), "Task.kept"),
    ],
)
def test_what_refers_to_a_replaced_parameter_is_named(
    attach: Callable[[Any], object], place: str, engine_with: Callable[..., Engine]
) -> None:
    """A loss that used it would see the initial values."""
    with pytest.raises(
        TaskError, match=rf"{place} also refers to the parameter embed\.weight or its memory, which strategy=fsdp"
    ):
        engine_with(attach)
    if torch.distributed.is_initialized():
        engine_with(attach, strategy="ddp")


def share_by_data(model: Any) -> None:
    model.other = nn.Linear(6, 6)
    model.other.weight.data = model.embed.weight.data


def share_rows(model: Any) -> None:
    model.rows = nn.Parameter(model.embed.weight.data[2:4])


def keep_in_buffer(model: Any) -> None:
    model.register_buffer("view", model.embed.weight.data)


@pytest.mark.parametrize("attach", [share_by_data, share_rows, keep_in_buffer])
def test_parameters_that_share_memory_without_being_one_are_refused(
    attach: Callable[[Any], object], engine_with: Callable[..., Engine]
) -> None:
    """They would be trained apart."""
    with pytest.raises(TaskError, match=r"embed\.weight and (other\.weight|rows|view) share memory without being one"):
        engine_with(attach)


def test_parameters_that_are_parts_of_one_tensor_are_sharded(engine_with: Callable[..., Engine]) -> None:
    """The weights of an LSTM on a GPU are such parts."""

    def attach(model: Any) -> None:
        flat = torch.arange(12.0)
        model.first, model.second = nn.Parameter(flat[:6]), nn.Parameter(flat[6:])

    engine_with(attach)


@pytest.mark.parametrize(
    ("attach", "place"),
    [
        (lambda model: setattr(model, "turned", model.embed.weight.detach().t()), "Model.turned"),
        (lambda model: setattr(model, "kept", {"a": [model.embed.weight.detach()[1]]}), "Model.kept"),
        (lambda model: model.embed.weight.data, "Task.kept"),
    ],
)
def test_a_tensor_that_shares_the_memory_of_a_parameter_is_named(
    attach: Callable[[Any], object], place: str, engine_with: Callable[..., Engine]
) -> None:
    with pytest.raises(TaskError, match=rf"{place} also refers to the parameter embed\.weight or its memory, which"):
        engine_with(attach)


@pytest.mark.parametrize(
    ("attach", "message"),
    [
        (lambda model: model.embed.weight.register_hook(lambda g: g * 0), r"embed\.weight has a gradient hook"),
        (
            lambda model: model.embed.weight.register_post_accumulate_grad_hook(lambda _: None),
            r"embed\.weight has a gradient hook",
        ),
        (lambda model: setattr(model, "phase", nn.Parameter(torch.zeros(3, dtype=torch.cfloat))), "phase is complex"),
        (lambda model: setattr(model, "turned", nn.Parameter(torch.zeros(3, 2).t())), "turned is not contiguous"),
    ],
)
def test_what_shards_cannot_have_is_refused(
    attach: Callable[[Any], object], message: str, engine_with: Callable[..., Engine]
) -> None:
    with pytest.raises(TaskError, match=rf"^model: {message}, which strategy=fsdp cannot .*\n.*strategy=ddp\.$"):
        engine_with(attach)


def test_a_list_of_the_optimizers_own_is_no_obstacle(engine_with: Callable[..., Engine]) -> None:
    """It is given the shards."""
    engine_with(lambda model: torch.optim.SGD(model.parameters(), 0.1))
