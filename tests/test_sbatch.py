"""What Slurm is asked for: the options, the script, and what is refused before anything is submitted."""

from __future__ import annotations

import shlex
import sys

import pytest

from launcher.cluster.slurm import submit
from launcher.cluster.slurm.client import count_gpus
from launcher.compose import compose
from launcher.errors import ConfigError
from launcher.placement import solve_cluster
from launcher.plan import ClusterPlan
from launcher.sbatch import clock, seconds
from launcher.site import Partition, Site
from tests.helpers import make_plan

GPUS = Partition(
    name="gpu", nodes=8, max_nodes=4, cores=64, gpus=8, gres=("gpu:8",), limit_s=86400, default_s=3600
)  # fmt: skip


def solve(*overrides: str, partition: Partition = GPUS, gpus: int = 8) -> ClusterPlan:
    site = Site(gpus=gpus, cores=partition.cores, cwd="/home/me", partition=partition)
    return solve_cluster(compose(["cluster=slurm", *overrides]).cluster, site, "run")


def test_the_script() -> None:
    plan = make_plan(
        "cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=4", "cluster.partition=train",
        "cluster.account=physics", "cluster.time=04:00:00", "cluster.mem=64G", "cluster.cpus_per_worker=3",
        "cluster.dependency=afterok:12", "cluster.setup=[module load cuda,source env.sh]",
        "cluster.sbatch.reservation=night", "cluster.sbatch.exclusive=true",
    )  # fmt: skip
    assert submit.script(plan).replace(shlex.quote(sys.executable), "PYTHON") == (
        """\
#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --cpus-per-task=12
#SBATCH --dependency=afterok:12
#SBATCH --exclusive
#SBATCH --job-name=run
#SBATCH --mem=64G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/nowhere/run/slurm/%j_0_log.out
#SBATCH --partition=train
#SBATCH --requeue
#SBATCH --reservation=night
#SBATCH --signal=USR2@45
#SBATCH --time=04:00:00

# setup
module load cuda
source env.sh

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /nowhere/run/slurm/%j_%t_log.out --kill-on-bad-exit=1 --cpus-per-task=12 """
        """/bin/sh -c 'trap "" TERM USR2; exec "$0" "$@"' PYTHON -P -u -m submitit.core._submit /nowhere/run/slurm
"""
    )


def test_gpus_and_cores_follow_the_partition() -> None:
    plan = solve("cluster.nodes=2")
    assert (plan.workers_per_node, plan.device.value) == (8, "cuda")
    assert plan.slurm is not None
    assert plan.slurm.options["gpus-per-node"] == 8
    assert plan.slurm.cpus_per_node == 64
    by_gres = solve("cluster.workers_per_node=4", "cluster.sbatch.gres=gpu:a100:4").slurm
    assert by_gres is not None
    assert "gpus-per-node" not in by_gres.options
    assert by_gres.options["gres"] == "gpu:a100:4"


def test_every_slurm_option_has_one_way_to_say_it() -> None:
    for option, key in (("partition", "cluster.partition"), ("cpus_per_task", "cluster.cpus_per_worker")):
        with pytest.raises(ConfigError, match=f"has a key of its own.\n  Use {key}"):
            solve(f"cluster.sbatch.{option}=1")
    with pytest.raises(ConfigError, match="the launcher's own to set"):
        solve("cluster.sbatch.output=here.txt")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.nodes=5", "partition gpu gives a job 4 at most"),
        ("cluster.workers_per_node=9", "a node of partition gpu shows 8 GPUs"),
        ("cluster.time=2-00:00:00", "allows 1-00:00:00 at most"),
        ("cluster.time=00:01:00", "too short for one checkpoint"),
        ("cluster.time=soon", "is no time limit"),
        ("cluster.cpus_per_worker=9", "a node of partition gpu has 64"),
        ("cluster.rendezvous=a:1", "has no effect with cluster=slurm"),
    ],
)
def test_what_the_partition_cannot_give_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        solve(override, *(["cluster.workers_per_node=8"] if "cpus" in override else []))


def test_a_default_limit_that_is_too_short_is_refused_too() -> None:
    short = Partition(name="p", nodes=1, max_nodes=None, cores=4, gpus=0, gres=(), limit_s=None, default_s=60)
    with pytest.raises(ConfigError, match=r"by default that of partition p\)=00:01:00: is too short"):
        solve(partition=short, gpus=0)
    solve("cluster.time=01:00:00", partition=short, gpus=0)


@pytest.mark.parametrize("key", ["partition=x", "time=01:00:00", "setup=[a]", "sbatch.qos=x", "cpus_per_worker=1"])
def test_slurms_keys_have_no_effect_elsewhere(key: str) -> None:
    with pytest.raises(ConfigError, match="has no effect with cluster=local"):
        make_plan(f"cluster.{key}")


def test_slurm_jobs_save_now_and_then() -> None:
    assert make_plan("cluster=slurm").checkpoint.every_minutes == 10
    assert make_plan("cluster=slurm").checkpoint.keep == 3
    said = make_plan("cluster=slurm", "checkpoint.every=50").checkpoint
    assert (said.every, said.every_minutes, said.keep) == (50, None, None)
    assert make_plan().checkpoint.every_minutes is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [("90", 5400), ("5:30", 330), ("04:00:00", 14400), ("1-02", 93600), ("1-00:30", 88200), ("infinite", None)],
)
def test_slurms_forms_of_a_time_limit(text: str, limit: int | None) -> None:
    assert seconds(text) == limit


def test_a_limit_is_shown_as_slurm_writes_it() -> None:
    assert clock(14400) == "04:00:00"
    assert seconds(clock(2 * 86400 + 61)) == 2 * 86400 + 61


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", 0), ("gpu:4", 4), ("gpu:a100:4(S:0-1)", 4), ("gpu:a100:2,gpu:v100:1,shard:8", 3), ("gpu", 1)],
)
def test_gpus_in_slurms_lists(gres: str, gpus: int) -> None:
    assert count_gpus(gres) == gpus
