"""The batch contract's arithmetic, for all sizes."""

from __future__ import annotations

import dataclasses
import re
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.schema import BatchConfig
from launcher.errors import ConfigError
from launcher.plan.batch import Batch, RampStage, in_samples, solve_batch
from launcher.plan.run_plan import TaskPlan
from launcher.plan.windows import Span, Windows, count_windows, share_of_window

sizes = st.integers(1, 64)


@given(
    micro=sizes,
    accumulation=sizes,
    world=sizes,
    left_out=st.sampled_from(["global_size", "micro_size", "accumulation"]),
)
def test_any_two_fix_the_third(micro: int, accumulation: int, world: int, left_out: str) -> None:
    whole = {"global_size": micro * accumulation * world, "micro_size": micro, "accumulation": accumulation}
    solved = solve_batch(BatchConfig(**{**whole, left_out: None}), world)
    assert solved == Batch(**whole, world_size=world)


@given(total=st.integers(1, 5000), micro=st.none() | sizes, accumulation=st.none() | sizes, world=sizes)
def test_a_solution_is_exact_or_an_error_whose_choices_work(
    total: int, micro: int | None, accumulation: int | None, world: int
) -> None:
    config = BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation)
    try:
        solved = solve_batch(config, world)
    except ConfigError as error:
        assert micro is None or accumulation is None or micro * accumulation * world != total
        offered = [part for part in str(error).replace(";", "").split() if part.startswith("batch.global_size=")]
        if "Nearest" in str(error):
            choice = int(offered[-1].partition("=")[2].rstrip(".;"))
            solve_batch(BatchConfig(global_size=choice, micro_size=micro, accumulation=accumulation), world)
    else:
        assert solved.micro_size * solved.accumulation * world == total == solved.global_size
        assert micro in (None, solved.micro_size)
        assert accumulation in (None, solved.accumulation)


def test_a_batch_in_tokens() -> None:
    for tokens in ("4M", "4096k", 2**22):
        assert in_samples(BatchConfig(global_tokens=tokens), 2048) == BatchConfig(global_size=2048)
    assert in_samples(BatchConfig(global_tokens="4M", global_size=2048), 2048).global_size == 2048
    refused = {
        "8,192 tokens are no whole number of samples, which have 3,000 .*\n.*global_tokens=6000 or 9000": ("8K", 3000),
        "the tokens of a sample are not known.\n.* tokens_per_sample": ("8K", None),
        "8Q: must be a number of tokens": ("8Q", 1),
        "is 8,192 samples of 1 tokens, and batch.global_size=64": ("8K", 1),
    }
    for message, (tokens, each) in refused.items():
        with pytest.raises(ConfigError, match=f"batch.global_tokens=.*{message}"):
            in_samples(BatchConfig(global_tokens=tokens, global_size=64 if each == 1 else None), each)


def test_tokens_of_a_sample() -> None:
    assert type(TaskPlan.unknown(10, cast("int", np.int64(4))).tokens_per_sample) is int
    for tokens in (0, -1, 4.0, "4"):
        with pytest.raises(ConfigError, match=f"tokens_per_sample={tokens}: must be a whole number of at least 1"):
            TaskPlan.unknown(10, cast("int", tokens))


def test_the_documented_message() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(BatchConfig(global_size=100, micro_size=3), 2)
    assert str(caught.value) == (
        "batch.global_size=100 batch.micro_size=3: 100 samples cannot be shared by 2 ranks in units of 3.\n"
        "  Nearest choices: batch.global_size=96 or 102; or batch.micro_size=2 or 5; or unequal shares "
        "(batch.uneven=true)."
    )


