"""A user's own loop on the engine, run by torchrun in test_engine.py: gradients against one big batch in one process.

Prints one JSON object from rank 0 for each run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.config.schema import Compress
from launcher.train.data.randomness import Permutation
from tests.infra.workers import flat, leave_group, print_on_rank_0


class Sentences(torch.utils.data.Dataset[Tensor]):
    """Variable-length samples: 3 to 60 valid tokens each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(3, 61, (count,), generator=generator).tolist()
        self.samples = [torch.randint(1, 50, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index]


def collate(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)  # 0 is padding


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 50))


def loss_sum(model: Any, batch: Tensor) -> tuple[Tensor, Tensor]:
    inputs, targets = batch[:, :-1], batch[:, 1:]
    total = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
    return total, (targets != 0).sum()


def residue(engine: Engine, model: nn.Module, items: int) -> Tensor:
    """Return PowerSGD's residue, summed over ranks, in the scale of the mean gradient."""
    kept = engine.parallel.state_dict()["residue"]
    mean = flat([kept.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()])
    dist.all_reduce(mean)
    return mean * engine._optimizer_step.gradient_unit / items


def compare(data: Sentences, overrides: list[str]) -> dict[str, Any]:
    """Every window of a run against the same window as one big batch in one process."""
    plan = make_plan(overrides, samples=len(data))
    lossy = plan.strategy.compress is not Compress.none
    model, reference = build(), build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in (model, reference)]
    engine = Engine(model, optimizers[0], plan)
    applied: list[Tensor] = []
    optimizers[0].register_step_pre_hook(lambda *_: applied.append(flat([p.grad for p in model.parameters()])))

    worst, clipped, norms, losses, samples, kinds = 0.0, 0, [], [], [], {}
    sum_applied, sum_expected, kept = torch.zeros(()), torch.zeros(()), 0.0
    for window in engine.windows(data, collate):
        if lossy:  # the reference follows: each gradient is compared at the very same parameters
            nn.utils.vector_to_parameters(flat(list(model.parameters())).float(), reference.parameters())
        for batch in window:
            engine.backward(*loss_sum(engine.model, batch))
        result = engine.step()
        losses.append(result.loss)
        samples.append(result.samples)
        if result.samples == plan.batch.global_size and result.sync is plan.strategy.sync:
            kinds = {kind.value: traffic.collectives for kind, traffic in result.comm.kinds.items()}

        # the same window as one big batch in one process, from the permutation alone
        epoch, place = divmod(result.window, plan.epoch.windows or 1)
        order = Permutation(len(data), plan.train.seed, epoch)
        first = place * plan.batch.global_size
        indices = order.take(first, min(plan.batch.global_size, len(data) - first))
        total, items = loss_sum(reference, collate([data[i] for i in indices]))
        optimizers[1].zero_grad()
        (total / items).backward()
        expected = flat([p.grad for p in reference.parameters() if p.grad is not None])
        norms.append(abs(result.grad_norm / expected.norm().item() - 1))
        if plan.train.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), plan.train.clip_norm)
            clipped += bool(norm > plan.train.clip_norm)
            expected = flat([p.grad for p in reference.parameters() if p.grad is not None])
        mine = applied.pop()
        worst = max(worst, ((mine - expected).norm() / expected.norm()).item())
        if plan.strategy.compress.keeps_residue:
            sum_applied, sum_expected = sum_applied + mine, sum_expected + expected
        if plan.strategy.compress.keeps_residue and result.step in (6, plan.train.steps):
            assert len(engine.parallel._compression._layout) > 1, "several buckets remember something"
            owed = sum_applied + residue(engine, model, result.items) - sum_expected
            kept = max(kept, (owed.norm() / sum_expected.norm()).item())
        assert result.items == items
        for group, factor in zip(
            optimizers[1].param_groups, [plan.schedule.factor(result.step - 1, plan.train.steps)], strict=True
        ):
            group["lr"] = 0.3 * factor
        optimizers[1].step()

    parameters, wanted = flat(list(model.parameters())), flat(list(reference.parameters()))
    drift = ((parameters - wanted).norm() / wanted.norm()).item()
    seen = {"gradient": worst, "norm": max(norms), "parameters": drift, "clipped": clipped, "owed": kept}
    return {**seen, "losses": losses, "samples": samples, "kinds": kinds}


def main() -> None:
    """argv: samples, then one or more runs' overrides, each closed by "/"."""
    data = Sentences(int(sys.argv[1]))
    overrides: list[str] = []
    for word in sys.argv[2:]:
        if word != "/":
            overrides.append(word)
            continue
        seen = compare(data, overrides)
        print_on_rank_0(seen)
        overrides = []
    leave_group()


if __name__ == "__main__":
    main()
