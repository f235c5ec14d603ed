"""Losses that change gradients, depend on more than the model's parameters, or run collectives; run by torchrun in
test_loss_watches.py.

argv: "all", or "some" for a third of the cases by strategy. Prints three JSON objects from rank 0: the messages by
strategy and case of `GRADIENTS` and of `LEAVES`, and of `COLLECTIVES` on all ranks; empty if all windows were applied.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher import Engine, Loss, make_plan
from launcher.train.engine.loss_watches import LossCollectives
from launcher.train.world import World
from tests.infra.workers import leave_group, message_of, print_on_rank_0

WIDTH = 6
COMMON = (
    "precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=8", "batch.micro_size=2",
    "cluster.device=cpu", "schedule=constant", "schedule.warmup_steps=0",
)  # fmt: skip
METHODS = dict(vars(dist.ProcessGroup))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.01)


def engine_of(model: Any, *settings: str, owner: object = None, optimizer: Any = sgd) -> Engine:
    return Engine(model, optimizer, make_plan([*COMMON, *settings], samples=8), owner=owner)


def run(make: Callable[[], Engine], data: list[Tensor], loss: Callable[[Any, Tensor], Loss]) -> str:
    """Return the error of the run; empty if all windows were applied."""

    def train() -> None:
        engine = make()
        for window in engine.windows(data):
            for batch in window:
                engine.backward(loss(engine.model, batch))
            engine.step()

    return message_of(train)


def by_strategy(strategies: Mapping[str, list[str]], cases: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield strategies with cases: all, or each case with a third of them."""
    for number, strategy in enumerate(strategies):
        for place, (name, case) in enumerate(cases.items()):
            if sys.argv[1] == "all" or (number + place) % 3 == 0:
                yield strategy, name, case


# losses that change gradients


class Net(nn.Module):
    def __init__(self, *, by_frequency: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, WIDTH, scale_grad_by_freq=by_frequency)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table((x[:, 0] > 0).long())
        for block in self.body:
            x = block(x).tanh()
        return self.head(x)


def plain(model: Any, x: Tensor) -> Tensor:
    return model(x).square().sum()


def own_backward(model: Any, x: Tensor) -> Tensor:
    plain(model, x / 2).backward()
    return plain(model, x)


def zeroed(model: Any, x: Tensor) -> Tensor:
    attacked = x.clone().requires_grad_()
    plain(model, attacked).backward()
    assert attacked.grad is not None
    model.zero_grad()
    return plain(model, x + attacked.grad.sign() / 10)


