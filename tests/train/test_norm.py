"""BatchNorm under accumulation: each ``batch.norm`` normalises by just the samples that it says, to fp64's rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "norm_worker.py"
CALLS = 4  # of BatchNorm in one forward pass
SAMPLES = 25  # windows of 12, 12 and 1: one rank of two has no sample in the last one


def run_all(ranks: int, tmp_path: Path, runs: list[str]) -> dict[str, dict[str, Any]]:
    words = [word for overrides in runs for word in (*overrides.split(), "/")]
    lines = torchrun(WORKER, [str(SAMPLES), *words], ranks, tmp_path).splitlines()
    return dict(zip(runs, [json.loads(line) for line in lines if line.startswith("{")], strict=True))


def require_one_batch(seen: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert seen["gradient"] < tolerance
    assert seen["from_one_batch"] < tolerance
    assert seen["statistics"] < tolerance
    assert seen["counted"] == [9, 18, 9], "once a window for each call: rehearsals and passes ahead leave no trace"


@pytest.mark.slow
def test_on_one_rank(tmp_path: Path) -> None:
    one = "strategy=single cluster.workers_per_node=1"
    runs = {
        norm: f"{one} batch.micro_size={micro} batch.norm={norm.split()[0]}"
        for norm, micro in (("window", 3), ("window whole", 12), ("freeze", 4), ("leave", 4), ("leave whole", 12))
    }
    found = run_all(1, tmp_path, list(runs.values()))
    seen = {norm: found[overrides] for norm, overrides in runs.items()}
    for norm in ("window", "window whole"):
        require_one_batch(seen[norm])
        assert seen[norm]["losses"] == pytest.approx(seen["leave whole"]["losses"], rel=1e-9)
    assert seen["freeze"]["gradient"] < 1e-9
    assert seen["freeze"]["counted"] == [0, 0, 0]
    assert seen["leave"]["gradient"] < 1e-9
    assert seen["leave"]["from_one_batch"] > 0.05, "or else there is nothing to mend"


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    window, sync = "batch.norm=window batch.micro_size=2", "batch.norm=sync batch.micro_size=2"
    whole, frozen = "batch.norm=sync batch.micro_size=6", "batch.norm=freeze batch.micro_size=3"
    alone = "batch.norm=leave batch.micro_size=6"
    runs = [window, f"{window} strategy=fsdp", sync, whole, f"{sync} strategy=fsdp", frozen, alone]
    seen = run_all(2, tmp_path, [*runs, "dropout"])
    require_one_batch(seen[window])
    require_one_batch(seen[f"{window} strategy=fsdp"], tolerance=1e-6)  # it adds gradients up in fp32
    assert seen[window]["collectives"] == [2 * CALLS] * 9, "however many micro-batches"

    require_one_batch(seen[whole])
    assert seen[sync]["gradient"] < 1e-9
    assert seen[sync]["statistics"] < 1e-9
    assert seen[sync]["from_one_batch"] > 0.05
    assert seen[sync]["collectives"] == [2 * CALLS * n for n in (3, 3, 1)] * 3
    assert seen[f"{sync} strategy=fsdp"]["gradient"] < 1e-6

    assert seen[frozen]["gradient"] < 1e-9
    assert seen[frozen]["counted"] == [0, 0, 0]
    assert seen[alone]["gradient"] < 1e-9
    assert seen[alone]["from_one_batch"] > 0.05, "or else there is nothing to mend"
    assert seen[alone]["collectives"] == [0] * 9

    assert seen["dropout"]["mean"] < 1e-9, "the passes ahead drew the very dropout of the pass that counts"
    assert seen["dropout"]["square"] == pytest.approx([1.0] * 4, rel=1e-3)


@pytest.mark.slow
def test_on_four_ranks(tmp_path: Path) -> None:
    window, sync = "batch.norm=window batch.micro_size=1", "batch.norm=sync batch.micro_size=3"
    hsdp = f"{window} strategy=hsdp strategy.shard_size=2 strategy.sync=replicas_at_boundary"
    seen = run_all(4, tmp_path, [window, hsdp, sync])
    require_one_batch(seen[window])
    require_one_batch(seen[hsdp], tolerance=1e-6)
    require_one_batch(seen[sync])
