"""Workers that are started again in place go on from the last checkpoint: the run is the one that was never hurt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import patience
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.runs import OWN, processes_of, records, start, summary, timeless, wait_for, worker_of
from tests.system.test_wandb import read_back

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
JOB = ("train.steps=40", "run.calibrate_s=5", "checkpoint.every=5", "checkpoint.keep=3", "wandb.mode=offline")


def test_a_killed_rank_costs_nothing_but_time(launch: Launch, project: Path) -> None:
    assert launch("train", *OWN, *JOB, "run.name=whole").returncode == 0
    job = start(project, *JOB, "task.trouble=slow", "cluster.max_restarts=1")
    run = project / "runs" / "own"
    wait_for(lambda: len([*run.glob("checkpoints/step_*")]) >= 2 and len(records(run)) >= 12, "twelve steps")
    worker_of(run, 1).kill()
    out, _ = job.communicate(timeout=patience(120))
    assert job.returncode == 0, out
    assert "Resuming from" in out
    assert "--- resumed after step" in out

    whole = project / "runs" / "whole"
    assert_same_tensors(*(place / "checkpoints" / "step_000040" for place in (run, whole)))
    assert [timeless(record) for record in records(run)] == [timeless(record) for record in records(whole)]
    assert (summary(run)["verdict"], summary(run)["resumed"]) == ("done", 1)
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["latest", *(f"step_{n:06d}" for n in (30, 35, 40))]
    _, history, _, _ = read_back(run)
    assert [row["step"] for row in history] == [*range(1, 41)], "the mirror saw each step once"
    assert processes_of(run) == []
