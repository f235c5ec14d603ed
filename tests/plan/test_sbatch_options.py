"""Requests to Slurm: options, script, and refusals before anything is submitted."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys

import pytest

from launcher.config.hydra import compose
from launcher.errors import ConfigError
from launcher.launch.slurm import client, submit
from launcher.plan.host import Partition, Site
from launcher.plan.launch_plan import ClusterPlan, SlurmPlan
from launcher.plan.placement import device_notes, solve_cluster
from launcher.plan.sbatch_options import clock, count_gpus, seconds
from tests.helpers import make_plan

GPUS = Partition(
    name="gpu", nodes=8, max_nodes=4, shapes=((64, 8),), gres=("gpu:8",), limit_s=86400, default_s=3600
)  # fmt: skip


def solve(*overrides: str, partition: Partition = GPUS, gpus: int = 8) -> ClusterPlan:
    site = Site(gpus=gpus, cores=partition.cores, cwd="/home/me", partition=partition)
    return solve_cluster(compose(["cluster=slurm", *overrides]).cluster, site, "run")


def slurm(*overrides: str, partition: Partition = GPUS, gpus: int = 8) -> SlurmPlan:
    options = solve(*overrides, partition=partition, gpus=gpus).slurm
    assert options is not None
    return options


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["exit 3"], "`exit 3` ended the job with status 3"),
        (["x() { /bin/false; }", "x load cuda"], "`x load cuda` ended the job with status 1"),
        (["if true; then", "  source /nowhere/env.sh", "fi"], "`source /nowhere/env.sh` ended the job with status 1"),
        (["false || true", "set -u"], ""),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_job(lines: list[str], message: str) -> None:
    setup = submit.batch_script(make_plan("cluster=slurm", f"cluster.setup={json.dumps(lines)}"))
    script = setup.partition("# command")[0] + "(exit 5)"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == (f"cluster.setup: {message}\n" if message else "")
    assert (done.returncode == 5) == (not message)


def test_the_script() -> None:
    plan = make_plan(
        "cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=4", "cluster.partition=train",
        "cluster.account=physics", "cluster.time=04:00:00", "cluster.mem=64G", "cluster.cpus_per_worker=3",
        "cluster.dependency=afterok:12", "cluster.setup=[module load cuda,source env.sh]",
        "cluster.sbatch.reservation=night", "cluster.sbatch.exclusive=true",
    )  # fmt: skip
    assert submit.batch_script(plan).replace(shlex.quote(sys.executable), "PYTHON") == (
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
set -e
"""
        r"""trap 'status=$?; [ -z "$setup_line" ] || """
        r"""echo "cluster.setup: \`$setup_line\` ended the job with status $status"' EXIT"""
        """
trap 'setup_line=$BASH_COMMAND' DEBUG
module load cuda
source env.sh
trap - DEBUG; setup_line=

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /nowhere/run/slurm/%j_%t_log.out --kill-on-bad-exit=1 --export=ALL --cpus-per-task=12 """
        """/bin/sh -c 'trap "" TERM USR2; exec "$0" "$@"' PYTHON -P -u -m launcher.launch.slurm.node """
        """/nowhere/run/slurm/NUMBER.json
"""
    )


def test_the_script_of_a_range() -> None:
    """With ntasks-per-node Slurm would count tasks by the fewest nodes, and never give more."""
    lines = submit.batch_script(
        make_plan("cluster=slurm", "cluster.nodes=2:4", "cluster.workers_per_node=1")
    ).splitlines()
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --cpus-per-task=2", "#SBATCH --job-name=run", "#SBATCH --nodes=2-4", "#SBATCH --open-mode=append",
        "#SBATCH --output=/nowhere/run/slurm/%j_0_log.out", "#SBATCH --requeue", "#SBATCH --signal=USR2@45",
    ]  # fmt: skip
    (srun,) = (line for line in lines if line.startswith("srun "))
    assert "--kill-on-bad-exit=1 --export=ALL --cpus-per-task=2 /bin/sh" in srun


