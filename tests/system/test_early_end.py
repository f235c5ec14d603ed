"""A whole job with checkpoint.best and train.patience: verdict, summary, status, resume and drill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.infra.runs import OWN, records, summary

pytestmark = pytest.mark.slow
# a rate at which nothing changes: every evaluation after the first is no better
STUCK = ("optimizer.lr=1e-30", "train.eval_every=2", "train.steps=50", "checkpoint.best=eval/loss")


def test_a_run_that_does_not_improve_ends_and_says_so(project: Path, launch: Launch) -> None:
    done = launch("train", *OWN, *STUCK, "train.patience=2", "checkpoint.every=4", "checkpoint.keep=1")
    assert done.returncode == 0, done.stderr
    run = project / "runs" / "own"
    result = summary(run)
    assert (result["verdict"], result["steps"]) == ("done", 6)
    first = run / "checkpoints" / "step_000002"
    assert result["best"] == {
        "metric": "eval/loss", "mode": "min", "step": 2, "value": records(run)[1]["eval/loss"], "directory": str(first),
        "judged": 6,
    }  # fmt: skip
    assert first.is_dir()
    text = "stopped early: eval/loss has not improved in 2 evaluations, since step 2"
    assert text.replace(":", " ") in done.stdout
    assert f"step 6: {text}" in done.stdout
    status = launch("status", "own").stdout
    assert text in status
    assert f"eval/loss {result['best']['value']:.6g} at step 2: runs/own/checkpoints/step_000002" in status
    assert json.loads(launch("status", "own", "--json").stdout)["best"]["directory"] == str(first)

    on = launch("resume", "own", "train.patience=3", "train.eval_micro_size=7")
    assert on.returncode == 0, on.stderr
    assert (summary(run)["steps"], summary(run)["best"]["step"]) == (8, 2)
    assert [record["step"] for record in records(run)] == list(range(1, 9))


@pytest.mark.nightly
@pytest.mark.usefixtures("project")
def test_a_drill_compares_the_best_ones_too(launch: Launch) -> None:
    own = [word for word in OWN if not word.startswith("run.name")]
    job = ("checkpoint.best=eval/loss", "train.eval_every=1", "train.patience=3", "strategy=fsdp")
    done = launch("drill", *own, *job)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bit by bit" in done.stdout
    assert "(train.patience=null)" in " ".join((done.stdout + done.stderr).split())
