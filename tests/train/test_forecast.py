"""strategy.sync=auto: what is predicted is what real ranks then need, and the cheapest policy that fits is taken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.config import Sync
from launcher.plan import Forecast, RunPlan
from launcher.strategy import with_memory
from tests.conftest import Launch
from tests.helpers import make_plan, torchrun

WORKER = Path(__file__).parent / "memory_worker.py"
JOB = (
    "task.width=256", "task.depth=4", "task.heads=4", "task.seq_len=32", "batch.global_size=32", "batch.micro_size=2",
    "train.loader_workers=0", "run.calibrate=0",
)  # fmt: skip


def forecasts(**peaks: int) -> list[Forecast]:
    wire = {"every": 300, "boundary": 200, "gather_once": 30}
    return [
        Forecast(sync=Sync(name), payload_bytes=0, wire_bytes=wire[name], wire_s=None, peak_bytes=peak)
        for name, peak in peaks.items()
    ]


@pytest.mark.parametrize(
    ("memory", "chosen", "why"),
    [
        (10_000, "gather_once", "fewest wire bytes of all, and all fit"),
        (1_000, "boundary", "fewest wire bytes of those that fit"),
        (700, "every", "fewest wire bytes of those that fit"),
        (300, "every", "the least memory: none is predicted to fit"),
    ],
)
def test_the_fewest_bytes_of_those_that_fit(memory: int, chosen: str, why: str) -> None:
    plan = make_plan("strategy=fsdp").strategy
    decided = with_memory(plan, forecasts(every=600, boundary=900, gather_once=1000), memory)
    assert (decided.sync.value, decided.sync_reason) == (chosen, why)
    assert decided.memory_bytes == memory
    assert decided.wire_bytes_every == 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "extra"),
    [
        (2, "strategy=fsdp precision=bf16 strategy.recompute=blocks"),
        (4, "strategy=hsdp strategy.shard_size=2 precision=bf16"),
    ],
)
def test_memory_is_what_was_predicted(ranks: int, extra: str, launch: Launch, tmp_path: Path) -> None:
    said = launch("plan", "--json", *JOB, f"cluster.workers_per_node={ranks}", *extra.split())
    plan = RunPlan.from_json(said.stdout)
    assert not plan.notes
    (tmp_path / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
    lines = torchrun(WORKER, [str(tmp_path / "plan.json")], ranks, tmp_path).splitlines()
    peaks = json.loads(lines[-1])
    assert len(plan.strategy.forecasts) == len(peaks) >= 3
    for forecast in plan.strategy.forecasts:
        assert forecast.peak_bytes == pytest.approx(peaks[forecast.sync.value], rel=0.05), forecast.sync
    smallest, largest = min(peaks.values()), max(peaks.values())
    assert largest > 1.1 * smallest, "the policies differ in what they hold, or nothing was tested"
