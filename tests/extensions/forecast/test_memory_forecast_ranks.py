"""Several hundred ranks of a fake process group: each of them calls the collectives that were predicted."""

from __future__ import annotations

import copy
import dataclasses
import gc
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.config.hydra import compose
from launcher.config.schema import Sync
from launcher.extensions.forecast.memory_forecast import forecast
from launcher.loss import as_losses
from launcher.plan.host import Site
from launcher.plan.launch_plan import RunInfo
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.solve import solve
from launcher.plan.sync_policy import POLICIES
from launcher.task import load_task
from launcher.train.engine.build import build_parallel
from launcher.train.inspection.task_probe import probe
from launcher.train.parallel import ddp
from launcher.train.precision import Precision
from launcher.train.trainer import optimizer_of
from tests.helpers import inspection_of

TASK = "tests.extensions.forecast.forecast_tasks.Task"
RUN = RunInfo(name="run", id="abcd1234", dir="/nowhere/run", created="2024-01-01T00:00:00+00:00", version="0")
# which argument of each collective has the bytes that a rank hands over or receives, the whole of a group
SENT = {"allreduce_": (0, 0), "_allgather_base_": (0,), "_reduce_scatter_base_": (1,)}


class Collectives(TorchDispatchMode):
    """Counter of the bytes that torch's operators of collectives are called with; independent of the meter."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func.namespace == "c10d" and name != "c10d::broadcast_":  # of DDP's new layout of buckets
            found: Any = args
            for place in SENT[name.partition("::")[2]]:
                found = found[place]
            self.sent += found.nbytes
        return func(*args, **(kwargs or {}))


def plan_of(nodes: int, *overrides: str) -> RunPlan:
    """A plan for GPUs that are not here, whose ranks then use torch's own collectives."""
    words = [
        f"cluster.nodes={nodes}", "cluster=elsewhere", "cluster.workers_per_node=6", "cluster.gpu=h100",
        "batch.micro_size=2", "batch.accumulation=3", "wandb.mode=disabled", *overrides,
    ]  # fmt: skip
    task = TaskPlan(**probe(inspection_of(TASK, "strategy=fsdp", model=overrides[-1].partition("=")[2])))
    plan = solve(
        compose(words[:-1]), Site(gpus=0, cores=2, cwd="/nowhere"), dataclasses.replace(task, samples=10**6), RUN
    )
    return dataclasses.replace(plan, train=dataclasses.replace(plan.train, hang_timeout=None))


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sent_by(rank: int, plan: RunPlan, model: torch.nn.Module) -> dict[Sync, int]:
    """Return the payload bytes of a window of ``rank`` under each policy of the plan."""
    task, device = load_task(plan.task.target, plan.task.params, [], 0), torch.device("cpu")
    precision, sent = Precision(plan.precision, device), dict[Sync, int]()
    batch = next(iter(torch.utils.data.DataLoader(task.train_data(), plan.batch.micro_size)))
    with fake_rank(rank, plan.batch.world_size):
        parallel, optimizer = build_parallel(copy.deepcopy(model), optimizer_of(task, plan), plan, device, None)
        for sync in (Sync.every, *POLICIES[plan.strategy.kind]):  # DDP lays out its buckets again in the second window
            with Collectives() as seen:
                for number in range(plan.batch.accumulation):
                    last = number == plan.batch.accumulation - 1
                    with parallel.micro_batch(sync, first=number == 0, last=last), precision.autocast():
                        (loss,) = as_losses(task.loss(parallel.module, batch), plan.batch.micro_size, "task")
                        with parallel.backward(loss.total):
                            precision.backward(loss.total)
                parallel.gradients()
            optimizer.step()
            parallel.zero_grad()
            sent[sync] = seen.sent
        del parallel, optimizer
    gc.collect()
    return sent


class Done:
    """Work of a collective whose future has its tensor, which that of a fake process group lacks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


@pytest.fixture
def with_futures(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        work = real(tensor, *arguments, **options)
        return work if work is None else Done(tensor)

    monkeypatch.setattr(ddp, "dist", types.SimpleNamespace(**{**vars(dist), "all_reduce": all_reduce}))


# uneven shards, frozen parts, layers that are used twice
CASES = [
    ("strategy=ddp", "precision=fp32", "model=shared"),
    ("strategy=fsdp", "precision=fp32", "model=last_block_of_loaded"),
    ("strategy=hsdp", "precision=bf16", "model=loaded"),
]


@pytest.mark.usefixtures("with_futures")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("nodes", "ranks", "overrides"),
    [
        (2, range(0, 12, 11), CASES[-1]),
        *(pytest.param(2, range(0, 12, 11), case, marks=pytest.mark.nightly) for case in CASES[:-1]),
        *(pytest.param(50, range(300), case, marks=[pytest.mark.nightly, pytest.mark.timeout(3000)]) for case in CASES),
    ],
    ids=str,
)
def test_every_rank_sends_what_is_predicted(nodes: int, ranks: range, overrides: tuple[str, ...]) -> None:
    plan = plan_of(nodes, *overrides)
    assert plan.batch.world_size == ranks[-1] + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = forecast(plan)
        assert isinstance(found, list)
        predicted = {each.sync: each.payload_bytes for each in found}
        assert len(set(predicted.values())) > 1
        model = load_task(plan.task.target, plan.task.params, [], 0).model()
        for rank in ranks:
            assert sent_by(rank, plan, model) == predicted, rank
