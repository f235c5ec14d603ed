"""`launch resume` and `launch retry` on this machine, and the exit status of a run that is told to stop."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from tests.conftest import Launch
from tests.system.runs import processes_of, records, start, summary, wait_for
from tests.train.test_resume import tensors

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_scheduler_around_it_finds_a_run_that_goes_on(project: Path, launch: Launch, number: int) -> None:
    job = start(project, "task.trouble=slow", "train.steps=12")
    run = project / "runs" / "own"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 3, "three steps")
    assert "is running" in launch("resume", "own").stderr
    job.send_signal(number)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 75, out
    assert summary(run)["verdict"] == "stopped"
    (shown,) = json.loads(launch("runs", "--json").stdout)
    assert (shown["state"], shown["step"]) == ("stopped", records(run)[-1]["step"])
    done = launch("resume", "own")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in records(run)] == list(range(1, 13))
    assert summary(run)["verdict"] == "done"
    assert processes_of(run) == []
    refused = launch("resume", "own")
    assert refused.returncode == 2
    assert "own: is done. `launch retry own` begins it anew" in refused.stderr
    again = launch("retry", "own")
    assert again.returncode == 0, again.stderr
    mine, wanted = (tensors(place / "checkpoints" / "step_000012") for place in (run, run.with_name("own.retry1")))
    assert all(torch.equal(mine[name], wanted[name]) for name in wanted)
    assert "Run own.retry1: done" in launch("status", "own.retry1").stdout


def test_cancel_ends_a_run_of_this_machine(project: Path, launch: Launch) -> None:
    job = start(project, "task.trouble=slow", "train.steps=1000")
    run = project / "runs" / "own"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run)) >= 2, "two steps")
    done = launch("cancel", "own")
    assert done.returncode == 0, done.stderr
    assert job.wait(10) == 75
    assert json.loads(launch("status", "own", "--json").stdout)["state"] == "cancelled"
    assert processes_of(run) == []
    assert job.stdout is not None
    job.stdout.close()
