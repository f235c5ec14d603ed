"""Parts of a drill without processes: the verdict, the record, the plan that it runs, and input that it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.cli import run
from launcher.extensions.drill.runner import Length, job_lines, shortened, with_length
from launcher.extensions.drill.verdict import (
    Difference,
    DrillOutcome,
    InterruptedRun,
    Interruption,
    RecordLines,
    first_difference,
    judge_drill,
    wrong_steps,
)
from launcher.plan.run_plan import RunPlan
from launcher.rundir.paths import RunPaths
from tests.helpers import make_plan

Captured = pytest.CaptureFixture[str]
SAME = Difference(tensors=9)


def off_by(norm: float, steps: str = "") -> Difference:
    return dataclasses.replace(SAME, differing=2, first="model.a", absolute=norm, relative=norm, norm=norm, steps=steps)


def disturbed(difference: Difference | None = SAME, problem: str = "", left: tuple[str, ...] = ()) -> InterruptedRun:
    return InterruptedRun(
        kind=Interruption.tree, what="", at_step=7, from_step=6, difference=difference, problem=problem, left=left
    )


@pytest.mark.parametrize(
    ("one", "rerun_difference", "outcome", "words"),
    [
        (disturbed(), None, DrillOutcome.survives, "bit by bit"),
        (disturbed(off_by(1e-3)), SAME, DrillOutcome.damaged, "differs from the undisturbed run"),
        (disturbed(off_by(1e-3)), off_by(1e-3), DrillOutcome.varies, "than a repetition of that does"),
        (disturbed(off_by(1e-1)), off_by(1e-3), DrillOutcome.damaged, "differs from the undisturbed run"),
        (disturbed(off_by(1e-3, "without 7")), off_by(1e-3), DrillOutcome.damaged, "without 7"),
        (disturbed(None, "`launch` left with status 1"), None, DrillOutcome.damaged, "status 1"),
        (disturbed(left=("process 12",)), None, DrillOutcome.damaged, "process 12"),
    ],
)
def test_the_verdict(
    one: InterruptedRun, rerun_difference: Difference | None, outcome: DrillOutcome, words: str
) -> None:
    found, reason = judge_drill([disturbed(), one], rerun_difference)
    assert found is outcome
    assert words in reason


def record(path: Path, steps: list[int], **figures: float) -> RecordLines:
    path.write_text("".join(json.dumps({"step": step, "time/step_s": step / 7, **figures}) + "\n" for step in steps))
    return RecordLines.of(path)


def test_gaps_repetitions_and_other_figures_in_a_record_are_found(tmp_path: Path) -> None:
    whole = record(tmp_path / "whole", [1, 2, 3], **{"train/loss": 1.5})
    assert (whole.step, wrong_steps(whole, 3)) == (3, "")
    assert "without 3" in wrong_steps(record(tmp_path / "a", [1, 2]), 3)
    assert "twice 2" in wrong_steps(record(tmp_path / "b", [1, 2, 2, 3]), 3)
    assert "out of order" in wrong_steps(record(tmp_path / "c", [2, 1, 3]), 3)
    other = record(tmp_path / "d", [1, 2, 3], **{"train/loss": 1.25})
    assert first_difference(other, whole) == "train/loss of step 1: 1.25 instead of 1.5"
    assert first_difference(record(tmp_path / "e", [1, 2, 3], **{"train/loss": 1.5, "time/data_s": 1}), whole) == ""
    assert RecordLines.of(tmp_path / "none").step == 0


def test_a_run_resumes_after_the_steps_that_its_new_record_shares_with_the_old_one(tmp_path: Path) -> None:
    before = record(tmp_path / "metrics", [1, 2, 3, 4, 5])
    (tmp_path / "new").write_text("".join(f"{line}\n" for line in before.lines[:4]) + '{"step": 5, "time/step_s": 9}\n')
    (tmp_path / "new").rename(tmp_path / "metrics")
    after = RecordLines.of(tmp_path / "metrics")
    assert after.file != before.file
    assert (after.shared_lines(before), len(after.lines)) == (4, 5)


@pytest.mark.parametrize("windows", [4, 5, 8, 9, 31, 64])
def test_the_interruption_is_between_two_checkpoints(windows: int) -> None:
    length = Length(windows)
    assert length.every < length.until < windows, "after a checkpoint, and before the end"
    assert length.until % length.every, "the step is in no checkpoint"


def test_the_schedule_is_that_of_the_whole_job_and_survives_the_plan_file() -> None:
    plan = make_plan("train.steps=1000", "schedule.warmup_steps=10", "checkpoint.every_minutes=5")
    cut, changed = shortened(plan)
    cut = with_length(cut, RunPaths(Path("/nowhere/drill/x")), Length(8))
    again = RunPlan.from_json(cut.to_json())
    assert again == cut
    assert (again.train.steps, again.schedule_steps, again.checkpoint.every) == (8, 1000, 2)
    assert again.checkpoint.every_minutes is None
    assert any("max_restarts" in words for words in changed)


def test_the_batch_is_described_as_in_the_plan() -> None:
    plan = make_plan("batch.uneven=true", "batch.global_size=10", "batch.micro_size=3", "cluster.workers_per_node=2")
    job = job_lines(plan)
    assert job["batch"] == plan.batch.text
    assert "shared by 3 micro-batch × 2 accumulation × 2 ranks" in job["batch"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checkpoint.enabled=false"], "checkpoint.enabled=false: no checkpoint is saved"),
        (["cluster=hosts"], "cluster=hosts: has no scheduler"),
        (["--windows", "3"], "--windows 3: must be a number of windows from 4"),
        (["--windows=many"], "--windows many:"),
        (["--windows"], "--windows: has no value"),
        (["-m", "train.seed=1,2"], "drills one job at a time"),
        (["batch.globl_size=8"], "did you mean"),
        (["--window", "8"], "--window: there is no such flag"),
    ],
)
def test_a_job_that_cannot_be_drilled_is_refused_with_one_message(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["drill", *arguments]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("error:") == 1
    assert list(tmp_path.iterdir()) == []
