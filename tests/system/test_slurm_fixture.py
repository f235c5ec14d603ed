"""The Slurm cluster of the tests is one: several hosts, jobs over them, failures, and nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import launch_command, patience
from tests.infra.netns import pids_in
from tests.infra.slurm import Cluster, cluster, needs_slurm
from tests.infra.slurm_conf import FREEZER, best_proctrack

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.root, needs_slurm]

# says where it is, waits for USR2, and says that it came
WAITER = """\
import os, signal, sys
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
place = Path(sys.argv[1]) / os.environ["SLURM_PROCID"]
place.with_suffix(".ready").write_text(os.uname().nodename)
signal.sigwait([signal.SIGUSR2])
place.with_suffix(".told").write_text("USR2")
"""


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with cluster(3, gpus=2, accounting="shim") as there:
        yield there


def submit(there: Cluster, *argv: str, cwd: Path) -> str:
    return there.login("sbatch", "--parsable", *argv, cwd=cwd).stdout.strip()


def ended(there: Cluster, job: str) -> None:
    there.wait(lambda: job not in there.jobs(), f"job {job} to end")


def answers(there: Cluster) -> bool:
    """Return whether node1's slurmd can be reached from the login host."""
    connect = "import socket; socket.create_connection(('node1', 6818), 0.5)"
    return there.login(sys.executable, "-S", "-c", connect, check=False).returncode == 0


def remains(*clusters: Cluster) -> list[str]:
    """Everything on the machine that is of one of them."""
    stems = [there.network.stem for there in clusters]
    links = Path("/proc/net/dev").read_text().split()
    found = [name for name in links if re.fullmatch(r"(bridge|(port|spare)\d+):", name)]
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        except OSError:
            continue
        if any(f"{stem}-".encode() in words for stem in stems):
            found.append(f"{place.name} {words[:80]!r}")
    directories = ("/tmp", "/run/netns", str(FREEZER))
    found += [str(path) for stem in stems for place in directories for path in Path(place).glob(f"{stem}-*")]
    mounts = Path("/proc/mounts").read_text().splitlines()
    return found + [line for stem in stems for line in mounts if f"{stem}-" in line]


def test_a_job_outlives_a_host(three: Cluster, tmp_path: Path) -> None:
    """First in this file: slurmctld asks its nodes every 15 s. A node that dies before the first time is found then,
    one that has answered only the second time after its death.
    """
    waiting = "srun sh -c 'touch start$SLURM_RESTART_COUNT-$(hostname); sleep 600'"
    job = submit(three, "-N2", "--requeue", "-o", "/dev/null", "--wrap", waiting, cwd=tmp_path)
    three.wait(lambda: len(list(tmp_path.glob("start-node[12]"))) == 2, "the first start", 20)
    assert len(three.pids("node2")) >= 2, "slurmstepd and sleep"
    assert three.pids("node3") == []
    three.fail("node2", "power")
    assert three.pids("node2") == []
    three.wait(lambda: len(list(tmp_path.glob("start1-node[13]"))) == 2, "the second start", 60)
    three.heal("node2")
    three.wait(lambda: three.idle() == ["node2"], "node2 to be back", 20)
    assert three.jobs() == [job]
    three.login("scancel", job)
    ended(three, job)
    assert three.pids("node1") == three.pids("node3") == []


def test_a_job_runs_on_two_hosts(three: Cluster, tmp_path: Path) -> None:
    assert three.nodes == ["node1", "node2", "node3"]
    three.wait(lambda: three.idle() == three.nodes, "idle nodes", 20)
    show = "echo $(hostname) $SLURM_NODEID $CUDA_VISIBLE_DEVICES $(ls /dev/shm | wc -l)"
    job = submit(three, "-N2", "--gpus-per-node=2", "-o", "out", "--wrap", f"srun sh -c '{show}'", cwd=tmp_path)
    ended(three, job)
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["node1 0 0,1 0", "node2 1 0,1 0"]
    assert three.state(job) == "COMPLETED"
    asked = three.login("sacct", "-o", "JobID,State,NodeList", "--parsable2", "-j", f"{job},999")
    assert asked.stdout == f"JobID|State|NodeList\n{job}|COMPLETED|node[1-2]\n"
    assert three.on_node("node3", "hostname").stdout == "node3\n"
    assert three.on_node("node3", "getent", "hosts", "node1").stdout.split() == [three.address("node1"), "node1"]
    limit = submit(three, "--partition=short", "--hold", "--wrap", "true", cwd=tmp_path)
    assert "TimeLimit=00:05:00" in three.login("scontrol", "show", "job", limit).stdout
    three.login("scancel", limit)
    ended(three, limit)


def test_a_signal_reaches_the_tasks_of_one_cluster(tmp_path: Path) -> None:
    """Several clusters run at once, with either way to track processes; nothing is left of them."""
    (tmp_path / "waiter.py").write_text(WAITER)
    with cluster(2) as one, cluster(1) as other, cluster(1, proctrack="linuxproc") as plain:
        assert len(remains(one, other, plain)) > 3 + 2 + 2, "namespaces, daemons, directories"
        for number, there in enumerate((one, other, plain)):
            place = tmp_path / str(number)
            place.mkdir()
            task = f"srun {sys.executable} -S {tmp_path}/waiter.py {place}"
            job = submit(there, f"-N{len(there.nodes)}", "-o", "out", "--wrap", task, cwd=place)
            assert job == "1", "the same in all: only their clusters tell them apart"
        one.wait(lambda: len(list(tmp_path.glob("*/*.ready"))) == 4, "tasks", 20)
        for there in (one, plain):
            there.login("scancel", "--signal=USR2", "1")
            ended(there, "1")
            assert there.state("1") == "COMPLETED"
        assert len(list(tmp_path.glob("[02]/*.told"))) == 3
        assert other.state("1") == "RUNNING"
        assert "disabled" in other.login("sacct", check=False).stderr
        other.fail("node1", "slurmd")
        assert other.pids("node1"), "the job goes on"
        assert not answers(other)
        other.heal("node1")
        other.wait(lambda: answers(other), "slurmd", 10)
        other.fail("node1", "link")
        assert not answers(other)
        other.heal("node1")
        other.wait(lambda: answers(other), "the link", 10)
        left = other.start("sleep", "600")  # and a job that still runs
        other.wait(lambda: left.pid in pids_in(other.network.switch), "it to be on the switch", 10)
    assert remains(one, other, plain) == []


def test_a_task_of_a_job_is_forked(tmp_path: Path) -> None:
    """From its node's server, which alone has imported this module: everything works without it too, but slowly."""
    if best_proctrack() != "cgroup":
        pytest.skip("only a cgroup keeps a forked task among the processes of its job")
    (tmp_path / "show.py").write_text("import sys; print(*sys.modules)")
    with cluster(1) as there:
        there.login(*launch_command("run", "cluster=slurm", "run.name=it", "--wait", "--", "show.py"), cwd=tmp_path)
    shown = (tmp_path / "runs/it/logs/rank0.log").read_text()
    assert "launcher.launch.slurm.node" in shown.split()


def test_an_error_shows_the_logs(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as caught, cluster(1) as there:
        submit(there, "--wrap=sleep 600", "--no-such-option", cwd=tmp_path)
    assert "--- slurmctld.log" in caught.value.__notes__[0]
    assert remains(there) == []


def test_a_command_on_a_fresh_cluster() -> None:
    command = [sys.executable, "-m", "tests.infra.slurm", "--nodes", "1", "--", "sh", "-c", "srun -n1 hostname; exit 3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert (done.stdout, done.returncode) == ("node1\n", 3), done.stderr
