"""Checks of the GPU acceptance that call the strategies directly, for code that no one-rank job reaches.

A world of one rank trains without DDP, and torch's FSDP2 skips its collectives there. NCCL refuses two ranks on one
GPU. Therefore the collectives, DDP's hook and the timing events run here, on an NCCL group of one rank. Each collective
starts late, on a stream of its own, and its result is NaN until then: what does not wait for it computes with NaN.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, cast
from unittest import mock

from jobs.gpu.registry import Environment, Skip, check, need_cuda

# about a millisecond at 2 GHz
_SLEEP_CYCLES = 2_000_000


def joined(environment: Environment, *overrides: str, samples: int = 240) -> tuple[Any, Any]:
    """Return the plan of a world of one rank and its device, with the process group started."""
    from launcher import make_plan
    from launcher.train.world import World, device_of, join

    job = ("batch.global_size=16", "batch.micro_size=4", "train.steps=3", "train.loader_workers=0", "precision=fp32")
    plan = make_plan([*job, f"cluster.device={environment.device}", *overrides], samples=samples)
    if "RANK" not in os.environ:
        _rendezvous()
    world = World.here()
    device = device_of(world, plan.cluster.device)
    join(world, device, plan.train.hang_timeout)
    return plan, device


def _rendezvous() -> None:
    """Set the variables of a world of one rank, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank_variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(rank_variables, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _assert_close(actual: Any, expected: Any, within: float, name: str) -> None:
    distance = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    if not distance <= within:
        raise AssertionError(f"{name}: relative distance {distance:.2g}, more than {within:g}")


@check("flags of a window", "as sent")
def flags_of_a_window(environment: Environment) -> str:
    """Check the all-reduce at a window's end as ranks of a larger world send it: loss, items, flags and observers."""
    import torch
    import torch.distributed as dist

    from launcher.config.schema import StrategyKind
    from launcher.loss import Loss
    from launcher.plan.sync_policy import Layout
    from launcher.train.engine.window_totals import WindowLoss, WindowTotals
    from launcher.train.measure.comm_meter import Meter
    from launcher.train.measure.noise_scale import LocalGradNorm, NoiseScale
    from launcher.train.world import World

    _, device = joined(environment)
    meter = Meter(StrategyKind.fsdp, Layout.replicated(0, 1), device)
    noise = NoiseScale(2, device, LocalGradNorm())
    noise.own = torch.tensor(0.25, device=device)
    world = World(0, 2, 0)  # as if of two ranks, so that the flags are sent
    terms = WindowLoss(world, device, meter)
    totals, losses = (
        WindowTotals(world, device, meter, terms, [noise]),
        [Loss(torch.tensor(3.5, device=device), items=torch.tensor(7, device=device))],
    )
    terms.agree(losses, 4)
    terms.sums.add(losses)
    totals.samples = 4
    totals.send(more=True, stop=False, save_due=True)
    sent = totals.sum_of(noise)
    agreed = totals.receive(torch.tensor(2.0, device=device))
    flags = (agreed.more, agreed.stop, agreed.save_due)
    received = (agreed.items, agreed.loss_sum, agreed.samples, *flags, *sent)
    if received != (7, 3.5, 4, True, False, True, 0.25) or agreed.grad_norm != 2.0:
        raise AssertionError(f"the window's flags came back as {agreed}")
    dist.destroy_process_group()
    return f"{agreed}"[:100]


@contextmanager
def delayed(environment: Environment) -> Iterator[list[str]]:
    """Start each collective late, with NaN in its result until then, and list the collectives."""
    import torch
    import torch.distributed as dist

    from launcher.train.parallel import collectives

    ran = list[str]()
    side = torch.cuda.Stream() if environment.on_gpu else None

    @torch.no_grad()
    def late(function: Any, output: Any, *arguments: Any, **options: Any) -> Any:
        current = torch.cuda.current_stream()
        assert side is not None
        side.wait_stream(current)
        with torch.cuda.stream(side):
            source = next((each for each in arguments if isinstance(each, torch.Tensor)), output)
            kept = source.clone()  # one rank's collectives are in place
            output.fill_(math.nan if output.is_floating_point() else 1)
            torch.cuda._sleep(_SLEEP_CYCLES)
            source.copy_(kept)
            work = function(output, *arguments, **options)
        if work is None:
            current.wait_stream(side)
        return work

    def slowly(name: str, function: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            ran.append(name)
            options = {name: getattr(value, "whole", value) for name, value in options.items()}  # see Unskipped
            return late(function, *arguments, **options) if arguments[0].is_cuda else function(*arguments, **options)

        return run

    with ExitStack() as patches:
        for name, place, attribute in (
            ("all-gather", collectives, "_all_gather"),
            ("reduce-scatter", collectives, "_reduce_scatter"),
            ("all-reduce", dist, "all_reduce"),
        ):
            function = slowly(name, getattr(place, attribute))
            patches.enter_context(mock.patch.object(place, attribute, function))
        yield ran


@check("DDP's hook, delayed", "gradients bit by bit")
def ddp(environment: Environment) -> str:
    """Compare gradients of two micro-batches through Ddp with one synchronisation against autograd alone."""
    import torch
    import torch.distributed as dist

    from jobs.gpu.tasks import Words
    from launcher.config.schema import Sync
    from launcher.train.parallel.ddp import Ddp

    plan, device = joined(environment, "strategy=ddp", "strategy.sync=boundary")
    task = Words()
    torch.manual_seed(0)
    model, alone = task.model().to(device), task.model().to(device)
    alone.load_state_dict(model.state_dict())
    parallel, data = Ddp(model, plan, device, compiled=False), task.train_data()
    parallel.meter.layout = dataclasses.replace(parallel.meter.layout, replicas=2)  # so that it expects an all-reduce
    comm = None
    for window in range(3):
        parallel.meter.open_window()
        with delayed(environment) as ran:
            for first in (0, 4):
                batch = task.collate([data[8 * window + first + n] for n in range(4)]).to(device)
                with parallel.micro_batch(Sync.boundary, first=first == 0, last=first == 4):
                    loss = task.loss(parallel.module, batch).total
                    with parallel.backward(loss):
                        loss.backward()
                task.loss(alone, batch).total.backward()
            gradients = parallel.gradients()
            copies = [gradient.clone() for gradient in gradients]  # on the stream of the optimizer
        if environment.on_gpu:
            torch.cuda.synchronize()
        comm = parallel.meter.close_window(2, Sync.boundary)
        wanted = [p.grad for p in alone.parameters() if p.grad is not None]
        if not ran or not all(map(torch.equal, copies, wanted)) or len(copies) != len(wanted):
            raise AssertionError(f"window {window}: other gradients after {ran}")
        if not comm.collectives or not comm.time_s > 0:
            raise AssertionError(f"window {window}: {comm}")
        parallel.zero_grad()
        alone.zero_grad()
    dist.destroy_process_group()
    assert comm is not None
    return f"{comm.collectives} all-reduce of {comm.payload_bytes} bytes, {1e3 * comm.time_s:.3f} ms"


class One(int):
    """Size of a group of one rank that torch's FSDP2 does not take for one: it skips the collectives of a group whose
    size is 1 or not above 1. In arithmetic it is 1."""

    def __new__(cls) -> Self:
        return super().__new__(cls, 1)

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __gt__(self, other: int) -> bool:
        return other <= 1


@dataclasses.dataclass(frozen=True)
class Unskipped:
    """Process group of one rank with the size One. ``whole``: the group itself, which ``delayed`` hands to torch."""

    whole: Any

    def size(self) -> int:
        return One()

    def rank(self) -> int:
        return 0


def _compare_shards(environment: Environment, *, replicated: bool) -> list[str]:
    """Train three windows in shards with delayed collectives and compare the parameters with a plain loop's.

    Returns the collectives of a window.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.tensor import DTensor

    from jobs.gpu.tasks import Words
    from launcher import Engine
    from launcher.config.schema import StrategyKind, Sync
    from launcher.train.parallel import fsdp

    plan, device = joined(environment, "strategy=fsdp", "strategy.sync=every", "train.clip_norm=null")
    task, patches = Words(), ExitStack()
    if replicated:
        hsdp = {"kind": StrategyKind.hsdp, "sync": Sync.replicas_at_boundary, "shard_size": 1}
        strategy = dataclasses.replace(plan.strategy, **hsdp)
        plan = dataclasses.replace(plan, strategy=strategy)
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicate", "shard"))
        patches.enter_context(mock.patch.object(fsdp, "mesh_of", return_value=mesh))
    torch.manual_seed(0)
    alone = task.model().to(device)
    torch.manual_seed(0)
    with patches:
        engine = Engine(task.model, lambda p: torch.optim.SGD(p, 0.1), plan, shard_units=task.shard_units)
        parallel = cast("fsdp.Fsdp", engine.parallel)
        parallel._gather._exchanger = parallel._scatter._exchanger = None  # the process group's own, on CPUs too
        for name in ("_all_gather_process_group", "_reduce_scatter_process_group"):
            group = property(lambda _: Unskipped(dist.group.WORLD))
            patches.enter_context(mock.patch.object(FSDPParamGroup, name, group))
        # which expects no collective of a group of one rank
        patches.enter_context(mock.patch.object(parallel.meter, "check"))
        optimizer, ran = torch.optim.SGD(alone.parameters(), 0.1), list[str]()
        for window in engine.windows(task.train_data(), task.collate):
            items = 0
            with delayed(environment) as started:
                for batch in window:
                    loss = task.loss(engine.model, batch)
                    engine.backward(loss.total, loss.items)
                    other = task.loss(alone, batch)
                    other.total.backward()
                    items += int(other.items)
                result = engine.step()
            ran = started
            for parameter in alone.parameters():
                assert parameter.grad is not None
                parameter.grad /= items
            for group in optimizer.param_groups:
                group["lr"] = result.lr
            optimizer.step()
            optimizer.zero_grad()
        whole = torch.cat([cast("DTensor", p).full_tensor().detach().flatten() for p in parallel.module.parameters()])
    _assert_close(whole, torch.cat([p.detach().flatten() for p in alone.parameters()]), 1e-5, "parameters")
    dist.destroy_process_group()
    return ran


def _text(ran: list[str], wanted: tuple[str, ...]) -> str:
    missing = [name for name in wanted if name not in ran]
    if missing:
        raise AssertionError(f"no {missing[0]} has run: {ran}")
    return ", ".join(f"{ran.count(name)} {name}" for name in wanted) + " in the last window"


@check("FSDP's collectives, delayed", "parameters within 1e-5")
def fsdp_delayed(environment: Environment) -> str:
    return _text(_compare_shards(environment, replicated=False), ("all-gather", "reduce-scatter"))


@check("HSDP on a (1, 1) mesh, delayed", "parameters within 1e-5")
def hsdp_delayed(environment: Environment) -> str:
    ran = _compare_shards(environment, replicated=True)
    return _text(ran, ("all-gather", "reduce-scatter", "all-reduce"))


@check("own process group", "collectives of tensors on the GPU only")
def own_group(environment: Environment) -> str:
    """Check the norm of offloaded gradients and an evaluation, as ranks of a larger world compute them, in a process
    group that a script has made for one backend."""
    import torch
    import torch.distributed as dist

    from jobs.gpu.tasks import Words
    from launcher import Engine
    from launcher.train.data.loader import MicroBatch
    from launcher.train.evaluation import _in_step
    from launcher.train.world import World

    if environment.on_gpu:
        torch.cuda.set_device(0)
    _rendezvous()
    dist.init_process_group("nccl" if environment.on_gpu else "gloo")
    offload = f"strategy.cpu_offload={str(environment.on_gpu).lower()}"
    plan, _ = joined(environment, "strategy=fsdp", "strategy.sync=every", offload)
    task = Words()
    engine = Engine(task.model, lambda p: torch.optim.SGD(p, 0.1), plan, shard_units=task.shard_units)
    windows = iter(engine.windows(task.train_data(), task.collate))
    for batch in next(windows):
        loss = task.loss(engine.model, batch)
        engine.backward(loss.total, loss.items)
    with delayed(environment) as ran:
        with mock.patch.object(engine.parallel, "_shard_size", 2):  # so that the norms of the shards are summed
            engine.step()
        if ran != ["all-reduce"]:
            raise AssertionError(f"not one all-reduce for the norm: {ran}")
        batches = [MicroBatch(number, 4) for number in range(3)]
        if [*_in_step(iter(batches), World(0, 2, 0), 4)] != batches:
            raise AssertionError("other batches in an evaluation of several ranks")
    if len(ran) != 5:
        raise AssertionError(f"not one all-reduce for each batch of an evaluation and its end: {ran[1:]}")
    backend = dist.get_backend_config()
    dist.destroy_process_group()
    return f"{ran.count('all-reduce')} all-reduce in a group of {backend}"


_QUEUED = """
import torch
import torch.distributed as dist
from launcher.train.parallel.collectives import _all_gather
device = torch.device("cuda", 0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
source, target = torch.ones(4, device=device), torch.zeros(4, device=device)
torch.cuda.synchronize()
torch.cuda._sleep(2**37)
work = _all_gather(target, source, async_op=True)
print("queued", flush=True)
for _ in range(5000):
    torch.zeros(1, device=device)
"""


@check("flight recorder, launch queue full", "1 collective queued, 0 completed")
def recorded(environment: Environment) -> str:
    """Ask a process whose GPU is busy, and that is stuck behind a full launch queue, for its trace."""
    from launcher.launch import flight_recorder

    need_cuda(environment)
    os.environ.update(flight_recorder.variables(str(environment.folder), environment.folder))
    child = subprocess.Popen([sys.executable, "-c", _QUEUED], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        if child.stdout.readline() != "queued\n":
            raise AssertionError("the process that queues a collective has failed: see the log")
        groups = flight_recorder.request_traces([0]).get(0, [])
    finally:
        child.kill()
    if [(group.queued, group.completed) for group in groups] != [(1, 0)]:
        raise AssertionError(f"groups in the trace: {groups}")
    return f"not completed: {groups[0].oldest}"


@check("page-locked copies", "1.1 times the bytes", alone=True)
def staging(environment: Environment) -> str:
    """Check a tensor just over a power of two, for which torch's own page-locked memory would take twice as much."""
    import torch

    from launcher.train.checkpoint.contents import Staging

    need_cuda(environment)
    device = torch.device("cuda", 0)
    tensor = torch.randn(2**28 + 1, device=device)  # 1 GiB and four bytes
    state = {"model": {"large": tensor, "small": torch.arange(7, device=device), "bf16": tensor[:9].bfloat16()}}
    staged = Staging(device)

    def resident() -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return int(lines["VmRSS"].split()[0]) * 1024

    torch.cuda.synchronize()
    before = resident()
    copied = staged.copy(state)
    taken = resident() - before
    times = list[float]()
    for _ in range(3):
        start = time.perf_counter()
        copied = staged.copy(state)
        times.append(time.perf_counter() - start)
    if not all(torch.equal(copied["model"][name].to(device), value) for name, value in state["model"].items()):
        raise AssertionError("the copies differ")
    pinned = copied["model"]["large"].is_pinned()
    if not pinned:
        raise AssertionError("the copies are not page-locked")
    rate = tensor.nbytes / min(times)
    if taken > 1.1 * tensor.nbytes:
        raise AssertionError(f"{taken / 2**20:.0f} MiB taken for {tensor.nbytes / 2**20:.0f} MiB")
    return f"{taken / 2**20:.0f} MiB for {tensor.nbytes / 2**20:.0f} MiB, {rate / 1e9:.1f} GB/s"


@check("float8 layers", "2^-7 of operands rounded by hand", seconds=180)
def float8(environment: Environment) -> str:
    """Compare a linear layer in float8, forward and backward, with products of operands rounded by hand, in fp64."""
    from importlib.util import find_spec

    import torch

    from launcher.config.hydra import compose
    from launcher.train.parallel.mixed_precision import set_format

    if find_spec("torchao") is None:
        raise Skip("torchao is not installed")
    if environment.on_gpu and torch.cuda.get_device_capability() < (8, 9):
        raise Skip("this GPU has no float8 units")
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 512, device=environment.device)
    set_format(layer, compose(("precision=float8", f"float8.emulate={str(not environment.on_gpu).lower()}")))
    x = (torch.randn(100, 256) * torch.logspace(-3, 2, 100)[:, None]).to(environment.device).requires_grad_()
    gradient = torch.randn(100, 512, device=environment.device).bfloat16()
    with torch.autocast(environment.device, torch.bfloat16):
        outputs = layer(x)
    outputs.backward(gradient)
    weight, inputs = layer.weight.detach().bfloat16(), x.detach().bfloat16()
    wanted = {
        "outputs": _rounded(inputs, 1) @ _rounded(weight, 1).T + layer.bias.detach().bfloat16(),
        "gradient of inputs": _rounded(gradient, 1) @ _rounded(weight, None),
        "gradient of weights": gradient.double().T @ inputs.double(),
        "gradient of the bias": gradient.double().sum(0),
    }
    found = (outputs.detach(), x.grad, layer.weight.grad, layer.bias.grad)
    for (name, expected), actual in zip(wanted.items(), found, strict=True):
        _assert_close(actual, expected, 2**-7, name)
    return "outputs and gradients are those of operands rounded by hand"


def _rounded(values: Any, dim: int | None) -> Any:
    """Return ``values`` rounded to float8 (e4m3), whose largest number is 448, with a scale that is a power of two.

    Args:
        dim: numbers along it share a scale; None: all do.
    """
    import torch

    largest = values.double().abs().amax() if dim is None else values.double().abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return (values.float() * scale.float()).to(torch.float8_e4m3fn).double() / scale
