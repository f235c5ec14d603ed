"""The permutation: a bijection, fixed by its key, without memory, and random enough; a sample's random numbers."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.task import seed_everything
from launcher.train.data.randomness import Permutation, SampleRandom, Seed


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_it_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    order = Permutation(n, seed, epoch)
    assert sorted(order.take(0, n)) == list(range(n))


@given(position=st.integers(0, 10**10 - 1))
def test_ten_thousand_million_samples_need_no_memory(position: int) -> None:
    order = Permutation(10**10, seed=1, epoch=2)
    count = min(100, 10**10 - position)
    values = order.take(position, count)
    assert len(set(values)) == count
    assert all(0 <= value < 10**10 for value in values)
    assert values[:1] == Permutation(10**10, seed=1, epoch=2).take(position, 1), (
        "a position does not need its neighbours"
    )


def test_memory_does_not_grow_with_the_dataset() -> None:
    tracemalloc.start()
    order = Permutation(10**10, seed=0, epoch=0)
    for position in range(1000):
        order.take(position * 10**6, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_epochs_and_seeds_differ() -> None:
    def first(seed: int, epoch: int) -> list[int]:
        return Permutation(1000, seed, epoch).take(0, 50)

    assert len({tuple(first(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


@pytest.mark.parametrize("n", [16, 30, 97])
def test_every_sample_is_as_likely_at_every_position(n: int) -> None:
    trials = 4000
    orders = [Permutation(n, seed, 0).take(0, n) for seed in range(trials)]
    for position in (0, 1, n // 2, n - 1):
        seen = Counter(order[position] for order in orders)
        expected = trials / n
        chi_square = sum((seen[value] - expected) ** 2 / expected for value in range(n))
        assert chi_square < n + 6 * (2 * n) ** 0.5, f"position {position} of {n}: chi-square {chi_square:.0f}"


def test_neighbours_are_independent() -> None:
    n = 10_000
    order = Permutation(n, seed=3, epoch=0)
    values = [value / n - 0.5 for value in order.take(0, n)]
    for lag in (1, 2, 100):
        correlation = 12 * sum(a * b for a, b in zip(values, values[lag:], strict=False)) / n
        assert abs(correlation) < 0.05, f"lag {lag}: {correlation:.3f}"


def test_a_position_outside_is_an_error() -> None:
    with pytest.raises(IndexError):
        Permutation(10, 0, 0).take(5, 6)


def state_drawn(state: Any) -> float:
    generator = random.Random()
    generator.setstate(state)
    return generator.random()


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda: torch.rand(1).item(), id="torch"),
        pytest.param(torch.initial_seed, id="the seed of torch"),
        pytest.param(random.random, id="Python"),
        pytest.param(lambda: random.gauss(0, 1), id="a number that Python's gauss has left over"),
        pytest.param(lambda: np.random.rand(), id="NumPy"),
        pytest.param(lambda: state_drawn(random.getstate()), id="Python's state"),
        pytest.param(lambda: float(np.random.RandomState(np.random.get_state()[1][0]).rand()), id="NumPy's state"),
        pytest.param(lambda: np.random.default_rng(torch.initial_seed()).random(), id="a generator of its own"),
    ],
)
def test_the_first_number_drawn_is_noticed_and_comes_from_the_samples_place(draw: Callable[[], float]) -> None:
    def read(seed: Seed | None) -> float:
        if seed is not None:
            seed(3, 5)
        return draw()

    values: list[float] = []
    for outer in (1, 2):
        seed_everything(outer)
        _ = random.gauss(0, 1), np.random.normal()  # each leaves a second number
        before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        values.append(SampleRandom(7).read(read))
        after = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
        assert torch.default_generator is torch.random.default_generator
    assert values[0] == values[1], "it does not depend on what was drawn elsewhere"


@pytest.mark.parametrize("draw", [np.random.normal, random.gauss, lambda: torch.randn(1).item()])
def test_a_streams_numbers_do_not_depend_on_the_sizes_of_its_reads(draw: Callable[[], float]) -> None:
    def values(*sizes: int) -> list[float]:
        stream, drawn = SampleRandom(7), list[float]()
        for size in sizes:
            with stream.continued(0):
                drawn += [draw() for _ in range(size)]
        return drawn

    assert values(1, 1, 1, 1, 1, 1) == values(2, 2, 2) == values(3, 3) == values(1, 5) == values(6)
