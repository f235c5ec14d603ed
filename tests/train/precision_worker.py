"""Narrow arithmetic on real ranks, run by torchrun in test_precision.py on the device named in argv.

Prints one JSON object from rank 0: by strategy and precision, what came of a window of 32k items in 8 micro-batches;
and whether every rank did what it is to do about one rank's overflow.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.train.data.randomness import Permutation
from launcher.train.parallel.base import local
from tests.infra.workers import flat, leave_group, print_on_rank_0

RANKS = int(sys.argv[2])
VOCABULARY, WIDTH, LENGTH, SAMPLES = 64, 32, 256, 128  # 128 samples of 256 items are the window
POLICIES = [("ddp", "boundary"), ("fsdp", "every"), ("fsdp", "gather_once")] if RANKS > 1 else [("fsdp", "boundary")]
OPTIONS = ["run.calibrate_s=0", "train.loader_workers=0", "train.clip_norm=null", f"cluster.device={sys.argv[1]}"]
# the scale after each window: it doubles after three steps without overflow, and halves at the third window's
OVERFLOWS = (False, False, True, False, False, False, False)
SCALES = [8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0]


def build() -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), hidden, nn.Tanh(), nn.Linear(WIDTH, VOCABULARY))


def texts() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.rand(SAMPLES, LENGTH + 1, generator=generator).square() * VOCABULARY).long()


def loss_sum(model: Any, batch: Tensor) -> tuple[Tensor, int]:
    targets = batch[:, 1:].flatten()
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets, reduction="sum"), targets.numel()


def engine_of(strategy: str, sync: str, *options: str) -> Engine:
    kind = [f"strategy={strategy}", *([f"strategy.sync={sync}"] if strategy != "single" else [])]
    plan = make_plan([*OPTIONS, *kind, *options], samples=SAMPLES)
    return Engine(build, lambda p: torch.optim.AdamW(p, 1e-3), plan, shard_units=lambda m: [m[1]])


def window(strategy: str, sync: str, precision: str, micro: int, *options: str) -> dict[str, Any]:
    """The gradient of one window of all samples against fp64, and in which formats everything is kept."""
    sizes = [f"batch.global_size={SAMPLES}", f"batch.micro_size={micro}", "train.steps=1", f"precision={precision}"]
    engine = engine_of(strategy, sync, *sizes, *options)
    table, found, parameters = texts(), list[Tensor](), list(engine.parallel.module.parameters())
    engine.optimizer.register_step_pre_hook(lambda *_: found.append(flat([p.grad for p in parameters])))
    skipped, dtypes = 0, {str(p.dtype) for p in parameters}
    for batches in engine.windows(range(SAMPLES), lambda indices: table[indices]):
        for batch in batches:
            engine.backward(*loss_sum(engine.model, batch))
        dtypes |= {str(p.grad.dtype) for p in parameters if p.grad is not None}
        skipped += engine.step().skipped
        if skipped > 20:
            break
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    dtypes |= {str(value.dtype) for value in states if isinstance(value, Tensor)}
    model = build().double()
    total, items = loss_sum(model, table[Permutation(SAMPLES, engine.plan.train.seed, 0).take(0, SAMPLES)])
    (total / items).backward()
    wanted = flat([p.grad for p in model.parameters()])
    error = ((found[0] - wanted).norm() / wanted.norm()).item()
    return {"items": items, "error": error, "skipped": skipped, "dtypes": sorted(dtypes)}


def overflow(strategy: str, sync: str) -> bool:
    """The last rank's backward pass overflows in the third window: what each rank has done about it."""
    sizes = ["batch.global_size=16", f"batch.micro_size={4 // RANKS}", "train.steps=6", "precision=fp16"]
    engine = engine_of(strategy, sync, *sizes, "precision.init_scale=8", "precision.growth_interval=3")
    table, seen = texts(), list[tuple[Any, ...]]()

    def state() -> list[Tensor]:
        kept = [value for state in engine.optimizer.state.values() for value in state.values()]
        return [local(t).detach().clone() for t in (*engine.parallel.module.parameters(), *kept)]

    for number, batches in enumerate(engine.windows(range(SAMPLES), lambda indices: table[indices])):
        before, rate = state(), engine.schedule.get_last_lr()
        for batch in batches:
            total, items = loss_sum(engine.model, batch)
            overflows = OVERFLOWS[number] and engine.world.rank == RANKS - 1
            engine.backward(total * 1e6 if overflows else total, items)
        result = engine.step()
        assert result.loss < 1e9, "the loss itself is finite"
        stays = len(before) == len(state()) and all(map(torch.equal, before, state()))
        seen.append((result.skipped, stays, rate == engine.schedule.get_last_lr(), result.scale, result.step))
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, (seen, engine.skipped_steps, engine.steps))
    assert all(one == everyone[0] for one in everyone), everyone
    assert [skipped for skipped, *_ in seen] == [stays for _, stays, *_ in seen] == list(OVERFLOWS), seen
    assert [rests for _, _, rests, *_ in seen] == list(OVERFLOWS), seen
    assert [scale for *_, scale, _ in seen] == SCALES, seen
    assert [step for *_, step in seen] == [1, 2, 2, 3, 4, 5, 6], seen
    return everyone[0][1:] == (1, 6)


def main() -> None:
    results: dict[str, Any] = {}
    micro = SAMPLES // RANKS // 8
    for strategy, sync in POLICIES:
        for precision in ("bf16", "fp16"):
            results[f"{strategy} {sync} {precision}"] = window(strategy, sync, precision, micro)
        results[f"{strategy} {sync} overflow"] = overflow(strategy, sync)
    strategy, sync = POLICIES[0]
    for precision in ("bf16", "fp16"):
        results[f"{precision} at once"] = window(strategy, sync, precision, 8 * micro)
    fixed = ("precision.init_scale=1", "precision.growth_interval=1000")
    results["fp16 without a scale"] = window(strategy, sync, "fp16", micro, *fixed)
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
