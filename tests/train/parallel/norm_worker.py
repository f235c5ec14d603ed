"""A loop of the user's own on a model with BatchNorm, run by torchrun in test_norm.py: fp64, against plain torch.

The reference runs the very groups of samples that ``batch.norm`` normalises together, through torch's own BatchNorm in
one process, at the same parameters. Prints one JSON object from rank 0 for each run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.config.schema import Norm
from launcher.errors import ConfigError
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective
from launcher.plan.windows import share_of_window
from launcher.train.data.randomness import Permutation
from launcher.train.parallel.batchnorm import batch_norms
from tests.infra.workers import flat, leave_group

torch.set_num_threads(1)


class Net(nn.Module):
    """Layers in sequence, one that is used twice, a residual path past it, momentum of both kinds."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.Dropout(dropout), nn.BatchNorm1d(4, momentum=None))
        self.again = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(4, affine=False), nn.Flatten(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(x + self.again(self.again(x)))


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return ((model(x) - y) ** 2).sum(), len(x)


def far(mine: Tensor, wanted: Tensor) -> float:
    return ((mine - wanted).norm() / wanted.norm()).item()


def groups(plan: RunPlan, indices: list[int]) -> list[list[int]]:
    """The samples of a window that are normalised together."""
    if plan.batch.norm is Norm.freeze or plan.batch.norm.looks_ahead:
        return [indices]
    shares = [share_of_window(len(indices), plan.batch, rank) for rank in range(plan.batch.world_size)]
    of_slots = [[[indices[i] for i in share] for share in slot] for slot in zip(*shares, strict=True)]
    if plan.batch.norm is Norm.sync:
        return [[i for share in slot for i in share] for slot in of_slots]
    return [share for slot in of_slots for share in slot if share]


def gradient(model: nn.Module, data: Any, parts: list[list[int]], items: int) -> Tensor:
    model.zero_grad()
    for part in parts:
        total, _ = loss_of(model, (data[part][0], data[part][1]))
        (total / items).backward()
    return flat([p.grad for p in model.parameters() if p.grad is not None])


def build(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    return Net(dropout).double()


def compare(data: Any, overrides: list[str]) -> dict[str, Any]:
    plan = make_plan(
        ["precision=fp32", "train.clip_norm=null", "train.epochs=2", "run.calibrate_s=1", "train.loader_workers=0",
         "batch.global_size=12", "schedule=constant", *overrides],
        samples=len(data),
    )  # fmt: skip
    reference, one_batch = build(), build()
    model = build()
    if plan.batch.norm is Norm.freeze:
        for layer in batch_norms(reference).values():
            layer.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = Engine(model, optimizer, plan, shard_units=lambda net: [net.first, net.last])
    applied: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: applied.append(flat([p.grad for p in model.parameters()])))
    error, from_one_batch, losses, calls = 0.0, 0.0, [], []
    for window in engine.windows(data, forward=loss_of):
        for each in (reference, one_batch):
            nn.utils.vector_to_parameters(flat(list(model.parameters())), each.parameters())
        for batch in window:
            engine.backward(*loss_of(engine.model, batch))
        result = engine.step()
        losses.append(result.loss)
        sent = result.comm.kinds.get(Collective.statistics)
        calls.append(sent.collectives if sent else 0)

        epoch, place = divmod(result.window, plan.epoch.windows or 1)
        first = place * plan.batch.global_size
        size = min(plan.batch.global_size, len(data) - first)
        indices = Permutation(len(data), plan.train.seed, epoch).take(first, size)
        mine = applied.pop()
        error = max(error, far(mine, gradient(reference, data, groups(plan, indices), size)))
        from_one_batch = max(from_one_batch, far(mine, gradient(one_batch, data, [indices], size)))
    buffers = [flat([b for b in m.buffers() if b.dtype == torch.float64]) for m in (model, reference)]
    engine.share_buffers()
    return {
        "gradient": error, "from_one_batch": from_one_batch, "statistics": far(*buffers), "losses": losses,
        "counted": [int(layer.num_batches_tracked) for layer in batch_norms(model).values()], "collectives": calls,
    }  # fmt: skip


def normalised_with_dropout(data: Any) -> dict[str, Any]:
    """Return the first layer's outputs over a window; each pass would draw other dropout if nothing prevented it."""
    plan = make_plan(["precision=fp32", "train.steps=2", "batch.global_size=12", "batch.micro_size=3",
                      "batch.norm=window", "train.loader_workers=0"], samples=len(data))  # fmt: skip
    model = build(dropout=0.5)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=1e-9), plan)
    seen: list[Tensor] = []
    for window in engine.windows(data, forward=loss_of):
        for batch in window:
            hook = model.first[2].register_forward_hook(lambda _m, _i, out: seen.append(out.detach()))
            loss = loss_of(engine.model, batch)
            hook.remove()
            engine.backward(*loss)
        engine.step()
        break
    out = torch.cat(seen).transpose(0, 1).flatten(1)
    sums = torch.stack((out.sum(1), out.square().sum(1), torch.full((4,), out.shape[1]).double()))
    if dist.is_initialized():
        dist.all_reduce(sums)
    return {"mean": (sums[0] / sums[2]).abs().max().item(), "square": (sums[1] / sums[2]).tolist()}


def without_forward(data: Any) -> dict[str, Any]:
    plan = make_plan(["train.steps=2", "batch.global_size=12", "batch.norm=window"], samples=len(data))
    engine = Engine(model := build(), torch.optim.SGD(model.parameters(), lr=0.1), plan)
    try:
        next(engine.windows(data))
    except ConfigError as error:
        return {"error": str(error)}
    return {}


SPECIAL = {"dropout": normalised_with_dropout, "no forward": without_forward}


def main() -> None:
    """argv: samples, then one or more runs' overrides, each closed by "/"."""
    generator = torch.Generator().manual_seed(5)
    x = 3 + torch.randn(int(sys.argv[1]), 1, 8, generator=generator, dtype=torch.float64).cumsum(0)
    y = torch.randn(len(x), 3, generator=generator, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(x, y)
    overrides: list[str] = []
    for word in sys.argv[2:]:
        if word != "/":
            overrides.append(word)
            continue
        special = SPECIAL.get(" ".join(overrides))
        seen = special(data) if special is not None else compare(data, overrides)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(json.dumps(seen), flush=True)
        overrides = []
    if dist.is_initialized():
        leave_group()


if __name__ == "__main__":
    main()
