"""Submissions to a real Slurm that are cut off at the worst moment: while sbatch runs."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import launch_command, patience
from tests.infra.jobs_on_slurm import JOB, Project
from tests.infra.slurm import Cluster, needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_slurm]

FEW = ("cluster.workers_per_node=1", "train.steps=3")


def submit_and_be_killed(mine: Project, signal: str, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Submit with a `sbatch` that sends a signal to its parent when Slurm has the job."""
    programs = mine.place / "programs"
    programs.mkdir()
    real = shlex.quote(str(shutil.which("sbatch")))
    (programs / "sbatch").write_text(f'#!/bin/sh\nanswer=$({real} "$@")\nkill -{signal} $PPID\necho "$answer"\n')
    (programs / "sbatch").chmod(0o755)
    job = [word for word in JOB if "-m" not in overrides or not word.startswith("run.name")]
    command = shlex.join(launch_command("train", "cluster=slurm", *job, *FEW, *overrides))
    line = f"PATH={shlex.quote(str(programs))}:$PATH exec env --default-signal=HUP,INT,TERM {command}"
    return mine.there.login("/bin/bash", "-c", line, cwd=mine.place, check=False, timeout=patience(120))


def shown(mine: Project) -> tuple[str, str | None]:
    status = json.loads(mine.launch("status", "own", "--json").stdout)
    return status["state"], status["job"]


def test_a_job_whose_submitter_was_killed_is_found_and_runs(by_cgroup: Cluster, project: Path) -> None:
    mine = Project(by_cgroup, project)
    assert submit_and_be_killed(mine, "KILL", "cluster.sbatch.hold=true").returncode
    assert json.loads((mine.run / "job.json").read_text())["submissions"][0]["job"] is None
    (job,) = by_cgroup.jobs()
    assert shown(mine) == ("pending", job)
    assert "is pending" in mine.launch("resume", "own", status=2).stderr
    by_cgroup.login("scontrol", "release", job)
    mine.launch("logs", "own", "--follow")
    assert shown(mine) == ("done", job)
    mine.nothing_is_left()


def test_a_job_whose_submitter_was_killed_can_be_cancelled(by_cgroup: Cluster, project: Path) -> None:
    mine = Project(by_cgroup, project)
    submit_and_be_killed(mine, "KILL", "cluster.sbatch.hold=true")
    mine.launch("cancel", "own")
    assert by_cgroup.jobs() == []
    assert shown(mine)[0] == "cancelled"
    mine.launch("resume", "own")
    (job,) = by_cgroup.jobs()
    assert shown(mine) == ("pending", job), "held like the first one, which is not taken for it"
    mine.launch("cancel", "own")


def test_each_cell_of_a_sweep_has_its_job_of_the_array(by_cgroup: Cluster, project: Path) -> None:
    mine = Project(by_cgroup, project)
    cells = ("-m", "sweep.name=s", "train.seed=1,2")
    assert submit_and_be_killed(mine, "KILL", "cluster.sbatch.hold=true", *cells).returncode
    found = json.loads(mine.launch("status", "s", "--json").stdout)
    assert {cell["state"] for cell in found} == {"pending"}
    array = found[0]["job"].partition("_")[0]
    assert [cell["job"] for cell in found] == [f"{array}_0", f"{array}_1"]
    mine.launch("cancel", "s")
    assert by_cgroup.jobs() == []


@pytest.mark.parametrize("signal", ["HUP", pytest.param("TERM", marks=pytest.mark.nightly)])
def test_a_closed_terminal_waits_for_the_record(by_cgroup: Cluster, project: Path, signal: str) -> None:
    mine = Project(by_cgroup, project)
    assert submit_and_be_killed(mine, signal, "cluster.sbatch.hold=true").returncode
    (job,) = by_cgroup.jobs()
    assert json.loads((mine.run / "job.json").read_text())["submissions"][0]["job"] == job
    mine.launch("cancel", "own")


def test_ctrl_c_leaves_nothing(by_cgroup: Cluster, project: Path) -> None:
    mine = Project(by_cgroup, project)
    assert submit_and_be_killed(mine, "INT", "cluster.sbatch.hold=true").returncode == 130
    assert by_cgroup.jobs() == []
    assert not mine.run.exists()
