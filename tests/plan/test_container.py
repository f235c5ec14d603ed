"""The tasks of a job in a container: what starts them, what is refused, and what they do where Slurm is silent."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.config.schema import ContainerRuntime
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, ConfigError, SiteError
from launcher.launch.slurm import client, node, outcome, submit
from launcher.launch.slurm.client import SlurmTask
from launcher.plan import container, host
from launcher.plan.container import srun_options, task_command
from launcher.plan.run_plan import RunPlan
from launcher.rundir import fencing, history
from launcher.rundir.files import write_json
from tests.helpers import make_plan, patience
from tests.infra.runs import wait_for
from tests.launch.slurm.test_node import PEER_GONE, STOPPED, Situation, broken
from tests.plan.test_sbatch_options import GPUS

IMAGE = 'cluster.container="me.example#team/launcher:1"'  # Hydra wants quotes around a #
SIF = ("cluster=slurm", "cluster.container=own.sif")


def planned(*overrides: str, run_dir: str = "/nowhere/runs/run") -> RunPlan:
    return make_plan("cluster=slurm", IMAGE, *overrides, run_dir=run_dir)


def test_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/etc/slurm.conf")
    plan = planned(
        "cluster.nodes=2", "cluster.setup=[module load cuda]", "cluster.sbatch.container-mounts=/data:/data:ro"
    )
    options, _, command = submit.batch_script(plan).partition("# command")
    assert "container" not in options
    assert command.splitlines()[-1] == (
        """srun --unbuffered --output /nowhere/runs/run/slurm/%j_%t_log.out --kill-on-bad-exit=1 --export=ALL """
        """--cpus-per-task=4 '--container-image=me.example#team/launcher:1' """
        """--container-mounts=/nowhere:/nowhere,/opt/slurm/etc:/opt/slurm/etc:nofail,/run/munge:/run/munge:nofail,"""
        """/data:/data:ro --container-workdir=/nowhere --no-container-mount-home """
        """/bin/sh -c 'trap "" TERM USR2; exec "$0" "$@"' python3 -P -u -m launcher.launch.slurm.node """
        """/nowhere/runs/run/slurm/NUMBER.json"""
    )


def test_without_a_container_nothing_changes() -> None:
    plan = make_plan("cluster=slurm")
    assert srun_options(plan, {}) == []
    assert f"{shlex.quote(sys.executable)} -P" in submit.batch_script(plan)


@pytest.mark.parametrize(
    ("run_dir", "mounts"),
    [
        ("/scratch/runs/run", "/scratch/runs:/scratch/runs,/nowhere:/nowhere"),
        ("/nowhere/runs/run", "/nowhere:/nowhere"),
        ("/nowhere/run", "/nowhere:/nowhere"),
    ],
)
def test_what_the_tasks_read_and_write_is_where_it_is_outside(run_dir: str, mounts: str) -> None:
    _, option, *_ = srun_options(planned(run_dir=run_dir), {})
    assert option == f"--container-mounts={mounts},/etc/slurm:/etc/slurm:nofail,/run/munge:/run/munge:nofail"


def test_pyxis_other_options_go_to_the_step() -> None:
    plan = planned("cluster.sbatch.container-mount-home=true", "cluster.sbatch.container_name=mine")
    assert srun_options(plan, {})[-2:] == ["--container-mount-home", "--container-name=mine"]
    assert "no-container-mount-home" not in submit.batch_script(plan), "pyxis refuses the two together"
    assert "#SBATCH --container" not in submit.batch_script(plan)


@pytest.mark.parametrize("run_dir", ["/a,b/run", "/a:b/run", "/a b/run", "/run"])
def test_a_path_that_no_mount_can_name_is_refused(run_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.dir=/.*cannot be mounted into a container"):
        srun_options(planned(run_dir=run_dir), {})


def test_that_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "require", lambda: None)
    with pytest.raises(ConfigError, match="cannot be mounted"):
        submit.submit_job(planned(run_dir=str(tmp_path / "a:b/run")), "yaml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("cluster=slurm", "cluster.sbatch.container-image=x"), "has its own config key.\n  Use cluster.container"),
        (("cluster=slurm", "cluster.sbatch.container-mounts=/a:/a"), "has no effect without a container"),
        (("cluster=slurm", IMAGE, "cluster.sbatch.container-workdir=/a"), "is set by the launcher"),
        (("cluster=slurm", "cluster.container=img.sif", "cluster.container_runtime=pyxis"), "is an image of apptainer"),
        (("cluster=slurm", "cluster.container_runtime=apptainer"), "has no effect without cluster.container"),
        ((*SIF, "cluster.sbatch.container-name=x"), "is an option of pyxis, and the container is started by apptainer"),
        ((*SIF, "cluster.sbatch.container-mounts='/a:/a,b:/b'"), "container-mounts=b:/b: is not a mount"),
        ((*SIF, "cluster.sbatch.container-mounts=/a:/a:nofail"), "is not a mount that apptainer knows"),
        (("cluster=slurm", "cluster.container=--nv.sif"), "must be an image"),
        (("cluster.container_runtime=pyxis",), "has no effect with cluster=local"),
        (("cluster=slurm", "cluster.container='a b'"), "must be an image"),
        (("cluster=slurm", "cluster.container=''"), "must be an image"),
        ((IMAGE,), "has no effect with cluster=local"),
    ],
)
def test_what_has_no_effect_or_another_key_is_refused(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(*overrides)


@pytest.mark.parametrize(
    ("image", "runtime"),
    [
        ("images/own.sif", ContainerRuntime.apptainer),
        ("oras://me.example/team/launcher:1", ContainerRuntime.apptainer),
        ("docker://me.example/team/launcher:1", ContainerRuntime.apptainer),
        ("launcher:1", ContainerRuntime.pyxis),
        ("/images/own.sqsh", ContainerRuntime.pyxis),
    ],
)
def test_the_form_of_the_image_decides_what_starts_it_unless_a_key_does(image: str, runtime: ContainerRuntime) -> None:
    job = ("cluster=slurm", f"cluster.container='{image}'")
    for overrides, expected in (((), runtime), (("cluster.container_runtime=apptainer",), ContainerRuntime.apptainer)):
        plan = make_plan(*job, *overrides)
        assert plan.cluster.slurm is not None
        assert (plan.cluster.slurm.container, plan.cluster.slurm.container_runtime) == (image, expected)
        assert RunPlan.from_json(plan.to_json()) == plan


def apptainer_words(*overrides: str, run_dir: str = "/nowhere/runs/run", gpus: int = 0) -> list[str]:
    """Return the command of a task after the script that starts it."""
    plan = make_plan(*SIF, *overrides, run_dir=run_dir, gpus=gpus)
    assert srun_options(plan, {}) == []
    return task_command(plan, {}, sys.executable)[4:]


def test_apptainer_runs_the_image_with_what_the_tasks_read_and_write() -> None:
    words = apptainer_words("cluster.sbatch.container-mounts='/data:/data:ro,/models'", run_dir="/scratch/runs/run")
    assert words[:-5] == [
        *("--bind", "/scratch/runs", "--bind", "/nowhere", "--bind", "/data:/data:ro", "--bind", "/models"),
        *("--pwd", "/nowhere", "--env", "PYTHONNOUSERSITE=1", "/nowhere/own.sif"),
    ]
    assert "USR1" in words[-3], "it tells the script outside that it has started"
    assert words[-2:] == ["python3", "-P"], "the image's interpreter"
    assert "--nv" in apptainer_words("cluster.device=cuda", gpus=1)
    assert "--no-home" in apptainer_words("cluster.sbatch.no-container-mount-home=true")
    assert "container" not in submit.batch_script(make_plan(*SIF)).partition("# command")[0], "not for sbatch"


def test_a_path_that_apptainer_cannot_mount_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^run\.dir=/a:b: cannot be mounted"):
        apptainer_words(run_dir="/a:b/run")


def test_an_image_that_is_not_there_is_refused_if_this_host_can_tell(tmp_path: Path) -> None:
    plan = make_plan("cluster=slurm", f"cluster.container={tmp_path}/no.sif")
    with pytest.raises(ConfigError, match=r"no\.sif: does not exist\."):
        submit.require_container(plan)
    (tmp_path / "no.sif").touch()
    submit.require_container(plan)
    submit.require_container(make_plan("cluster=slurm", f"cluster.container={tmp_path}/of-the-nodes/no.sif"))
    submit.require_container(make_plan("cluster=slurm", "cluster.container=oras://me.example/no:1"))


class Task:
    """A task of a job in a container, where ``apptainer`` is a shell script."""

    def __init__(self, place: Path, shell: Sequence[str], runtime: str | None, script: str = "") -> None:
        self.place = place
        if runtime is not None:
            (place / runtime).write_text(f"#!/bin/sh\ncd {place}\n{script}\n")
            (place / runtime).chmod(0o755)
        plan = make_plan("cluster=slurm", f"cluster.container={place}/own.sif")
        _, *command = task_command(plan, {"SLURM_CONF": f"{place}/etc/slurm.conf"}, "python")
        env = {"PATH": str(place), "SLURMD_NODENAME": "node7"}
        self.process = subprocess.Popen([*shell, *command], env=env, stderr=subprocess.PIPE, text=True)

    def signal(self, number: signal.Signals) -> None:
        """Send ``number`` once the task is ready for it."""
        wait_for((self.place / "ready").exists, "the task")
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        errors = self.process.communicate(timeout=patience(30))[1]
        return self.process.returncode, errors


@pytest.fixture(params=[("/usr/bin/dash",), ("/usr/bin/bash", "--posix")], ids=["dash", "bash"])
def shell(request: pytest.FixtureRequest) -> Sequence[str]:
    return request.param


@pytest.mark.parametrize("runtime", ["apptainer", "singularity"])
def test_the_node_has_apptainer_or_singularity_and_its_status_is_the_tasks(
    tmp_path: Path, shell: Sequence[str], runtime: str
) -> None:
    (tmp_path / "etc").mkdir()
    assert Task(tmp_path, shell, runtime, 'echo "$@" > words; exit 3').end() == (3, "")
    words = (tmp_path / "words").read_text()
    assert words.startswith("exec ")
    assert f"--bind {tmp_path}/etc " in words
    assert "--bind /run/munge " not in words or Path("/run/munge").exists(), (
        "apptainer refuses to mount what is missing"
    )


def test_a_node_with_neither_says_so(tmp_path: Path, shell: Sequence[str]) -> None:
    status, errors = Task(tmp_path, shell, None).end()
    assert status == 127
    assert errors == "cluster.container: neither apptainer nor singularity is on the PATH of node7\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_signal_reaches_the_task_which_decides_how_it_ends(
    tmp_path: Path, shell: Sequence[str], number: signal.Signals
) -> None:
    script = f'trap "exit 75" {number.name.removeprefix("SIG")}; : > ready; while :; do /usr/bin/sleep 0.05; done'
    task = Task(tmp_path, shell, "apptainer", script)
    task.signal(number)
    assert task.end() == (75, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_stop_signal_while_the_container_starts_is_not_its_end(
    tmp_path: Path, shell: Sequence[str], number: signal.Signals
) -> None:
    script = "if [ -e ready ]; then exit 3; fi; : > ready; exec /usr/bin/sleep 1000"
    task = Task(tmp_path, shell, "apptainer", script)
    task.signal(number)
    assert task.end()[0] == 3, "of the second start"


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Situation:
    """A job in an image that has none of Slurm's commands."""
    asked = {name: getattr(client, name) for name in ("job", "requeue", "settings", "host_names")}
    situation = Situation(tmp_path / "run", monkeypatch, IMAGE)
    for name, function in asked.items():
        monkeypatch.setattr(client, name, function)
    monkeypatch.setenv("PATH", str(tmp_path))
    return situation


