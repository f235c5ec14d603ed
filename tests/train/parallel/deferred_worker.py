"""Real ranks that shard a model before it has any memory, run by torchrun in test_deferred.py.

argv: ``values`` or ``memory``. Prints one JSON object from rank 0.
"""

from __future__ import annotations

import json
import math
import resource
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from launcher.tasks.bytes_model import GPT
from launcher.train.parallel.deferred_init import build_deferred, fill, own_shard


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


def sharded(model: nn.Module, gpt: GPT, hybrid: bool = False) -> nn.Module:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "shard"))
    if not hybrid:
        mesh = init_device_mesh("cpu", (ranks,))
    for block in gpt.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def values(hybrid: bool) -> bool:
    torch.manual_seed(1)
    ordinary = Uneven()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    model, recipe = build_deferred(Uneven)
    sharded(model, model.gpt, hybrid).to_empty(device="cpu")  # pyright: ignore[reportArgumentType]
    fill(model, recipe)
    same = torch.equal(after, torch.get_rng_state()) and all(
        torch.equal(whole(tensor), wanted) for tensor, wanted in zip(state(model), state(ordinary), strict=True)
    )

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
    return same and losses[0] == losses[1] and math.isclose(losses[2], losses[3], rel_tol=1e-5)


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
            if not torch.equal(own_shard(value, target), target.to_local()):
                return False
    return True


def state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def memory() -> dict[str, float]:
    """Bytes of the model, and by how much building this rank's part of it raised the process's highest use."""

    def make() -> GPT:
        return GPT(256, 768, 14, 12, 256, 0.0)

    sharded(small := GPT(16, 8, 1, 1, 8, 0.0), small)(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.manual_seed(1)
    model, recipe = build_deferred(make)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    sharded(model, model).to_empty(device="cpu")  # pyright: ignore[reportArgumentType]
    fill(model, recipe)
    grown = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024.0)
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    return {"model": size, "grown": grown.item()}


def main() -> None:
    dist.init_process_group("gloo")
    if sys.argv[1] == "memory":
        seen = memory()
    else:
        same = torch.tensor([values(hybrid=False), values(hybrid=True), shards()]).int()
        dist.all_reduce(same, dist.ReduceOp.MIN)
        seen = {"same": same.tolist()}
    if dist.get_rank() == 0:
        print(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
