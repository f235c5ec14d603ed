"""Sites of outer steps that are Slurm jobs of their own: one is requeued, and the other continues without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.infra.checkpoints import tensors
from tests.infra.jobs_on_slurm import Project
from tests.infra.runs import PROJECT, records, summary
from tests.infra.slurm import Cluster, needs_slurm
from tests.train.outer.test_outer_steps import JOB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    needs_slurm,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # checkpoints are read in this process alone
]


class SiteProject(Project):
    """Directory of the user of one site."""

    def submit(self, *arguments: str) -> str:
        shutil.copytree(PROJECT / "speech", self.place / "speech")
        said = self.launch(
            "train", "cluster=slurm", "cluster.workers_per_node=1", "run.name=own", *JOB, *arguments
        ).stdout
        return said.partition("as Slurm job ")[2].partition(":")[0]


def test_a_requeued_site_is_back_while_the_other_continues(by_cgroup: Cluster, project: Path) -> None:
    job = [
        f"outer.store={project / 'store'}", "outer.sites=2", "outer.every=4", "outer.patience_s=60", "train.steps=120",
        "+task.pause_s=0.1", "checkpoint.every=10", "cluster.device=cpu", "outer.fragments=2", "outer.delay=1",
    ]  # fmt: skip
    sites = [SiteProject(by_cgroup, project / f"site{site}") for site in range(2)]
    # one rank on one host, and two on two hosts
    sites[0].submit(*job, "outer.site=0")
    number = sites[1].submit(*job, "outer.site=1", "cluster.nodes=2", "batch.micro_size=3")
    sites[1].wait_for_step(12)
    by_cgroup.login("scancel", "--signal=USR2", number)
    by_cgroup.wait(lambda: sites[1].count("requeued") == 1, "the requeue")
    reached = len(records(sites[0].run))
    sites[0].wait_for_step(reached + 8)  # without waiting for the other one, which has said that it stops
    for site in sites:
        site.finish()
    models = [tensors(site.run / "checkpoints" / "step_000120") for site in sites]
    for name, value in models[0].items():
        if name.startswith("model."):
            assert value.equal(models[1][name]), name
    assert [record["step"] for record in records(sites[0].run)] == [*range(1, 121)]
    for site in sites:
        assert len(records(site.run)) + summary(site.run)["outer/left_out_steps"] == 120
        site.nothing_is_left()
