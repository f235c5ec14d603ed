"""Commands that torchrun, srun or mpirun start several times, and commands in an allocation of Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import launcher
from launcher.errors import UserError
from launcher.launch import outer_job
from launcher.launch.outer_job import allocation_note, require_one_copy
from launcher.process import Copies
from tests.helpers import patience
from tests.infra import warm

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
# such as PyTorchJob of Kubeflow, in each pod
PLATFORM = {"RANK": "0", "WORLD_SIZE": "2"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
OMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
ONE_EACH = SRUN | {"SLURM_STEP_NUM_TASKS": "2"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1"}
BATCH["SLURM_JOB_NUM_NODES"] = "1"
TRAIN = ("train", "cluster.nodes=1", "train.steps=3", "task.words=[a, b]")


@pytest.mark.parametrize(
    ("env", "copies"),
    [
        (TORCHRUN, Copies("torchrun", 0, 2, 2, ("RANK",))),
        (SRUN, Copies("srun", 0, 4, 2, ("SLURM_PROCID",))),
        (ONE_EACH, Copies("srun", 0, 2, 1, ("SLURM_PROCID",))),
        (OMPI, Copies("mpirun", 0, 4, 2, ("OMPI_COMM_WORLD_RANK",))),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Copies("mpirun", 1, 3, None, ("PMI_RANK",))),
        (PLATFORM, Copies("a program that sets RANK and WORLD_SIZE", 0, 2, None, ("RANK",))),
        # torchrun in a task on each node
        (ONE_EACH | TORCHRUN, Copies("torchrun", 0, 2, 2, ("RANK", "SLURM_PROCID"))),
        (BATCH, None),
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "8"}, None),
    ],
)
def test_copies(env: dict[str, str], copies: Copies | None) -> None:
    assert Copies.of(env, interactive=False) == copies


def test_the_shell_of_a_step_is_the_only_one_that_types() -> None:
    assert Copies.of(SRUN | {"PMI_RANK": "0", "PMI_SIZE": "4"}, interactive=True) is None
    assert Copies.of(TORCHRUN, interactive=True) is not None, "torchrun leaves its workers the terminal"


def set_environment(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    for name in {*SRUN, *OMPI, *BATCH, *TORCHRUN, "PMI_RANK", "PMI_SIZE"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(outer_job, "typed_kinds", lambda: ["typed"])


REST = "cluster.nodes=1 train.steps=3 'task.words=[a, b]'"
TWO_WORKERS = f"launch train cluster.workers_per_node=2 {REST}"
SEVERAL = "On 2 hosts: add cluster.nodes=2 and cluster=slurm or cluster=typed on each host."


@pytest.mark.parametrize(
    ("env", "starter", "lines"),
    [
        (TORCHRUN, "torchrun has started 2 copies", [TWO_WORKERS]),
        (TORCHRUN | {"WORLD_SIZE": "4"}, "torchrun has started 4 copies", [TWO_WORKERS, SEVERAL]),
        (ONE_EACH, "srun has started 2 copies", [f"launch train {REST}", SEVERAL]),
        (
            PLATFORM,
            "a program that sets RANK and WORLD_SIZE has started 2 copies",
            [f"launch train {REST}", SEVERAL],
        ),
    ],
)
def test_the_message_has_the_command(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], starter: str, lines: list[str]
) -> None:
    set_environment(monkeypatch, env)
    with pytest.raises(UserError, match=f"^{starter} of this command, and each would start the whole job") as refused:
        require_one_copy("local", TRAIN)
    first, *others, way_out = [line.strip() for line in str(refused.value).splitlines()[1:]]
    assert [first.removeprefix("`launch` starts the workers itself: "), *others] == lines
    words = way_out.removeprefix("A copy that is to start a job of its own: env ").removesuffix(" launch ...").split()
    for name in words[1::2]:
        monkeypatch.delenv(name)
    require_one_copy("local", TRAIN)


def test_a_job_that_names_its_hosts_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, SRUN)
    with pytest.raises(UserError, match=r"itself: launch train cluster=slurm cluster.nodes=8\n  A copy"):
        require_one_copy("slurm", ["train", "cluster=slurm", "cluster.nodes=8"])
    with pytest.raises(UserError, match=r"itself: launch resume own\n  A copy"):
        require_one_copy(None, ["resume", "own"])


def test_one_command_on_each_host_is_right_where_the_user_types_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Typed:
        typed_on_each_host = True

    monkeypatch.setattr(outer_job, "cluster_of", lambda _kind: Typed)
    for env in (ONE_EACH, PLATFORM, PLATFORM | {"RANK": "1"}, {"PMI_RANK": "1", "PMI_SIZE": "3"}):
        set_environment(monkeypatch, env)
        require_one_copy("typed", TRAIN)
    set_environment(monkeypatch, SRUN)
    with pytest.raises(UserError, match=r"4 copies(.|\n)* on each host: srun --ntasks-per-node=1 launch train clus"):
        require_one_copy("typed", TRAIN)
    set_environment(monkeypatch, TORCHRUN)
    with pytest.raises(UserError, match=r"2 copies(.|\n)* on each host: launch train clus"):
        require_one_copy("typed", TRAIN)


def test_each_copy_shows_the_message_where_no_other_may_be_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, SRUN | {"SLURM_PROCID": "1"})
    with pytest.raises(SystemExit):
        require_one_copy("local", TRAIN)
    set_environment(monkeypatch, PLATFORM | {"RANK": "1"})
    with pytest.raises(UserError, match="has started 2 copies"):
        require_one_copy("local", TRAIN)


def test_no_function_starts_one_job_per_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, TORCHRUN | {"RANK": "1"})
    with pytest.raises(UserError, match=r"torchrun has started 2 copies(.|\n)*: launch train train.steps=3\n"):
        launcher.submit(["train.steps=3"])
    with pytest.raises(UserError, match=r"itself: launch train -m train.steps=3 train.seed=1,2\n"):
        launcher.sweep({"train.seed": [1, 2]}, ["train.steps=3"])


def test_an_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_job, "typed_kinds", lambda: ["typed"])
    assert allocation_note({}, TRAIN) == ""
    assert allocation_note(BATCH, TRAIN) == ""
    of_two = BATCH | {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    assert allocation_note(of_two | {"SLURM_STEP_NUM_NODES": "1"}, TRAIN) == "", "a step on one of them"
    noted = allocation_note(of_two, TRAIN)
    assert "job 7 of Slurm has 2 nodes, and the run uses this host only" in noted
    assert "srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=4 launch train cluster.rendezvous=$(" in noted
    shell = allocation_note({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, TRAIN)  # of salloc, on the login node
    assert "has 1 node, and the run uses this host, which need not be one of them" in shell
    assert shell.endswith(f"srun --nodes=1 --ntasks-per-node=1 launch train {REST}")


@pytest.mark.slow
def test_torchrun_of_a_command_shows_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "launcher"]
    done = warm.run([*command, "train", "train.steps=3"], patience(240), cwd=tmp_path)
    assert done.returncode == 1, "torchrun's own"
    shown = done.stdout + done.stderr
    assert shown.count("launch: error: torchrun has started 2 copies of this command") == 1
    assert "launch train cluster.workers_per_node=2 train.steps=3\n" in shown
    assert "exitcode  : 2" in shown
    assert not (tmp_path / "runs").exists()
