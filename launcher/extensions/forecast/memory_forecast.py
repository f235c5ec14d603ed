"""Forecast of memory and communication for each sync policy: runs windows of the real task under the real strategy, on
tensors without memory.

``forecast`` is an entry point ``launcher.forecasts``: it runs in the process that inspects the task (task_probe.py). A
fake process group stands for the whole world, so that a model of any size on any number of ranks runs on one CPU.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks  # pyright: ignore[reportMissingModuleSource]
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from launcher.config.schema import Device, Recompute, Sync
from launcher.errors import LauncherError
from launcher.extensions.forecast.fake_model import (
    NEEDS_VALUES,
    AllocationLog,
    NotPredictable,
    Replica,
    autocast_of_cuda,
    buildable_without_memory,
    model_without_memory,
    problem_text,
)
from launcher.extensions.forecast.repeated_blocks import (
    CHECK_BLOCKS,
    SHORTEST_BLOCKS,
    BlockRun,
    BlockTrace,
    IrregularModel,
    StandIns,
    block_runs,
    extrapolate,
)
from launcher.loss import as_losses, loss_of_batch
from launcher.plan.gpus import ALLOCATION_BYTES
from launcher.plan.run_plan import Forecast, NoForecast, RunPlan
from launcher.plan.sync_policy import POLICIES, SHARDED, Collective, Layout, transfers_per_window
from launcher.task import Task, first_batch
from launcher.train.context import ContextSource
from launcher.train.data.length_balance import first_within_bound
from launcher.train.engine.build import build_parallel
from launcher.train.inspection.built_task import BuiltTask, attributes_restored
from launcher.train.measure.flops import time_limit, without_memory
from launcher.train.parallel.base import Parallel, ShardUnits
from launcher.train.parallel.fsdp import mesh_of
from launcher.train.parallel.shard_units import find_units
from launcher.train.precision import Precision
from launcher.train.trainer import optimizer_of

LIMIT_S = 60.0  # of CPU time, for the traces of a whole model and all that precedes them


def forecast(plan: RunPlan, built: BuiltTask | None = None) -> list[Forecast] | NoForecast:
    """Return the forecast of each policy of the plan's strategy.

    ``peak_bytes`` is that of the device that the model computes on. Communication is counted in the windows that ran;
    if the task cannot run without values, it follows from the sharded model and the policy table.

    Raises:
        LauncherError: the same error would occur in the job.
    """
    try:
        with silence(), tracing(plan, built) as tracer:
            results = [tracer.forecast(sync) for sync in POLICIES[plan.strategy.kind]]
    except LauncherError:
        raise
    except Exception as error:
        return NoForecast(problem_text(error))
    found, reasons = zip(*results, strict=True)
    reason = next(filter(None, reasons), None)
    return [*found] if reason is None else NoForecast(reason, found)


@contextmanager
def tracing(plan: RunPlan, built: BuiltTask | None = None, *, shorten: bool = True) -> Iterator[Tracer]:
    """Return a context with a tracer of the plan's task, in a fake process group of the plan's size.

    Args:
        built: the task, if it has been built.
    """
    built = built or BuiltTask(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
    task, data, model = built.task, built.data, built.model
    device = torch.device("cuda" if plan.cluster.device is Device.cuda and torch.cuda.is_available() else "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.batch.world_size)
    collects = gc.isenabled()
    gc.collect()
    gc.freeze()  # so that collecting the garbage of each micro-batch takes little time
    gc.disable()  # a collection at another time would change the order of the trace
    elsewhere = plan.cluster.device is Device.cuda and device.type == "cpu"
    try:
        mesh_of(device, plan.batch.world_size, plan.strategy.shard_size)  # created here: its tensors must be real
        context = ContextSource(device, plan.train.seed, world_size=plan.batch.world_size)
        with autocast_of_cuda() if elsewhere else nullcontext(), context.active():
            batch, _ = first_batch(task, data, first_within_bound(data, task, plan))
            yield Tracer(plan, task, model, batch, device, shorten=shorten)
    finally:
        dist.destroy_process_group()
        gc.unfreeze()
        if collects:
            gc.enable()


class Tracer:
    """Traces of windows of a task under the policies of its strategy.

    Args:
        model: the task's model, of which copies without memory are traced.
        batch: the first micro-batch.
        shorten: whether repeated blocks are traced once, if that is less work.

    Attributes:
        irregular: why the whole model was traced although it has repeated blocks; None if it was not.
    """

    def __init__(
        self, plan: RunPlan, task: Task, model: nn.Module, batch: Any, device: torch.device, *, shorten: bool
    ) -> None:
        self._task, self._built, self._batch, self._device = task, model, batch, device
        self._copies = True
        self._plan = plan
        self.irregular: Exception | None = None
        self._regular = False
        self._until = time.process_time() + LIMIT_S  # CPU time, so that a loaded host decides like an idle one
        self._runs: list[BlockRun] = []
        self._units: list[str] = []
        self._compiled: list[str] = []  # modules that the task's compile_units names
        self._whole = self._fake_model(FakeTensorMode(allow_non_fake_inputs=True))
        if shorten:
            self._runs = block_runs(self._whole)
            if not self._saves_work():
                self._runs = []
        if self._runs:
            try:
                self._compare_blocks()
            except Exception as error:
                self.irregular = error
            strategy, shard_units = plan.strategy, getattr(task, "shard_units", None)
            names = {module: name for name, module in self._whole.named_modules()}
            if plan.train.compile and (compile_units := getattr(task, "compile_units", None)) is not None:
                self._compiled = [names[unit] for unit in compile_units(self._whole) if unit in names]
            if strategy.kind in SHARDED or strategy.recompute is Recompute.blocks:
                units = find_units(self._whole, None if shard_units is None else shard_units(self._whole))
                self._units = [names[unit] for unit in units]

    def _fake_model(self, fake: FakeTensorMode) -> nn.Module:
        if self._copies:
            try:
                return without_memory(self._built, fake, self._device)
            except Exception:
                self._copies = False
        return model_without_memory(self._plan, self._task, fake, self._device)

    def _inputs(self, fake: FakeTensorMode) -> Any:
        def convert(leaf: Any) -> Any:
            return fake.from_tensor(leaf).to(self._device) if isinstance(leaf, Tensor) else leaf

        return tree_map(convert, self._batch)

    def _saves_work(self) -> bool:
        """Return whether the traces of shortened models run fewer blocks than those of the whole model."""
        policies, shortest = len(POLICIES[self._plan.strategy.kind]), SHORTEST_BLOCKS * len(self._runs)
        each = shortest + sum(shortest + 1 for _ in self._runs)
        longest = shortest + CHECK_BLOCKS * len(self._runs)
        return each * policies + longest < sum(len(run.names) for run in self._runs) * policies

    def _compare_blocks(self) -> None:
        """Run one forward pass of a model of its own, which may keep tensors."""
        fake, precision = FakeTensorMode(allow_non_fake_inputs=True), Precision(self._plan.precision, self._device)
        model = self._fake_model(fake)
        calls = BlockCalls(model, self._runs, self._device)
        with fake, calls, precision.autocast(), attributes_restored(self._task):
            loss_of_batch(self._task, model, self._inputs(fake))
        calls.check()

    @property
    def shortens(self) -> bool:
        """Return whether the model has repeated blocks, and none of them has made the trace of a shortened one fail."""
        return bool(self._runs) and self.irregular is None

    def forecast(self, sync: Sync) -> tuple[Forecast, str | None]:
        """Return the forecast of a policy, and why its memory is not predicted (None if it is)."""
        plan = dataclasses.replace(self._plan, strategy=dataclasses.replace(self._plan.strategy, sync=sync))
        if self.shortens:
            try:
                return self._of(sync, self._from_shortened(plan)), None
            except Exception as error:  # the whole model may run where a shortened one fails
                self.irregular = error
        left_s = self._until - time.process_time()
        try:
            if left_s <= 0:
                raise TimeoutError
            with time_limit(left_s, cpu=True):
                trace, problem = self._whole_trace(plan)
        except TimeoutError:
            reason = f"the trace of the whole model takes more than {LIMIT_S:.0f} s"
            if self.irregular is not None:
                reason += f", and it is too irregular to be shortened ({problem_text(self.irregular)})"
            known = next((each for each in plan.strategy.forecasts if each.sync is sync), None)
            if known is None:  # the number of parameters is unknown
                raise NotPredictable(reason) from None
            return dataclasses.replace(known, peak_bytes=None), reason
        return self._of(sync, trace, known=problem is None), problem

    def _of(self, sync: Sync, trace: BlockTrace, *, known: bool = True) -> Forecast:
        strategy, payload = self._plan.strategy, trace.payload
        replicas = self._plan.batch.world_size // strategy.shard_size
        layout = Layout(shard_size=strategy.shard_size, replicas=replicas, unit_bytes=0, root_bytes=0, gradient_bytes=0)
        return Forecast(
            sync=sync,
            payload_bytes=sum(payload.values()),
            wire_bytes=layout.wire(payload),
            peak_bytes=trace.peak if known else None,
        )

    def _from_shortened(self, plan: RunPlan) -> BlockTrace:
        """Return the trace of the whole model, from those of shortened ones."""
        least = dict.fromkeys(self._runs, SHORTEST_BLOCKS)
        shortest = self._shortened(plan, least)
        longer = {run: self._shortened(plan, least | {run: SHORTEST_BLOCKS + 1}) for run in least}
        longest = None
        if not self._regular:  # a model that is regular under one policy is so under all
            longest = self._shortened(plan, dict.fromkeys(least, SHORTEST_BLOCKS + CHECK_BLOCKS))
        trace = extrapolate(least, shortest, longer, longest)
        self._regular = True
        return trace

    def _shortened(self, plan: RunPlan, real: dict[BlockRun, int]) -> BlockTrace:
        fake, log = FakeTensorMode(allow_non_fake_inputs=True), self._log()
        short = StandIns(self._whole, fake, self._device, real)
        compile_units = (lambda _: short.named(self._compiled)) if self._compiled else None
        trace, error = self._trace(plan, short.model, fake, log, lambda _: short.named(self._units), compile_units)
        if error is not None:
            raise error
        return trace

    def _log(self) -> AllocationLog:
        return AllocationLog(self._device, ALLOCATION_BYTES if self._plan.cluster.device is Device.cuda else 1)

    def _whole_trace(self, plan: RunPlan) -> tuple[BlockTrace, str | None]:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = self._fake_model(fake)
        shard_units = getattr(self._task, "shard_units", None)
        compile_units = getattr(self._task, "compile_units", None)
        trace, error = self._trace(plan, model, fake, self._log(), shard_units, compile_units)
        if error is not None and self._copies and not isinstance(error, LauncherError | NEEDS_VALUES):
            self._copies = False  # its functions may refer to the original's modules, or it remembers its device
            return self._whole_trace(plan)
        if isinstance(error, LauncherError):  # the same error would occur in the job
            raise error
        return trace, None if error is None else problem_text(error)

    def _trace(
        self,
        plan: RunPlan,
        model: nn.Module,
        fake: FakeTensorMode,
        log: AllocationLog,
        shard_units: ShardUnits | None,
        compile_units: ShardUnits | None,
    ) -> tuple[BlockTrace, Exception | None]:
        """Return the trace of the windows, and the exception that they raised. Nothing is compiled."""
        task, device = self._task, self._device
        with fake:
            with buildable_without_memory(self._whole):
                parallel, optimizer = build_parallel(
                    model, optimizer_of(task, plan), plan, device, shard_units, compile_units=compile_units
                )
            log.add([*model.parameters(), *model.buffers()])
            log.add([*parallel.buckets.values()] if isinstance(parallel, Replica) else [])
            inputs = self._inputs(fake)
            # without a run, the payload follows from the policy table and the shapes of the sharded model
            passes_of_window = transfers_per_window(
                plan.strategy.kind, plan.strategy.sync, plan.batch.predicted_accumulation
            )
            payload = parallel.meter.layout.payload(passes_of_window)
            problem: Exception | None = None
            try:
                with log, attributes_restored(task):
                    payload = run_fake_windows(plan, task, inputs, parallel, optimizer, device)
            except TimeoutError:
                raise
            except Exception as error:  # a loss may need tensors with values
                problem = error
        return BlockTrace.of(log.events, payload), problem


@contextmanager
def silence() -> Iterator[None]:
    """Return a context that discards all output: that of torch and the task would be repeated when the job runs, and
    torch logs a traceback for each operator that fails on fake tensors."""
    saved, logged = [(number, os.dup(number)) for number in (1, 2)], logging.root.manager.disable
    with warnings.catch_warnings(), Path(os.devnull).open("wb") as devnull:
        warnings.simplefilter("ignore")
        logging.disable()
        _redirect([(number, devnull.fileno()) for number, _ in saved])
        try:
            yield
        finally:
            _redirect(saved)
            logging.disable(logged)
            for _, copy in saved:
                os.close(copy)


def _redirect(targets: Sequence[tuple[int, int]]) -> None:
    """Let each descriptor be another one, after what was printed to it before."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, target in targets:
        os.dup2(target, number)


