"""Models that cannot be trained or sharded are refused by the names of their parts; no others are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.errors import TaskError
from launcher.train.inspection.built_task import BuiltTask
from launcher.train.inspection.task_probe import _described
from launcher.train.parallel.model_check import require_trainable
from tests.helpers import inspection_of


class Whole(nn.Module):
    """A linear layer, and the parts that are given."""

    def __init__(self, **parts: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)


class Divided:
    """A task whose model is divided among ranks that it cannot have met yet."""

    def model(self) -> nn.Module:
        return parallelize_module(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), ColwiseParallel())

    def train_data(self) -> list[int]:
        return list(range(1000))

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model(batch).sum(), len(batch)


def sparse(*, trained: bool = True) -> nn.Module:
    return nn.Embedding(4, 4, sparse=True).requires_grad_(trained)


def initialised() -> nn.Module:
    model = Whole(lazy=nn.LazyLinear(4))
    model.lazy(torch.zeros(1, 3))  # pyright: ignore[reportCallIssue]
    return model


EVERYWHERE: dict[str, Callable[[], nn.Module]] = {
    "model: Whole has no parameter that requires a gradient": lambda: Whole().requires_grad_(False),
    "model: lazy.weight, lazy.bias have no shape": lambda: Whole(lazy=nn.LazyLinear(4)),
    "model: norm.running_mean, norm.running_var have no shape": lambda: Whole(norm=nn.LazyBatchNorm1d(affine=False)),
    "model: edges has a sparse layout": lambda: Whole(edges=torch.eye(4).to_sparse()),
    "model: part.weight has sparse gradients": lambda: Whole(part=sparse()),
    "model: weight has sparse gradients": lambda: nn.EmbeddingBag(4, 4, sparse=True),
    "model: part.weight, part.bias have no values": lambda: Whole(part=nn.Linear(4, 4, device="meta")),
}
SHARDED: dict[str, Callable[[], nn.Module]] = {
    "model: part has TorchScript's fixed parameters": lambda: Whole(
        part=torch.jit.trace_module(nn.ReLU(), {"forward": torch.ones(1)})
    ),
    "model: part has no numbers": lambda: Whole(part=nn.Parameter(torch.zeros(0, 4))),
    "model: part has no dimension": lambda: Whole(part=nn.Parameter(torch.zeros(()))),
}
ALLOWED: dict[str, Callable[[], nn.Module]] = {
    "lazy modules that have run": initialised,
    "a frozen embedding": lambda: Whole(part=sparse(trained=False)),
    "a frozen parameter without numbers": lambda: Whole(part=nn.Parameter(torch.zeros(0, 4), requires_grad=False)),
    "a buffer without numbers": lambda: Whole(part=torch.zeros(0)),
}


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*torch.jit.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("expected", [*EVERYWHERE, *SHARDED])
def test_what_is_refused(expected: str) -> None:
    model, everywhere = (EVERYWHERE | SHARDED)[expected](), expected in EVERYWHERE
    with pytest.raises(TaskError) as caught:
        require_trainable(model, sharded=True, deferred=False)
    assert str(caught.value).startswith(expected)
    if everywhere:
        with pytest.raises(TaskError):
            require_trainable(model, sharded=False, deferred=False)
    else:
        require_trainable(model, sharded=False, deferred=False)


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_allowed(case: str) -> None:
    require_trainable(ALLOWED[case](), sharded=True, deferred=False)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_model_that_is_divided_already(sharded: bool) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel()})
        with pytest.raises(TaskError, match=r"1\.weight, 1\.bias have shards already \(DTensor\)"):
            require_trainable(model, sharded=sharded, deferred=False)
    finally:
        dist.destroy_process_group()


def test_a_task_that_needs_a_process_group() -> None:
    request = inspection_of(f"{__name__}.Divided")
    error = _described(dataclasses.asdict(request), BuiltTask(*request.build))["error"]
    assert "Divided: ValueError: " in error
    assert "where there is no process group. Leave the model whole: strategy=fsdp shards it" in error


def test_a_model_that_gets_its_values_later() -> None:
    require_trainable(nn.Linear(4, 4, device="meta"), sharded=True, deferred=True)