def test_gpus_and_cores_follow_the_partition() -> None:
    plan = solve("cluster.nodes=2")
    assert (plan.workers_per_node, plan.device.value) == (8, "cuda")
    both = slurm("cluster.nodes=2")
    assert (both.options["gpus-per-node"], both.cpus_per_node) == (8, 64)
    by_gres = slurm("cluster.workers_per_node=4", "cluster.sbatch.gres=gpu:a100:4").options
    assert "gpus-per-node" not in by_gres
    assert by_gres["gres"] == "gpu:a100:4"


def test_gpus_of_the_users_own_options_count() -> None:
    for option, nodes, workers in (
        ("gres=gpu:h100:2", 2, 2), ("gres='gpu:a:1,lscratch:9,gpu:b:2'", 1, 3), ("gpus=h100:4", 2, 2),
        ("gpus-per-task=2", 2, 2), ("gres=shard:16", 1, 8), ("gres=lscratch:9", 1, 8),
    ):  # fmt: skip
        plan = solve(f"cluster.nodes={nodes}", f"+cluster.sbatch={{{option.replace('=', ': ', 1)}}}")
        assert plan.workers_per_node == workers, option
    assert solve("cluster.sbatch.gres=gpu:4", "cluster.workers_per_node=2").workers_per_node == 2
    with pytest.raises(ConfigError, match=r"=4: cluster.sbatch.gres asks for 2 GPUs a node.*\n.*workers_per_node=2 or"):
        solve("cluster.sbatch.gres=gpu:h100:2", "cluster.workers_per_node=4")
    with pytest.raises(ConfigError, match=r"cluster.sbatch.gpus=3: cannot be divided by the 2 nodes"):
        solve("cluster.sbatch.gpus=3", "cluster.nodes=2")


def test_a_job_that_may_get_gpus_of_several_types_is_told() -> None:
    partition = dataclasses.replace(GPUS, gres=("gpu:a100:8(S:0-1)", "gpu:h100:8", "gpu:t4:1"))

    def notes(*overrides: str) -> list[str]:
        config = compose(["cluster=slurm", *overrides]).cluster
        site = Site(gpus=8, cores=64, cwd="/", partition=partition)
        return device_notes(config, solve_cluster(config, site, "run"), site)

    assert "different GPUs (a100, h100)" in notes("cluster.nodes=2")[0]
    for other in ("cluster.nodes=1", "cluster.constraint=h100", "cluster.sbatch.gres=gpu:h100:8", "cluster.device=cpu"):
        assert notes("cluster.nodes=2", other) == []


def joint(*shapes: tuple[int, int]) -> Partition:
    return dataclasses.replace(GPUS, shapes=shapes)


def test_of_unlike_nodes_the_least_is_the_default_and_the_most_the_bound() -> None:
    unlike = joint((32, 4), (64, 8))
    assert solve(partition=unlike, gpus=4).workers_per_node == 4
    assert slurm(partition=unlike, gpus=4).cpus_per_node == 32
    assert slurm("cluster.workers_per_node=8", partition=unlike, gpus=4).cpus_per_node == 64
    with pytest.raises(ConfigError, match="has 8 usable GPUs"):
        solve("cluster.workers_per_node=9", "cluster.constraint=big", partition=unlike, gpus=4)
    large = ("cluster.device=cpu", "cluster.workers_per_node=4")
    assert slurm(*large, "cluster.cpus_per_worker=12", partition=unlike, gpus=4)
    with pytest.raises(ConfigError, match="has 64"):
        solve(*large, "cluster.cpus_per_worker=17", partition=unlike, gpus=4)
    with pytest.raises(ConfigError, match="this needs 48 cores per node, and a node of partition gpu has 32"):
        solve("cluster.workers_per_node=8", "cluster.cpus_per_worker=6", partition=joint((64, 4), (32, 8)), gpus=4)


def test_cores_that_are_not_said_fit_a_node_that_has_the_gpus() -> None:
    assert slurm("cluster.workers_per_node=8", partition=joint((64, 4), (64, 8)), gpus=4).cpus_per_node == 64
    cuda = ("cluster.workers_per_node=4", "cluster.device=cuda")
    assert slurm(*cuda, partition=joint((128, 0), (16, 8))).cpus_per_node == 8


