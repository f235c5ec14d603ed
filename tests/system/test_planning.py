"""`launch plan -m` against the same cells as real jobs of a Slurm cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import launch_command, patience
from tests.infra.slurm import Cluster, cluster, needs_slurm

CELLS = (
    "cluster=slurm", "cluster.nodes=1,2", "strategy=ddp,fsdp", "batch.micro_size=2,8,32", "batch.global_size=64",
    "cluster.workers_per_node=1", "cluster.cpus_per_worker=1", "cluster.link_gbit=1", "cluster.device=cpu",
)  # fmt: skip
JOB = (
    "task=bytes_gpt", "task.width=128", "task.depth=4", "task.seq_len=64", "precision=fp32", "train.steps=12",
    "run.calibrate_s=0", "checkpoint.enabled=false", "wandb.mode=disabled",
)  # fmt: skip


@pytest.fixture(scope="module")
def there() -> Iterator[Cluster]:
    with cluster(2, proctrack="cgroup", accounting="shim", rate="1gbit") as made:
        yield made


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.root
@needs_slurm
def test_the_best_cell_of_a_real_sweep_is_among_the_first_two(there: Cluster, tmp_path: Path) -> None:
    """Twelve cells: one host and two with a link of 1 Gbit/s, each with two strategies and three micro-batches."""

    def launch(*arguments: str) -> str:
        done = there.login(*launch_command(*arguments), cwd=tmp_path, check=False, timeout=patience(1500))
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    ranking = json.loads(launch("plan", "-m", "--json", *CELLS, *JOB))
    assert len(ranking["by_time"]) == 12, "each cell has a predicted time"
    # one after the other, because two jobs at the same time would share the cores
    launch("train", "-m", *CELLS, *JOB, "sweep.name=real", "sweep.at_once=1", "--wait", "--quiet")
    runs = json.loads(launch("report", "real", "--json"))["runs"]
    times = {run["run"].removeprefix("real/"): run["time/step_s"] for run in runs}
    assert set(times) == set(ranking["by_time"])
    best = min(times, key=lambda cell: times[cell])
    assert best in ranking["by_time"][:2], (ranking["by_time"], times)
