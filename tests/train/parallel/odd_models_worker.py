"""Models whose parts are not called as usual, run by test_base.py.

Prints one JSON object from rank 0: by strategy and model, how far the parameters are from those of plain torch in one
process after two steps; or the message.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from launcher import Engine, make_plan
from launcher.errors import LauncherError
from tests.infra.workers import flat, leave_group, print_on_rank_0

WIDTH, GLOBAL, MICRO, STEPS = 8, 8, 2, 2
STRATEGIES = {
    "ddp": ["strategy=ddp"],
    "every": ["strategy=fsdp", "strategy.sync=every"],
    "boundary": ["strategy=fsdp", "strategy.sync=boundary"],
    "gather_once": ["strategy=fsdp", "strategy.sync=gather_once"],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """Runs blocks, and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)))

    def body(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Lookup(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.embedding((x[:, 0] > 0).long(), self.table, sparse=True).sum()


class Held:
    """Output of a block; the block takes it, too."""

    __slots__ = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values = values


class InObjects(Block):
    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.pack = pack

    def forward(self, x: Any) -> Any:
        x = x.values if isinstance(x, Held) else x() if callable(x) else x
        return self.pack(super().forward(x))


class Objects(Model):
    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__(lambda: InObjects(pack))
        self.unpack = unpack

    def body(self, x: Any) -> Tensor:
        return self.unpack(super().body(x))


class Weight(Block):
    def forward(self, x: Any) -> Any:
        x = x[0] + x[1] if isinstance(x, tuple) else x
        return super().forward(x), self.linear.weight[:1]


class Weights(Model):
    def body(self, x: Any) -> Tensor:
        x, weight = super().body(x)
        return x + weight


class Again(Block):
    """Registers another parameter in the place of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight = nn.Parameter(functional.normalize(self.linear.weight))
        return super().forward(x)


class Edges(Block):
    """Returns a sparse tensor beside its output."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), torch.eye(WIDTH).to_sparse()


class Graph(Model):
    def body(self, x: Any) -> Any:
        for block in self.blocks:
            x, edges = block(x)
            x = x @ edges.to_dense()
        return x


class Recursive(Block):
    """Calls itself, and uses its parameters before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = super().forward(x)
        return self.last(self(x, depth - 1)) if depth else x


class Views(Model):
    """Its units return views, which it changes in place, or not. torch warns of each of them; here it is an error."""

    def __init__(self, in_place: bool) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, -1)), nn.Flatten()))
        self.in_place = in_place

    def body(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
            x = x.mul_(2) if self.in_place else x * 2
        return x


class Reentrant(Model):
    """Args: rounds: how often each block runs."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def body(self, x: Any) -> Any:
        for _ in range(self.rounds):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
        return checkpoint_sequential([*self.blocks], 2, x, use_reentrant=True) if self.rounds == 1 else x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: Model(lambda: torch.jit.trace_module(Block(), {"forward": torch.zeros(1, WIDTH)})),
    "sparse": Lookup,
    "slots": lambda: Objects(Held, lambda held: held.values),
    "functions": lambda: Objects(lambda x: lambda: x, lambda function: function()),
    "edges": lambda: Graph(Edges),
    "recursive": lambda: Model(Recursive),
    "views": lambda: Views(False),
    "views in place": lambda: Views(True),
    "weight": lambda: Weights(Weight),
    "again": lambda: Model(Again),
    "reentrant": lambda: Reentrant(1),
    "reentrant twice": lambda: Reentrant(2),
}


def made(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def forward(model: Any, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) - 1).square().sum(), len(batch)


def in_one_process(model: nn.Module, samples: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        total, items = forward(model, samples)
        (total / items).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model.parameters())


def outcome(name: str, settings: list[str]) -> float | str:
    samples = torch.sin(torch.arange(1.0, GLOBAL * WIDTH + 1)).view(GLOBAL, WIDTH)
    plan = make_plan(
        ["precision=fp32", "train.loader_workers=0", f"batch.global_size={GLOBAL}", f"batch.micro_size={MICRO}",
         f"train.steps={STEPS}", "train.clip_norm=null", "cluster.device=cpu", "schedule=constant",
         "schedule.warmup_steps=0", *settings],
        samples=GLOBAL,
    )  # fmt: skip
    try:
        engine = Engine(lambda: made(name), lambda parameters: torch.optim.SGD(parameters, 0.1), plan)
        for window in engine.windows(list(samples), forward=forward):
            for batch in window:
                engine.backward(*forward(engine.model, batch))
            engine.step()
    except LauncherError as error:
        return f"{type(error).__name__}: {error}"
    return (flat(engine.model.parameters()) - in_one_process(made(name), samples)).abs().max().item()


def main() -> None:
    warnings.filterwarnings("error", "FSDP2-wrapped module .* returned a view")
    print_on_rank_0({
        strategy: {
            name: outcome(name, settings) for place, name in enumerate(MODELS)
            if sys.argv[1] == "all" or strategy == "ddp" or place % 3 == number - 1
        }
        for number, (strategy, settings) in enumerate(STRATEGIES.items())
    })  # fmt: skip
    leave_group()


main()