def test_nodes_with_and_without_gpus() -> None:
    mixed = joint((32, 0), (64, 8))
    for other in ((), ("cluster.sbatch.gres=lscratch:10",), ("cluster.sbatch.gpus=null",)):
        with pytest.raises(ConfigError, match=r"cluster.device=auto: some nodes .*\n  Set cluster.device=cuda"):
            solve(*other, partition=mixed)
    for said in ("cluster.constraint=h100", "cluster.sbatch.gres=gpu:8", "cluster.device=cuda"):
        plan = solve(said, partition=mixed)
        assert (plan.device.value, plan.workers_per_node) == ("cuda", 8)
    assert solve("cluster.device=cpu", partition=mixed).workers_per_node == 2
    assert solve(partition=mixed, gpus=0).device.value == "cpu", "torch sees none of them"


def test_partitions_are_read_from_sinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ("cpu|4|1-infinite|32|(null)|infinite|n/a", "gpu*|2|1-3|32|gpu:4|1-00:00:00|01:00:00",
            "gpu*|1|1-3|64|gpu:h100:8(S:0-1)|1-00:00:00|01:00:00")  # fmt: skip

    def answer(*command: str) -> str:
        if command[0] == "scontrol":
            return ""
        assert "--exact" in command, "of nodes with unlike cores it tells the least alone otherwise"
        return "\n".join(rows)

    monkeypatch.setattr(client, "ask", answer)
    gpu, cpu = client.partitions()
    assert (gpu.name, gpu.nodes, gpu.max_nodes, gpu.shapes) == ("gpu", 3, 3, ((32, 4), (64, 8)))
    assert (gpu.cores, gpu.most_cores, gpu.gpus, gpu.most_gpus, gpu.mixed) == (32, 64, 4, 8, False)
    assert (cpu.gpus, cpu.most_gpus, cpu.mixed) == (0, 0, False)
    both = Partition.joined([gpu, cpu])
    assert (both.name, both.nodes, both.max_nodes, both.mixed, both.gpus) == ("gpu,cpu", 3, 3, True, 4)


def test_cores_that_are_reserved_for_the_system_are_none_of_a_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """CoreSpecCount=4, as scontrol of Slurm 22.05 shows it; sinfo shows all cores."""
    node = (
        "NodeName=n{} Arch=x86_64 CoresPerSocket=32 CPUAlloc=0 CPUEfctv={} CPUTot=64 CPULoad=0.06 Gres=gpu:8(S:0-1) "
        "OS=Linux 6.1.0 #1 SMP  RealMemory=2000 CoreSpecCount=4 State=IDLE ThreadsPerCore=1 Partitions={} "
    )
    answers = {
        "sinfo": "gpu*|2|1-infinite|64|gpu:8|infinite|n/a\nold|1|1-infinite|64|gpu:8|infinite|n/a",
        "scontrol": "\n".join([node.format(1, 60, "gpu"), node.format(2, 56, "gpu,all")]),
    }
    monkeypatch.setattr(client, "ask", lambda *command, **_: answers[command[0]])
    gpu, old = client.partitions()
    assert (gpu.shapes, old.shapes) == (((56, 8), (60, 8)), ((64, 8),))
    plan = make_plan("cluster=slurm", "cluster.cpus_per_worker=8", "cluster.workers_per_node=8")
    text = "sbatch: error: CPU count per node can not be satisfied\nsbatch: error: Batch job submission failed: no\n"
    refused = str(submit.refusal(plan, text))
    assert refused.startswith("cluster.cpus_per_worker=8: Slurm refuses it: CPU count per node can not be satisfied")
    assert "gpu: 56, 60; old: 64" in refused
    for text, about_cores in (("Requested node configuration is not available", True), ("Job violates QOS", False)):
        assert ("Fewer cores per node" in str(submit.refusal(plan, f"sbatch: error: {text}"))) == about_cores


