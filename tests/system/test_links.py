"""The meter against the kernel: what a job over two hosts says it sent is what their links have carried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import launch_command
from tests.infra.hosts import Hosts
from tests.infra.jobs_on_hosts import finish
from tests.infra.netns import needs_root

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_root]

WORKER = Path(__file__).parent / "link_worker.py"


def measured(there: Hosts, tmp_path: Path, workers: int, policies: list[str]) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy on the second host's first rank. ``workers``: on each host."""
    where = f"cluster.rendezvous={there.address(0)}:29400"
    job = ("cluster=hosts", "cluster.nodes=2", where, f"cluster.workers_per_node={workers}", "run.name=job")
    command = launch_command("run", *job, "--", str(WORKER), *policies)
    finish([there.start(host, command, tmp_path) for host in (0, 1)], 0, 0)
    lines = (tmp_path / "runs/job/logs" / f"rank{workers}.log").read_text().splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert [each["policy"] for each in told] == policies
    return {each["policy"]: each for each in told}


@pytest.mark.parametrize(
    "policies",
    [
        ["ddp boundary bf16", "fsdp every", "fsdp gather_once"],
        pytest.param(["ddp boundary", "ddp every", "fsdp boundary"], marks=pytest.mark.nightly),
    ],
)
def test_the_links_carry_what_the_meter_says(policies: list[str], pair: Hosts, tmp_path: Path) -> None:
    for policy, told in measured(pair, tmp_path, 1, policies).items():
        assert told["accumulation"] == 8
        assert told["link"] == pytest.approx(sum(told["meter"].values()), rel=0.03), policy


@pytest.mark.parametrize(
    "policies",
    [
        ["hsdp replicas_at_boundary", "hsdp gather_once"],
        pytest.param(["hsdp every", "hsdp boundary"], marks=pytest.mark.nightly),
    ],
)
def test_bytes_between_replicas_and_within_a_shard_group(policies: list[str], pair: Hosts, tmp_path: Path) -> None:
    """Two workers a host are a shard group: only what goes between replicas is on the link, all else stays inside."""
    for policy, told in measured(pair, tmp_path, 2, policies).items():
        assert told["accumulation"] == 4
        meter = told["meter"]
        assert told["link"] == pytest.approx(2 * meter["all_reduce"], rel=0.03), policy
        in_group = meter["all_gather"] + meter["reduce_scatter"]
        assert told["within"] == pytest.approx(2 * in_group, rel=0.05), policy  # headers, and the host's own small talk
