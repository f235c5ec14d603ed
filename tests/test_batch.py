"""The batch contract's arithmetic, for all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.batch import Batch, count_windows, share_of_window, solve_batch
from launcher.config import BatchConfig
from launcher.errors import ConfigError

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


def test_the_documented_message() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(BatchConfig(global_size=100, micro_size=3), 2)
    assert str(caught.value) == (
        "batch.global_size=100 batch.micro_size=3: 100 samples cannot be shared by 2 ranks in units of 3.\n"
        "  Nearest choices: batch.global_size=96 or 102; or batch.micro_size=2 or 5."
    )


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
