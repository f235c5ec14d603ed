"""Errors that end a run: their own message comes first, the status is right, and no process is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import patience
from tests.infra.runs import OWN, processes_of, records, start, summary, wait_for, wait_for_steps, worker_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("trouble", "status", "words"),
    [
        (
            "raise",
            1,
            [
                "ValueError: the eleventh utterance is cursed",
                "launch: rank 1 failed",
                "\nIn step 3 on rank 1, with samples ",
            ],
        ),
        ("killed", 1, ["launch: rank 1 failed: killed by SIGKILL"]),
        ("crash", 1, ["launch: rank 1 failed: killed by SIGSEGV", "Fatal Python error", "in misbehave"]),
        ("not finite", 1, ["The loss of step 3 is not finite", "rank 1, micro-batch 3 (samples ", "optimizer.lr"]),
        ("unused", 1, ["does not depend on 1 of the model's parameters: forgotten", "find_unused_parameters=true"]),
        ("bad gradient", 1, ["The gradient of step 1 has norm nan", "2.bias"]),
        ("held-out sample", 1, ["collate", "While micro-batch 1 of eval_data() was evaluated on rank 0."]),
        ("held-out loss", 1, ["ValueError: this loss is for training only", "micro-batch 1 of eval_data()"]),
        ("leave", 1, ["the workers left before the run was over", "sys.exit"]),
        ("detached", 2, ["does not require a gradient"]),
        ("wrong type", 2, ["loss() returned a dict", "launcher.Loss"]),
    ],
)
def test_trouble_ends_the_run_with_its_own_words_first(
    launch: Launch, project: Path, trouble: str, status: int, words: list[str]
) -> None:
    done = launch("train", *OWN, f"task.trouble={trouble}", "train.steps=50")
    assert done.returncode == status, done.stdout + done.stderr
    for text in words:
        assert text in done.stderr
    if trouble in ("raise", "held-out loss"):
        assert done.stderr.startswith("Traceback"), "the failing rank's traceback comes first"
        assert "misbehave" in done.stderr
        frames = done.stderr.partition("launch: ")[0]
        assert "/launcher/" not in frames, "the user's frames alone"
        assert "/torch/" not in frames
        assert (
            "/launcher/train/"
            in (project / "runs" / "own" / "logs" / "rank1.log").read_text()
            + (project / "runs" / "own" / "logs" / "rank0.log").read_text()
        ), "the log has all of them"
    elif trouble not in ("killed", "crash", "leave"):
        assert "Traceback" not in done.stderr, "a message of our own needs no traceback"
    assert "Traceback" not in done.stdout
    run = project / "runs" / "own"
    assert summary(run)["verdict"] == "failed"
    wait_for(lambda: not processes_of(run), "every process of the failed run to end", 60)


def test_the_one_who_raised_is_named_not_the_one_who_was_ended_for_it(launch: Launch, project: Path) -> None:
    done = launch("train", *OWN, "task.trouble=peer asleep", "train.steps=50", "cluster.grace_s=1")
    assert done.returncode == 1
    assert "launch: rank 0 failed: ValueError: rank 0 is the one" in done.stderr
    assert processes_of(project / "runs" / "own") == []


@pytest.mark.usefixtures("project")
def test_a_gradient_that_no_loss_scale_helps_ends_the_run(launch: Launch) -> None:
    """It once skipped for ever."""
    done = launch("train", *OWN, "precision=fp16", "task.trouble=bad gradient", "train.steps=5")
    assert done.returncode == 1
    assert "The gradient of step 1 has norm nan" in done.stderr


def test_ctrl_c_stops_after_the_window_and_saves(project: Path) -> None:
    job = start(project, "task.trouble=slow", "train.steps=100000")
    run = project / "runs" / "own"
    wait_for_steps(run, 3)
    assert len(processes_of(run)) >= 3, "the agent and two workers are found while they live"
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=patience(60))
    assert job.returncode == 130, out
    assert "Stopping at the end of this window" in out
    seen = records(run)
    assert (summary(run)["verdict"], summary(run)["stopped_by"]) == ("stopped", "Ctrl-C")
    assert "Run own: stopped by Ctrl-C" in out
    assert f"`launch resume own` continues from step {len(seen)}" in out
    assert summary(run)["steps"] == seen[-1]["step"] == len(seen)
    assert (run / "checkpoints" / f"step_{len(seen):06d}" / ".metadata").exists()
    assert processes_of(run) == []


def test_sigterm_to_a_worker_stops_the_job_like_any_stop_from_outside(project: Path) -> None:
    job = start(project, "task.trouble=slow", "train.steps=100000")
    run = project / "runs" / "own"
    wait_for_steps(run, 2)
    worker_of(run, 1).terminate()
    out, _ = job.communicate(timeout=patience(60))
    assert job.returncode == 75, out
    found = summary(run)
    assert (found["verdict"], found["stopped_by"]) == ("stopped", "a signal to a worker")
    assert (run / "checkpoints" / f"step_{len(records(run)):06d}" / ".metadata").exists()


def test_a_second_ctrl_c_kills_at_once(project: Path) -> None:
    job = start(project, "task.trouble=hang", "train.steps=100000", "cluster.grace_s=1000")
    run = project / "runs" / "own"
    wait_for((project / "hangs").exists, "rank 1 to hang")
    job.send_signal(signal.SIGINT)
    assert job.stdout is not None
    assert any("Stopping at the end of this window" in line for line in job.stdout), "the first one was not answered"
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=patience(60))
    assert job.returncode == 130, out
    assert summary(run) == {"verdict": "killed", "stopped_by": "Ctrl-C"}
    wait_for(lambda: not processes_of(run), "every process of the run to end", 60)


def test_ctrl_c_before_the_first_step(project: Path, launch: Launch) -> None:
    job = start(project, "train.steps=100000")
    run = project / "runs" / "own"
    wait_for(lambda: (run / "logs" / "node0.log").exists(), "the agent's start")
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=patience(60))
    assert job.returncode == 130, out
    assert "Traceback" not in out
    assert "Run own: stopped" in out
    assert "Run own: stopped" in launch("status", "own").stdout
    wait_for(lambda: not processes_of(run), "every process of the run to end", 60)


def test_a_hanging_worker_does_not_outlive_ctrl_c(project: Path) -> None:
    job = start(project, "task.trouble=hang", "train.steps=100000", "cluster.grace_s=1")
    run = project / "runs" / "own"
    wait_for((project / "hangs").exists, "rank 1 to hang")
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=patience(60))
    assert job.returncode == 130, out
    assert summary(run)["verdict"] == "killed"
    assert processes_of(run) == []


@pytest.mark.parametrize("victim", ["launcher.cli", "launcher.launch.agent"])
def test_kill_9_leaves_nothing_behind(project: Path, victim: str) -> None:
    job = start(project, "task.trouble=slow", "train.steps=100000", "cluster.grace_s=5", "wandb.mode=offline")
    run = project / "runs" / "own"
    wait_for_steps(run, 2)
    if victim == "launcher.cli":
        job.kill()
    else:
        os.kill(worker_of(run, 1).ppid(), signal.SIGKILL)
    job.communicate(timeout=patience(60))
    wait_for(lambda: not processes_of(run), "every process of the run to end", 60)


def test_a_run_never_writes_into_another_ones_directory(launch: Launch, project: Path) -> None:
    (project / "runs" / "own").mkdir(parents=True)
    done = launch("train", *OWN)
    assert done.returncode == 2
    assert "exists" in done.stderr
    assert list((project / "runs" / "own").iterdir()) == []
