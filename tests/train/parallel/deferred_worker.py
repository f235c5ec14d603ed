"""Ranks that build a model for shards, run by torchrun in test_deferred_init.py. Prints one JSON object from rank 0."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import math
import random
import resource
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from launcher.tasks.bytes_model import GPT
from launcher.train.parallel import deferred_init
from launcher.train.parallel.base import own_region
from launcher.train.parallel.deferred_init import build_for_shards
from launcher.train.world import World
from tests.train.parallel.deferred_models import FULL, MODELS, Make


class Uneven(nn.Module):
    """A GPT with what does not divide by the ranks, a tie, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(61, 24, 3, 2, 7, 0.0)
        self.few = nn.Parameter(torch.randn(3, 5))
        self.one = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.tensor([math.pi]))
        self.gpt.head.weight = self.gpt.bytes.weight
        self.register_buffer("mask", torch.tril(torch.ones(7, 7)), persistent=False)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt(tokens) * self.scale + self.few.sum() * self.one


def seed(value: int = 3) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def state(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def same(model: nn.Module, ordinary: nn.Module) -> bool:
    pairs = zip(state(model), state(ordinary), strict=True)
    ties = len(list(model.parameters())) == len(list(ordinary.parameters()))
    return ties and all(a == b and x.dtype == y.dtype and torch.equal(whole(x), whole(y)) for (a, x), (b, y) in pairs)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.to_dense()


def built(make: Make, world: World) -> tuple[bool, bool, str]:
    """Return whether values and random numbers are those of an ordinary build, whether some ranks had none before, and
    the output."""
    seed()
    ordinary = make()
    after = states()
    seed()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        model, initial = build_for_shards(make, world)
    if initial is not None:
        assert initial.complete(model, set()) or world.rank > 0
        initial.take(model)
        model.to_empty(device="cpu")
        initial.fill(model)
    return same(model, ordinary) and states() == after, initial is not None, output.getvalue()


def elsewhere(world: World) -> list[bool]:
    """Build a model all of whose values but one buffer come from elsewhere; that one has a value everywhere, or not."""

    class Named(nn.Module):
        def __init__(self, drawn: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("phase", torch.rand(4) if drawn else torch.arange(4.0).sin(), persistent=False)

    found = list[bool]()
    for drawn in (False, True):
        model, initial = build_for_shards(lambda drawn=drawn: Named(drawn), world, values=False)
        assert initial is not None
        found.append(initial.complete(model, {"layer.weight", "layer.bias"}))
    return found


def sharded(model: nn.Module, gpt: GPT, hybrid: bool = False) -> nn.Module:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "shard"))
    if not hybrid:
        mesh = init_device_mesh("cpu", (ranks,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shards_of_a_model(world: World, hybrid: bool) -> bool:
    torch.manual_seed(1)
    ordinary = Uneven()
    torch.manual_seed(1)
    model, initial = build_for_shards(Uneven, world)
    assert initial is not None
    initial.take(model)
    sharded(model, model.gpt, hybrid).to_empty(device="cpu")  # pyright: ignore[reportArgumentType]
    initial.fill(model)
    equal = same(model, ordinary)

    # the first loss and the first step, too, are those of the ordinary model
    tokens = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (ordinary, model)]
    losses = []
    for _ in range(2):
        for one, optimizer in zip((ordinary, model), optimizers, strict=True):
            loss = one(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return equal and losses[0] == losses[1] and math.isclose(losses[2], losses[3], rel_tol=1e-5)


def shards() -> bool:
    """Return whether each rank's part is the one that torch distributes, for sizes that ranks do not divide."""
    ranks = dist.get_world_size()
    line, grid = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (2, ranks // 2))
    for shape in ((61, 24), (3, 5), (5, 3, 2), (7, 1), (1, 9)):
        value = torch.arange(math.prod(shape)).view(shape)
        for mesh, *placements in (
            (line, Shard(0)), (line, Shard(1)), (line, Replicate()), (grid, Replicate(), Shard(0)),
            (grid, Shard(1), Replicate()), (grid, Shard(0), Shard(1)), (grid, Shard(0), Shard(0)),
        ):  # fmt: skip
            target = distribute_tensor(value, mesh, placements)
            if not torch.equal(value[own_region(target)], target.to_local()):
                return False
    return True


def memory(world: World) -> dict[str, float]:
    """Bytes of the model, and by how much building this rank's part of it raised the process's highest use."""
    sharded(small := GPT(16, 8, 1, 1, 8, 0.0), small)(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, initial = build_for_shards(lambda: GPT(256, 768, 14, 12, 256, 0.0), world)
    assert initial is not None
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    initial.take(model)
    sharded(model, model).to_empty(device="cpu")  # pyright: ignore[reportArgumentType]
    initial.fill(model)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024.0
    return {"model": size, "grown": max(world.of_all(grown)[1:])}


def waits_with_heartbeats(world: World) -> bool:
    """Build a model on rank 0 that is complete only after another rank has published three heartbeats."""
    store: Any = dist.distributed_c10d._get_default_store()
    beat = deferred_init.HEARTBEAT.again

    def counted() -> None:
        beat()
        store.add("beats", 1)

    def slow() -> nn.Module:
        while world.rank == 0 and store.add("beats", 0) < 3:
            time.sleep(0.01)
        return nn.Linear(2, 2)

    deferred_init.HEARTBEAT.again = counted
    initial = build_for_shards(slow, world)[1]
    deferred_init.HEARTBEAT.again = beat
    return initial is not None


def main() -> None:
    dist.init_process_group("gloo")
    gc.freeze()  # each build looks through all objects for tensors
    world = World(dist.get_rank(), dist.get_world_size(), dist.get_rank())
    seen: dict[str, Any] = {}
    if world.size == 2:
        seen["memory"] = memory(world)
        seen["models"] = {name: world.of_all(built(make, world)) for name, make in MODELS.items()}
        seen["full"] = {name: world.of_all(built(make, world)) for name, (make, _) in FULL.items()}
        seen["waits"] = world.of_all(waits_with_heartbeats(world))
        seen["elsewhere"] = world.of_all(elsewhere(world))
    seen["shards"] = world.of_all([shards_of_a_model(world, hybrid) for hybrid in (False, True)] + [shards()])
    if world.rank == 0:
        print(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