@given(total=st.integers(1, 5000), micro=st.none() | sizes, accumulation=st.none() | sizes, world=sizes, index=sizes)
def test_unequal_shares_hold_the_window_in_as_few_rounds_as_can_be(
    total: int, micro: int | None, accumulation: int | None, world: int, index: int
) -> None:
    config = BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation, uneven=True)
    try:
        solved = solve_batch(config, world)
    except ConfigError as error:
        assert accumulation is not None
        assert accumulation != -(-total // ((micro or -(-total // (accumulation * world))) * world))
        advised = re.search(r"Use batch\.accumulation=(\d+)", str(error))
        assert advised
        works = solve_batch(dataclasses.replace(config, accumulation=int(advised[1])), world)
        assert works.accumulation == int(advised[1])
        return
    assert solved.global_size == total
    assert micro in (None, solved.micro_size)
    assert accumulation in (None, solved.accumulation)
    assert (
        (solved.accumulation - 1) * solved.micro_size * world < total <= solved.accumulation * solved.micro_size * world
    )
    shares = [share_of_window(total, solved, rank) for rank in range(world)]
    assert {len(share) for share in shares} == {solved.accumulation_at(index)}
    assert sorted(offset for share in shares for part in share for offset in part) == list(range(total))
    assert max(len(part) for share in shares for part in share) <= solved.micro_size
    even = len({sum(map(len, share)) for share in shares}) == 1
    assert even or not solved.even
    if micro is None and accumulation is None and total % world == 0:
        assert solved == solve_batch(BatchConfig(global_size=total), world), "no share is unequal without need"


@pytest.mark.parametrize("name", ["global_size", "micro_size", "accumulation"])
@pytest.mark.parametrize("value", [0, -4])
def test_sizes_below_one_are_refused(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"batch.{name}={value}: must be at least 1"):
        solve_batch(BatchConfig(**{name: value}), 2)


@given(
    samples=st.integers(1, 4096), micro=st.integers(1, 16), accumulation=st.integers(1, 16), world=st.integers(1, 16)
)
def test_a_window_is_shared_out_whole(samples: int, micro: int, accumulation: int, world: int) -> None:
    batch = Batch(
        global_size=micro * accumulation * world, micro_size=micro, accumulation=accumulation, world_size=world
    )
    samples = min(samples, batch.global_size)
    shares = [share_of_window(samples, batch, rank) for rank in range(world)]
    assert sorted(offset for share in shares for part in share for offset in part) == list(range(samples))
    assert len({len(share) for share in shares}) == 1, "every rank must run as many micro-batches as the others"
    lengths = [len(part) for share in shares for part in share]
    assert max(lengths) <= micro
    assert max(lengths) - min(lengths) <= 1
    if samples == batch.global_size:
        assert len(shares[0]) == accumulation
    else:
        assert len(shares[0]) == -(-samples // (micro * world)), "no more micro-batches than the window needs"


@given(samples=st.integers(1, 10**12), size=st.integers(1, 10**6))
def test_an_epoch_is_its_windows(samples: int, size: int) -> None:
    windows, short = count_windows(samples, size, keep_short=True)
    assert (windows - bool(short)) * size + short == samples
    assert count_windows(samples, size, keep_short=False) == (samples // size, 0)


@given(st.integers(40, 300), st.lists(st.tuples(st.integers(1, 30), st.integers(1, 39)), max_size=3), st.booleans())
def test_where_a_window_lies_is_its_number_alone(samples: int, stages: list[tuple[int, int]], keep_short: bool) -> None:
    """Against a walk through the run, one window after the other."""
    ramp = tuple(RampStage(windows=steps, global_size=size) for steps, size in stages)
    batch = Batch(global_size=40, micro_size=1, accumulation=40, world_size=1, ramp=ramp)
    windows = Windows(samples, batch, keep_short=keep_short)
    epoch = window = first = 0
    begins = [0]
    for index in range(150):
        size = batch.global_size_at(index)
        rest = samples - first
        if rest < size and not (rest and keep_short):
            epoch, window, first, rest = epoch + 1, 0, 0, samples
            begins.append(index)
        span = Span(epoch, window, first, min(size, rest))
        assert windows.at(index) == span
        window, first = window + 1, first + span.size
    assert [windows.before(number) for number in range(len(begins))] == begins


def test_a_ramp_grows_by_accumulation() -> None:
    batch = solve_batch(BatchConfig(global_size=64, micro_size=4, ramp=[[10, 16], [20, 32]]), 2)
    assert [batch.global_size_at(index) for index in (0, 9, 10, 29, 30, 1000)] == [16, 16, 32, 32, 64, 64]
    assert [batch.accumulation_at(index) for index in (0, 10, 30)] == [2, 4, 8]


@pytest.mark.parametrize(
    ("ramp", "says"),
    [
        ([[10, 12]], r"12 samples cannot be shared by the ranks in micro-batches: 8 at once.*\n.*8 or 16"),
        ([[10]], r"\[10\] is not a stage"),
        ([[0, 16]], "is not a stage"),
        ([[10, 64]], r"64 samples after 0 do not rise towards batch.global_size=64"),
        ([[10, 32], [5, 16]], "16 samples after 32 do not rise"),
    ],
)
def test_a_ramp_that_is_none_is_said(ramp: list[list[int]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        solve_batch(BatchConfig(global_size=64, micro_size=4, ramp=ramp), 2)
