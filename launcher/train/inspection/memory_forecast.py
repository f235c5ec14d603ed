"""Forecast of memory and communication for each sync policy: runs windows of the real task under the real strategy, on
tensors without memory.

``launcher.plan.task_inspection`` runs it as a separate process. A fake process group stands for the whole world, so
that a model of any size on any number of ranks runs on one CPU. Reads a plan from standard input; writes one JSON
object to the file named on the command line.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from launcher.config.schema import Device, Sync
from launcher.errors import LauncherError
from launcher.loss import as_losses, loss_of_batch
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.plan.sync_policy import POLICIES, Collective, transfers_per_window
from launcher.process import die_with_parent
from launcher.task import Task, build_model, first_batch, load_task, train_data
from launcher.train.context import ContextSource
from launcher.train.engine.build import build_parallel
from launcher.train.parallel.base import Parallel
from launcher.train.parallel.fsdp import mesh_of
from launcher.train.precision import Precision
from launcher.train.trainer import optimizer_of

WINDOWS = 2  # the optimizer's state exists from the second window on
# fraction of the free host memory that a model may take whose construction needs real values
BUILT_SHARE = 0.5


class NotPredictable(Exception):
    """Memory cannot be predicted; the message is the reason, for the plan's note."""


def forecasts(plan: RunPlan) -> tuple[list[Forecast], str | None]:
    """Return the forecast of each policy of the plan's strategy, and why no memory is predicted (None if it is).

    ``peak_bytes`` is that of the device that the model computes on. Communication is counted in the windows that ran;
    if the task cannot run without values, it follows from the sharded model and the policy table.
    """
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
    data = train_data(task, plan.train.seed)
    device = torch.device("cuda" if plan.cluster.device is Device.cuda and torch.cuda.is_available() else "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.batch.world_size)
    mesh_of(device, plan.batch.world_size, plan.strategy.shard_size)  # created here: its tensors must be real
    with ContextSource(device, plan.train.seed, world_size=plan.batch.world_size).active():
        batch, _ = first_batch(task, data, plan.batch.micro_size)
        results = [_forecast(plan, sync, task, batch, device) for sync in POLICIES[plan.strategy.kind]]
    return [forecast for forecast, _ in results], next((reason for _, reason in results if reason), None)


def _forecast(plan: RunPlan, sync: Sync, task: Task, batch: Any, device: torch.device) -> tuple[Forecast, str | None]:
    plan = dataclasses.replace(
        plan,
        strategy=dataclasses.replace(plan.strategy, sync=sync),
        train=dataclasses.replace(plan.train, compile=False),
    )
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = _model_without_memory(plan, task, fake, device)
    with fake:
        with patch.object(torch.utils, "swap_tensors", _set_data):
            parallel, optimizer = build_parallel(
                model, optimizer_of(task, plan), plan, device,
                getattr(task, "shard_units", None),
            )  # fmt: skip
        memory = PeakMemory(device)
        memory.add([*model.parameters(), *model.buffers()])
        inputs = tree_map(lambda x: fake.from_tensor(x).to(device) if isinstance(x, Tensor) else x, batch)
        # without a run, the payload follows from the policy table and the shapes of the sharded model
        passes_of_window = transfers_per_window(plan.strategy.kind, plan.strategy.sync, plan.batch.accumulation)
        payload, problem = parallel.meter.layout.payload(passes_of_window), None
        try:
            with memory:
                payload = _run_windows(plan, task, inputs, parallel, optimizer, device)
        except LauncherError:  # the same error would occur in the job
            raise
        except Exception as error:  # a loss may need tensors with values
            problem = _describe(error)
    forecast = Forecast(
        sync=sync,
        payload_bytes=sum(payload.values()),
        wire_bytes=parallel.meter.layout.wire(payload),
        wire_s=None,
        peak_bytes=memory.peak if problem is None else None,
    )
    return forecast, problem


def _run_windows(
    plan: RunPlan, task: Task, inputs: Any, parallel: Parallel, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[Collective, int]:
    """Run windows of at most two micro-batches, which suffice for the peak: further ones keep nothing more. Return the
    payload bytes of a full window of the plan."""
    precision = Precision(plan.precision, device)
    micro_batches = min(2, plan.batch.accumulation)
    payloads: list[Mapping[Collective, int]] = []
    for number in itertools.chain(*[range(micro_batches)] * WINDOWS):
        last = number == micro_batches - 1
        parallel.meter.open_window()
        with parallel.micro_batch(plan.strategy.sync, first=number == 0, last=last), precision.autocast():
            losses = as_losses(loss_of_batch(task, parallel.module, inputs), plan.batch.micro_size, plan.task.target)
            total = sum((loss.total for loss in losses[1:]), losses[0].total)
            with parallel.backward(total):
                precision.backward(total)
        if last:
            parallel.gradients()
            optimizer.step()
            parallel.zero_grad()
        payloads.append(parallel.meter.payload)
    return _full_window(payloads[-micro_batches], payloads[-1], plan.batch.accumulation)


def _full_window(
    first: Mapping[Collective, int], last: Mapping[Collective, int], micro_batches: int
) -> dict[Collective, int]:
    """Return the payload of a window of ``micro_batches``, from that of its first and its last micro-batch. Those in
    between gather like the last one, because no policy gathers more at the boundary, and reduce like the first."""
    between = micro_batches - 1
    reduces = (Collective.all_reduce, Collective.reduce_scatter)
    payload = {kind: first[kind] * between + last[kind] for kind in reduces}
    gathers = Collective.all_gather
    return payload | {gathers: first[gathers] + last[gathers] * between if between else last[gathers]}


def _model_without_memory(plan: RunPlan, task: Task, fake: FakeTensorMode, device: torch.device) -> nn.Module:
    """Return the task's model on fake tensors.

    Raises:
        NotPredictable: its construction needs values, and the model is too large to be built with them.
    """
    try:
        with patch.object(torch.utils, "swap_tensors", _set_data), fake, device:
            model = build_model(task, plan.train.seed)
    except LauncherError:
        raise
    except Exception as error:
        needed = 4 * ((plan.task.parameters or 0) + plan.task.frozen_parameters)
        if needed > BUILT_SHARE * free_host_bytes():
            raise NotPredictable(
                f"model() cannot be built without values ({_describe(error)}), and with them it takes "
                f"{needed / 2**30:.1f} GB here"
            ) from None
        model = build_model(task, plan.train.seed)
    with fake:
        _convert(model, device)
    return model


def _set_data(old: Tensor, new: Tensor) -> None:
    """Stand in for ``torch.utils.swap_tensors``, which nn.Module.to() calls for fake parameters and which refuses them,
    because their mode holds weak references to them."""
    old.data = new.data


def _convert(model: nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers that are real or on the meta device, such as those of an assigned state dict, by
    fake tensors. Tied ones stay tied."""
    replacements: dict[int, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            replacements[id(tensor)] = empty
        return replacements[id(tensor)]

    def is_real(tensor: Tensor) -> bool:
        return not (isinstance(tensor, FakeTensor) and tensor.device.type == device.type)

    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and is_real(parameter):
                setattr(module, name, replaced(parameter))  # also updates the list of parameters in an nn.LSTM
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and is_real(buffer):
                module._buffers[name] = replaced(buffer)


class PeakMemory(TorchDispatchMode):
    """Mode that records the peak sum of all storages that exist on one kind of device.

    torch's MemTracker also classifies memory by use, for which it hooks each parameter and each module, and fails for
    frozen parameters. Only the sum is needed here.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._type = device.type
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._current = self.peak = 0
        self._resize = torch.UntypedStorage.resize_

    def add(self, tree: Any) -> None:
        """Count every tensor in ``tree``."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.device.type == self._type:
                for storage in get_untyped_storages(leaf):
                    self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.size()
        reference, before = self._storages.get(key, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, functools.partial(self._forget, key))
        self._storages[key] = reference, size
        self._current += size - before
        self.peak = max(self.peak, self._current)

    def _forget(self, key: int, _: Any) -> None:
        self._current -= self._storages.pop(key)[1]

    def __enter__(self) -> PeakMemory:
        def resize(storage: torch.UntypedStorage, size: int) -> None:  # FSDP frees and gathers units by this
            self._resize(storage, size)
            if id(storage) in self._storages:
                self._count(storage)

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # DTensor then calls the operator on its local tensors
        result = func(*args, **(kwargs or {}))
        self.add(result)
        return result


def memory_bytes(plan: RunPlan) -> int | None:
    """Return the bytes of memory of one rank's device; None if this machine has no such device."""
    if plan.cluster.device is Device.cuda:
        return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None
    return free_host_bytes() // plan.cluster.workers_per_node


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory available to this process in bytes: the host's, or less if its cgroup (version 2) or a parent
    of it has less left.

    Inactive file cache counts as available: the kernel reclaims it at the limit.
    """
    available = 1024 * _numbers(proc / "meminfo")["MemAvailable:"]
    lines = (proc / "self" / "cgroup").read_text().splitlines()
    own = cgroups / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (own, *own.parents):
        if group.is_relative_to(cgroups):
            with suppress(OSError, ValueError):  # no memory controller; no limit: "max"
                limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
                cached = _numbers(group / "memory.stat").get("inactive_file", 0)
                available = min(available, max(0, limit - used + cached))
    return available


def _numbers(file: Path) -> dict[str, int]:
    """Parse a file of lines "NAME NUMBER ..." and return the numbers by name."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def _describe(error: Exception) -> str:
    if isinstance(error, NotPredictable):
        return str(error)
    if isinstance(error, DataDependentOutputException):
        return "the model or its loss asks a tensor for its value (.item(), bool(), ...)"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    plan = RunPlan.from_json(sys.stdin.read())
    # the output of torch and the task would be repeated when the job runs; besides, torch logs a traceback for each
    # operator that fails on fake tensors
    warnings.simplefilter("ignore")
    logging.disable()
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    answer: dict[str, Any] = {"memory_bytes": memory_bytes(plan)}
    try:
        results, answer["problem"] = forecasts(plan)
        answer["forecasts"] = [dataclasses.asdict(forecast) for forecast in results]
    except LauncherError as error:  # the same error would occur in the job
        answer["error"] = str(error)
    except Exception as error:
        answer["problem"] = _describe(error)
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
