"""`launch doctor` on this machine, as a command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import run
from launcher.config.hydra import compose
from launcher.extensions.doctor import examination
from launcher.extensions.doctor.check import CheckState
from launcher.extensions.doctor.probe import Exchange, ProbeRequest
from launcher.plan.host import file_system
from tests.conftest import Launch
from tests.helpers import launch_command, patience
from tests.infra.runs import processes_of

pytestmark = pytest.mark.slow


def run_doctor(launch: Launch, tmp_path: Path, *arguments: str, status: int, **env: str) -> dict[str, dict[str, Any]]:
    """Run the doctor, and return its checks by name. It must leave nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    done = launch("doctor", "--json", *arguments, env=env)
    assert done.returncode == status, done.stdout + done.stderr
    assert sorted(tmp_path.rglob("*")) == before
    checks = json.loads(done.stdout)
    assert all(check.keys() == {"name", "state", "found", "remedy", "node"} for check in checks)
    return {check["name"]: check for check in checks}


def test_this_machine_passes(launch: Launch, tmp_path: Path) -> None:
    checks = run_doctor(launch, tmp_path, "cluster.device=cpu", "cluster.workers_per_node=2", status=0)
    assert {"python", "packages", "gpu", "shared memory", "open files", "run directory", "W&B"} <= checks.keys()
    assert re.search(r"all-reduce [\d.]+, all-gather .* Gbit/s of a worker", checks["inside a host"]["found"])
    assert "failure" not in {check["state"] for check in checks.values()}


@pytest.mark.parametrize("silent", [False, True])
def test_a_probe_that_does_not_end_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    """A call to a dead network disk blocks the probe, perhaps before its first answer."""
    over = threading.Event()

    def blocked(_: ProbeRequest, folder: Path, node: int, host: str) -> None:
        exchange = Exchange(folder, node, 1)
        if not silent:
            exchange.publish(host=host)
        over.wait(patience(20))
        exchange.publish(host=host, done=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination, "answer", blocked)
    monkeypatch.setattr(examination, "_LOCAL_WITHIN_S", 0.1)
    checks = examination.examine(compose(["cluster.device=cpu"]), lambda _: None)
    assert not over.is_set()
    over.set()
    assert [check.state for check in checks if check.name == "probe"] == [CheckState.failure]


def test_the_output_is_a_table_by_default(launch: Launch) -> None:
    done = launch("doctor", "cluster.device=cpu", "cluster.workers_per_node=1", status=0)
    assert "one worker: no collectives" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Fit to run")


def test_a_run_directory_that_is_a_file(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    checks = run_doctor(launch, tmp_path, "cluster.workers_per_node=1", "cluster.device=cpu", status=1)
    assert checks["run directory"]["state"] == "failure"
    assert f"{tmp_path}/runs cannot be used: File exists" in checks["run directory"]["found"]
    assert "Choose a run.dir" in checks["run directory"]["remedy"]
    assert checks["working directory"]["state"] == "ok"


def test_wandb_online(launch: Launch, tmp_path: Path) -> None:
    few = ("cluster.workers_per_node=1", "cluster.device=cpu", "wandb.mode=online")
    here = {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    checks = run_doctor(launch, tmp_path, *few, status=1, **here)
    assert "there is no key for 127.0.0.1" in checks["W&B"]["found"]
    assert "wandb login" in checks["W&B"]["remedy"]
    checks = run_doctor(launch, tmp_path, *few, status=0, WANDB_API_KEY="0" * 40, **here)
    assert checks["W&B"]["state"] == "warning"
    assert "http://127.0.0.1:9 does not answer" in checks["W&B"]["found"]
    assert "0" * 40 not in json.dumps(checks)


def test_an_interface_that_does_not_exist(launch: Launch, tmp_path: Path) -> None:
    checks = run_doctor(launch, tmp_path, "cluster.device=cpu", status=1, GLOO_SOCKET_IFNAME="nosuch0")
    assert "GLOO_SOCKET_IFNAME=nosuch0" in checks["interface"]["found"]
    assert checks["links"]["state"] == "failure"


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or file_system(Path("/dev/shm"))[1] != "tmpfs", reason="needs a tmpfs at /dev/shm"
)
def test_runs_in_memory_cause_a_warning(launch: Launch, tmp_path: Path) -> None:
    place = f"/dev/shm/launch-doctor-test-{os.getpid()}"
    few = ("cluster.workers_per_node=1", "cluster.device=cpu", f"run.dir={place}")
    checks = run_doctor(launch, tmp_path, *few, status=0)
    assert "tmpfs on /dev/shm" in checks["run directory"]["found"]
    assert not Path(place).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cluster.nodes=2",), "cluster=local is one machine"),
        (("cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=nowhere.invalid:1"), "has no IPv4 address"),
        (("cluster=elsewhere", "cluster.nodes=2"), "nothing can be started on hosts that are not at hand"),
        (("cluster=slurm",), "sbatch is not on this machine's PATH"),
        (("cluster.link_gbit=1",), "there is no such key.\n  Leave it out: times are not predicted."),
    ],
)
def test_wrong_input(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm
    assert run(["doctor", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        launch_command("doctor", "cluster.device=cpu"), cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE,
        # tests that a shell runs in the background have it ignored, and hand that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    end = time.monotonic() + patience(30)
    while not list(tmp_path.glob("runs/.doctor-*")):
        assert time.monotonic() < end
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=patience(20))
    assert process.returncode == 130
    assert b"Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    assert processes_of(tmp_path) == []