def test_an_option_that_is_off_is_left_out() -> None:
    options = slurm("cluster.sbatch.exclusive=false", "cluster.sbatch.nice=null", "cluster.sbatch.oversubscribe=true")
    assert not {"exclusive", "nice"} & options.options.keys()
    assert options.options["oversubscribe"] is True


def test_every_slurm_option_has_one_way_to_say_it() -> None:
    for option, key in (("partition", "cluster.partition"), ("cpus_per_task", "cluster.cpus_per_worker")):
        with pytest.raises(ConfigError, match=f"has its own config key.\n  Use {key}"):
            solve(f"cluster.sbatch.{option}=1")
    with pytest.raises(ConfigError, match="is set by the launcher"):
        solve("cluster.sbatch.output=here.txt")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.nodes=5", "partition gpu allows a job at most 4 nodes"),
        ("cluster.nodes=2:5", r"cluster.nodes=2:5: partition gpu allows .* most 4 nodes.\n  Use cluster.nodes=2:4 or"),
        ("cluster.nodes=5:6", r"partition gpu allows a job at most 4 nodes.\n  Use cluster.nodes=4 or less"),
        ("cluster.workers_per_node=9", "a node of partition gpu has 8 usable GPUs"),
        ("cluster.time=2-00:00:00", "allows at most 1-00:00:00"),
        ("cluster.time=infinite", "cluster.time=infinite: partition gpu allows at most 1-00:00:00"),
        ("cluster.time='0'", "cluster.time=0: partition gpu allows at most 1-00:00:00"),
        ("cluster.time=00:01:00", "too short for one checkpoint"),
        ("cluster.time=soon", "is not a time limit"),
        ("cluster.cpus_per_worker=9", "a node of partition gpu has 64"),
        ("cluster.rendezvous=a:1", "has no effect with cluster=slurm"),
    ],
)
def test_what_the_partition_cannot_give_is_refused(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        solve(override, *(["cluster.workers_per_node=8"] if "cpus" in override else []))


def test_a_default_limit_that_is_too_short_is_refused_too() -> None:
    short = Partition(name="p", nodes=1, max_nodes=None, shapes=((4, 0),), gres=(), limit_s=None, default_s=60)
    with pytest.raises(ConfigError, match=r"by default that of partition p\)=00:01:00: is too short"):
        solve(partition=short, gpus=0)
    for time in ("01:00:00", "infinite", "0"):
        assert slurm(f"cluster.time={time}", partition=short, gpus=0).options["time"] == time


@pytest.mark.parametrize("key", ["partition=x", "time=01:00:00", "setup=[a]", "sbatch.qos=x", "cpus_per_worker=1"])
def test_slurms_keys_have_no_effect_elsewhere(key: str) -> None:
    with pytest.raises(ConfigError, match="has no effect with cluster=local"):
        make_plan(f"cluster.{key}")


def test_slurm_jobs_save_now_and_then() -> None:
    assert make_plan("cluster=slurm").checkpoint.every_minutes == 10
    assert make_plan("cluster=slurm").checkpoint.keep == 3
    said = make_plan("cluster=slurm", "checkpoint.every=50").checkpoint
    assert (said.every, said.every_minutes, said.keep) == (50, None, None)
    assert make_plan().checkpoint.every_minutes == 5


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("90", 5400), ("5:30", 330), ("04:00:00", 14400), ("1-02", 93600), ("1-00:30", 88200), ("infinite", None),
        ("0", None), ("00:00:00", None),
    ],
)  # fmt: skip
def test_slurms_forms_of_a_time_limit(text: str, limit: int | None) -> None:
    assert seconds(text) == limit
    assert limit is None or seconds(clock(limit)) == limit
    assert clock(14400) == "04:00:00"


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [("(null)", 0), ("gpu:4", 4), ("gpu:a100:4(S:0-1)", 4), ("gpu:a100:2,gpu:v100:1,shard:8", 3), ("gpu", 1)],
)
def test_gpus_in_slurms_lists(gres: str, gpus: int) -> None:
    assert count_gpus(gres) == gpus
