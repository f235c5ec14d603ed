"""Shard units: what is found by itself, and what a task may not name."""

from __future__ import annotations

import pytest
from torch import nn

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
