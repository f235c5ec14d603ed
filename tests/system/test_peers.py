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
SMALL = ("--width", "64", "--depth", "2", "--seconds", "0")
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


def test_hand_written_contenders(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = measured(launch, tmp_path, "--accumulation", "1", "2", "--only", *HAND_WRITTEN)
    even = {(r["contender"], r["accumulation"]): r for r in records if not r["uneven"]}
    uneven = {r["contender"]: r["difference"] for r in records if r["uneven"]}
    assert {name for name, _ in even} == uneven.keys() == set(HAND_WRITTEN)
    assert all(record["difference"] < 1e-3 and len(record["times_s"]) == 7 for record in even.values())
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

    monkeypatch.syspath_prepend(ROOT / "jobs")
    import bench_peers  # pyright: ignore[reportMissingImports]

    bench_peers.report(tmp_path / "peers.jsonl", tmp_path)
    page = (tmp_path / "peers.md").read_text()
    bench_peers.report(tmp_path / "peers.jsonl", tmp_path)
    assert (tmp_path / "peers.md").read_text() == page
    rows = [line for line in page.splitlines() if line.startswith("| DDP by hand |")]
    assert [row.count("|") for row in rows] == [4, 4, 5]  # times, bytes, equality of the result
    assert "**different**" in rows[2]
    assert page.count("**different**") == 3
    assert (tmp_path / "peers.png").stat().st_size > 10_000


@pytest.mark.nightly
def test_other_libraries(launch: Launch, tmp_path: Path) -> None:
    """Needs the extra dependencies peers, and torchtitan: `make bench-peers` installs them."""
    records = measured(launch, tmp_path, "--accumulation", "2")
    assert len(records) == 32
    assert all(record["difference"] < 1e-3 for record in records if not record["uneven"])
    exact = {record["contender"] for record in records if record["uneven"] and record["difference"] < 1e-3}
    assert exact == {*EXACT, "transformers Trainer, DDP", "torchtitan", "torchtitan, kept gathered"}
