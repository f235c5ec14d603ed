"""Correction of predictions by past runs: which of them count, by how much, and what a damaged file does."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.forecast import Forecast, StepTime
from launcher.plan.past_runs import PastRuns, corrected_step, job_of, likeness, store_run
from launcher.plan.run_plan import RunPlan
from tests.helpers import make_plan

STEP = StepTime(
    step_s=1.0, low_s=0.8, high_s=1.25, compute_s=0.7, optimizer_s=0.1, data_s=0.0, communication_s=0.4, exposed_s=0.2,
    source="measured",
)  # fmt: skip


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "launcher" / "past_runs.jsonl"


@functools.cache
def solved(*overrides: str) -> RunPlan:
    return make_plan(*overrides)


def predicted(*overrides: str, step: StepTime | None = STEP, name: str = "one") -> RunPlan:
    """A plan whose policies all have the same predicted step."""
    plan = solved(*overrides)
    forecasts = tuple(dataclasses.replace(each, step=step) for each in plan.strategy.forecasts)
    run = dataclasses.replace(plan.run, id=name)
    return dataclasses.replace(plan, run=run, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts))


def next_step(plan: RunPlan) -> StepTime:
    """The step of the next run's plan, predicted as before and then corrected."""
    bare = [dataclasses.replace(each, step=STEP) for each in plan.strategy.forecasts]
    corrected: list[Forecast] = PastRuns.load().corrected(plan, bare)
    step = next(each.step for each in corrected if each.sync is plan.strategy.sync)
    assert step is not None
    return step


def test_the_correction_is_the_geometric_mean_shrunk_by_one_run(ledger: Path) -> None:
    plan = predicted()
    assert next_step(plan) == STEP, "nothing is known"
    for number, measured in enumerate((2.0, 8.0), 1):
        store_run(predicted(name=str(number)), measured, 10)
    step = next_step(plan)
    assert step.correction == pytest.approx(16 ** (1 / 3)), "two runs, and one at 1"
    assert step.past_runs == 2
    assert step.step_s == pytest.approx(step.correction)
    assert step.compute_s + step.optimizer_s + step.exposed_s == pytest.approx(step.step_s), "its parts make it up"
    assert step.low_s < step.step_s < step.high_s
    assert len(ledger.read_text().splitlines()) == 2


def test_a_correction_does_not_act_on_itself() -> None:
    """Every run takes twice as long as predicted without a correction, and is predicted with that of all before it."""
    plan = predicted()
    for number in range(1, 40):
        step = next_step(plan)
        assert step.correction == pytest.approx(2 ** ((number - 1) / number))
        store_run(predicted(step=step, name=str(number)), 2.0, 10)
    assert next_step(plan).step_s == pytest.approx(2.0, rel=0.02)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30), st.floats(0.1, 1))
def test_the_interval_follows_the_spread(logarithms: list[float], weight: float) -> None:
    step = corrected_step(STEP, [(weight, math.exp(each)) for each in logarithms])
    total = weight * len(logarithms)
    mean = weight * sum(logarithms) / (total + 1)
    assert math.log(step.correction) == pytest.approx(mean, abs=1e-9)
    assert step.high_s / step.step_s == pytest.approx(step.step_s / step.low_s), "symmetric in the logarithm"
    further = corrected_step(STEP, [(weight, math.exp(3 * each - 2 * mean)) for each in logarithms])
    if max(abs(each - mean) for each in logarithms) > 0.01 and abs(math.log(further.correction) - mean) < 1e-9:
        assert further.high_s / further.step_s > step.high_s / step.step_s


def test_many_equal_runs_narrow_the_interval() -> None:
    few, many = corrected_step(STEP, [(1.0, 1.1)] * 2), corrected_step(STEP, [(1.0, 1.1)] * 50)
    assert many.high_s / many.low_s < few.high_s / few.low_s < STEP.high_s / STEP.low_s * 1.5
    assert many.step_s == pytest.approx(1.1, rel=0.01)