def task_of(situation: Situation) -> SlurmTask:
    task = SlurmTask(job="7", node=0, nodes=2, node_list="node[1-2]", restart=0, can_ask=False)
    situation.fence = fencing.Fence(situation.paths, fencing.Incarnation())
    node._open_attempt(situation.plan, task, situation.fence)
    return task


def test_a_node_finds_out_that_slurm_is_silent(silent: Situation, capsys: pytest.CaptureFixture[str]) -> None:
    assert not node._can_ask(silent.plan, silent.task())
    assert "scontrol is not on this machine's PATH" in (said := capsys.readouterr().out)
    assert "Continue it with `launch resume`." in said
    assert node._can_ask(make_plan("cluster=slurm"), silent.task()), "outside of containers nobody is asked"


def test_a_job_that_cannot_ask_stops_and_can_be_resumed(silent: Situation, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(silent)
    assert history.read_events(silent.paths)[0]["nodes"] == ["node[1-2]"]
    assert outcome.reason_to_requeue(silent.plan, task) == ""
    write_json(silent.paths.summary, {"verdict": "stopped", "steps": 5})
    assert outcome.conclude(silent.plan, task, silent.fence, STOPPED) == EXIT_RESUMABLE
    assert silent.told() == ["started", "stopped", "not requeued"]
    assert "Continue it with `launch resume`." in capsys.readouterr().err
    node._stay_if_replaced(task, EXIT_DONE)
    node._stay_if_replaced(task, EXIT_FAILED)


def test_nodes_that_lost_each_other_and_cannot_ask_do_not_wait_for_ever(
    silent: Situation, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(silent)
    monkeypatch.setattr(outcome, "_SLURMD_TIMEOUT_S", 0)
    assert outcome.conclude(silent.plan, task, silent.fence, broken(PEER_GONE)) == EXIT_FAILED


@pytest.mark.usefixtures("silent")
def test_the_way_is_by_the_address_that_srun_has_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    ways: list[str] = []
    monkeypatch.setattr(node, "route_to", lambda address, _: ways.append(address))
    with pytest.raises(SiteError, match="scontrol is not on"):
        node.route_to_others(None)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    node.route_to_others(None)
    assert ways == ["10.0.0.1"]


def test_the_gpus_are_for_the_torch_in_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "torch_has_cuda", lambda: False)
    assert host.Site.of(GPUS).gpus == 0
    assert host.Site.of(GPUS, "launcher:1").gpus == 8


def test_a_task_that_has_started_is_not_started_again(tmp_path: Path, shell: Sequence[str]) -> None:
    script = 'echo once >> starts; kill -s USR1 "$LAUNCHER_STARTER_PID"; : > ready; exec /usr/bin/sleep 1000'
    task = Task(tmp_path, shell, "apptainer", script)
    task.signal(signal.SIGTERM)
    assert task.end()[0] == 128 + signal.SIGTERM
    assert (tmp_path / "starts").read_text() == "once\n"


def test_a_stop_signal_before_the_script_knows_its_task_reaches_it(
    tmp_path: Path, shell: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = container._START_SCRIPT.replace("task=$! ", f"while [ ! -e {tmp_path}/sent ]; do :; done; task=$! ")
    assert late != container._START_SCRIPT
    monkeypatch.setattr(container, "_START_SCRIPT", late)
    script = (
        'trap "exit 75" TERM; kill -s USR1 "$LAUNCHER_STARTER_PID"; : > ready; while :; do /usr/bin/sleep 0.05; done'
    )
    task = Task(tmp_path, shell, "apptainer", script)
    task.signal(signal.SIGTERM)
    (tmp_path / "sent").touch()
    assert task.end() == (75, "")
