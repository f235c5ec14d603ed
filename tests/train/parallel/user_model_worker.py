"""Losses that use a model in other ways than by one forward pass, run by test_base.py.

Prints one JSON object from rank 0: by case, how far the gradients of two windows are from that of fp64, beside how far
plain torch's is, of the same window as one batch in one process; and the messages of losses that are refused.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher.errors import TaskError
from launcher.train.parallel.shard_units import is_direct_use
from tests.infra.workers import distance, leave_group, print_on_rank_0
from tests.train.parallel.uses_worker import SAMPLES, WIDTH, Block, LossOf, by_hand, joined, windows, with_evaluations

POLICIES: list[tuple[str, ...]] = [
    ("strategy=ddp", "strategy.sync=boundary"),
    ("strategy=ddp", "strategy.sync=every", "strategy.find_unused_parameters=true"),
    ("strategy=ddp", "strategy.sync=every", "strategy.static_graph=true"),
    ("strategy=fsdp", "strategy.sync=every"),
    ("strategy=fsdp", "strategy.sync=boundary", "strategy.recompute=blocks"),
    ("strategy=fsdp", "strategy.sync=gather_once"),
    ("strategy=hsdp", "strategy.shard_size=2", "strategy.sync=replicas_at_boundary"),
]


class Model(nn.Module):
    """Two blocks between a tied embedding and head, a frozen layer, and a scale that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.frozen = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.config = {"power": 2}

    def encode(self, x: Tensor) -> Tensor:
        x = self.frozen(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def square(x: Tensor) -> Tensor:
    return x.double().square().sum()


def attributes(model: Model, x: Tensor) -> Tensor:
    return (model(x).double() ** model.config["power"]).sum()


def methods(model: Model, x: Tensor) -> Tensor:
    return square(model.head(model.encode(x)))


def both(model: Model, x: Tensor) -> Tensor:
    return square(model(x).double() - model.encode(x.flip(1)).double())


def parameters(model: Model, x: Tensor) -> Tensor:
    """A loss in chunks over the rows of the head, as of a large vocabulary."""
    hidden = model.encode(x)
    chunks = [functional.linear(hidden, weight) for weight in model.head.weight.split(4)]
    return square(torch.cat(chunks, 1) + model.head.bias)


def root_alone(model: Model, x: Tensor) -> Tensor:
    """One of the passes uses no block."""
    return square(model(x)) + square(model.head(model.embed(x)))


def target(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        before = model(x.flip(1))
    out = model(x)
    with torch.no_grad():
        after = model.encode(x * 0.5)
    return square(out.double() - before.double() - after.double())


def inner(model: Model, x: Tensor) -> Tensor:
    """A gradient penalty on a method, of inputs that require a gradient."""
    at = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(square(model.encode(at)), at, create_graph=True)
    return square(gradient) + square(model(at))


def checkpointed(model: Model, x: Tensor) -> Tensor:
    hidden: Any = checkpoint(model.encode, x, use_reentrant=False)
    return square(model.head(hidden))


LOSSES: list[LossOf] = [attributes, methods, both, parameters, root_alone, target, inner, checkpointed]


def full(loss: LossOf) -> LossOf:
    """The loss, and a term of a parameter that no forward pass uses."""
    return lambda model, x: loss(model, x) + square(model.scale) * len(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def gradients(loss: LossOf, *options: str) -> list[Tensor]:
    """The gradients that the engine applies in two windows."""
    return windows(build(), loss, "train.steps=2", "run.calibrate_s=0", *options, calibrates=False)[0]


def refused(loss: LossOf) -> str:
    try:
        gradients(loss, "strategy=fsdp", "strategy.sync=boundary", "precision=fp32")
    except TaskError as refusal:
        return str(refusal)
    except RuntimeError as error:
        return "torch: mixed tensors" if is_direct_use(error) else str(error)
    return ""


def weight_of_a_unit(model: Any, x: Tensor) -> Tensor:
    return square(model(x)) + square(model.blocks[0].up.weight.full_tensor())


def decay_of_all(model: Any, x: Tensor) -> Tensor:
    return square(model(x)) + sum(square(p) for p in model.parameters())


def part_of_a_unit(model: Any, x: Tensor) -> Tensor:
    return square(model.blocks[0].up(x))


def contrastive(model: Model, x: Tensor) -> Tensor:
    """Each sample against those of all ranks, once by its own rank."""
    own, others = model(x), model.encode(x.flip(1))
    first, everything = 0, others
    if dist.is_initialized() and len(x) < SAMPLES:
        everything, first = torch.cat(all_gather(others)), dist.get_rank() * len(x)
    logits = model.scale * own @ everything.T
    return functional.cross_entropy(logits.double(), torch.arange(first, first + len(x)), reduction="sum")


def compared(loss: LossOf, cases: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, Any]:
    """Compare windows with one big batch. ``cases``: precision, and options of the plan."""
    exact, found = by_hand(build(), full(loss), torch.float64), dict[str, Any]()
    for precision, options in cases:
        at_once = distance(by_hand(build(), full(loss), torch.float32, autocast=precision == "bf16"), exact)
        error = max(distance(each, exact) for each in gradients(full(loss), f"precision={precision}", *options))
        found[f"{loss.__name__} {precision} {' '.join(options)}"] = {"error": error, "at once": at_once}
    return found


def main() -> None:
    joined()
    results: dict[str, Any] = {}
    match sys.argv[2]:
        case "two ranks":
            # a window of one micro-batch per rank, whose ranks gather each other's samples
            whole = f"batch.micro_size={SAMPLES // dist.get_world_size()}"
            policies = [(f"strategy={policy}", whole) for policy in ("ddp", "fsdp")]
            results = compared(contrastive, itertools.product(("bf16", "fp32"), policies))
            results |= {loss.__name__: refused(loss) for loss in (weight_of_a_unit, decay_of_all, part_of_a_unit)}
            for sync in ("every", "boundary", "gather_once"):
                results[sync] = [with_evaluations(sync, evaluates=evaluates) for evaluates in (False, True)]
        case part:  # bf16 is the default; each policy and each loss has both
            for number, loss in enumerate(LOSSES):
                results |= compared(loss, (
                    (("bf16", "fp32")[(place + number) % 2], policy) for place, policy in enumerate(POLICIES)
                    if part == "all" or (place - number) % len(POLICIES) in (0, 2, 3)
                ))  # fmt: skip
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
