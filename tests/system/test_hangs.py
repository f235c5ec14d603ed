"""A rank that hangs: found, named with host, step and stack, ended as if it had died; and slow ones left alone."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Launch
from tests.helpers import launch_command, slowness
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.hosts import hosts
from tests.infra.jobs_on_hosts import finish
from tests.infra.netns import needs_root
from tests.infra.runs import OWN, processes_of, records, summary, timeless, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
HERE = socket.gethostname()
# longer than any part of a healthy start, or a micro-batch, on a machine that has other things to do too
LIMIT_S = 15 * slowness()
SOON = ("cluster.grace_s=1", f"train.hang_timeout={LIMIT_S:g}")


def hang_of(run: Path) -> dict[str, Any]:
    (event,) = [e for e in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if e["event"] == "hang"]
    entry = summary(run)["hang"]
    assert {name: event[name] for name in entry} == entry
    return event


def test_a_rank_that_hangs_costs_nothing_but_time(launch: Launch, project: Path) -> None:
    """It even holds the interpreter's lock. In the first window the others wait for it longer than the time limit: then
    it is slow, and does not hang."""
    # beside the steps, step 2's checkpoint might still be under way, and never end: it needs the interpreter
    job = ("train.steps=8", "checkpoint.every=1", "checkpoint.async_save=false")
    assert launch("train", *OWN, *job, "run.name=whole").returncode == 0
    pause_s = 2.8 * slowness()  # four of them are longer than the limit, and each is shorter
    limit = f"train.hang_timeout={10 * slowness():g}"
    trouble = ("task.trouble=slow then hang once", f"task.pause_s={pause_s}", limit, "cluster.max_restarts=1")
    done = launch("train", *OWN, *job, *SOON, *trouble)
    assert done.returncode == 0, done.stdout + done.stderr
    run, whole = project / "runs" / "own", project / "runs" / "whole"
    hang = hang_of(run)  # the only one
    assert (hang["rank"], hang["host"], hang["step"], hang["phase"]) == (1, HERE, 3, "computing")
    said = f"rank 1 hangs on {HERE} in step 3, micro-batch 3, forward and backward pass"
    assert said in done.stdout
    assert "--- resumed after step 2 ---" in done.stdout
    stack = [line for line in (run / "logs/rank1.log").read_text().splitlines() if "in hold_the_interpreter" in line]
    assert stack, "the log of the rank has the stack"
    assert stack[0] in hang["stack"]
    shown = " ".join(launch("status", "own").stdout.split())
    assert said in shown
    assert "in hold_the_interpreter" in shown
    assert_same_tensors(*(place / "checkpoints" / "step_000008" for place in (run, whole)))
    assert [timeless(record) for record in records(run)] == [timeless(record) for record in records(whole)]
    assert (summary(run)["verdict"], summary(run)["resumed"]) == ("done", 1)
    assert processes_of(run) == []


def test_a_rank_that_hangs_ends_the_run_with_where_it_stands(launch: Launch, project: Path) -> None:
    """It is stopped: it cannot even say so."""
    done = launch("train", *OWN, *SOON, "task.trouble=stopped", "train.steps=50")
    assert done.returncode == 1, done.stdout + done.stderr
    run = project / "runs" / "own"
    said = f"launch: rank 1 failed: hangs on {HERE} in step 3, micro-batch 3, forward and backward pass: nothing moved"
    assert f"{said} for {LIMIT_S:g} s (train.hang_timeout); the process is stopped (state T" in done.stderr
    assert (summary(run)["verdict"], summary(run)["failure"]["rank"]) == ("failed", 1)
    assert (hang_of(run)["rank"], hang_of(run)["step"]) == (1, 3)
    wait_for(lambda: not processes_of(run), "every process of the failed run to end", 60)


@pytest.mark.root
@needs_root
def test_a_rank_of_another_host_that_hangs_at_the_start(project: Path) -> None:
    with hosts(2) as pair:
        where = (f"cluster.rendezvous={pair.address(0)}:29400", "cluster.nodes=2", "cluster.workers_per_node=1")
        # each host waits so long for what the other one has to say, and a busy machine takes more than a second
        job = launch_command(
            "train",
            *OWN,
            *SOON,
            f"cluster.grace_s={10 * slowness():.0f}",
            "cluster=hosts",
            *where,
            "task.trouble=hang at the start",
        )
        first, other = finish([pair.start(host, job, project) for host in (0, 1)], 1, 1)
    run = project / "runs" / "own"
    said = f"hangs on {HERE} in its start: making the data"
    assert f"launch: the job failed on node 1 ({pair.address(1)}): rank 1: {said}" in first
    assert f"launch: rank 1 failed: {said}" in other
    assert "in train_data" in other
    assert summary(run)["failure"]["rank"] == hang_of(run)["rank"] == 1
    assert "in train_data" in hang_of(run)["stack"]
    wait_for(lambda: not processes_of(run), "every process of the run to end", 60)
