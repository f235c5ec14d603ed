"""A job that may have fewer nodes goes on with those that are left, and with more once they are back."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.infra.jobs_on_slurm import Project, train_undisturbed
from tests.infra.runs import records, summary
from tests.infra.slurm import Cluster, needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_slurm]

STEPS = 40
# two steps a second, so that a node can come back while two others train
MINE = (
    f"train.steps={STEPS}", "precision=fp32", "checkpoint.every=2", "cluster.workers_per_node=1",
    "batch.global_size=22", "batch.micro_size=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one world."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), *MINE)


def test_a_job_goes_on_with_the_nodes_that_are_left(by_cgroup: Cluster, project: Path, undisturbed: Path) -> None:
    """22 samples cannot be shared alike by three ranks, and can by two: both worlds learn the same."""
    three, mine = by_cgroup, Project(by_cgroup, project)
    job = mine.submit(*MINE, "cluster.nodes=2:3")
    mine.wait_for_step(6)
    assert mine.events()[-1]["ranks"] == 3
    lost = random.choice(mine.events()[-1]["nodes"])
    three.fail(lost, "power")
    mine.wait_for_start(2)
    started = mine.newest("started")
    assert (len(started["nodes"]), started["ranks"]) == (2, 2)
    assert lost not in started["nodes"]
    three.heal(lost)
    three.wait(lambda: lost in three.idle(), "the node to come back", 60)
    three.wait(lambda: mine.count("resumed") == 1, "the checkpoint to be loaded", 90)
    step = mine.newest("resumed")["from_step"]
    assert step >= 4
    mine.wait_for_step(step + 3)
    assert json.loads(mine.launch("status", "own", "--json").stdout)["ranks"] == 2
    three.login("scancel", "--signal=USR2", job)
    mine.wait_for_start(3)
    assert mine.newest("started")["nodes"] == three.nodes
    mine.finish()

    mine_now, wanted = records(mine.run), records(undisturbed)
    assert [record["step"] for record in mine_now] == list(range(1, STEPS + 1))
    worlds = [record["batch/world_size"] for record in mine_now]
    fewer, more = (event["from_step"] for event in mine.events() if event["event"] == "resumed")
    assert worlds == [3] * fewer + [2] * (more - fewer) + [3] * (STEPS - more)
    for ours, theirs in zip(mine_now, wanted, strict=True):
        for key in ("batch/samples", "batch/items", "progress/samples", "progress/items", "train/lr"):
            assert ours[key] == theirs[key], key
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
    assert summary(mine.run)["eval/loss"] == pytest.approx(summary(undisturbed)["eval/loss"], rel=1e-4)
    mine.nothing_is_left()
