"""Runs cells of the grid on real ranks, one after the other; started by torchrun from run.py.

argv: a selection of grid.py, then mistakes of mistakes.py, or "none". Prints one Outcome a cell from rank 0.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import ArrangedData, Engine, Loss, make_plan
from launcher.config.hydra import compose
from launcher.config.schema import Balance, Config, StrategyKind, Sync
from launcher.errors import LauncherError
from launcher.plan.run_plan import RunPlan, SchedulePlan
from launcher.train.data.randomness import Permutation
from tests.equivalence import grid
from tests.equivalence.grid import GLOBAL_SIZE, SELECTIONS, SHORT, Cell, Outcome, Problem
from tests.equivalence.mistakes import MISTAKES
from tests.infra.workers import flat, leave_group, print_on_rank_0

STEPS = grid.STEPS[sys.argv[1]]
# no world divides the vocabulary, so shards are padded; narrower matrices are summed without blocks, and one process
# with one fp32 batch is then itself more than 1e-6 away from fp64
VOCABULARY, WIDTH, LONGEST, SAMPLES = 17, 12, 10, GLOBAL_SIZE + SHORT
LOOKED_AT = (0, 1, STEPS - 2, STEPS - 1)  # windows: a sharded gradient takes a collective to look at
LR = {"sgd": 0.1, "adamw": 0.003}


def tokens(items: str) -> Tensor:
    """[samples, longest]: 0 is padding; a sample has one item less than it has tokens."""
    generator = torch.Generator().manual_seed(7)
    # frequent ones and rare ones: gradients that do not cancel, or their relative error would say little
    table = 1 + (torch.rand(SAMPLES, LONGEST, generator=generator).square() * (VOCABULARY - 1)).long()
    lengths = torch.randint(2, LONGEST + 1, (SAMPLES, 1), generator=generator)
    return torch.where(torch.arange(LONGEST) < (7 if items == "fixed" else lengths), table, 0)


def build() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), hidden, nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))


def terms_of(model: Any, batch: Tensor, items: str) -> list[Loss]:
    targets, logits = batch[:, 1:].flatten(), model(batch[:, :-1]).flatten(0, 1)
    if items == "weighted":
        weights = (torch.arange(VOCABULARY) / 7).to(logits.dtype)  # 0 for padding
        total = functional.cross_entropy(logits, targets, weight=weights, reduction="sum")
        return [Loss(total, weights[targets].sum())]
    total = functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
    if items != "terms":
        return [Loss(total, (targets != 0).sum())]
    # a second term over the rare tokens only: many micro-batches have none. With a factor of 1 its gradient nearly
    # cancels the first one's, and one process with one fp32 batch is itself 1.06e-6 away from fp64
    rare = targets == VOCABULARY - 1
    return [Loss(total, (targets != 0).sum()), Loss(0.3 * logits[rare].square().sum(), int(rare.sum()), name="rare")]


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), LR[name], momentum=0.9)
    return torch.optim.AdamW(model.parameters(), LR[name], weight_decay=0.1)


@dataclasses.dataclass(frozen=True)
class Reference:
    """One process, one big batch, fp64: gradients before the clip and as applied, and the last parameters."""

    gradients: list[Tensor]
    norms: list[float]
    parameters: Tensor


@functools.cache
def reference(problem: Problem, schedule: SchedulePlan, seed: int) -> Reference:
    model, table = build().double(), tokens(problem.items)
    optimizer = optimizer_of(model, problem.optimizer)
    parameters = list(model.parameters())
    gradients: list[Tensor] = []
    norms: list[float] = []
    for step in range(STEPS):
        epoch, place = divmod(step, 2)
        order = Permutation(SAMPLES, seed, epoch).take(0, SAMPLES)
        terms = terms_of(model, table[order[GLOBAL_SIZE:] if place else order[:GLOBAL_SIZE]], problem.items)
        optimizer.zero_grad()
        means = [term.total / term.items for term in terms if term.items]
        sum(means[1:], means[0]).backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, problem.clip or torch.inf).item())
        gradients.append(flat([p.grad for p in parameters]))
        optimizer.param_groups[0]["lr"] = LR[problem.optimizer] * schedule.factor(step, STEPS)
        optimizer.step()
    return Reference(gradients, norms, flat(parameters))


@functools.cache
def composed() -> Config:
    options = ["precision=fp32", "run.calibrate_s=0", "train.loader_workers=0", "schedule.warmup_steps=4"]
    return compose([*options, f"train.steps={STEPS}", f"batch.global_size={GLOBAL_SIZE}"])


def plan_of(cell: Cell) -> RunPlan:
    config, kind = composed(), StrategyKind(cell.strategy)
    shard_size = 2 if kind is StrategyKind.hsdp else None
    strategy = dataclasses.replace(config.strategy, kind=kind, sync=Sync(cell.sync), shard_size=shard_size)
    balance = Balance.length if cell.balance else Balance.none
    batch = dataclasses.replace(config.batch, accumulation=cell.accumulation, balance=balance)
    train = dataclasses.replace(config.train, clip_norm=cell.problem.clip)
    return make_plan(dataclasses.replace(config, strategy=strategy, batch=batch, train=train), samples=SAMPLES)


def compare(cell: Cell, mistake: str) -> Outcome:
    """The largest relative errors of a run."""
    plan = plan_of(cell)
    expected = reference(cell.problem, plan.schedule, plan.train.seed)
    table, model = tokens(cell.problem.items), build()
    optimizer = optimizer_of(model, cell.problem.optimizer)
    engine = Engine(model, optimizer, plan, shard_units=lambda m: [m[1]])
    if mistake != "none":
        MISTAKES[mistake](engine)
    applied: list[Tensor] = []

    def keep(*_: object) -> None:
        if engine.steps in LOOKED_AT:
            applied.append(flat([p.grad for p in model.parameters()]))

    optimizer.register_step_pre_hook(keep)
    worst = {"full": 0.0, "short": 0.0, "norm": 0.0}
    lengths = (table != 0).sum(1)

    def collate(indices: list[int]) -> Tensor:
        """Pad to the longest of a balanced micro-batch; otherwise to the longest of all samples."""
        return table[indices][:, : lengths[indices].max() if cell.balance else LONGEST]

    def forward(model: Any, batch: Tensor) -> list[Loss]:
        return terms_of(model, batch, cell.problem.items)

    data = ArrangedData(range(SAMPLES), lengths=lengths)
    for number, window in enumerate(engine.windows(data, collate, forward)):
        for batch in window:
            (term, *others) = forward(engine.model, batch)
            if others:
                engine.backward([term, *others])
            else:
                engine.backward(term.total, term.items)
        result = engine.step()
        if applied:
            kind = "full" if result.samples == GLOBAL_SIZE else "short"
            wanted = expected.gradients[number]
            worst[kind] = max(worst[kind], ((applied.pop() - wanted).norm() / wanted.norm()).item())
        worst["norm"] = max(worst["norm"], abs(result.grad_norm / expected.norms[number] - 1))
    drift = (flat(list(model.parameters())) - expected.parameters).norm() / expected.parameters.norm()
    return Outcome(str(cell), mistake, parameters=drift.item(), **worst)


def main() -> None:
    selection, mistakes = SELECTIONS[sys.argv[1]], sys.argv[2:]
    for mistake in mistakes:
        for cell in selection(int(os.environ["WORLD_SIZE"])):
            try:
                outcome = compare(cell, mistake)
            except LauncherError as error:
                outcome = Outcome(str(cell), mistake, error=f"{type(error).__name__}: {error}")
            print_on_rank_0(dataclasses.asdict(outcome))
    leave_group()


if __name__ == "__main__":
    main()
