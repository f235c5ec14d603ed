"""Checks of the GPU acceptance that call the strategies directly, for code that no one-rank job reaches.

A world of one rank trains without DDP, and torch's FSDP2 skips its collectives there. NCCL refuses two ranks on one
GPU. Therefore the collectives, DDP's hook and the timing events run here, on an NCCL group of one rank.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path
from typing import Any

from jobs.gpu.registry import Environment, Skip, check, need_cuda


def joined(environment: Environment, *overrides: str, samples: int = 240) -> tuple[Any, Any]:
    """Return the plan of a world of one rank and its device, with the process group started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank_variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(rank_variables, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    from launcher import make_plan
    from launcher.train.world import World, device_of, join

    job = ("batch.global_size=16", "batch.micro_size=4", "train.steps=3", "train.loader_workers=0", "precision=fp32")
    plan = make_plan([*job, f"cluster.device={environment.device}", *overrides], samples=samples)
    world = World.here()
    device = device_of(world, plan.cluster.device)
    join(world, device, plan.train.hang_timeout)
    return plan, device


def _assert_close(actual: Any, expected: Any, within: float, name: str) -> None:
    distance = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    if not distance <= within:
        raise AssertionError(f"{name}: relative distance {distance:.2g}, more than {within:g}")


@check("collectives of FSDP and of a window, NCCL")
def collectives(environment: Environment) -> str:
    import torch
    import torch.distributed as dist

    from launcher.config.schema import StrategyKind
    from launcher.loss import Loss
    from launcher.plan.sync_policy import Layout
    from launcher.train.engine.window_totals import WindowLoss, WindowTotals
    from launcher.train.measure.comm_meter import Meter, _union_s
    from launcher.train.measure.noise_scale import LocalGradNorm, NoiseScale
    from launcher.train.parallel.collectives import Gather, Scatter
    from launcher.train.world import World

    _, device = joined(environment)
    meter = Meter(StrategyKind.fsdp, Layout.replicated(0, 1), device)
    exchanges = not environment.on_gpu
    gather, scatter = Gather(meter, exchanges=exchanges), Scatter(meter, LocalGradNorm(), exchanges=exchanges)
    source, group = torch.randn(2**22, device=device), dist.group.WORLD
    assert group is not None
    start = time.perf_counter()
    for async_op in (False, True):
        output = torch.empty_like(source)
        work = gather(output, source, group, async_op)
        if work is not None:
            work.wait()
        _assert_close(output, source, 0, "all-gather")
    output = torch.empty_like(source)
    scatter(output, source, group, dist.ReduceOp.SUM)
    scatter.finish()
    _assert_close(output, source, 0, "reduce-scatter")
    if environment.on_gpu:
        torch.cuda.synchronize()
    elapsed_s, in_flight_s = time.perf_counter() - start, _union_s(meter._timers)
    if len(meter._timers) != 3 or not 0 < in_flight_s <= elapsed_s:
        raise AssertionError(f"{len(meter._timers)} collectives took {in_flight_s} s of {elapsed_s} s")

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
    dist.barrier()
    backend = dist.get_backend()
    dist.destroy_process_group()
    return f"{backend}, torch {torch.__version__}; 3 collectives of 16 MiB in {1e3 * in_flight_s:.2f} ms"


@check("DDP's hook and events, NCCL")
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
    for window in range(3):
        parallel.meter.open_window()
        for first in (0, 4):
            batch = task.collate([data[8 * window + first + n] for n in range(4)]).to(device)
            with parallel.micro_batch(Sync.boundary, first=first == 0, last=first == 4):
                loss = task.loss(parallel.module, batch).total
                with parallel.backward(loss):
                    loss.backward()
            task.loss(alone, batch).total.backward()
        gradients = parallel.gradients()
        if environment.on_gpu:
            torch.cuda.synchronize()
        comm = parallel.meter.close_window(2, Sync.boundary)
        expected = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])
        _assert_close(torch.cat([gradient.flatten() for gradient in gradients]), expected, 1e-5, "gradients")
        if not comm.collectives or not comm.time_s > 0:
            raise AssertionError(f"window {window}: {comm}")
        parallel.zero_grad()
        alone.zero_grad()
    dist.destroy_process_group()
    return f"{comm.collectives} all-reduce of {comm.payload_bytes} bytes, {1e3 * comm.time_s:.3f} ms"


@check("HSDP's streams, NCCL")
def hsdp(environment: Environment) -> str:
    """Check a shard group of one rank in one replica: torch's all-reduce between replicas runs, then the hook."""
    import torch
    import torch.distributed as dist

    from jobs.gpu.tasks import Words
    from launcher import Engine
    from launcher.config.schema import StrategyKind

    plan, device = joined(environment, "strategy=fsdp", "strategy.sync=boundary", "train.clip_norm=null")
    plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, kind=StrategyKind.hsdp, shard_size=1))
    task = Words()
    torch.manual_seed(0)
    alone = task.model().to(device)
    torch.manual_seed(0)
    engine = Engine(task.model, lambda p: torch.optim.SGD(p, 0.1), plan, shard_units=task.shard_units)
    meter = engine.parallel.meter
    meter.layout = dataclasses.replace(meter.layout, replicas=2)
    optimizer, sent = torch.optim.SGD(alone.parameters(), 0.1), list[int]()
    for window in engine.windows(task.train_data(), task.collate):
        items = 0
        for batch in window:
            loss = task.loss(engine.model, batch)
            engine.backward(loss.total, loss.items)
            other = task.loss(alone, batch)
            other.total.backward()
            items += int(other.items)
        result = engine.step()
        sent.append(result.comm.payload_bytes)
        for parameter in alone.parameters():
            parameter.grad /= items
        for group in optimizer.param_groups:
            group["lr"] = result.lr
        optimizer.step()
        optimizer.zero_grad()
    whole = (p.full_tensor() for p in engine.parallel.module.parameters())
    parameters = torch.cat([p.detach().flatten() for p in whole])
    _assert_close(parameters, torch.cat([p.detach().flatten() for p in alone.parameters()]), 1e-5, "parameters")
    if not all(sent):
        raise AssertionError(f"bytes of all-reduce in each window: {sent}")
    dist.destroy_process_group()
    return f"{sent[-1]} bytes between replicas a window"


@check("page-locked copies", alone=True)
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


@check("random numbers")
def randomness(environment: Environment) -> str:
    import torch

    from launcher.task import seed_everything
    from launcher.train.data.randomness import random_state, restore_random_state

    device = torch.device(environment.device, 0) if environment.on_gpu else torch.device("cpu")
    seed_everything(5)
    torch.rand(3, device=device)
    state = random_state(device)
    first = torch.nn.functional.dropout(torch.ones(1000, device=device), 0.5)
    restore_random_state(state, device)
    if not torch.equal(first, torch.nn.functional.dropout(torch.ones(1000, device=device), 0.5)):
        raise AssertionError("other numbers after the state was restored")
    return f"saved and restored: {', '.join(sorted(state))}"


@check("native bf16 and memory of the device")
def device_facts(environment: Environment) -> str:
    import torch

    need_cuda(environment)
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{name}, {memory / 2**30:.0f} GiB, bf16 {'native' if native else 'emulated'}, NCCL {nccl}"


@check("float8 layers", seconds=180)
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
