"""The rank that holds the others up is named with what it spends its time on; equal ranks are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from launcher.train.measure.observer import EndedWindow
from launcher.train.measure.straggler import LOOK_EVERY, StragglerDetector, slowest
from launcher.train.world import World
from tests.helpers import torchrun

HOSTS = ["a", "a", "b", "b"]
ALONE = World(rank=0, size=1, local_rank=0)


def of_two(share: float | None) -> StragglerDetector:
    pace = StragglerDetector(ALONE, share)
    pace._ranks, pace.width, pace._hosts, pace.slow = 2, 6, ["a", "b"], [0, 0]
    return pace


def table(*rows: tuple[float, float, float]) -> list[list[float]]:
    return [[seconds for row in rows for seconds in row] for _ in range(5)]


def test_the_slowest_rank_and_what_it_costs() -> None:
    found = slowest(table((1.0, 0.1, 0.9), (1.0, 0.1, 0.9), (1.9, 0.1, 0.0), (1.1, 0.0, 0.9)), HOSTS)
    assert (found.rank, found.host, found.of) == (2, "b", "compute")
    assert found.share == pytest.approx(0.9 / 2)
    assert (found.own_s, found.others_s) == (1.9, 1.0)
    found = slowest(table((1.0, 0.1, 0.9), (1.0, 1.0, 0.0), (0.9, 0.1, 1.0), (1.0, 0.1, 0.9)), HOSTS)
    assert (found.rank, found.of) == (1, "data")


def test_one_slow_window_is_no_slow_rank() -> None:
    tables = table((1.0, 0.0, 0.0), (1.0, 0.0, 0.0))
    tables[2][3] = 100.0
    assert slowest(tables, ["a", "b"]).share == 0.0


def test_it_is_said_once_when_it_begins_and_when_it_is_over() -> None:
    pace = of_two(0.1)
    equal, slow = [1.0, 0.0, 0.0] * 2, [1.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    said: list[tuple[int, str]] = []
    for window in range(80):
        pace.receive(slow if 20 <= window < 50 else equal)
        if pace.news is not None:
            said.append((window, pace.news))
    (begun, first), (over, last) = said
    assert 25 < begun < 50 < over
    assert first == (
        "Straggler: rank 1 on b makes a step 50% longer: 2 s of computing a window, where the other ranks need "
        "1 s (medians of 20 windows)."
    )
    assert last == "Straggler: no more. Rank 1 on b no longer holds the others up."
    assert (pace.slow, pace.measured) == ([0, 30], 78), "windows 20 to 49, of all but the first two"
    assert pace.straggler is None
    assert pace.named is not None
    assert pace.named.rank == 1


@pytest.mark.parametrize("share", [0.1, None])
def test_equal_ranks_and_those_slow_by_less_than_the_share_are_left_alone(share: float | None) -> None:
    pace = of_two(share)
    noise = torch.Generator().manual_seed(3)
    for _ in range(100):
        low, high = (1 + 0.04 * torch.rand(2, generator=noise)).tolist()
        pace.receive([low, 0.1, 0.2, high, 0.1, 0.2] if share else [1.0, 0.0, 1.0, 2.0, 0.0, 0.0])
        assert pace.news is None
        assert pace.straggler is None
    assert pace.named is None


def test_a_delay_of_milliseconds_is_not_worth_a_line() -> None:
    """30% of a window, and 3 ms; the same share of seconds is named."""
    for scale, named in ((0.01, False), (1.0, True)):
        pace = of_two(0.1)
        for _ in range(30):
            pace.receive([1.0 * scale, 0.0, 0.3 * scale, 1.3 * scale, 0.0, 0.0])
            assert pace.news is None or named
        assert (pace.straggler is not None) is named


@pytest.mark.parametrize("between", [1, 2])
def test_a_delay_near_the_limit_is_not_named_and_withdrawn_again_and_again(between: int) -> None:
    """About 10 ms of 50 ms, in turn on either rank or on one of them."""
    pace, noise = of_two(0.1), torch.Generator().manual_seed(5)
    said: list[str] = []
    for window in range(600):
        delay = 0.01 + 0.004 * torch.randn(1, generator=noise).item()
        slow = [0.04, 0.0, max(0.0, delay), 0.04 + max(0.0, delay), 0.0, 0.0]
        pace.receive(slow if window // 12 % between == 0 else slow[3:] + slow[:3])
        if pace.news is not None:
            said.append(pace.news)
    assert len(said) <= 2, said
    assert 200 < pace.slow[1] + pace.slow[0] < 400


def test_a_wait_for_data_during_a_collective_counts_once() -> None:
    pace = of_two(0.1)
    ended = EndedWindow(
        samples=2, items=2, comparable=True, grad_norm=1.0, gradient_unit=1.0, step_s=1.0, data_s=0.6, wait_s=0.7
    )
    pace.window_ended(ended)
    assert pace.contribution() == pytest.approx([0.0, 0.3, 0.7, 0.0, 0.0, 0.0])


@pytest.mark.slow
def test_real_ranks(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).with_name("pace_worker.py"), [], 2, tmp_path).splitlines()
    found = {name: seen for line in lines if line.startswith("{") for name, seen in json.loads(line).items()}
    for name in ("computes", "computes, every", "computes, fsdp", "computes, events", "reads"):
        of = "data" if name == "reads" else "compute"
        assert found[name]["named"] == [1, of], name
        assert found[name]["said"][0].startswith("Straggler: rank 1 on ")
        assert len(found[name]["said"]) == 1
        assert found[name]["slow"][1] > LOOK_EVERY
        assert found[name]["first"] > LOOK_EVERY, "and not before there are enough windows"
    for seen in found.values():
        assert {"time/compute_s", "time/compute_s_max", "time/wait_s"} <= {*seen["metrics"]}


def test_a_rank_is_named_once_two_looks_blame_the_same_one() -> None:
    pace = of_two(0.1)
    slow = [1.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    news: dict[int, str] = {}
    for window in range(40):  # looks come after windows 11, 21 and 31
        pace.receive(slow if window >= 8 else slow[3:] + slow[:3])
        if pace.news is not None:
            news[window] = pace.news
    assert [*news] == [31], "the first look blamed the other rank"
    assert news[31].startswith("Straggler: rank 1 on b ")
