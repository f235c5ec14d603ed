"""A job on a real Slurm, submitted and watched from a laptop through a real sshd."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import launch
from tests.infra.jobs_on_slurm import JOB
from tests.infra.runs import PROJECT
from tests.infra.slurm import Cluster, cluster, needs_slurm
from tests.infra.sshd import LoginNode, login_node, needs_sshd

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_slurm, needs_sshd]


@pytest.fixture(scope="module")
def there() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


@pytest.fixture
def node(there: Cluster, tmp_path: Path) -> Iterator[LoginNode]:
    """The login host of the cluster, with a sshd."""
    with login_node(tmp_path / "node", {"SLURM_CONF": there.env["SLURM_CONF"]}, there.gate.command()) as made:
        made.install_launcher()
        yield made


def test_submit_look_cancel_resume_report(there: Cluster, node: LoginNode, tmp_path: Path) -> None:
    laptop = tmp_path / "laptop"
    shutil.copytree(PROJECT / "speech", laptop / "speech")

    def typed(*arguments: str, status: int = 0) -> str:
        done = launch(*arguments, cwd=laptop, env=node.env)
        assert done.returncode == status, f"{arguments}: {done.stdout}{done.stderr}\n{there.logs()}"
        return done.stdout if status == 0 else done.stderr

    place = ("cluster=slurm", "cluster.login=login", "cluster.login_dir=work")
    assert "The batch script" in typed("plan", *place, *JOB)
    assert "cluster.partition=nope: Slurm has no such partition" in typed(
        "train", *place, *JOB, "cluster.partition=nope", status=2
    )
    shown = typed("train", *place, *JOB, "task.trouble=slow", "cluster.workers_per_node=1")
    assert "Submitted own as Slurm job" in shown
    run = node.home / "work/runs/own"
    (laptop / "speech/tasks.py").write_text("raise SystemError('edited after submission')\n")
    there.wait(lambda: (run / "checkpoints/step_000010").is_dir(), "a checkpoint", 120)
    assert json.loads(typed("status", "own", "--json"))["state"] == "running"
    assert "own" in typed("runs")
    typed("cancel", "own")
    assert json.loads(typed("status", "own", "--json"))["state"] == "cancelled"
    typed("resume", "own", "train.steps=40")
    typed("logs", "own", "--follow")
    assert json.loads(typed("status", "own", "--json"))["state"] == "done", "it was followed to its end"
    assert "The page: runs/report.html" in typed("report", "own")
    assert (laptop / "runs/report.html").is_file()
    assert not (laptop / "runs/own").exists(), "the run is on the cluster"
