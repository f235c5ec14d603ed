"""The meter against the kernel: what a job over two hosts says it sent is what their links have carried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.hosts import Hosts
from tests.system.jobs_on_hosts import finish, start
from tests.system.netns import needs_root
from tests.system.runs import records

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_root]

HEADERS = 14 + 20 + 32  # of a packet: Ethernet, IP, TCP with time stamps


def carried(there: Hosts, tmp_path: Path, *job: str) -> tuple[dict[str, float], float, float]:
    """The last record of a run, and what host 1 sent for each of its steps: on the link without headers, and inside.

    Two lengths: what starting and ending a job sends drops out of the difference.
    """
    short, long = 2, 8
    seen: list[tuple[int, int]] = []
    record: dict[str, float] = {}
    for steps in (short, long):
        link, inside = link_bytes(there), there.sent_bytes(1, "lo")
        finish(start(there, tmp_path, *job, f"train.steps={steps}", f"run.name=job{steps}"), 0, 0)
        seen.append((link_bytes(there) - link, there.sent_bytes(1, "lo") - inside))
        record = records(tmp_path / f"host0/runs/job{steps}")[-1]
    on_link, within = ((b - a) / (long - short) for a, b in zip(*seen, strict=True))
    return record, on_link, within


def link_bytes(there: Hosts) -> int:
    return there.sent_bytes(1) - HEADERS * there.sent_packets(1)


@pytest.mark.parametrize(
    "policy",
    ["ddp boundary", "ddp every", "ddp boundary bf16", "fsdp every", "fsdp boundary", "fsdp gather_once"],
)
def test_the_links_carry_what_the_meter_says(pair: Hosts, tmp_path: Path, policy: str) -> None:
    kind, sync, *compress = policy.split()
    compressed = [f"strategy.compress={name}" for name in compress]
    job = (f"strategy={kind}", f"strategy.sync={sync}", *compressed, "task.width=192")
    record, on_link, _ = carried(pair, tmp_path, *job)
    assert record["batch/accumulation"] == 8
    assert on_link == pytest.approx(record["comm/wire_bytes"], rel=0.03)


@pytest.mark.parametrize("sync", ["every", "boundary", "replicas_at_boundary", "gather_once"])
def test_bytes_between_replicas_and_within_a_shard_group(pair: Hosts, tmp_path: Path, sync: str) -> None:
    """Two workers a host are a shard group: only what goes between replicas is on the link, all else stays inside."""
    job = (
        "strategy=hsdp", f"strategy.sync={sync}", "strategy.shard_size=2", "cluster.workers_per_node=2",
        "task.width=192",
    )  # fmt: skip
    record, on_link, within = carried(pair, tmp_path, *job)
    assert on_link == pytest.approx(2 * record["comm/all_reduce/wire_bytes"], rel=0.03)
    in_group = record["comm/all_gather/wire_bytes"] + record["comm/reduce_scatter/wire_bytes"]
    assert within == pytest.approx(2 * in_group, rel=0.05)  # headers, and the host's own small talk
