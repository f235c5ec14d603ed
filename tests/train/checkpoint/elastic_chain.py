"""Runs that go on in other worlds, and what came of them: for test_elastic.py, and by hand for larger ones:

python -m tests.train.checkpoint.elastic_chain 8 4 6 1
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.infra.runs import records, run_jobs

run = partial(run_jobs, Path(__file__).parent / "elastic_worker.py")
STEPS = 20
COMMON = (
    "batch.global_size=16", "precision=fp32", f"train.steps={STEPS}", "run.calibrate_s=1", "optimizer.lr=0.01",
    "train.clip_norm=0.5", "batch.uneven=true", "train.loader_workers=0",
)  # fmt: skip
SAVES = ("checkpoint.every=epoch",)


@dataclass(frozen=True)
class Chain:
    """``pieces``: (ranks, overrides) one after the other. ``task``: parameters of the task."""

    name: str
    pieces: tuple[tuple[int, tuple[str, ...]], ...]
    task: Mapping[str, Any] = field(default_factory=dict[str, Any])


def strategies(worlds: Sequence[int], turn: int) -> Chain:
    """Through ``worlds``, each under another strategy than the one before."""

    def kind(number: int, ranks: int) -> tuple[str, ...]:
        if ranks == 1:
            return ("strategy=single", "batch.micro_size=5")
        if ranks % 2 == 0 and ranks > 2 and (number + turn) % 3 == 2:
            return ("strategy=hsdp", "strategy.shard_size=2", "batch.micro_size=1")
        if (number + turn) % 2:
            return ("strategy=fsdp", "batch.micro_size=2")
        return ("strategy=ddp", "strategy.bucket_mb=0.002", "batch.micro_size=3")

    return Chain(f"turn{turn}", tuple((ranks, (*kind(number, ranks), *SAVES)) for number, ranks in enumerate(worlds)))


def go(chains: Sequence[Chain], place: Path, beside: Mapping[int, Callable[[], list[dict[str, Any]]]]) -> list[str]:
    """All chains side by side, which have the same numbers of ranks; what each torchrun printed. ``beside``: jobs that
    run before a piece, by its number."""
    pieces = len(chains[0].pieces)
    said: list[str] = []
    for number in range(pieces):
        ranks = chains[0].pieces[number][0]
        jobs = beside[number]() if number in beside else []
        for chain in chains:
            stop = {} if number == pieces - 1 else {"stop": STEPS // pieces}
            jobs.append(job(place / chain.name, *chain.pieces[number][1], task=dict(chain.task), **stop))
        said.append(run(jobs, ranks, place))
    return said


def job(run: Path, *overrides: str, **known: Any) -> dict[str, Any]:
    target = "tests.train.checkpoint.elastic_task.Words"
    return {"run": str(run), "overrides": [*COMMON, *overrides], "task": {}, "target": target} | known


def seen(run: Path) -> dict[int, list[int]]:
    """The samples that counted in each window, sorted."""
    windows: dict[int, list[int]] = {}
    for file in run.glob("seen.*"):
        for line in file.read_text().splitlines():
            index, samples = json.loads(line)
            windows.setdefault(index, []).extend(samples)
    return {index: sorted(samples) for index, samples in sorted(windows.items())}


def worst(run: Path, undisturbed: Path) -> float:
    """The largest relative difference of a step's loss and of its gradient's norm."""
    ours, theirs = records(run), records(undisturbed)
    assert [each["step"] for each in ours] == [each["step"] for each in theirs] == list(range(1, len(ours) + 1))
    names = ("train/loss", "train/grad_norm", "train/lr")
    pairs = ((mine[name], its[name]) for mine, its in zip(ours, theirs, strict=True) for name in names)
    return max(abs(mine - its) / abs(its) if its else abs(mine) for mine, its in pairs)


def main() -> None:
    worlds = [int(word) for word in sys.argv[1:]] or [8, 4, 6, 1]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        whole = job(place / "whole", "strategy=ddp", "batch.micro_size=2")
        chains = [strategies(worlds, turn) for turn in (0, 1, 2)]
        for text in go(chains, place, {0: lambda: [whole]}):
            print("\n".join(line for line in text.splitlines() if "Resuming from" in line))
        for chain in chains:
            words = " -> ".join(f"{ranks} {kind[0].partition('=')[2]}" for ranks, kind in chain.pieces)
            same = "as" if seen(place / chain.name) == seen(place / "whole") else "NOT as"
            print(f"{words}: worst {worst(place / chain.name, place / 'whole'):.2e}, samples {same} in the whole run")


if __name__ == "__main__":
    main()
