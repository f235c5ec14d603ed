"""Initial values from other weights: each rank reads its part; what does not fit is named with the nearest names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.errors import ConfigError, UserError
from launcher.plan.initial_weights import InitialWeights
from launcher.train.checkpoint.initial import InitialValues, initial_values, require_fit
from launcher.train.checkpoint.weights import Region, StoredTensor
from launcher.train.parallel.base import own_region
from launcher.train.world import World

SOURCE = InitialWeights(path="/weights", run=None, step=None, digest="")


class InMemory:
    """Weights that note how many numbers each read returns."""

    def __init__(self, **tensors: Tensor) -> None:
        self.values = tensors
        self.tensors = {name: StoredTensor(tuple(value.shape), value.dtype) for name, value in tensors.items()}
        self.others: list[str] = []
        self.sizes: list[int] = []

    def read(self, name: str, region: Region | None = None) -> Tensor:
        value = self.values[name] if region is None else self.values[name][region]
        self.sizes.append(value.numel())
        return value


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one of four ranks, of which the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


def test_a_rank_reads_only_its_part(rank: int) -> None:  # noqa: ARG001
    flat, pairs = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    for shape in ((8, 3), (7, 2), (5, 4), (1, 6), (4,), (6, 2, 3)):
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        layouts = [(flat, [Shard(0)]), (pairs, [Replicate(), Shard(0)]), (flat, [Shard(len(shape) - 1)])]
        for mesh, placements in layouts:
            part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            assert whole[own_region(part)].equal(part.to_local())

            model: Any = nn.Module()
            empty = distribute_tensor(torch.zeros(shape), mesh, placements, src_data_rank=None)
            model.register_buffer("weight", empty)  # a parameter would be on the mesh of an earlier test
            weights, values = InMemory(weight=whole.double()), InitialValues(SOURCE, World(0, 1, 0))
            values._weights = weights
            values.fill(model)
            assert model.weight.to_local().equal(part.to_local()), "converted to the dtype of the parameter"
            assert weights.sizes == [part.to_local().numel()]


def tied(**changes: Tensor) -> tuple[nn.Module, InMemory]:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False), "norm": nn.BatchNorm1d(2)})
    model["head"].weight = model["embed"].weight
    return model, InMemory(**{**model.state_dict(), **changes})


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    model, weights = tied()
    for name in ("embed.weight", "head.weight"):
        without = InMemory(**{key: torch.full_like(v, 2) for key, v in weights.values.items() if key != name})
        require_fit(model, SOURCE, without)
        values = InitialValues(SOURCE, World(0, 1, 0))
        values._weights = without
        values.fill(model)
        assert all((value == 2).all() for value in model.state_dict().values())
    values._weights = InMemory(**weights.values | {"head.weight": torch.zeros(4, 2)})
    with pytest.raises(UserError, match=r"embed.weight and head.weight are one parameter of the model, and two with"):
        values.fill(model)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"norm.wieght": torch.ones(2)}, ["norm.wieght is not in the model"]),
        ({"embed.weight": torch.ones(2, 4)}, ["embed.weight has the shape [2, 4] there, and [4, 2] in the model"]),
        (
            {"norm.num_batches_tracked": torch.ones(())},
            ["is in torch.float32 there, which cannot be converted to the model's torch.int64"],
        ),
        (
            {"norm.num_batches_tracked": torch.ones((), dtype=torch.uint64)},
            ["is in torch.uint64 there, which cannot be converted to the model's torch.int64"],
        ),
    ],
)
def test_what_does_not_fit(changes: dict[str, Tensor], lines: list[str]) -> None:
    model, weights = tied(**changes)
    with pytest.raises(ConfigError) as error:
        require_fit(model, SOURCE, weights)
    for line in lines:
        assert line in str(error.value).splitlines()[1]


def test_missing_names_have_the_nearest_one() -> None:
    model, weights = tied()
    renamed = {name.replace("norm.", "norm_1."): value for name, value in weights.values.items()}
    with pytest.raises(ConfigError) as error:
        require_fit(model, SOURCE, InMemory(**renamed))
    text = str(error.value)
    assert "norm.weight is not among them; the nearest name is 'norm_1.weight'" in text
    assert "norm_1.bias is not in the model; the nearest name is 'norm.bias'" in text
    assert text.count("and 1 more") == 2


def filled(model: nn.Module, weights: InMemory) -> Any:
    require_fit(model, SOURCE, weights)
    values = InitialValues(SOURCE, World(0, 1, 0))
    values._weights = weights
    values.fill(model)
    return model


class OtherRank(World):
    """A rank 0 whose only other rank has found other weights."""

    def of_all(self, value: Any, group: Any = None) -> list[Any]:  # noqa: ARG002
        return [value, dataclasses.replace(SOURCE, path="/weights/newer", digest="2")]


def test_ranks_with_different_weights_are_refused() -> None:
    plan: Any = type("Plan", (), {"initial": SOURCE})
    with pytest.raises(ConfigError, match=r"different weights: rank 0 /weights, .*rank 1 /weights/newer, digest 2"):
        initial_values(plan, OtherRank(0, 2, 0))


class Hooked(nn.Linear):
    """Its state_dict has a copy of the weight, and a value that is no parameter."""

    def __init__(self, **more: Tensor) -> None:
        super().__init__(2, 2)
        self.scale = 1.0
        self.register_state_dict_post_hook(lambda _, state, start, __: self._change(state, start, more))

    def _change(self, state: dict[str, Any], start: str, more: dict[str, Tensor]) -> None:
        state[f"{start}weight"] = state[f"{start}weight"].clone()
        state.update({start + name: value for name, value in more.items()})

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.scale)

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = float(state)


def test_copies_in_the_state_dict_and_extra_state_are_loaded() -> None:
    weights = InMemory(**{f"0.{name}": torch.full_like(v, 3) for name, v in Hooked().state_dict().items()})
    (layer,) = filled(nn.Sequential(Hooked()), weights)
    assert isinstance(layer, Hooked)
    assert (layer.weight == 3).all()
    assert layer.scale == 3
    with pytest.raises(
        ConfigError, match=r"0\.more is in the model's state_dict, and is neither a parameter nor a buffer"
    ):
        filled(nn.Sequential(Hooked(more=torch.ones(1))), InMemory(**weights.values, **{"0.more": torch.ones(1)}))


def test_values_that_would_become_infinite_are_refused() -> None:
    weights = InMemory(weight=torch.full((2, 2), 1e5), bias=torch.tensor([float("inf"), 1]))
    with pytest.raises(UserError, match=r"weight is in torch.float32 there, and has values that are infinite in the"):
        filled(nn.Linear(2, 2).half(), weights)
    assert filled(nn.Linear(2, 2).bfloat16(), weights).weight.isfinite().all()


def test_extra_state_of_another_kind() -> None:
    """A text where a parameter is; and a tensor that the module's own method does not take."""
    weights = InMemory(**Hooked().state_dict())
    weights.others = ["bias"]
    del weights.tensors["bias"]
    with pytest.raises(ConfigError, match=r"\n  bias is a tensor on one side only\n"):
        filled(Hooked(), weights)
    weights = InMemory(**{**Hooked().state_dict(), "_extra_state": torch.ones(2)})
    with pytest.raises(UserError, match=r"init_from=.*does not take the _extra_state that is there: \w+Error: "):
        filled(Hooked(), weights)


class Wrapped(nn.Module):
    """A module with the names of one that torch.compile wraps; its import would take seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)


@pytest.mark.parametrize("compiled", ["model", "weights"])
def test_names_of_compiled_modules(compiled: str) -> None:
    plain, wrapped = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(Wrapped())
    model, source = (wrapped, plain) if compiled == "model" else (plain, wrapped)
    wanted = source.state_dict()
    found = filled(model, InMemory(**wanted)).state_dict()
    assert all(a.equal(b) for a, b in zip(found.values(), wanted.values(), strict=True))
