"""Balance by length: the same windows in every world, in micro-batches with little padding, and ranks that finish
together."""

from __future__ import annotations

import dataclasses
import itertools
import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import launcher
from launcher.config.schema import OnOom
from launcher.errors import ConfigError, DataError, TaskError
from launcher.plan.batch import Batch
from launcher.plan.windows import share_of_window
from launcher.train.data.length_balance import balanced, first_within_bound
from launcher.train.data.sample_order import ArrangedData
from launcher.train.data.window_feed import WindowPosition, open_feed
from launcher.train.engine import oom
from launcher.train.world import World
from tests.helpers import make_plan, torchrun
from tests.train.data import length_balance_worker
from tests.train.data.feeds import CPU, plan_for, planned, read
from tests.train.data.length_balance_worker import LENGTHS, trained

BALANCE = ("batch.balance=length",)
DATA = ArrangedData(list(range(103)), lengths=LENGTHS)


def batch_of(micro: int, ranks: int) -> Batch:
    return Batch(global_size=micro * ranks, micro_size=micro, accumulation=1, world_size=ranks)


def padded(parts: list[list[int]], lengths: list[int]) -> int:
    return sum(len(part) * max(lengths[offset] for offset in part) for part in parts if part)


@given(lengths=st.lists(st.integers(0, 500), min_size=1, max_size=80), micro=st.integers(1, 6), ranks=st.integers(1, 5))
def test_a_window_is_divided_without_loss_into_parts_of_alike_lengths(
    lengths: list[int], micro: int, ranks: int
) -> None:
    batch = batch_of(micro, ranks)
    window = balanced(lengths, batch)
    assert sorted(chain.from_iterable(chain.from_iterable(window.offsets))) == list(range(len(lengths)))
    assert {len(of_rank) for of_rank in window.offsets} == {-(-len(lengths) // (micro * ranks))}
    sizes = [len(part) for of_rank in window.offsets for part in of_rank]
    assert max(sizes) <= micro
    assert max(sizes) - min(sizes) <= 1
    unsorted = [list(part) for rank in range(ranks) for part in share_of_window(len(lengths), batch, rank)]
    ours = padded(list(chain.from_iterable(window.offsets)), lengths)
    if min(sizes) == max(sizes):
        assert ours <= padded(unsorted, lengths)
    assert window.padding_fraction == pytest.approx(1 - sum(lengths) / ours if ours else 0.0)
    assert 0 <= window.padding_fraction < 1
    # the n-th micro-batches of all ranks are neighbours: all of their samples are at least as long as the next ones'
    rounds = [[lengths[o] for part in parts for o in part] for parts in zip(*window.offsets, strict=True)]
    assert all(min(one) >= max(two) for one, two in itertools.pairwise(rounds))


@given(
    lengths=st.lists(st.integers(0, 500), min_size=1, max_size=80), micro=st.integers(1, 9), ranks=st.integers(1, 5),
    room=st.integers(0, 2000),
)  # fmt: skip
def test_a_bound_in_tokens_holds_in_every_micro_batch(lengths: list[int], micro: int, ranks: int, room: int) -> None:
    bound = max(1, *lengths) + room
    window = balanced(lengths, dataclasses.replace(batch_of(micro, ranks), micro_tokens=bound))
    assert sorted(chain.from_iterable(chain.from_iterable(window.offsets))) == list(range(len(lengths)))
    assert len({len(of_rank) for of_rank in window.offsets}) == 1
    for part in chain.from_iterable(window.offsets):
        assert len(part) <= micro
        assert padded([part], lengths) <= bound
    if len(lengths) * max(lengths) <= bound:
        assert len(window.offsets[0]) == -(-len(lengths) // (micro * ranks)), "no more than without the bound"


def test_a_sample_longer_than_the_bound_is_refused() -> None:
    longest = max(LENGTHS)
    plan = plan_for(24, 1, "batch.balance=length", f"batch.micro_tokens={longest - 1}")
    with pytest.raises(ConfigError, match=f"sample {LENGTHS.index(longest)} alone.* takes {longest} tokens"):
        open_feed(DATA, plan, World(0, 1, 0), CPU)
    rows = launcher.Packing(512)
    with pytest.raises(ConfigError, match=rf"length is {longest}, takes 512 tokens.\n.*shorter rows"):
        open_feed(DATA, plan, World(0, 1, 0), CPU, rows)
    with pytest.raises(ConfigError, match=r"batch.micro_tokens=1K: has no effect with batch.balance=none"):
        make_plan("batch.micro_tokens=1K")


def test_micro_batches_bounded_in_tokens_become_smaller_when_memory_runs_out() -> None:
    """micro_size is far above what the bound permits: halved alone, it would repeat the same window."""
    plan = plan_for(24, 1, "batch.balance=length", f"batch.micro_tokens={2 * max(LENGTHS)}", "batch.on_oom=shrink")
    counts: list[int] = []
    batch: Batch | None = plan.batch
    assert "with micro-batches of 404 tokens" in str(oom.out_of_memory(MemoryError(), batch, 0, 1))
    assert "batch.micro_tokens=202, or" in str(
        oom.out_of_memory(MemoryError(), dataclasses.replace(batch, on_oom=OnOom.stop), 0, 1)
    )
    while batch is not None:
        feed = open_feed(DATA, dataclasses.replace(plan, batch=batch), World(0, 1, 0), CPU)
        counts.append(next(feed.windows()).count)
        feed.close()
        batch = batch.shrunk()
    assert all(one < two for one, two in itertools.pairwise(counts) if one < 24)
    assert counts[-1] == 24


def test_the_micro_batch_that_memory_is_predicted_with_is_within_the_bound() -> None:
    plan = plan_for(24, 1, "batch.balance=length", "batch.micro_tokens=1K")
    most = first_within_bound(DATA.dataset, cast("Any", SimpleNamespace(lengths=lambda _: LENGTHS)), plan)
    assert most * max(LENGTHS[:most]) <= 1024 < (most + 1) * max(LENGTHS[: most + 1])
    packed = SimpleNamespace(length=lambda _: 128, collate=launcher.Packing(512))
    assert first_within_bound(DATA.dataset, cast("Any", packed), plan) == 8
    assert first_within_bound(DATA.dataset, cast("Any", packed), plan_for(24, 1)) == 24


@pytest.mark.parametrize("tokens", [None, float("nan"), float("inf"), -5, "many"])
def test_tokens_of_a_micro_batch_that_are_no_number_are_refused(tokens: Any) -> None:
    """Also with on_oom=shrink, where no sample is compared with the bound; nan would exceed none."""
    data = ArrangedData(DATA.dataset, None, LENGTHS, lambda _: tokens)
    for on_oom in OnOom:
        plan = plan_for(24, 1, "batch.balance=length", "batch.micro_tokens=1K", f"batch.on_oom={on_oom.value}")
        with pytest.raises(DataError, match=rf"micro_batch_tokens\(lengths\) returned {tokens!r} for "):
            read(plan, data)


def test_the_first_samples_count_tokens_alike() -> None:
    first = ArrangedData(DATA.dataset, None, LENGTHS, sum).first(5)
    assert (first.micro_batch_tokens, len(first)) == (sum, 5)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_window_with_more_micro_batches_than_planned_has_the_same_gradient(tmp_path: Path) -> None:
    """On one rank, and on two, whose own parts have other numbers of micro-batches."""
    whole, planned = trained("batch.micro_size=16")
    bounded, counts = trained("batch.micro_size=16", "batch.balance=length", "batch.micro_tokens=1K")
    assert planned == [1] * 8
    assert min(counts) > 1
    assert bounded == pytest.approx(whole, rel=1e-5, abs=1e-6)
    output = torchrun(Path(length_balance_worker.__file__), [], 2, tmp_path)
    for strategy, (values, of_ranks) in json.loads(output.splitlines()[-1]).items():
        assert max(of_ranks) > 1, strategy
        assert values == pytest.approx(whole, rel=1e-5, abs=1e-6), strategy


@given(lengths=st.lists(st.integers(1, 500), min_size=48, max_size=48))
def test_ranks_differ_by_no_more_than_a_micro_batch(lengths: list[int]) -> None:
    """For long micro-batches on one rank, the others get those that follow in the order."""
    window = balanced(lengths, batch_of(4, 3))
    work = [padded(of_rank, lengths) for of_rank in window.offsets]
    assert max(work) - min(work) <= 4 * max(lengths)


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_members_of_a_window_are_those_without_balance_in_every_world(loader_workers: int) -> None:
    options = ("train.epochs=2", "batch.uneven=true", f"train.loader_workers={loader_workers}")
    plain = read(plan_for(24, 1, *options), list(range(103)))
    worlds = [(24, 1), (4, 2), (2, 4), (5, 3), (2, 30)]
    for micro, ranks in worlds if not loader_workers else worlds[1:2]:
        plan = plan_for(micro, ranks, *options, "batch.balance=length")
        assert read(plan, DATA) == plain
        bounded = plan_for(micro, ranks, *options, "batch.balance=length", "batch.micro_tokens=404")
        assert read(bounded, DATA) == plain
        # in the middle of the second epoch, also in micro-batches of half the size, as after running out of memory
        halved = dataclasses.replace(plan, batch=plan.batch.shrunk() or plan.batch)
        for resumed in (plan, halved):
            assert read(resumed, DATA, WindowPosition(7)) == plain[7:]


def test_a_ramp_keeps_its_windows() -> None:
    options = ("batch.ramp=[[3,8],[5,16]]", "train.epochs=3", "schedule=constant")
    plain = read(plan_for(2, 2, *options), list(range(103)))
    for micro, ranks in ((8, 1), (2, 2), (1, 4)):
        assert read(plan_for(micro, ranks, *options, "batch.balance=length"), DATA) == plain


def test_a_rank_without_samples_runs_the_shortest_one() -> None:
    plan = plan_for(4, 30, "train.epochs=1", "batch.uneven=true", "batch.balance=length")
    feeds = [open_feed(DATA, plan, World(rank, 30, rank), CPU) for rank in range(30)]
    batches = [next(next(feed.windows()).micro_batches) for feed in feeds]
    stand_ins = [batch.data.tolist() for batch in batches if not batch.samples]
    shortest = min(LENGTHS[sample] for batch in batches for sample in batch.data.tolist())
    assert len(stand_ins) == 6
    assert {LENGTHS[sample] for (sample,) in stand_ins} == {shortest}


def test_the_padding_is_that_of_all_ranks() -> None:
    plan = plan_for(3, 2, "train.epochs=1", "batch.balance=length")
    feeds = [open_feed(DATA, plan, World(rank, 2, rank), CPU) for rank in range(2)]
    for windows in zip(*(feed.windows() for feed in feeds), strict=True):
        rows = [[LENGTHS[i] for i in batch.data] for window in windows for batch in window.micro_batches]
        padding = 1 - sum(map(sum, rows)) / sum(len(row) * max(row) for row in rows)
        assert [window.padding_fraction for window in windows] == pytest.approx([padding] * 2)
    plain = open_feed(DATA, plan_for(3, 2), World(0, 2, 0), CPU)
    assert next(plain.windows()).padding_fraction is None


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([1, 2], r"There are \[2\] lengths for 3 samples"),
        ([1, -1, 2], "The length of sample 1 is -1"),
        ([1.0, 2.0, float("nan")], "The length of sample 2 is nan"),
        ([1.0, float("inf"), 2.0], "The length of sample 1 is inf"),
        (["long", "short", "short"], "are no numbers"),
        (torch.ones(3, 2), r"There are \[3, 2\] lengths for 3 samples"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrangedData([7, 8, 9], lengths=lengths)


def test_balance_without_lengths_is_one_message() -> None:
    with pytest.raises(
        ConfigError, match=r"batch.balance=length: the lengths of the samples are not known.\n.*Arranged"
    ):
        open_feed(list(range(103)), plan_for(4, 2, "batch.balance=length"), World(0, 2, 0), CPU)
    with pytest.raises(ConfigError, match=r"batch.balance=length: does not work with a stream"):
        make_plan("batch.balance=length", samples=None)
    with pytest.raises(
        ConfigError, match=r"lengths of the samples of task._target_=.*Plain are not known.*\n.*lengths\(data\)"
    ):
        planned("Plain", *BALANCE)


@pytest.mark.parametrize("name", ["WithLengths", "WithLength", "WithColumn"])
def test_the_plan_knows_where_lengths_come_from(name: str) -> None:
    assert planned(name, *BALANCE).lengths


def test_mistakes_in_lengths_are_known_before_anything_starts() -> None:
    with pytest.raises(TaskError, match=r"There are \[1\] lengths for 90 samples"):
        planned("TooFewLengths", *BALANCE)
    with pytest.raises(TaskError, match=r"must be lengths\(data\): "):
        planned("LengthsOfNothing", *BALANCE)
    with pytest.raises(TaskError, match=r"LengthIsText: length\(sample\) returned a str for sample 0"):
        planned("LengthIsText", *BALANCE)
