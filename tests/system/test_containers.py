"""Jobs on a real Slurm whose tasks run in a container of apptainer: as without it, whatever happens to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.infra import apptainer
from tests.infra.jobs_on_slurm import JOB, Project, assert_as_undisturbed
from tests.infra.runs import MY_SETUP, export_canary, files_with_canary, records
from tests.infra.slurm import Cluster, needs_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    needs_slurm,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # checkpoints are read in this process alone
]


@pytest.fixture
def in_container(by_cgroup: Cluster, project: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Return the overrides of a job in an image of this machine's own files."""
    image = project / "own.sif"
    apptainer.make_image(image)
    programs = project / "programs"
    programs.mkdir()
    apptainer.install(programs)
    monkeypatch.setitem(by_cgroup.env, "PATH", f"{programs}:{by_cgroup.env['PATH']}")
    export_canary(project, monkeypatch)
    mounts = apptainer.mounts()
    return (
        "cluster.container=own.sif",
        f"cluster.sbatch.container-mounts='{mounts}'",
        MY_SETUP,
    )


def test_a_job_that_is_preempted_and_cancelled_is_the_undisturbed_run(
    by_cgroup: Cluster, project: Path, undisturbed: Path, in_container: tuple[str, ...]
) -> None:
    mine = Project(by_cgroup, project)
    mine.submit("cluster.nodes=2", "cluster.workers_per_node=1", *in_container)
    mine.wait_for_step(3)
    for node in mine.events()[-1]["nodes"]:
        inside = [pid for pid in by_cgroup.pids(node) if Path(f"/proc/{pid}/root{apptainer.PYTHON}").is_symlink()]
        assert len(inside) >= 2, "the agent and its worker"
    urgent = by_cgroup.login(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    ).stdout.strip()
    by_cgroup.wait(lambda: mine.count("requeued") == 1, "the preemption", 60)
    assert mine.newest("requeued")["why"] == "preempted", "asked from inside"
    by_cgroup.wait(lambda: urgent not in by_cgroup.jobs(), "the urgent job")
    mine.wait_for_start(2)
    mine.wait_for_step(30)
    assert mine.newest("resumed")["from_step"] == mine.newest("stopped")["step"] >= 3
    mine.launch("cancel", "own")
    assert mine.state() == "cancelled"
    mine.nothing_is_left()
    assert (mine.run / "checkpoints" / f"step_{records(mine.run)[-1]['step']:06d}").is_dir(), "it had time to save"
    mine.launch("resume", "own", "--wait")
    assert_as_undisturbed(mine.run, undisturbed)
    assert all("canary\n" in log.read_text() for log in (mine.run / "logs").glob("rank*.log"))
    assert files_with_canary(project) == []
    mine.nothing_is_left()


def test_what_is_wrong_with_an_image_is_named(by_cgroup: Cluster, project: Path, in_container: tuple[str, ...]) -> None:
    mine = Project(by_cgroup, project)
    (project / "broken.sif").write_text("this is no image")
    job = ("cluster=slurm", *in_container)
    checks = json.loads(mine.launch("doctor", "--json", *job, status=0).stdout)
    assert {"container", "python", "run directory"} <= {check["name"] for check in checks}
    failed = mine.launch("doctor", "--json", *job, "cluster.container=broken.sif", status=1)
    assert any(check["name"] == "container" and "no probe ran" in check["found"] for check in json.loads(failed.stdout))
    refused = mine.launch("train", *job, "cluster.container=missing.sif", status=2)
    assert f"cluster.container={project}/missing.sif: does not exist." in refused.stderr
    assert not (project / "runs").exists()
    mine.launch("train", *job, "cluster.container=broken.sif", "run.name=broken", "--wait", status=1)
    assert "before its first line: FATAL:" in " ".join(mine.launch("status", "broken").stdout.split())


def test_a_failure_inside_is_the_jobs_and_starts_nothing_again(
    by_cgroup: Cluster, project: Path, in_container: tuple[str, ...]
) -> None:
    mine = Project(by_cgroup, project)
    job = ("cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", *in_container, *JOB)
    mine.launch("train", *job, "task.trouble=raise", "--wait", status=1)
    assert "rank 1 failed: ValueError: the eleventh utterance is cursed" in mine.launch("status", "own").stdout
    assert mine.count("started") == 1
    mine.nothing_is_left()
