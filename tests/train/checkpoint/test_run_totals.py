"""The best checkpoint stays, and a run without improvement ends: the same ones whether or not it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint.run_totals import BestEvaluation
from launcher.train.checkpoint.save import Retention, delete_old
from tests.helpers import make_plan
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.runs import records, run_jobs, summary, timeless

run = partial(run_jobs, Path(__file__).parent / "resume_worker.py")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAN = None  # as JSON has it
#           1  2  3    4    5  6    7    8    9    10
SCRIPT = dict(enumerate([3, 2, 2.5, NAN, 2, 1.5, 1.5, 1.7, 1.6, 1.9], 1))
JOB = ("batch.global_size=8", "batch.micro_size=2", "precision=fp32", "train.steps=10", "run.calibrate_s=0",
       "train.eval_every=1", "checkpoint.every=4", "train.loader_workers=0")  # fmt: skip
BEST, HIGHEST = "checkpoint.best=eval/loss", ("checkpoint.best=eval/accuracy", "checkpoint.best_mode=max")
DDP, FSDP = "strategy.bucket_mb=0.001", "strategy=fsdp"


def job(place: Path, name: str, overrides: Sequence[str], script: dict[int, float | None] = SCRIPT, **more: Any) -> Any:
    target = "tests.train.evaluation_tasks.Scripted"
    task = {"samples": 48, "script": {str(step): value for step, value in script.items()}}
    return {"run": str(place / name), "target": target, "overrides": [*JOB, *overrides], "task": task, **more}


def saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))


def best(run: Path) -> tuple[Any, ...]:
    found = summary(run)["best"]
    assert found["directory"] == str(run / "checkpoints" / f"step_{found['step']:06d}")
    return found["step"], found["value"]


def assert_same(run: Path, whole: Path) -> None:
    """Parameters, optimizer and random state of all checkpoints that are left, the record, and the verdict."""
    assert saved(run) == saved(whole)
    for step in saved(whole):
        assert_same_tensors(*(place / "checkpoints" / f"step_{step:06d}" for place in (run, whole)))
    assert [timeless(record) for record in records(run)] == [timeless(record) for record in records(whole)]
    ours, theirs = summary(run), summary(whole)
    assert best(run) == best(whole)
    for name in ("verdict", "stopped_early", "steps", "eval/loss", "eval/accuracy", "train/loss"):
        assert ours.get(name) == theirs.get(name)


@pytest.mark.slow
def test_what_is_kept_and_when_the_run_ends(tmp_path: Path) -> None:
    jobs = {
        "all": [DDP, BEST],
        "newest": [FSDP, BEST, "checkpoint.keep=1"],
        "synchronous": [DDP, BEST, "checkpoint.keep=2", "checkpoint.async_save=false"],
        "patient": [DDP, BEST, "train.patience=3", "checkpoint.keep=2"],
        "highest": [FSDP, *HIGHEST, "train.patience=4"],
        "unsaved": [DDP, BEST, "checkpoint.enabled=false", "train.patience=2"],
    }
    out = run([job(tmp_path, name, overrides) for name, overrides in jobs.items()], 2, tmp_path)
    assert saved(tmp_path / "all") == [4, 6, 8, 10], "of those saved as the best only the last is left"
    assert saved(tmp_path / "newest") == [6, 10]
    assert saved(tmp_path / "synchronous") == [6, 8, 10]
    assert [best(tmp_path / name) for name in ("all", "newest", "synchronous")] == [(6, 1.5)] * 3
    seen = records(tmp_path / "all")
    assert [record["best/step"] for record in seen] == [1, 2, 2, 2, 2, 6, 6, 6, 6, 6]
    assert [record["best/value"] for record in seen] == [3, 2, 2, 2, 2, *[1.5] * 5]
    assert "stopped_early" not in summary(tmp_path / "all")

    patient = summary(tmp_path / "patient")
    text = "eval/loss has not improved in 3 evaluations, since step 2 (2)"
    assert (patient["verdict"], patient["steps"], patient["stopped_early"]) == ("done", 5, text)
    assert f"step 5: stopped early: {text}" in out
    assert saved(tmp_path / "patient") == [2, 4, 5], "the last step is saved, and the best one is not the newest"
    assert best(tmp_path / "highest") == (1, 3)
    assert (summary(tmp_path / "highest")["steps"], saved(tmp_path / "highest")) == (5, [1, 4, 5])
    unsaved = summary(tmp_path / "unsaved")
    assert (unsaved["steps"], unsaved["best"]["step"], unsaved["best"]["directory"]) == (4, 2, None)


CASES: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    # (overrides, windows after which the run is asked to stop, or killed in the evaluation if negative)
    "ddp": ((DDP, BEST, "checkpoint.keep=1", "train.patience=4"), (-2, 5, -8)),
    "fsdp": ((FSDP, BEST, "checkpoint.keep=2", "train.patience=4", "checkpoint.async_save=false"), (3, -6, 7)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_an_interrupted_run_keeps_the_same_ones_and_ends_at_the_same_step(name: str, tmp_path: Path) -> None:
    """Killed between a checkpoint and its evaluation, and stopped before an evaluation."""
    overrides, interruptions = CASES[name]
    run([job(tmp_path, "whole", overrides)], 2, tmp_path)
    done = 0
    for at in interruptions:
        if at > 0:
            run([job(tmp_path, name, overrides, stop=at - done)], 2, tmp_path)
        else:
            (marker := tmp_path / f"die at {-at}").touch()
            with pytest.raises(AssertionError):  # torchrun may name either rank as the first to fail
                run([job(tmp_path, name, overrides)], 2, tmp_path)
            assert not marker.exists(), "it was killed"
        done = saved(tmp_path / name)[-1] if saved(tmp_path / name) else 0
    run([job(tmp_path, name, overrides)], 2, tmp_path)
    last = summary(tmp_path / "whole")
    assert (last["steps"], last["best"]["step"]) == (10, 6)
    assert_same_end(tmp_path / name, tmp_path / "whole")


def assert_same_end(run: Path, whole: Path) -> None:
    """Like ``assert_same``, but a stop leaves a checkpoint where there would be none."""
    extra = set(saved(run)) - set(saved(whole))
    assert not extra - {3, 5, 7}
    for step in sorted(extra):
        (run / "checkpoints" / f"step_{step:06d}").rename(run / f"stopped_{step}")
    assert_same(run, whole)


@pytest.mark.slow
def test_a_run_that_ended_early_ends_again_or_goes_on(tmp_path: Path) -> None:
    options = [DDP, BEST, "train.patience=3"]
    first = job(tmp_path, "run", options)
    whole = job(tmp_path, "whole", [DDP, BEST, "train.patience=4"])
    longer = job(tmp_path, "run", [DDP, BEST, "train.patience=4"])
    run([whole, first], 2, tmp_path)
    before = records(tmp_path / "run")
    run([first], 2, tmp_path)
    assert records(tmp_path / "run") == before, "nothing is trained"
    assert summary(tmp_path / "run")["stopped_early"]
    run([longer], 2, tmp_path)
    assert best(tmp_path / "run") == (6, 1.5)
    assert [timeless(each) for each in records(tmp_path / "run")] == [
        timeless(each) for each in records(tmp_path / "whole")
    ]


@pytest.mark.slow
def test_an_unknown_metric_ends_the_run_before_the_first_step(tmp_path: Path) -> None:
    wrong = job(tmp_path, "wrong", ["checkpoint.best=eval/acuracy", "checkpoint.best_mode=max"], raises="ConfigError")
    # known, but never a number
    never = job(tmp_path, "never", ["checkpoint.best=eval/never", "checkpoint.best_mode=max", "train.patience=3"])
    out = run([wrong, never], 2, tmp_path)
    assert "checkpoint.best=eval/acuracy: the evaluation has no such metric." in out
    assert "did you mean 'eval/accuracy'? Its metrics: eval/accuracy, eval/loss, eval/never." in out
    assert not (tmp_path / "wrong" / "metrics.jsonl").exists()
    text = "eval/never has not improved in 3 evaluations, from the start"
    assert summary(tmp_path / "never")["stopped_early"] == text
    assert summary(tmp_path / "never")["best"]["step"] is None
    assert out.count("Warning: checkpoint.best=eval/never is nan") == 1


def made(*overrides: str) -> BestEvaluation:
    return BestEvaluation(make_plan(BEST, "train.eval_every=1", *overrides))


def test_what_is_better() -> None:
    least = made("train.patience=2")
    values = {1: 3.0, 2: float("nan"), 3: float("-inf"), 4: 3.0, 5: 2.0}
    judged = {step: least.judge(step, {"eval/loss": value}) for step, value in values.items()}
    assert judged == {1: True, 2: False, 3: False, 4: False, 5: True}
    assert (least.step, least.value, least.misses) == (5, 2.0, 0)
    assert not least.judge(5, {"eval/loss": 1.0}), "a step is judged once"
    with pytest.raises(ConfigError, match=r"checkpoint.best=eval/loss: the evaluation has no such metric."):
        least.judge(6, {"eval/other": 1.0})


def test_the_first_value_that_is_not_finite_is_worth_a_warning() -> None:
    best = made()
    warnings = [best.warning({"eval/loss": value}) for value in (1.0, float("nan"), float("inf"))]
    assert [warning is not None for warning in warnings] == [False, True, False]
    assert "checkpoint.best=eval/loss is nan in this evaluation" in str(warnings[1])


def test_another_metric_starts_afresh() -> None:
    first = made("train.patience=2")
    first.judge(3, {"eval/loss": 1.0})
    same, other = made(), made("checkpoint.best_mode=max")
    nothing = BestEvaluation(make_plan())
    state = json.loads(json.dumps(first.state_dict()))
    text = [each.load_state_dict(state) for each in (same, other, nothing)]
    dropped = "The best evaluation by eval/loss (min), 1 at step 3, no longer counts"
    assert (text[0], text[1].startswith(dropped), text[2].startswith(dropped)) == ("", True, True)
    assert made("checkpoint.best_mode=max").load_state_dict(made().state_dict()) == "", "there was none yet"
    assert (same.step, same.value, same.judged) == (3, 1.0, 3)
    assert other.is_new


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(), [1, 2, 3, 4, 5]),
        (Retention(keep=2), [4, 5]),
        (Retention(keep=2, best=2), [2, 4, 5]),
        (Retention(keep=2, best=5), [4, 5]),
        (Retention(best=4, superseded=(1, 3)), [2, 4, 5]),
        (Retention(keep=2, best=2, superseded=(1, 4)), [2, 3, 5]),
        (Retention(best=9, superseded=(1, 3)), [1, 2, 3, 4, 5]),  # the best one could not be saved
        (Retention(best=2, superseded=(5,)), [1, 2, 3, 4, 5]),  # the newest one stays
    ],
)
def test_what_is_deleted(retention: Retention, left: list[int], tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    fence = Fence(paths, Incarnation(0, 1))
    for step in range(1, 6):
        paths.checkpoint(step).mkdir(parents=True)
    delete_old(paths, fence, retention)
    assert saved(tmp_path) == left
    for step in (999_999, 1_000_000):
        paths.checkpoint(step).mkdir()
    delete_old(paths, fence, Retention(keep=1))
    assert saved(tmp_path) == [1_000_000], "the newest is that of the highest step"
