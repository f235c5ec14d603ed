"""Differences on a GPU that can be tested without one: devices, groups, time limits, device of the loss scale."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from launcher import Engine
from launcher import make_plan as make_plan_in_a_job
from launcher.config.schema import Device, PrecisionKind, StrategyKind, Sync
from launcher.errors import ConfigError, SiteError
from launcher.train.parallel import fsdp
from launcher.train.parallel.ddp import Ddp
from launcher.train.precision import Precision
from launcher.train.world import World, device_of, join
from tests.helpers import make_plan, torchrun


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine with one GPU; the calls that would use it."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(index))
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: calls.append((backend, options)))
    return calls


def test_each_rank_needs_a_gpu_of_its_own(one_gpu: list[Any]) -> None:
    assert device_of(World(0, 2, 0), Device.cuda) == torch.device("cuda", 0)
    with pytest.raises(SiteError, match="sees 1 GPUs, and local rank 1 needs one of its own"):
        device_of(World(1, 2, 1), Device.cuda)
    join(World(0, 2, 0), torch.device("cuda", 0), 60.0)
    assert one_gpu[:2] == [0, "init"]
    backend, options = one_gpu[2]
    assert backend == "cpu:gloo,cuda:nccl"
    assert options["device_id"] == torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="has 1 usable GPUs, and each worker needs one"):
        make_plan("cluster.workers_per_node=2", "cluster.device=cuda", gpus=1)


def test_ranks_share_a_gpu_where_a_test_says_so(one_gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_SHARE_GPU", "1")
    assert device_of(World(1, 2, 1), Device.cuda) == torch.device("cuda", 0)
    join(World(1, 2, 1), torch.device("cuda", 0), 60.0)
    assert one_gpu[:2] == [0, "init"]
    backend, options = one_gpu[2]
    assert backend == "cpu:gloo,cuda:gloo", "NCCL refuses two ranks on one device"
    assert "device_id" not in options
    make_plan("cluster.workers_per_node=2", "cluster.device=cuda", gpus=1)
    with pytest.raises(ConfigError, match="has 0 usable GPUs"):
        make_plan("cluster.workers_per_node=2", "cluster.device=cuda", gpus=0)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_the_loss_scale_is_kept_where_the_gradients_are(place: str) -> None:
    """From a GPU, torch copies it to gradients on the host without waiting for the copy."""
    plan = dataclasses.replace(make_plan("precision=fp16", "precision.init_scale=8").precision, kind=PrecisionKind.fp16)
    precision = Precision(plan, torch.device("cpu"), gradients_on=torch.device(place))
    scale = precision.scaler._scale
    assert scale is not None
    assert scale.device.type == place
    if place == "cpu":
        assert precision.scaled(torch.tensor(3.0)).item() == 24
        assert precision.scaler.get_scale() == 8
    assert Precision(plan, torch.device("cpu")).scaler._scale is None, "torch decides"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    fsdp._mesh.cache_clear()


@pytest.mark.usefixtures("alone")
def test_the_groups_of_a_mesh_wait_until_a_hang_is_found() -> None:
    """NCCL's own ten minutes, or gloo's thirty, would end the ranks that wait, and name them for the cause."""
    plan = make_plan_in_a_job(
        ["strategy=fsdp", "precision=fp32", "batch.global_size=4", "train.steps=1", "train.hang_timeout=5000",
         "cluster.device=cpu"],
        samples=8,
    )  # fmt: skip
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, kind=StrategyKind.hsdp, shard_size=1))
    mesh = fsdp.mesh_of(torch.device("cpu"), 1, 1)
    for group in mesh.get_all_groups():
        group.set_timeout(timedelta(seconds=600))  # as NCCL has it
    Engine(torch.nn.Linear(3, 2), lambda parameters: torch.optim.SGD(parameters, 0.1), plan)
    for group in mesh.get_all_groups():
        waits = group._get_backend(torch.device("cpu")).options._timeout
        assert waits >= timedelta(seconds=5000)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sync", [Sync.boundary, Sync.every])
def test_passes_that_are_undone_hold_no_second_copy_of_the_gradients(
    sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When DDP's new buckets are made, the old ones are free."""
    plan = make_plan("strategy=ddp", f"strategy.sync={sync}", "batch.accumulation=2", "batch.micro_size=1",
                     "batch.global_size=null", "cluster.device=cpu", "cluster.workers_per_node=1")  # fmt: skip
    parallel = Ddp(torch.nn.Linear(64, 64), plan, torch.device("cpu"), compiled=False)
    old: list[weakref.ref[torch.UntypedStorage]] = []
    held: list[bool] = []
    make = parallel._wrapped

    def watched(*, init_sync: bool) -> Any:
        held.extend(each() is not None for each in old)
        return make(init_sync=init_sync)

    monkeypatch.setattr(parallel, "_wrapped", watched)

    def window() -> None:
        parallel.begin_window()
        for last in (False, True):
            with parallel.micro_batch(sync, first=not last, last=last):
                loss = parallel.module(torch.ones(1, 64)).sum()
                with parallel.backward(loss):
                    loss.backward()
        old.extend(weakref.ref(cast("Tensor", p.grad).untyped_storage()) for p in parallel.module.parameters())
        parallel.zero_grad()

    window()
    old.clear()
    with parallel.without_effects():
        window()
        window()
    assert held
    assert not any(held)


SPLIT = """
import os, warnings
from datetime import timedelta
import torch, torch.distributed as dist
from torch._C._distributed_c10d import Backend
from launcher.train.parallel import fsdp

def split(*_, **__):  # as torch does on GPUs: gloo's part of the group with options of NCCL's part
    options = Backend.Options("nccl", timedelta(seconds=5))
    assert dist.group.WORLD.split_group([0], opts=options, group_name="part", group_desc="part") is not None
    warnings.warn("another warning", UserWarning)
    return "made"

dist.init_process_group("gloo")
fsdp.init_device_mesh = split
os.dup2(1, 2)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    print(fsdp.mesh_of(torch.device("cpu"), 2, 1), [str(each.message) for each in seen], flush=True)
os._exit(0)
"""


def test_a_mesh_of_replicas_is_made_without_a_warning_of_gloo(tmp_path: Path) -> None:
    (tmp_path / "split.py").write_text(SPLIT)
    out = torchrun(tmp_path / "split.py", [], 1, tmp_path)
    assert "made ['another warning']" in out, out
    assert "ProcessGroupGloo" not in out, out