def run_fake_windows(
    plan: RunPlan,
    task: Task,
    inputs: Any,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> dict[Collective, int]:
    """Run two windows, because the optimizer's state exists from the second one on, and return the payload bytes of a
    full window of the plan. Two micro-batches suffice for the peak: further ones keep nothing more."""
    precision = Precision(plan.precision, device)

    def window(micro_batches: int) -> list[Mapping[Collective, int]]:
        payloads: list[Mapping[Collective, int]] = []
        for number in range(micro_batches):
            last = number == micro_batches - 1
            parallel.meter.open_window()
            with parallel.micro_batch(plan.strategy.sync, first=number == 0, last=last), precision.autocast():
                losses = as_losses(
                    loss_of_batch(task, parallel.module, inputs), plan.batch.micro_size, plan.task.target
                )
                total = sum((loss.total for loss in losses[1:]), losses[0].total)
                with parallel.backward(total):
                    precision.backward(total)
            if last:
                parallel.gradients()
                optimizer.step()
                parallel.zero_grad()
            payloads.append(parallel.meter.payload)
            gc.collect()  # frees what reference cycles of the task and of torch hold
        return payloads

    most = min(2, plan.batch.predicted_accumulation)
    window(1 if plan.strategy.kind in SHARDED else most)  # DDP holds gradients beside its buckets until the first one
    payloads = window(most)
    return _full_window(payloads[0], payloads[-1], plan.batch.predicted_accumulation)


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


# Arguments that are compared. Whole numbers are not: a block's index may be one, and the operators show what follows.
_COMPARED = (bool, float, complex, str, bytes, type(None), torch.dtype)


class BlockCalls(TorchDispatchMode):
    """Mode that records the calls of the blocks of ``runs`` in ``model``, in which it registers hooks.

    Args:
        model: the whole model, on fake tensors.
    """

    def __init__(self, model: nn.Module, runs: Sequence[BlockRun], device: torch.device) -> None:
        super().__init__()
        self._runs, self._device = runs, device.type
        self._calls: dict[str, list[list[Any]]] = defaultdict(list)  # for each block, what each of its calls does
        self._order: list[tuple[BlockRun, int]] = []
        self._inside = False
        self._makers: dict[int, int] = {}  # the call that made a tensor, by the tensor's id
        self._alive: list[Tensor] = []  # an id may be used again if its tensor is gone
        for run in runs:
            for index, name in enumerate(run.names):
                block = model.get_submodule(name)
                block.register_forward_pre_hook(self._opener(run, index), prepend=True, with_kwargs=True)
                block.register_forward_hook(self._close)

    def _opener(self, run: BlockRun, index: int) -> Callable[..., None]:
        def open_call(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside:
                raise IrregularModel("equal blocks call each other")
            leaves = tree_leaves((args, kwargs))
            conditions = (
                torch.is_grad_enabled(),
                _top_saved_tensors_default_hooks(True) is not None,  # checkpointing, offloading
                torch.is_autocast_enabled(self._device) and torch.get_autocast_dtype(self._device),
            )
            self._inside = True
            self._order.append((run, index))
            self._calls[run.names[index]].append([conditions, [_argument(leaf) for leaf in leaves]])

        return open_call

    def _close(self, *_: Any) -> None:
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **(kwargs or {}))
        call = len(self._order) - 1
        for tensor in given:
            maker = self._makers.get(id(tensor))
            if maker is not None and not (self._inside and maker >= call - 1):
                raise IrregularModel("the model reads what an inner block computes elsewhere than in the next block")
        if self._inside:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            run, index = self._order[-1]
            self._calls[run.names[index]][-1].append((func, [(tensor.shape, tensor.dtype) for tensor in made]))
            if run.names[index] in run.left_out(SHORTEST_BLOCKS):
                new = [tensor for tensor in made if all(tensor is not each for each in given)]
                self._makers.update(dict.fromkeys(map(id, new), call))
                self._alive += new
        return result

    def check(self) -> None:
        """Raise IrregularModel unless each block was called once, in order, and the inner ones of a run did the same.

        The first blocks and the last one of a run may differ, because no stand-in takes their place.
        """
        for run in self._runs:
            if [index for each, index in self._order if each is run] != list(range(len(run.names))):
                raise IrregularModel("the model does not call each of its equal blocks once, in their order")
            inner = [self._calls[name] for name in run.left_out(SHORTEST_BLOCKS)]
            if any(calls != inner[0] for calls in inner):
                raise IrregularModel("equal blocks differ in what they do, or in how they are called")


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    return value if isinstance(value, _COMPARED) else type(value)
