"""A job of many nodes on a real Slurm: ranks, master and host lists of all agents, which meet and leave."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers import launch
from tests.infra.runs import summary
from tests.infra.slurm import needs_slurm
from tests.infra.stand_in import Meeting, submit
from tests.infra.virtual_nodes import virtual_cluster

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_slurm]


@pytest.mark.parametrize("nodes", [4, pytest.param(512, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_all_agents_of_a_job_meet(tmp_path: Path, nodes: int) -> None:
    """512 nodes are more than the 1,024 open files with which Slurm starts a process allow at two for each."""
    with virtual_cluster(nodes) as there:
        run = submit(there, tmp_path, nodes)
        script = next((run / "slurm").glob("*submission*.sh")).read_text()
        names = there.login("scontrol", "show", "hostnames", f"node[1-{nodes}]").stdout.split()
    assert re.search(rf"#SBATCH --nodes={nodes}$", script, re.MULTILINE)
    assert "#SBATCH --ntasks-per-node=1" in script
    assert summary(run)["verdict"] == "done"
    meetings = Meeting.of(run)
    assert [meeting.node for meeting in meetings] == list(range(nodes))
    assert [rank for meeting in meetings for rank in meeting.ranks] == list(range(8 * nodes))
    assert all(meeting.world == [8 * nodes] for meeting in meetings)
    assert len({meeting.master for meeting in meetings}) == 1
    assert [meeting.host for meeting in meetings] == names, "node numbers follow Slurm's order"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    started = next(event for event in events if event["event"] == "started")
    assert (started["nodes"], started["ranks"]) == (names, 8 * nodes)
    (shown,) = json.loads(launch("runs", "--dir", str(run.parent), "--json", cwd=tmp_path).stdout)
    assert shown["nodes"] == f"node[1-{nodes}]"
