"""Ranking of plans with made forecasts: order, frontier, intervals, memory, equal work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import ConfigError
from launcher.plan.forecast import StepTime
from launcher.plan.ranking import Candidate, frontier, rank, require_equal_work
from launcher.plan.run_forecast import RunForecast
from launcher.plan.work import OTHERS_BUSY
from tests.helpers import make_plan

WORKERS = "cluster.workers_per_node"


def step_time(step_s: float, error: float = 0.0) -> StepTime:
    return StepTime(
        step_s=step_s, low_s=step_s * (1 - error), high_s=step_s * (1 + error), compute_s=step_s, optimizer_s=0.0,
        data_s=0.0, communication_s=0.0, exposed_s=0.0, source="measured",
    )  # fmt: skip


def candidate(
    label: str, step_s: float | None, *overrides: str, error: float = 0.0, peak: int | None = None, memory: int = 1000
) -> Candidate:
    """Return a plan whose policy has this predicted time and peak."""
    plan = make_plan(*overrides)
    step = None if step_s is None else step_time(step_s, error)
    forecasts = tuple(dataclasses.replace(each, peak_bytes=peak, step=step) for each in plan.strategy.forecasts)
    strategy = dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=memory)
    return Candidate(label, dataclasses.replace(plan, strategy=strategy))


BASE = {workers: candidate("", 1.0, f"{WORKERS}={workers}") for workers in (1, 2, 4, 8)}


def made(label: str, workers: int, step_s: float, error: float = 0.0) -> Candidate:
    """Return a copy of a plan with another time, which is quick to make."""
    plan = BASE[workers].plan
    forecasts = tuple(dataclasses.replace(each, step=step_time(step_s, error)) for each in plan.strategy.forecasts)
    return Candidate(label, dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts)))


CELLS = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), st.sampled_from([0.0, 0.3])),
    min_size=1, max_size=12,
)  # fmt: skip


def labels(candidates: Sequence[Candidate]) -> list[str]:
    return [each.label for each in candidates]


@given(CELLS)
def test_the_frontier_is_what_no_other_cell_beats(cells: list[tuple[int, float, float]]) -> None:
    """Against the definition, compared pair by pair."""
    candidates = [made(str(number), *cell) for number, cell in enumerate(cells)]
    ranking = rank(candidates)

    def beats(one: tuple[int, float, float], other: tuple[int, float, float]) -> bool:
        a, b = (one[1], one[0] * one[1]), (other[1], other[0] * other[1])
        return a != b and a[0] <= b[0] and a[1] <= b[1]

    expected = {str(n) for n, cell in enumerate(cells) if not any(beats(other, cell) for other in cells)}
    assert set(labels(ranking.frontier)) == expected
    assert list(ranking.frontier) == frontier(ranking.by_time)
    times = [cells[int(label)][1] for label in labels(ranking.by_time)]
    hours = [cells[int(label)][0] * cells[int(label)][1] for label in labels(ranking.by_gpu_time)]
    assert times == sorted(times)
    assert hours == sorted(hours)


@given(CELLS)
def test_cells_that_cannot_be_told_apart(cells: list[tuple[int, float, float]]) -> None:
    ranking = rank([made(str(number), *cell) for number, cell in enumerate(cells)])

    def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[1] and other[0] <= one[1]

    for alike, best, factor in (
        (ranking.fastest, ranking.by_time[0], lambda _: 1),
        (ranking.cheapest, ranking.by_gpu_time[0], lambda cell: cell[0]),
    ):
        intervals = [
            (factor(cell) * step.low_s, factor(cell) * step.high_s)
            for cell in cells
            for step in [step_time(cell[1], cell[2])]
        ]
        first = intervals[int(best.label)]
        assert set(labels(alike)) == {str(n) for n, other in enumerate(intervals) if overlap(first, other)}
        assert alike[0] is best


def test_gpu_hours_and_cost_are_those_of_the_whole_run() -> None:
    one = candidate("a", 1.8, f"{WORKERS}=4", "train.steps=1000", "cluster.price_per_gpu_hour=2.5")
    assert one.hours == pytest.approx(0.5)
    assert one.gpu_hours == pytest.approx(2.0)
    assert one.cost == pytest.approx(5.0)
    assert candidate("a", 1.8, f"{WORKERS}=4").cost is None
    stream = dataclasses.replace(one.plan, train=dataclasses.replace(one.plan.train, steps=None))
    endless = Candidate("a", stream)
    assert (endless.hours, endless.gpu_hours, endless.cost) == (None, None, None)
    assert labels(rank([endless]).frontier) == ["a"], "GPU-seconds of a step compare, too"


def test_the_shorter_windows_of_a_ramp_count_as_in_the_plan_of_one_cell() -> None:
    one = candidate("a", 1.8, "batch.ramp=[[10,4],[10,12]]", "batch.micro_size=1", "train.steps=1000")
    whole = RunForecast.of(one.plan)
    assert whole is not None
    assert whole.total_s is not None
    assert one.hours is not None
    assert one.hours == pytest.approx(whole.total_s / 3600)
    assert one.hours < 0.5


def test_what_does_not_fit_is_named_with_its_excess_and_not_ranked() -> None:
    fits = candidate("fits", 2.0, peak=920)
    large, larger = candidate("large", 1.0, peak=921), candidate("larger", 0.5, peak=2000)
    untimed, unknown = candidate("untimed", None, peak=10), candidate("unknown", 3.0, peak=None)
    ranking = rank([larger, fits, untimed, large, unknown])
    assert labels(ranking.by_time) == ["fits", "unknown"]
    assert [(each.label, each.missing_bytes) for each in ranking.too_large] == [("large", 1), ("larger", 1080)]
    assert labels(ranking.untimed) == ["untimed"]


def test_equal_reasons_are_grouped() -> None:
    ranking = rank([made("a", 1, 1.0)], [("b", "no"), ("c", "never"), ("d", "no")])
    assert ranking.impossible == {"no": ["b", "d"], "never": ["c"]}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("batch.global_size=128", r"batch.global_size=64, 128: differs between the cells.*\n.*batch.micro_size"),
        ("train.steps=7", r"train.steps=7, 300: differs between the cells"),
    ],
)
def test_cells_that_do_not_do_the_same_work_are_refused(other: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_equal_work([make_plan(), make_plan(other)])


def test_notes_that_all_plans_have_are_shown_once() -> None:
    common, own = made("a", 1, 1.0), made("b", 2, 1.0)
    plans = [common.plan.with_notes(["both", "first"]), own.plan.with_notes(["both"])]
    assert rank([Candidate(str(n), plan) for n, plan in enumerate(plans)]).notes == ("both",)


def test_a_note_names_the_cells_that_were_measured_on_a_busy_machine() -> None:
    idle, busy = made("idle", 1, 1.0), made("busy", 2, 1.0)
    step = busy.step
    assert step is not None
    forecasts = tuple(
        dataclasses.replace(each, step=dataclasses.replace(step, busy=True)) for each in busy.plan.strategy.forecasts
    )
    plan = dataclasses.replace(busy.plan, strategy=dataclasses.replace(busy.plan.strategy, forecasts=forecasts))
    busy = Candidate("busy", plan.with_notes([f"{OTHERS_BUSY} 1.5 of 2 cores"]))
    assert rank([idle]).notes == ()
    assert ["while the steps of busy were" in note for note in rank([idle, busy]).notes] == [True]
    assert ["while the steps of all cells were" in note for note in rank([busy, busy]).notes] == [True], "said once"
