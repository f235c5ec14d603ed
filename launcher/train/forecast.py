"""What each sync policy would need: a window of the real task and the real strategy, on tensors without memory.

Run by ``launcher.forecast`` as a process of its own. A fake process group stands for the whole world, so that a model
of any size on any number of ranks is gone through on one CPU. Reads a plan from standard input; writes its answer, one
JSON object, to the file named on the command line.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from launcher.config import Device, Sync
from launcher.errors import LauncherError
from launcher.plan import Forecast, RunPlan
from launcher.policy import POLICIES, passes
from launcher.train.build import build
from launcher.train.fsdp import mesh_of
from launcher.train.loop import as_loss, build_optimizer
from launcher.train.precision import Precision
from launcher.train.task import Task, load_task

WINDOWS = 2  # the optimizer's state is there from the second on


def forecasts(plan: RunPlan) -> list[Forecast]:
    """Of each policy of the plan's strategy. ``peak_bytes`` is that of the device that the model computes on."""
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from)
    batch = _micro_batch(task, plan.batch.micro_size)
    device = torch.device("cuda" if plan.cluster.device is Device.cuda and torch.cuda.is_available() else "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.batch.world_size)
    mesh_of(device, plan.batch.world_size, plan.strategy.shard_size)  # its own tensors must be real ones
    return [_forecast(plan, sync, task, batch, device) for sync in POLICIES[plan.strategy.kind]]


def _micro_batch(task: Task, size: int) -> Any:
    data: Any = task.train_data()
    indexed = hasattr(data, "__getitem__") and not isinstance(data, torch.utils.data.IterableDataset)
    samples: Iterable[Any] = (data[index] for index in range(size)) if indexed else itertools.islice(data, size)
    return getattr(task, "collate", default_collate)(list(samples))


def _forecast(plan: RunPlan, sync: Sync, task: Task, batch: Any, device: torch.device) -> Forecast:
    plan = dataclasses.replace(
        plan,
        strategy=dataclasses.replace(plan.strategy, sync=sync),
        train=dataclasses.replace(plan.train, compile=False),
    )
    precision = Precision(plan.precision, device)
    micro_batches = min(2, plan.batch.accumulation)  # what is held from one to the next is held from then on
    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        inputs = tree_map(lambda x: fake.from_tensor(x).to(device) if isinstance(x, torch.Tensor) else x, batch)
        with device:
            model = task.model()
        parallel, optimizer = build(
            model, lambda p: build_optimizer(p, plan.optimizer, plan.cluster.device), plan, device,
            getattr(task, "shard_units", None),
        )  # fmt: skip
        tracker.track_external(model, optimizer)
        with tracker:
            for number in itertools.chain(*[range(micro_batches)] * WINDOWS):
                tracker.reset_mod_stats()
                last = number == micro_batches - 1
                with parallel.micro_batch(sync, first=number == 0, last=last), precision.autocast():
                    loss = as_loss(task.loss(parallel.forward, inputs), plan.batch.micro_size, plan.task.target)
                    precision.backward(loss.total)
                if last:
                    parallel.gradients()
                    optimizer.step()
                    parallel.zero_grad()
    payload = parallel.meter.layout.payload(passes(plan.strategy.kind, sync, plan.batch.accumulation))
    peak: Any = tracker.get_tracker_snapshot("peak")
    return Forecast(
        sync=sync,
        payload_bytes=sum(payload.values()),
        wire_bytes=parallel.meter.layout.wire(payload),
        wire_s=None,
        peak_bytes=next(sizes["Total"] for place, sizes in peak.items() if place.type == device.type),
    )


def memory_bytes(plan: RunPlan) -> int | None:
    """What one rank has on the device that it computes on; None where that is not this machine's to say."""
    if plan.cluster.device is Device.cuda:
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
    return free_host_bytes() // plan.cluster.workers_per_node


def free_host_bytes() -> int:
    """Memory that this process may still take, of the host's and of its cgroup's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        available = min(available, int(text))
    return available


def main() -> None:
    plan = RunPlan.from_json(sys.stdin.read())
    warnings.simplefilter("ignore")  # they will be said when the job runs
    try:
        answer: dict[str, Any] = {
            "forecasts": [dataclasses.asdict(forecast) for forecast in forecasts(plan)],
            "memory_bytes": memory_bytes(plan),
        }
    except LauncherError as error:  # the job would meet the same mistake
        answer = {"error": str(error)}
    except DataDependentOutputException:
        answer = {"problem": "the model or its loss asks a tensor for its value (.item(), bool(), ...)"}
    except Exception as error:  # a model may do what tensors without values cannot
        answer = {"problem": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
