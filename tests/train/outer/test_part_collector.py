"""Exchanges in the background, between the sites of two jobs in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import SiteError
from launcher.train.outer.part_collector import PartCollector
from launcher.train.outer.store_client import OuterExchange, PatientStore
from launcher.train.outer.store_part import make_part
from tests.helpers import make_plan
from tests.infra.runs import wait_for

EXCHANGE = OuterExchange(4, 0)


def collect(store: PatientStore, site: int, sites: int = 2, **header: Any) -> PartCollector:
    part = make_part({"saved": 10 * site, **header}, torch.full((4,), site, dtype=torch.uint8))
    return PartCollector(store, EXCHANGE, site, sites, part, {"0": 3, "1": 4})


@pytest.fixture
def store(tmp_path: Path) -> PatientStore:
    plan = make_plan(
        "outer=diloco", "outer.every=4", f"outer.store={tmp_path}", "outer.sites=2", "outer.site=0",
        "outer.patience_s=0.1", "cluster.workers_per_node=1", "schedule.warmup_steps=0", "batch.short_window=drop",
    )  # fmt: skip
    assert plan.outer is not None
    return PatientStore(plan.outer)


def test_an_exchange_is_closed_while_its_sites_take_further_steps(store: PatientStore, tmp_path: Path) -> None:
    """Nobody waits for it; each site has the other one's part then."""
    collectors = [collect(store, site) for site in range(2)]
    for each in collectors:
        each.join(60)
    members = json.loads((tmp_path / EXCHANGE.name / "members").read_text())
    assert members == {"members": [0, 1], "saved": {"0": 0, "1": 10}}
    assert any(each.closed_here for each in collectors)
    for each, other in zip(collectors, reversed(collectors), strict=True):
        assert each.closed is not None
        assert each.closed.members == [0, 1]
        assert [*each.parts.values()] == [other.own]


def test_without_all_parts_it_is_closed_when_that_is_asked_for(store: PatientStore) -> None:
    """Also after outer.patience_s: how long to wait for a site is decided at the step that needs the average."""
    collector, other = (collect(store, site, sites=3) for site in (1, 0))
    wait_for(lambda: len(collector.parts) == len(other.parts) == 1, "the parts")
    assert collector.closed is other.closed is None
    collector.close_now()
    collector.join(60)
    assert collector.closed is not None
    assert collector.closed.members == [0, 1]


def test_the_part_of_an_earlier_process_stays(store: PatientStore) -> None:
    first, again = collect(store, 1), collect(store, 1, norm=2.0)
    wait_for(lambda: first.sent and again.sent, "the parts")
    assert [first.stored, again.stored].count(True) == 1
    for each in (first, again):
        each.close_now()
        each.join(60)
        assert each.closed is not None


def test_an_error_is_raised_by_the_site(store: PatientStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bool:
        raise SiteError("full")

    monkeypatch.setattr(store, "post", fails)
    collector = collect(store, 0)
    collector.join(60)
    with pytest.raises(SiteError, match="full"):
        collector.require_no_error()
