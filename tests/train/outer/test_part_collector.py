"""Exchanges in the background, between the sites of two jobs in this process."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import SiteError
from launcher.plan.outer import OuterPlan
from launcher.train.outer.part_collector import PartCollector, make_part
from launcher.train.outer.store_client import OuterExchange, PatientStore
from tests.helpers import make_plan
from tests.infra.runs import wait_for

EXCHANGE = OuterExchange(4, 0)


def plan_of(store: Path, site: int, sites: int = 2) -> OuterPlan:
    plan = make_plan(
        "outer=diloco", "outer.every=4", f"outer.store={store}", f"outer.sites={sites}", f"outer.site={site}",
        "outer.patience_s=0.1", "cluster.workers_per_node=1", "schedule.warmup_steps=0", "batch.short_window=drop",
        "batch.global_size=48",
    )  # fmt: skip
    assert plan.outer is not None
    return plan.outer


def collect(
    root: Path, site: int, sites: int = 2, store: PatientStore | None = None, exchange: OuterExchange = EXCHANGE,
    **header: Any,
) -> PartCollector:  # fmt: skip
    plan = plan_of(root, site, sites)
    part = make_part({"saved": 10 * site, **header}, torch.full((4,), site, dtype=torch.uint8))
    return PartCollector(store or PatientStore(plan), plan, exchange, part, {"0": 3, "1": 4})


def test_an_exchange_is_closed_while_its_sites_take_further_steps(tmp_path: Path) -> None:
    """Nobody waits for it; each site has the other one's part then."""
    collectors = [collect(tmp_path, site) for site in range(2)]
    for each in collectors:
        each.join(60)
    members = json.loads((tmp_path / EXCHANGE.name / "members").read_text())
    assert members == {"members": [0, 1], "saved": {"0": 0, "1": 10}}
    for each, other in zip(collectors, reversed(collectors), strict=True):
        assert each.closed is not None
        assert each.closed.members == [0, 1]
        assert [*each.parts.values()] == [other.own]


def test_without_all_parts_it_is_closed_when_that_is_asked_for(tmp_path: Path) -> None:
    """Also after outer.patience_s: how long to wait for a site is decided at the step that needs the average."""
    collector, other = (collect(tmp_path, site, sites=3) for site in (1, 0))
    wait_for(lambda: len(collector.parts) == len(other.parts) == 1, "the parts")
    assert collector.closed is other.closed is None
    collector.close_now()
    collector.join(60)
    assert collector.closed is not None
    assert collector.closed.members == [0, 1]


def test_the_part_of_an_earlier_process_stays(tmp_path: Path) -> None:
    first, again = collect(tmp_path, 1), collect(tmp_path, 1, norm=2.0)
    wait_for(lambda: first.sent and again.sent, "the parts")
    assert [first.stored, again.stored].count(True) == 1
    for each in (first, again):
        each.close_now()
        each.join(60)
        assert each.closed is not None


def test_what_failed_is_tried_again_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PatientStore(plan_of(tmp_path, 0))

    def fails(*_: object) -> bool:
        raise SiteError("full")

    with monkeypatch.context() as broken:
        broken.setattr(store, "post", fails)
        collector = collect(tmp_path, 0, store=store)
        collector.join(60)
        with pytest.raises(SiteError, match="full"):
            collector.require_no_error()
    again = collector.again()
    wait_for(lambda: again.sent, "the part")
    assert again.again() is again
    again.close_now()
    again.join(60)
    assert again.closed is not None


def test_parts_that_no_checkpoint_needs_are_removed(tmp_path: Path) -> None:
    """The newest exchanges that are needed are those of the round before the older checkpoint."""
    store = PatientStore(plan_of(tmp_path, 0))
    for step in (4, 8, 12, 16):
        for name in ("site0", "site1", "members"):
            store.post(f"{OuterExchange(step, 0).name}/{name}", b"")
    collectors = [collect(tmp_path, site, exchange=OuterExchange(20, 0), saved=13 + site) for site in range(2)]
    for each in collectors:
        each.join(60)
    left = {step: store.names(OuterExchange(step, 0).name) for step in (4, 8, 12, 16)}
    whole = {"site0", "site1", "members"}
    assert left == {4: {"members"}, 8: {"members"}, 12: whole, 16: whole}


class Uploads(PatientStore):
    """Store to which parts are uploaded when the test lets them, one after the other."""

    def __init__(self, plan: OuterPlan) -> None:
        super().__init__(plan)
        self.started, self.fetched = [], []
        self._may_end = threading.Semaphore(0)

    def post(self, name: str, value: bytes) -> bool:
        if name.endswith("/site0"):
            self.started.append(name)
            self._may_end.acquire()
        return super().post(name, value)

    def get(self, name: str) -> bytes | None:
        self.fetched.append(name)
        return super().get(name)

    def let_end(self) -> None:
        self._may_end.release()


def test_a_site_whose_upload_outlasts_the_exchange_sends_one_part_at_a_time(tmp_path: Path) -> None:
    """It does not download parts of an exchange that was closed without it."""
    plan = plan_of(tmp_path, 0)
    store, part = Uploads(plan), make_part({"saved": 0}, torch.zeros(4, dtype=torch.uint8))
    exchanges = [OuterExchange(step, 0) for step in (4, 8, 12)]
    collectors: list[PartCollector] = []
    for exchange in exchanges:
        collectors.append(PartCollector(store, plan, exchange, part, {}, collectors[-1] if collectors else None))
        other = collect(tmp_path, 1, exchange=exchange)
        if exchange != exchanges[-1]:
            other.close_now()
            other.join(60)
            assert other.closed is not None
            assert other.closed.members == [1]
            collectors[-1].abandon()
    wait_for(lambda: len(store.started) == 1, "the first upload")
    for _ in range(2):
        store.let_end()
    collectors[-1].join(60)
    assert store.started == [f"{each.name}/site0" for each in (exchanges[0], exchanges[2])]
    assert not [name for name in store.fetched if not name.startswith(exchanges[2].name)]
    assert collectors[-1].closed is not None
    assert collectors[-1].closed.members == [0, 1]


def test_the_list_of_another_site_counts(tmp_path: Path) -> None:
    """Also if this site has a part that is not on it, and if it was about to close the exchange itself."""
    plan = plan_of(tmp_path, 0, sites=3)
    store = PatientStore(plan)
    store.post(f"{EXCHANGE.name}/site1", make_part({"saved": 0}, torch.zeros(4, dtype=torch.uint8)))
    decide, others = store.decide, json.dumps({"members": [0, 2], "saved": {}}).encode()

    def late(name: str, own: bytes) -> bytes:
        store.post(f"{EXCHANGE.name}/site2", own)
        store.post(name, others)
        return decide(name, own)

    store.decide = late  # pyright: ignore[reportAttributeAccessIssue]
    collector = collect(tmp_path, 0, 3, store)
    collector.close_now()
    collector.join(60)
    assert collector.closed is not None
    assert collector.closed.members == [0, 2]
    assert collector.parts.keys() == {1, 2}
