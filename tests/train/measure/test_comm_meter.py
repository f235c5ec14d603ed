"""The meter's arithmetic, and its refusal of what it did not see."""

from __future__ import annotations

import pytest
import torch

from launcher.config.schema import StrategyKind, Sync
from launcher.errors import SyncPolicyViolated
from launcher.plan.sync_policy import Collective, Layout
from launcher.train.measure.comm_meter import Meter

CPU = torch.device("cpu")
DDP_OF_4 = Layout.replicated(1000, 4)
# of 800 bytes in units and 200 in the root, in groups of 2, twice
HSDP_OF_4 = Layout(shard_size=2, replicas=2, unit_bytes=800, root_bytes=200, gradient_bytes=1000)


def ddp() -> Meter:
    return Meter(StrategyKind.ddp, DDP_OF_4, CPU)


@pytest.mark.parametrize(("world", "factor"), [(1, 0), (2, 1), (4, 1.5), (1024, 2 * 1023 / 1024)])
def test_wire_factor_of_a_ring(world: int, factor: float) -> None:
    layout = Layout(shard_size=world, replicas=world, unit_bytes=0, root_bytes=0, gradient_bytes=0)
    assert layout.wire_factor(Collective.all_reduce) == factor
    assert layout.wire_factor(Collective.all_gather) == layout.wire_factor(Collective.reduce_scatter) == factor / 2


def test_a_window_at_the_boundary_and_one_that_synchronises_each_micro_batch() -> None:
    meter = ddp()
    meter.count(Collective.all_reduce, 600)
    meter.count(Collective.all_reduce, 400)
    stats = meter.close_window(8, Sync.boundary)
    assert (stats.collectives, stats.payload_bytes, stats.wire_bytes, stats.wire_bytes_every) == (2, 1000, 1500, 12000)
    assert stats.saved_fraction == 7 / 8
    meter.open_window()
    for _ in range(8):
        meter.count(Collective.all_reduce, 1000)
    stats = meter.close_window(8, Sync.every)
    assert (stats.collectives, stats.payload_bytes, stats.saved_fraction) == (8, 8000, 0)


def test_compressed_gradients_cover_more_than_they_send() -> None:
    meter = ddp()
    meter.count(Collective.all_reduce, 20, covers=1000, collectives=3)
    stats = meter.close_window(8, Sync.boundary)
    assert (stats.collectives, stats.payload_bytes, stats.wire_bytes, stats.wire_bytes_every) == (3, 20, 30, 240)


@pytest.mark.parametrize(("seen", "sync"), [(0, Sync.boundary), (2, Sync.boundary), (1, Sync.every), (9, Sync.every)])
def test_a_policy_that_is_not_observed_is_an_error(seen: int, sync: Sync) -> None:
    meter = ddp()
    for _ in range(seen):
        meter.count(Collective.all_reduce, 1000)
    with pytest.raises(SyncPolicyViolated, match=f"{seen * 1000:,} bytes were seen in {seen} collective"):
        meter.check(8, sync)


def send(meter: Meter, gathers: int, scatters: int, reduces: int) -> None:
    for kind, number, size in (
        (Collective.all_gather, gathers, 1000),
        (Collective.reduce_scatter, scatters, 1000),
        (Collective.all_reduce, reduces, 500),
    ):
        for _ in range(number):
            meter.count(kind, size)


@pytest.mark.parametrize(
    ("sync", "gathers", "scatters", "reduces"),
    [
        (Sync.every, 8, 4, 4),
        (Sync.boundary, 8, 1, 1),
        (Sync.gather_once, 1, 1, 1),
        (Sync.replicas_at_boundary, 8, 4, 1),
    ],
)
def test_each_policy_of_hsdp(sync: Sync, gathers: int, scatters: int, reduces: int) -> None:
    """Collectives are counted by kind; one reduction too few or too many, or one gather too many, is noticed."""
    meter = Meter(StrategyKind.hsdp, HSDP_OF_4, CPU)
    send(meter, gathers, scatters, reduces)
    stats = meter.close_window(4, sync)
    assert stats.kinds[Collective.all_gather].wire_bytes == gathers * 500
    assert stats.kinds[Collective.reduce_scatter].wire_bytes == scatters * 500
    assert stats.kinds[Collective.all_reduce].wire_bytes == reduces * 500
    # until `every` was seen, units are taken to be gathered twice a micro-batch and the root once
    gathered = gathers * 1000 if sync is Sync.every else 4 * (2 * 800 + 200)
    assert stats.wire_bytes_every == gathered // 2 + 4 * 500 + 4 * 500
    wrong = [(gathers, scatters + 1, reduces), (gathers, scatters, reduces + 1), (gathers, scatters - 1, reduces)]
    if sync is Sync.gather_once:
        wrong.append((gathers + 1, scatters, reduces))
    for numbers in wrong:
        meter.open_window()
        send(meter, *numbers)
        with pytest.raises(SyncPolicyViolated, match=f"strategy.sync={sync.value} means"):
            meter.check(4, sync)


def test_gathers_of_every_are_those_that_were_seen() -> None:
    """A model may call its units any number of times; once `every` has run, savings are compared with that."""
    layout = Layout(shard_size=2, replicas=1, unit_bytes=800, root_bytes=200, gradient_bytes=0)
    meter = Meter(StrategyKind.fsdp, layout, CPU)
    meter.count(Collective.all_gather, 4 * 2600)
    assert meter.close_window(4, Sync.every).wire_bytes_every == 4 * 1300
    meter.open_window()
    meter.count(Collective.all_gather, 1000)
    stats = meter.close_window(8, Sync.gather_once)
    assert stats.wire_bytes_every == 8 * 1300


def test_one_rank_sends_nothing() -> None:
    alone = Layout.replicated(1000, 1)
    stats = Meter(StrategyKind.ddp, alone, CPU).close_window(8, Sync.boundary)
    assert (stats.payload_bytes, stats.wire_bytes_every, stats.saved_fraction) == (0, 0, 0)


def test_time_under_way_is_counted_once() -> None:
    meter = ddp()
    timers = [meter.start_timer() for _ in range(3)]
    for timer, (began, ended) in zip(timers, [(1.0, 3.0), (2.0, 4.0), (6.0, 7.0)], strict=True):
        timer.began, timer.ended = began, ended
    meter.count(Collective.all_reduce, 1000)
    assert meter.close_window(8, Sync.boundary).time_s == pytest.approx(4.0)
