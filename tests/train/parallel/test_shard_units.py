"""Shard units: what is found by itself, and what a task may not name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.errors import TaskError
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.train.parallel.shard_units import find_units, owned


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = self.layers[2]


def test_repeated_blocks_are_found() -> None:
    task = BytesGPT(depth=3)
    model = task.model()
    assert find_units(model) == list(model.blocks) == find_units(model, task.shard_units(model))
    in_units = sum(p.numel() for unit in find_units(model) for p in unit.parameters())
    assert in_units == task.facts()["unit_parameters"]


def test_blocks_of_a_sequential_are_found_and_single_ones_are_not() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert find_units(model) == [model[1], model[3]]
    assert find_units(nn.Linear(4, 4)) == []


def test_a_block_that_is_used_elsewhere_stays_with_the_root() -> None:
    model = Blocks()
    assert find_units(model) == [model.layers[0], model.layers[1]]


def test_blocks_that_share_a_parameter_stay_with_the_root() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1].weight = model[0].weight
    assert find_units(model) == [model[2]]


def tied_to_the_root() -> tuple[nn.Module, list[nn.Module]]:
    model = nn.Module()
    model.embed, model.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.blocks[1].weight = model.embed.weight
    return model, [*model.blocks]


def test_a_block_that_shares_a_parameter_with_the_root_stays_with_it() -> None:
    model, blocks = tied_to_the_root()
    assert find_units(model) == [blocks[0], blocks[2]]


def test_lists_in_lists_are_looked_into() -> None:
    """A list has no forward that could be hooked; its elements have."""
    model = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]) for _ in range(2))
    assert find_units(model) == [model[0][0], model[0][1], model[1][0], model[1][1]]


def test_inner_units_come_first_and_own_their_parameters() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    outer, inner = model[0], model[0][1]
    units = find_units(model, [outer, inner])
    assert units == [inner, outer]
    groups = owned(units, model)
    assert [len(parameters) for _, parameters in groups] == [2, 2, 2]
    assert groups[0][1] == list(inner.parameters())


def shared() -> tuple[nn.Module, list[nn.Module]]:
    model = Blocks()
    return model, [model.layers[0], model.layers[2]]


def tied() -> tuple[nn.Module, list[nn.Module]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model, list(model)


def stranger() -> tuple[nn.Module, list[nn.Module]]:
    return nn.Sequential(nn.Linear(4, 4)), [nn.Linear(4, 4)]


def whole() -> tuple[nn.Module, list[nn.Module]]:
    model = Blocks()
    return model, [model]


def empty() -> tuple[nn.Module, list[nn.Module]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return model, [model[1]]


def container() -> tuple[nn.Module, list[nn.Module]]:
    model = Blocks()
    return model, [model.layers]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shared, "layers.2 and last are one Linear under two parents"),
        (tied, "0 and 1 share the parameter weight"),
        (stranger, "Linear is not part of this model"),
        (container, "layers is a ModuleList, which has no forward of its own"),
        (whole, "the model itself is among them"),
        (empty, "1 has no parameters to shard"),
        (tied_to_the_root, "blocks.1 shares the parameter weight with a module that is in no unit"),
    ],
)
def test_what_cannot_be_a_unit(make, message: str) -> None:  # type: ignore[no-untyped-def]
    model, units = make()
    with pytest.raises(TaskError) as caught:
        find_units(model, units)
    assert message in str(caught.value)


class WithEdges(nn.Module):
    """A unit that returns a sparse tensor beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.edges = nn.Linear(4, 4), torch.eye(4).to_sparse()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.edges


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithEdges() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, edges = block(x)
            x = x @ edges.to_dense()
        return x


class Recursive(nn.Module):
    """A unit that calls itself, and uses its parameters before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self(x, depth - 1)) if depth else x


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Recursive() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(model: Callable[[], nn.Module], *overrides: str) -> Engine:
    plan = make_plan(
        ["batch.global_size=4", "batch.micro_size=2", "train.loader_workers=0", "train.steps=3", "precision=fp32",
         "cluster.device=cpu", "cluster.workers_per_node=1", "run.calibrate_s=0", *overrides],
        samples=12,
    )  # fmt: skip
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, 0.1), plan)
    for window in engine.windows(list(torch.sin(torch.arange(48.0)).reshape(12, 4))):
        for batch in window:
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
    return engine


@pytest.mark.usefixtures("alone")
def test_a_unit_may_return_a_sparse_tensor() -> None:
    assert trained(Graph, "strategy=fsdp").steps == 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sync", ["every", "gather_once"])
def test_a_unit_may_call_itself(sync: str) -> None:
    wanted = trained(Tree, "strategy=single").model.state_dict()
    sharded = trained(Tree, "strategy=fsdp", f"strategy.sync={sync}").model.state_dict()
    for name, value in sharded.items():
        torch.testing.assert_close(value.full_tensor(), wanted[name])


class Views(nn.Module):
    """Units that return views, which the model changes in place, or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.blocks, self.in_place = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2)),
                                                                 nn.Flatten()) for _ in range(2)), in_place  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x.mul_(2) if self.in_place else x * 2
        return x


@pytest.mark.usefixtures("alone")
def test_a_view_that_a_unit_returns_is_refused_only_if_it_is_changed_in_place() -> None:
    """torch warns of each of them; tests make an error of it."""
    assert trained(lambda: Views(False), "strategy=fsdp", "strategy.sync=every").steps == 3
    with pytest.raises(TaskError, match=r"write y = y \+ 1, not y \+= 1"):
        trained(lambda: Views(True), "strategy=fsdp", "strategy.sync=every")