def attacked(model: Any, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(plain(model, inputs), inputs)
    return plain(model, x + slope.sign() / 10)


def penalty(model: Any, x: Tensor) -> Tensor:
    inputs = x.clone().requires_grad_()
    total = plain(model, inputs)
    (slope,) = torch.autograd.grad(total, inputs, create_graph=True)
    return total + slope.square().sum()


def several_passes(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model(x)
    return functional.mse_loss(model(x + 1), target, reduction="sum") + plain(model, x)


GRADIENTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "own backward": own_backward, "zeroed": zeroed, "plain": plain, "attacked": attacked, "penalty": penalty,
    "several passes": several_passes, "steps in backward": plain, "by frequency": plain,
}  # fmt: skip
POLICIES = {
    "ddp every": ["strategy=ddp", "strategy.sync=every"],
    "ddp boundary": ["strategy=ddp", "strategy.sync=boundary"],
    "ddp compressed": ["strategy=ddp", "strategy.sync=every", "strategy.compress=bf16"],
    "fsdp every": ["strategy=fsdp", "strategy.sync=every"],
    "fsdp boundary": ["strategy=fsdp", "strategy.sync=boundary"],
    "fsdp gather_once": ["strategy=fsdp", "strategy.sync=gather_once"],
    "fsdp bf16": ["strategy=fsdp", "strategy.sync=boundary", "precision=bf16"],
}


def with_gradients(name: str, settings: list[str]) -> str:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        parameters = [*parameters]
        if name == "steps in backward":
            last = sgd(parameters[-1:])
            parameters[-1].register_post_accumulate_grad_hook(lambda _: last.step() and None)
        return sgd(parameters)

    data = list(torch.sin(torch.arange(8.0 * WIDTH)).view(8, WIDTH))

    def make() -> Engine:
        model = Net(by_frequency=name == "by frequency")
        return engine_of(model, "train.steps=3", *settings, optimizer=optimizer)

    return run(make, data, lambda model, x: Loss(GRADIENTS[name](model, x), len(x)))


# losses that depend on tensors outside of the model

GLOBAL_SCALE = nn.Parameter(torch.ones(1))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: ARG004
        return 2 * gradient


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.plain = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.body:
            x = checkpoint(block, Double.apply(x), use_reentrant=False).tanh()  # pyright: ignore
        return x * self.plain[0]


class Task:
    """Has a loss of the model's outputs alone, and what the cases below need."""

    def __init__(self) -> None:
        self.log_var = nn.Parameter(torch.zeros(1))
        self.scales = {"one": torch.ones(WIDTH, requires_grad=True)}
        self.criterion = nn.Linear(WIDTH, WIDTH)
        self.data = torch.randn(8, WIDTH, requires_grad=True)
        self.critic: Any = None

    def model(self) -> nn.Module:
        return Blocks()

    def loss(self, model: Any, x: Tensor) -> Loss:
        return Loss(self.total(model, x), len(x))

    def total(self, model: Any, x: Tensor) -> Tensor:
        return model(x).square().sum()


class Weighted(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return super().total(model, x) * self.log_var.exp().sum()


class Criterion(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return self.criterion(model(x)).square().sum()


class NoParameter(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return (model(x) * self.scales["one"]).square().sum()


class OfTheModel(Task):
    def model(self) -> nn.Module:
        model = super().model()
        model.plain = [torch.ones(WIDTH, requires_grad=True)]  # pyright: ignore[reportAttributeAccessIssue]
        return model


class Global(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return super().total(model, x) * GLOBAL_SCALE.sum()


class FrozenCriterion(Criterion):
    def __init__(self) -> None:
        super().__init__()
        self.criterion.requires_grad_(False)


class Penalty(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        total = super().total(model, x)
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return total + slope.square().sum()


class Adversarial(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        self.delta = nn.Parameter(torch.zeros_like(x))  # another one in each micro-batch
        return super().total(model, x + self.delta)


class Critic(Task):
    def total(self, model: Any, x: Tensor) -> Tensor:
        return functional.softplus(self.critic.model(model(x))).sum()


LEAVES: dict[str, type[Task]] = {
    "weighted": Weighted, "criterion": Criterion, "no parameter": NoParameter, "of the model": OfTheModel,
    "global": Global, "plain": Task, "frozen": FrozenCriterion, "penalty": Penalty, "adversarial": Adversarial,
    "critic": Critic,
}  # fmt: skip
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "bf16": ["strategy=fsdp", "precision=bf16", "strategy.sync=gather_once"],
}


def with_leaves(kind: type[Task], settings: list[str], *, owner: bool = True) -> str:
    task = kind()
    options = ("train.steps=2", "train.shuffle=false", *settings)
    engine = engine_of(task.model(), *options, owner=task if owner else None)
    if kind is Critic:
        task.critic = engine_of(Task().model(), *options)
    return run(lambda: engine, list(task.data if kind is Penalty else task.data.detach()), task.loss)


# losses that run collectives, in windows of one and of two micro-batches


class Model(nn.Module):
    def __init__(self, *, gathers: bool = False, norm: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.gathers = nn.Linear(6, 4), norm or nn.Identity(), gathers

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.body(x))
        return Gather.apply(rows) if self.gathers else rows  # pyright: ignore[reportReturnType]


class Gather(torch.autograd.Function):
    """The usual hand-written one: rows of all ranks, and of the gradient this rank's part of the sum."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        ctx.rows = len(rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dist.all_reduce(gradient)
        return gradient[dist.get_rank() * ctx.rows :][: ctx.rows]


class GatheringNorm(nn.BatchNorm1d):
    """BatchNorm over the ranks, in the way of torch's SyncBatchNorm, which supports no CPUs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
        return input - Gather.apply(input).mean(0)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def contrastive(rows: Tensor, everyone: Tensor) -> Loss:
    own = torch.arange(len(rows)) + dist.get_rank() * len(rows)
    return Loss(functional.cross_entropy(rows @ everyone.T, own, reduction="sum"), len(rows))


def without_gradient(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    with torch.no_grad():
        dist.all_gather(parts, rows)
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


def squares(rows: Tensor) -> Loss:
    return Loss(rows.square().sum(), len(rows))


def with_count(rows: Tensor) -> Loss:
    count = torch.tensor([len(rows), 1.0])
    dist.all_reduce(count)
    return squares(rows)


def with_objects(rows: Tensor) -> Loss:
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, "rank")
    dist.barrier()
    return squares(rows)


def variance(rows: Tensor) -> Loss:
    mean = all_reduce(rows.mean(0)) / dist.get_world_size()  # pyright: ignore[reportOperatorIssue]
    return Loss((rows - mean).square().sum(), len(rows))


def gathered(rows: Tensor) -> Loss:
    return contrastive(rows, torch.cat(all_gather(rows)))  # pyright: ignore[reportArgumentType]


def functionally_gathered(rows: Tensor) -> Loss:
    group = dist.group.WORLD
    everyone = functional_collectives.all_gather_tensor_autograd(rows.contiguous(), 0, group)  # pyright: ignore
    return contrastive(rows, everyone)


def with_collectives(loss: Callable[[Tensor], Loss], model: Callable[[], nn.Module] = Model, *overrides: str) -> str:
    engine = engine_of(model, "train.steps=1", *overrides)
    before = engine.model.state_dict()["body.weight"].clone()
    data = list(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)))
    message = run(lambda: engine, data, lambda model, batch: loss(model(batch)))
    if message:
        assert engine.steps == 0
        assert torch.equal(engine.model.state_dict()["body.weight"], before)
    else:
        assert not any(isinstance(watch, LossCollectives) for watch in engine._watches), "after a window"
    return message


COLLECTIVES: dict[str, Callable[[], str]] = {
    "torch.distributed.nn": lambda: with_collectives(gathered),
    "functional": lambda: with_collectives(functionally_gathered),
    "a Function of one's own": lambda: with_collectives(lambda rows: contrastive(rows, Gather.apply(rows))),  # pyright: ignore
    "in the model": lambda: with_collectives(squares, lambda: Model(gathers=True)),
    "without gradient": lambda: with_collectives(lambda rows: contrastive(rows, without_gradient(rows))),
    "a mean with gradient": lambda: with_collectives(variance),
    "fsdp": lambda: with_collectives(gathered, Model, "strategy=fsdp"),
    "one micro-batch": lambda: with_collectives(gathered, Model, "batch.micro_size=4"),
    "a count": lambda: with_collectives(with_count),
    "objects": lambda: with_collectives(with_objects),
    "no collective": lambda: with_collectives(squares, Model, "strategy=fsdp"),
    "batch.norm=sync": lambda: with_collectives(squares, lambda: Model(norm=nn.BatchNorm1d(4)), "batch.norm=sync"),
    "another BatchNorm": lambda: with_collectives(squares, lambda: Model(norm=GatheringNorm(4, affine=False))),
}


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch 2.13 renames its collectives
    print_on_rank_0({
        f"{policy}: {name}": with_gradients(name, POLICIES[policy])
        for policy, name, _ in by_strategy(POLICIES, GRADIENTS)
    })  # fmt: skip
    leaves = {
        f"{strategy} {name}": with_leaves(kind, STRATEGIES[strategy])
        for strategy, name, kind in by_strategy(STRATEGIES, LEAVES) if kind is not Critic or strategy == "ddp"
    }  # fmt: skip
    print_on_rank_0({**leaves, "own loop": with_leaves(Weighted, STRATEGIES["ddp"], owner=False)})
    print_on_rank_0({name: World.here().of_all(case()) for name, case in COLLECTIVES.items()})
    assert dict(vars(dist.ProcessGroup)) == METHODS  # nothing is recorded any more
    leave_group()


main()
