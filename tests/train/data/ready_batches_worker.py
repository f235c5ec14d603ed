"""Training on a DataLoader's batches, run by test_ready_batches.py.

Arguments: a directory, and the strategies. Prints the greatest difference from a plain loop by case, from rank 0.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from launcher import Engine, make_plan
from launcher.errors import DataError
from tests.infra.workers import leave_group, print_on_rank_0

SAMPLES, STEPS = 52, 5  # an epoch of three windows of 16 samples and one of 4
torch.set_num_threads(1)


class Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.sin(torch.arange(SAMPLES * 4.0)).reshape(SAMPLES, 4))


def loader_of(kind: str) -> Any:
    if kind == "stream":
        return DataLoader(Streamed(), 2)
    data = TensorDataset(torch.sin(torch.arange(SAMPLES * 4.0)).reshape(SAMPLES, 4))
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "processes" else {}
    generator = torch.Generator().manual_seed(dist.get_rank() if kind == "other seeds" else 3)
    return DataLoader(data, 2, shuffle=True, generator=generator, collate_fn=unpacked, **workers)


def unpacked(samples: list[Any]) -> Tensor:
    return torch.stack([sample[0] for sample in samples])


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: Any, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) - batch.sum(1, keepdim=True)).square().sum(), len(batch)


def plain(kind: str) -> Tensor:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader, steps = loader_of(kind), 0
    while steps < STEPS:
        batches = iter(loader)
        while steps < STEPS and (window := list(itertools.islice(batches, 8))):
            optimizer.zero_grad()
            parts = [loss(model, batch) for batch in window]
            (sum(total for total, _ in parts) / sum(items for _, items in parts)).backward()  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.step()
            steps += 1
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(kind: str, strategy: str, *, stop: int = STEPS) -> Tensor:
    plan = make_plan(
        [f"run.dir={sys.argv[1]}", f"run.name={kind.replace(' ', '-')}-{strategy}", f"strategy={strategy}",
         "batch.global_size=16", "batch.micro_size=2", f"train.steps={STEPS}", "train.clip_norm=null",
         "cluster.device=cpu", "precision=fp32", "run.calibrate_s=0", "schedule=constant", "schedule.warmup_steps=0",
         "checkpoint.every=2", "checkpoint.async_save=false"], samples=None,
    )  # fmt: skip
    engine = Engine(model_of, lambda parameters: torch.optim.SGD(parameters, 0.05), plan)
    engine.resume()
    for window in engine.windows(loader_of(kind)):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        result = engine.step()
        engine.finish_step(result)
        if result.step == stop < STEPS:
            break
    whole = [getattr(each, "full_tensor", lambda each=each: each)() for each in engine.parallel.module.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])


def main() -> None:
    results: dict[str, Any] = {}
    for kind in ("shuffle", "stream", "processes"):
        expected = plain(kind)
        for strategy in sys.argv[2:] if kind == "shuffle" else sys.argv[-1:]:
            train(kind, strategy, stop=3)  # the newest checkpoint is of step 2, in the middle of an epoch
            results[f"{kind}, {strategy}"] = (train(kind, strategy) - expected).abs().max().item()
    try:
        train("other seeds", "ddp")
    except DataError as error:
        results["other seeds"] = str(error)
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
