"""make bench-peers: contenders that take turns reach equal parameters, and send the bytes of their policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launch
from tests.helpers import ROOT

pytestmark = pytest.mark.slow
JOB = ROOT / "jobs" / "bench_peers.py"
SMALL = ("--width", "64", "--depth", "2", "--seq-len", "64", "--seconds", "0")
GATHERED = "launcher FSDP2, gather_once"
EXACT = ("launcher DDP", GATHERED, "launcher FSDP2, boundary", "DDP by hand, counting items")
HAND_WRITTEN = (*EXACT, "DDP by hand", "FSDP2 by hand", "FSDP2 by hand, kept gathered")


def measured(launch: Launch, tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """Run the job on two ranks, uneven samples included, and return its records."""
    out = tmp_path / "peers.jsonl"
    command = ["measure", "--setting", "here", "--out", str(out), "--uneven", *SMALL, *options]
    done = launch("run", "cluster.workers_per_node=2", "--", str(JOB), *command)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in out.read_text().splitlines()]


def peak_of_ddp(accumulation: int) -> int:
    """Return the bytes that DDP by hand has at its peak, by counting the tensors of SMALL: width 64, depth 2."""
    rows, width, depth, vocabulary = 4 * 64, 64, 2, 256
    block = 4 * width + 3 * width**2 + width**2 + (4 * width**2 + 4 * width) + (4 * width**2 + width)
    parameters = 4 * (2 * vocabulary * width + 64 * width + depth * block + 2 * width)
    tensors = 2 + 10 * depth + 3  # each has a step count in AdamW's state
    state = 4 * parameters + 4 * tensors  # parameters, DDP's buckets, two moments
    batches = accumulation * 2 * rows * 8
    # of each block: both norms, query, key, value, attention, two sums (residual), and four times the width before and
    # after gelu; means and deviations of the norms, and the logarithms of one head's sums
    kept = depth * (4 * rows * width * (2 + 3 + 1 + 2 + 4 + 4) + 4 * rows * (4 + 1))
    kept += 4 * rows * (2 * width + 2)  # the first sum, and the last norm
    # when the gradient of the logits is there: their log-softmax, the gradients of both, the loss, and the number of
    # items by which cross_entropy has divided it
    at_the_loss = 4 * rows * vocabulary * 3 + 4 + 4
    # later micro-batches add to gradients outside the buckets, into which DDP copies them at the end
    outside = parameters if accumulation > 1 else 0
    return state + batches + kept + at_the_loss + outside


@pytest.mark.nightly
def test_hand_written_contenders(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = measured(launch, tmp_path, "--accumulation", "1", "2", "--only", *HAND_WRITTEN)
    even = {(r["contender"], r["accumulation"]): r for r in records if not r["uneven"]}
    uneven = {r["contender"]: r["difference"] for r in records if r["uneven"]}
    assert {name for name, _ in even} == uneven.keys() == set(HAND_WRITTEN)
    assert all(record["difference"] < 1e-3 and len(record["times_s"]) == 3 for record in even.values())
    assert all((difference < 1e-3) == (name in EXACT) for name, difference in uneven.items()), uneven
    # gradients once, and of FSDP2 parameters once more, or once more in each micro-batch
    sent = {cell: record["sent_bytes"] for cell, record in even.items()}
    once = sent["DDP by hand", 1]
    assert sent["DDP by hand", 2] == once
    for name in ("launcher DDP", "DDP by hand, counting items", GATHERED, "FSDP2 by hand, kept gathered"):
        for accumulation in (1, 2):
            assert abs(sent[name, accumulation] - once) < 1000, "the flags of a window are small"
    for name in ("FSDP2 by hand", "launcher FSDP2, boundary"):
        assert once < sent[name, 1] < sent[name, 2]
    peak = {cell: record["peak_bytes"] for cell, record in even.items()}
    assert [peak["DDP by hand", each] for each in (1, 2)] == [peak_of_ddp(1), peak_of_ddp(2)]
    assert peak["FSDP2 by hand", 2] < peak["FSDP2 by hand, kept gathered", 2] < peak["DDP by hand", 2]

    monkeypatch.syspath_prepend(ROOT / "jobs")
    import bench_peers  # pyright: ignore[reportMissingImports]

    bench_peers.report(tmp_path / "peers.jsonl", tmp_path)
    page = (tmp_path / "peers.md").read_text()
    bench_peers.report(tmp_path / "peers.jsonl", tmp_path)
    assert (tmp_path / "peers.md").read_text() == page
    shown = [
        f"{peak_of_ddp(each) / 1e6:,.2f} ({peak_of_ddp(each) / peak['launcher DDP', each]:.2f})" for each in (1, 2)
    ]
    rows = [line for line in page.splitlines() if line.startswith("| DDP by hand |")]
    assert [row.count("|") for row in rows] == [4, 4, 4, 5]  # times, bytes, memory, equality
    assert rows[2] == f"| DDP by hand | {' | '.join(shown)} |"
    assert "**different**" in rows[3]
    assert page.count("**different**") == 3
    assert (tmp_path / "peers.png").stat().st_size > 10_000


@pytest.mark.nightly
def test_other_libraries(launch: Launch, tmp_path: Path) -> None:
    """Needs the extra dependencies peers, and torchtitan: `make bench-peers` installs them."""
    records = measured(launch, tmp_path, "--accumulation", "2")
    assert len(records) == 36
    assert all(record["difference"] < 1e-3 for record in records if not record["uneven"])
    exact = {record["contender"] for record in records if record["uneven"] and record["difference"] < 1e-3}
    trainer = {"transformers Trainer, DDP", "transformers Trainer, FSDP2", "transformers Trainer, FSDP2, kept gathered"}
    assert exact == {*EXACT, *trainer, "torchtitan", "torchtitan, kept gathered"}
    # the same policies in other libraries: equal bytes, and equal memory but for what they hold besides
    even = {record["contender"]: record for record in records if not record["uneven"]}
    for mode in ("", ", kept gathered"):
        accelerate, own = even[f"Accelerate FSDP2{mode}"], even[f"transformers Trainer, FSDP2{mode}"]
        assert own["sent_bytes"] == pytest.approx(accelerate["sent_bytes"], rel=1e-3)
        assert own["peak_bytes"] == pytest.approx(accelerate["peak_bytes"], rel=0.02)