def test_likeness_falls_with_each_difference() -> None:
    plan = predicted("strategy=fsdp", "batch.global_size=64", "batch.micro_size=2")
    job = job_of(plan, "measured")
    assert likeness(job, job) == 1
    others = {
        "task": "b.Task", "strategy": "ddp", "sync": "every", "precision": "bf16", "compile": True, "hosts": 2,
        "workers": 4, "parameters": 2000, "micro_size": 4, "accumulation": 1, "several_hosts": True,
    }  # fmt: skip
    for name, value in others.items():
        other = {**job, name: value}
        assert 0.1 <= likeness(job, other) < 1, name
        assert likeness(job, other) == pytest.approx(likeness(other, job)), name
        assert likeness({**job, "machine": "another"}, other) == 0
        assert likeness({**job, "source": "roofline"}, other) == 0
    assert likeness(job, {**job, **others}) == 0, "nothing in common but the machine"
    assert likeness(job, {**job, "accumulation": 2 * job["accumulation"]}) > likeness(
        job, {**job, "accumulation": 8 * job["accumulation"]}
    )


def test_a_run_that_tells_nothing_of_its_prediction_is_not_stored(ledger: Path) -> None:
    store_run(predicted(step=None), 1.0, 10)
    store_run(predicted(), 1.0, 4)
    store_run(predicted(step=dataclasses.replace(STEP, busy=True)), 1.0, 10)
    assert not ledger.exists()


def test_the_last_line_of_a_resumed_run_counts(ledger: Path) -> None:
    for measured in (9.0, 4.0):
        store_run(predicted(), measured, 10)
    assert next_step(predicted()).correction == pytest.approx(2.0)
    store_run(predicted("strategy.sync=every"), 9.0, 10)
    assert len(PastRuns.load().runs) == 2, "under another plan it is another measurement"
    assert len(ledger.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "damage", [b'{"id": "x"}\n', b"\xff\xfe\n", b"[]\n", b'{"id": "1", "job": {"machine": 3', b'{"predicted_s": NaN}\n']
)
def test_damaged_lines_are_ignored_with_a_note(damage: bytes, ledger: Path) -> None:
    store_run(predicted(name="before"), 2.0, 10)
    with ledger.open("ab") as file:
        file.write(damage)
    store_run(predicted(name="after"), 2.0, 10)
    past = PastRuns.load()
    assert [run.id for run in past.runs] == ["before", "after"]
    (note,) = past.notes
    assert note == f"{ledger}: 1 damaged line ignored. Delete the file to forget all past runs."


def test_numbers_that_cannot_be_are_damage(ledger: Path) -> None:
    store_run(predicted(), 2.0, 10)
    whole = json.loads(ledger.read_text())
    for name, value in (("predicted_s", 0), ("measured_s", -1), ("measured_s", "inf"), ("measured_s", None)):
        ledger.write_text(json.dumps(whole | {name: value}) + "\n")
        assert PastRuns.load() == PastRuns((), 1)
    ledger.write_text(json.dumps(whole | {"job": whole["job"] | {"workers": "two"}}) + "\n")
    assert PastRuns.load() == PastRuns((), 1)


def _store_many(first: int) -> None:
    for number in range(first, first + 25):
        store_run(predicted(name=str(number)), 2.0, 10)


def test_concurrent_writers_lose_nothing() -> None:
    predicted()  # so that the processes need not solve it
    writers = [multiprocessing.get_context("fork").Process(target=_store_many, args=(n,)) for n in (0, 100, 200)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(PastRuns.load().runs) == 75
    assert not PastRuns.load().damaged


def test_a_directory_that_cannot_be_used_is_no_error(ledger: Path) -> None:
    ledger.parent.write_text("a file in its place")
    store_run(predicted(), 2.0, 10)
    assert PastRuns.load() == PastRuns(())


def test_only_the_end_of_a_long_file_is_read(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        store_run(predicted(name=str(number)), 2.0, 10)
    monkeypatch.setattr("launcher.plan.past_runs.READ_BYTES", ledger.stat().st_size // 2)
    past = PastRuns.load()
    assert 5 < len(past.runs) < 15
    assert past.runs[-1].id == "19"
    assert not past.damaged
