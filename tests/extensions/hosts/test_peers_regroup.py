"""A number of hosts that is a range: who begins, and who goes on when one is lost."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from launcher.extensions.hosts import multihost
from launcher.extensions.hosts.channel import Channel
from launcher.extensions.hosts.multihost import differences, job_facts
from launcher.extensions.hosts.peers import FirstHost, OtherHost, Regrouping
from launcher.launch import local
from launcher.plan.launch_plan import HostPosition
from launcher.plan.run_plan import RunPlan
from launcher.rundir import history
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import read_json, write_json
from tests.extensions.hosts.meeting import TWO, free_port, star, wait_until
from tests.extensions.hosts.test_multihost import Member, meet, settle
from tests.extensions.hosts.test_peers import failed
from tests.helpers import make_plan

RANGE = (*TWO, "cluster.nodes=2:3", "cluster.workers_per_node=1", "batch.global_size=32", "batch.micro_size=1")


def plan_in(place: Path, *overrides: str) -> RunPlan:
    return make_plan(*RANGE, *overrides, run_dir=str(place / "run"))


def test_those_that_came_begin_when_no_other_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost, "SETTLE_S", 0.5)
    port = free_port()
    first, other = (Member(plan_in(tmp_path / name), port, first=name == "a") for name in "ab")
    (plan, peers), (there, line) = first.wait(), other.wait()
    assert plan.cluster.nodes == there.cluster.nodes == 2
    assert (plan.batch.world_size, plan.batch.accumulation) == (2, 16)
    assert there.batch == plan.batch
    assert RunPlan.load(there.paths.plan_of(1)) == there
    assert "127.0.0.1 has joined: 2 of 2 to 3 hosts." in first.said
    assert "2 hosts are enough: waiting 0.5 s for one more." in first.said
    late = Member(plan_in(tmp_path / "late"), port, first=False)
    wait_until(lambda: peers.listen(0.01) or not late.is_alive())
    assert "is under way, and no host can join it" in str(late.wait())
    settle(peers, line)


def test_all_that_may_come_are_not_waited_for_any_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost, "SETTLE_S", 3600)
    assert [member.wait()[0].cluster.nodes for member in meet(tmp_path, *RANGE, hosts="abc")] == [3, 3, 3]


def test_too_few_do_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.extensions.hosts.multihost.MEET_WITHIN_S", 0)
    monkeypatch.setattr(multihost, "SETTLE_S", 0)
    text = str(Member(plan_in(tmp_path), free_port(), first=True).wait())
    assert "cluster.nodes=2:3: 1 of 2 to 3 hosts connected" in text


def test_what_is_planned_for_fewer_must_be_the_same_too() -> None:
    plan = make_plan(*RANGE)
    here = job_facts(plan, None)
    assert "cluster.nodes (the fewest): 2 on a, 1 on b" in differences(
        here, job_facts(make_plan(*RANGE, "cluster.nodes=1:3"), None), "a", "b"
    )
    (fewer,) = plan.fewer
    strategy = dataclasses.replace(fewer.strategy, sync=next(s for s in type(fewer.strategy.sync) if s != "boundary"))
    other = dataclasses.replace(plan, fewer=(dataclasses.replace(fewer, strategy=strategy),))
    assert "strategy.sync on 2 hosts: boundary on a" in differences(here, job_facts(other, None), "a", "b")


def lose(first: FirstHost, gone: Channel, left: list[OtherHost]) -> None:
    """The connection to one is reset; the workers of the others fail by that, and all of these hosts have ended."""
    gone.close()
    wait_until(lambda: first.listen(0.01) or first.lost)
    for other in left:
        wait_until(lambda other=other: other.listen(0.01) or other.lost)
        other.ended(failed(2, datetime.now(UTC).isoformat()))
    first.ended(failed(0, datetime.now(UTC).isoformat()))
    wait_until(lambda: first.listen(0.01) or first.complete())


def test_those_that_are_left_go_on_under_new_numbers_until_they_are_too_few() -> None:
    first, (one, two), ends = star(least=2)
    lose(first, ends[0], [two])
    here = first.regroup()
    assert here is not None
    assert (here.node, here.nodes, here.lost) == (0, 2, "node 1 (127.0.0.1)")
    assert not two.complete(), "node 0 is not ready yet"
    first.start_regrouped()
    wait_until(lambda: two.listen(0.01) or two.complete())
    there = two.regroup()
    assert there == dataclasses.replace(here, node=1)
    for peers in (first, two):
        assert (peers.lost, peers.trouble, peers.complete()) == (False, None, False)
    assert not one._first.open

    lose(first, ends[1], [])
    assert first.regroup() is None
    summary = first.conclude()
    assert summary["failure"]["node"] == 1
    assert summary["failure"]["error"].endswith("; 1 host is left, and cluster.nodes has 2 at least")


def test_a_job_with_a_fixed_number_of_hosts_ends() -> None:
    first, (_, two), ends = star()
    lose(first, ends[0], [two])
    assert first.regroup() is None
    assert "at least" not in first.conclude()["failure"]["error"]


def test_a_rank_that_raised_is_no_lost_host() -> None:
    """A host that goes later changes nothing of that: the job would raise again."""
    first, (_, two), ends = star(least=2)
    ago = (datetime.now(UTC) - timedelta(seconds=20)).isoformat()
    first.ended(failed(0, ago))
    ends[0].close()
    two.ended(failed(2, ago))
    wait_until(lambda: first.listen(0.01) or first.complete())
    assert first.regroup() is None


def test_a_stop_is_no_lost_host() -> None:
    first, (_, two), ends = star(least=2)
    two.stop("Ctrl-C")
    wait_until(lambda: first.listen(0.01) or first.stopped_by)
    lose(first, ends[0], [two])
    assert first.regroup() is None
    assert first.conclude()["stopped_by"] == "Ctrl-C"


def test_a_stop_that_comes_with_the_news_is_one_of_the_new_start() -> None:
    first, (_, two), ends = star(least=2)
    lose(first, ends[0], [two])
    assert first.regroup() is not None
    first.start_regrouped()
    first.stop("Ctrl-C")
    wait_until(lambda: two.listen(0.01) or two.stopped_by)
    assert two.regroup() is not None
    assert two.stopped_by == "node 0 (127.0.0.1)"


def placed(plan: RunPlan, node: int) -> RunPlan:
    place = HostPosition(node=node, address="10.0.0.3", interface="eth0", store="10.0.0.1:1", shared=True)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, place=place))


def test_going_on_is_a_new_attempt_with_a_plan_of_its_own(tmp_path: Path) -> None:
    whole = plan_in(tmp_path)
    Path(whole.run.dir, "logs").mkdir(parents=True)
    fence = Fence(whole.paths, Incarnation())
    fence.claim(ranks=3, attempt=0)
    write_json(whole.paths.summary, {"verdict": "stopped"})
    again = Regrouping(0, 2, "10.0.0.1:2", "node 1 (10.0.0.2)")
    first, _, new = local.regroup(placed(whole, 0), again, fence)
    plan, file, same = local.regroup(placed(whole, 2), dataclasses.replace(again, node=1), fence)
    assert (plan.node, plan.cluster.nodes, plan.batch) == (1, 2, whole.fewer[0].batch)
    assert plan.cluster.place is not None
    assert (plan.cluster.place.store, plan.cluster.place.address) == ("10.0.0.1:2", "10.0.0.3")
    assert RunPlan.load(file) == plan
    assert RunPlan.load(whole.paths.plan_for(2)) == first != plan
    assert new.own == same.own == Incarnation(0, 1)
    assert (fence.superseded, new.superseded) == (True, False)
    assert not whole.paths.summary.exists(), "what the last start said of its end is over"
    (event,) = history.read_events(whole.paths)
    assert (event["event"], event["host"], event["attempt"]) == ("lost", "node 1 (10.0.0.2)", 1)
    assert new.newest()["ranks"] == event["ranks"] == 2
    assert local.describe_regrouping(plan, again).startswith(
        "Node 1 (10.0.0.2) is gone: continuing with 2 hosts, 2 ranks, from the newest checkpoint."
    )


def test_a_host_that_was_cut_off_leaves_no_verdict(tmp_path: Path) -> None:
    plan = placed(plan_in(tmp_path), 1)
    Path(plan.run.dir).mkdir(parents=True)
    old, new = (Fence(plan.paths, Incarnation(0, restart)) for restart in (0, 1))
    new.claim()
    gone: dict[str, Any] = {"verdict": "failed"}
    local._write_summary(plan, old, gone)
    assert not plan.paths.summary.exists()
    local._write_summary(plan, new, gone)
    assert read_json(plan.paths.summary) == gone
