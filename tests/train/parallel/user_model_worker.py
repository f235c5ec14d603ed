"""Losses that use a model in other ways than by one forward pass, run by test_base.py.

Prints one JSON object from rank 0: by case, how far the gradients of two windows are from that of fp64, beside how far
plain torch's is, of the same window as one batch in one process; and the messages of losses that are refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher import Engine, make_plan
from launcher.errors import TaskError
from launcher.train.data.randomness import Permutation
from launcher.train.parallel.shard_units import is_direct_use
from launcher.train.world import World, device_of, join
from tests.infra.workers import distance, flat, leave_group, print_on_rank_0
from tests.train.parallel.uses_worker import OPTIONS, SAMPLES, WIDTH, Block, batch_of

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


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    loss.__name__: loss for loss in (attributes, methods, both, parameters, root_alone, target, inner, checkpointed)
}


def full(name: str, model: Any, x: Tensor) -> Tensor:
    """The loss of the case, and a term of a parameter that no forward pass uses."""
    return LOSSES[name](model, x) + square(model.scale) * len(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def by_hand(name: str, dtype: torch.dtype, *, autocast: bool) -> Tensor:
    """The gradient of the window as one batch: plain torch."""
    model = build().to(dtype)
    samples = batch_of(list(Permutation(SAMPLES, 0, 0).take(0, SAMPLES))).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total = full(name, model, samples)
    (total / SAMPLES).backward()
    return flat([p.grad for p in trained(model)])


def windows(loss: Callable[[Any, Tensor], Tensor], *options: str) -> list[Tensor]:
    """The gradients that the engine applies in two windows; the learning rate is 0."""
    plan = make_plan([*OPTIONS, "train.steps=2", *options], samples=SAMPLES)
    model = copy.deepcopy(build())
    engine = Engine(model, torch.optim.SGD(trained(model), 0.0), plan)
    assert engine.model is model
    found: list[Tensor] = []
    engine.optimizer.register_step_pre_hook(lambda *_: found.append(flat([p.grad for p in trained(model)])))
    for batches in engine.windows(range(SAMPLES), batch_of):
        for batch in batches:
            engine.backward(loss(engine.model, batch), len(batch))
        engine.step()
    return found


def refused(loss: Callable[[Any, Tensor], Tensor]) -> str:
    try:
        windows(loss, "strategy=fsdp", "strategy.sync=boundary", "precision=fp32", "run.calibrate_s=0")
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


def contrasts() -> dict[str, Any]:
    """Compare a window of one micro-batch per rank, whose ranks gather each other's samples, with one big batch."""
    found: dict[str, Any] = {}
    LOSSES["contrastive"] = contrastive
    exact = by_hand("contrastive", torch.float64, autocast=False)
    for policy in ("ddp", "fsdp"):
        for precision in ("bf16", "fp32"):
            at_once = distance(by_hand("contrastive", torch.float32, autocast=precision == "bf16"), exact)
            whole = f"batch.micro_size={SAMPLES // dist.get_world_size()}"
            gradients = windows(
                lambda model, x: full("contrastive", model, x),
                f"strategy={policy}", f"precision={precision}", "run.calibrate_s=0", whole,
            )  # fmt: skip
            error = max(distance(gradient, exact) for gradient in gradients)
            found[f"{policy} {precision}"] = {"error": error, "at once": at_once}
    return found


def main() -> None:
    plan = make_plan([*OPTIONS, *POLICIES[0]], samples=SAMPLES)
    join(World.here(), device_of(World.here(), plan.cluster.device), None)
    results: dict[str, Any] = {}
    refusals = sys.argv[2] == "refusals"
    for case, name in enumerate(LOSSES if sys.argv[2] in ("some", "all") else ()):
        exact = by_hand(name, torch.float64, autocast=False)
        at_once = {
            kind: distance(by_hand(name, torch.float32, autocast=kind == "bf16"), exact) for kind in ("bf16", "fp32")
        }
        for number, policy in enumerate(POLICIES):  # bf16 is the default; each policy and each loss has both
            if sys.argv[2] == "some" and (number - case) % len(POLICIES) not in (0, 2, 3):
                continue
            precision = ("bf16", "fp32")[(number + case) % 2]
            found = windows(
                lambda model, x, name=name: full(name, model, x),
                *policy, f"precision={precision}", "run.calibrate_s=0",
            )  # fmt: skip
            error = max(distance(gradient, exact) for gradient in found)
            results[f"{name} {precision} {' '.join(policy)}"] = {"error": error, "at once": at_once[precision]}
    if sys.argv[2] == "contrasts":
        results = contrasts()
    if refusals:
        results = {loss.__name__: refused(loss) for loss in (weight_of_a_unit, decay_of_all, part_of_a_unit)}
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
