"""A job on a real Slurm, submitted and watched from a laptop through a real sshd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import launch, launch_command, patience
from tests.infra import warm
from tests.infra.jobs_on_slurm import JOB
from tests.infra.runs import PROJECT, records
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
    assert "cluster.partition=nope: Slurm has no such partition" in typed(
        "train", *place, *JOB, "cluster.partition=nope", status=2
    )
    shown = typed("train", *place, *JOB, "train.steps=100000", "task.trouble=slow", "cluster.workers_per_node=1")
    assert "Submitted own as Slurm job" in shown
    run = node.home / "work/runs/own"
    (laptop / "speech/tasks.py").write_text("raise SystemError('edited after submission')\n")
    there.wait(lambda: (run / "checkpoints/step_000010").is_dir(), "a checkpoint", 120)
    assert json.loads(typed("status", "own", "--json"))["state"] == "running"
    typed("cancel", "own")
    assert json.loads(typed("status", "own", "--json"))["state"] == "cancelled"
    typed("resume", "own", f"train.steps={records(run)[-1]['step'] + 20}")
    typed("logs", "own", "--follow")
    assert json.loads(typed("status", "own", "--json"))["state"] == "done", "it was followed to its end"
    assert "The page: runs/report.html" in typed("report", "own")
    assert (laptop / "runs/report.html").is_file()
    assert not (laptop / "runs/own").exists(), "the run is on the cluster"


SLOW_SBATCH = """\
#!/bin/sh
echo $PPID > ~/submitting.new && mv ~/submitting.new ~/submitting
until [ -e ~/go ]; do sleep 0.1; done
exec {real} "$@"
"""


@pytest.mark.parametrize("how", ["ctrl-c", pytest.param("lost connection", marks=pytest.mark.nightly)])
def test_a_submission_under_way_is_withdrawn(there: Cluster, node: LoginNode, tmp_path: Path, how: str) -> None:
    laptop = tmp_path / "laptop"
    shutil.copytree(PROJECT / "speech", laptop / "speech")
    (node.home / "bin/sbatch").write_text(SLOW_SBATCH.format(real=shutil.which("sbatch")))
    (node.home / "bin/sbatch").chmod(0o755)
    submitting = node.home / "submitting"

    def is_interrupted() -> bool:
        lines = Path(f"/proc/{submitting.read_text().strip()}/status").read_text().splitlines()
        pending = next(line for line in lines if line.startswith("SigPnd:"))
        return bool(int(pending.split()[1], 16) & 1 << signal.SIGINT - 1)

    with warm.Popen(
        launch_command("train", "cluster=slurm", "cluster.login=login", "cluster.login_dir=work", *JOB),
        cwd=laptop, env={**os.environ, **node.env}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        there.wait(submitting.exists, "sbatch", patience(60))
        if how == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            node.cut()
        there.wait(is_interrupted, "the signal there", patience(30))
        (node.home / "go").touch()
        shown = process.communicate(timeout=patience(60))
    assert process.returncode == (130 if how == "ctrl-c" else 1), shown
    there.wait(lambda: not (node.home / "work/runs/own").exists(), "the end of the command there", patience(60))
    assert there.jobs() == []
