"""A Slurm cluster for the tests: every node a host of tests.infra.hosts, the daemons Debian's, all gone afterwards.

    python -m tests.infra.slurm --nodes 2 --gpus 4 -- sbatch --wait ...    # on the login host of a fresh one
    python -m tests.infra.slurm                                            # a shell there

The switch's namespace is the login host: slurmctld and munged run in it, so that clusters do not meet over a port.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from tests.helpers import patience
from tests.infra import slurm_conf, slurm_warm, warm
from tests.infra.hosts import NET, Hosts, hosts, ip
from tests.infra.netns import can_make_namespaces
from tests.infra.runs import wait_for
from tests.infra.slurm_conf import FREEZER, Accounting, Proctrack, Shape, best_proctrack
from tests.infra.slurm_login import Done, Login, run
from tests.infra.slurm_node import Node

SBIN = "/usr/sbin:/sbin"
LIMIT_S = patience(60)  # of one command


@dataclass
class Cluster:
    root: Path  # its directory
    shape: Shape
    network: Hosts
    env: dict[str, str] = field(init=False)  # what a login shell has set
    gate: Login = field(init=False)
    members: dict[str, Node] = field(init=False)
    python: str = field(init=False)  # what a job's tasks run

    def __post_init__(self) -> None:
        shim = f"{self.root}/bin:" if self.shape.accounting == "shim" else ""
        path = f"{shim}{os.environ['PATH']}:{SBIN}"
        self.env = {"SLURM_CONF": f"{self.root}/etc/slurm.conf", "PATH": path}
        self.gate = Login(self.network.switch, self.root / "etc/hosts", self.env)
        self.python = sys.executable
        self.members = {}
        if self.shape.virtual:
            return
        for name, namespace in zip(self.shape.names, self.network.names, strict=True):
            cgroup = FREEZER / f"{self.network.stem}-{name}" if self.shape.proctrack == "cgroup" else None
            self.members[name] = Node(name, namespace, self.root, cgroup, self.gate.environment())

    @property
    def nodes(self) -> list[str]:
        """Their names, which are their host names too unless they are virtual."""
        return self.shape.names

    def address(self, node: str) -> str:
        return self.network.address(self.nodes.index(node))

    def login(
        self,
        *argv: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = LIMIT_S,
    ) -> Done:
        """Run a command on the login host. Python's programs are those of ``python``."""
        if warm.COMMAND_LINE in argv:
            return self.gate.run_warm(argv, self.python, self.gate.environment(env), cwd, check, timeout)
        if argv[0] == sys.executable:
            argv = (self.python, *argv[1:])
        return run(self.gate.command(*argv), self.gate.environment(env), cwd, check, timeout)

    def start(self, *argv: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> Any:
        """The same in the background: a process, its output and errors together in ``stdout``."""
        together: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = self.gate.start(argv, cwd, env, stdin=subprocess.DEVNULL, **together)
        self.network.processes.append(process)  # ended and closed with the hosts
        return process

    def on_node(self, node: str, *argv: str, check: bool = True, timeout: float = LIMIT_S) -> Done:
        """Run a command inside a node."""
        return run(self.members[node].inside(*argv), self.gate.environment(), None, check, timeout)

    def fail(self, node: str, kind: Literal["power", "link", "slurmd"]) -> None:
        """power: the host is gone and closed no connection; link: cut; slurmd: killed, and its jobs go on."""
        member = self.members[node]
        if kind in ("power", "link"):
            self.network.link_down(self.nodes.index(node))
        if kind == "power":
            member.kill()
        if kind == "slurmd":
            pid = member.slurmd()
            assert pid, f"no slurmd on {node}"
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: member.slurmd() != pid, "slurmd's end", 10)

    def heal(self, node: str) -> None:
        """Whatever failed. slurmctld sees it seconds later."""
        member = self.members[node]
        self.network.link_up(self.nodes.index(node))
        if not member.init:
            member.start()
            member.wait()
            self._serve(node)
        if member.slurmd() is None:
            member.start_slurmd()

    def pids(self, node: str) -> list[int]:
        """Processes of the node's jobs, Slurm's own slurmstepd included, as seen from here."""
        member = self.members[node]
        return [pid for pid in member.processes() if pid not in (member.init, member.slurmd(), member.warm())]

    def jobs(self) -> list[str]:
        """Ids of the jobs that have not ended: pending, running, completing."""
        return self.login("squeue", "--noheader", "--format=%i").stdout.split()

    def state(self, job_id: str) -> str:
        """PENDING, RUNNING, COMPLETED ...; of a job that slurmctld has not yet forgotten."""
        shown = self.login("scontrol", "show", "job", job_id).stdout
        return shown.partition("JobState=")[2].split()[0]

    def idle(self) -> list[str]:
        """The nodes that are up, without a job, and not left out for a failure that slurmctld remembers."""
        shown = self.login("sinfo", "--noheader", "-N", "--partition=train", "--format=%N %T", check=False).stdout
        return [line.split()[0] for line in shown.splitlines() if line.endswith(" idle")]

    def wait(self, condition: Callable[[], object], what: str, seconds: float = 30) -> None:
        """Until ``condition`` holds; the error that it does not ends with the daemons' logs."""
        try:
            wait_for(condition, what, seconds, 0.2)  # it may ask Slurm, which takes six processes
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self, lines: int = 15) -> str:
        """Return the ends of the daemons' logs."""
        parts: list[str] = []
        for path in sorted((self.root / "log").iterdir()):
            text = path.read_text(errors="replace").splitlines()
            # every daemon tries every MPI plugin, and complains of those whose libraries are not there
            told = [line for line in text if "mpi/pmix" not in line]
            parts += [f"--- {path.name}", *told[-lines:]] if told else []
        return "\n".join(parts)

    def up(self) -> None:
        addresses = {node: self.address(node) for node in self.members}
        slurm_conf.write(self.root, self.shape, f"{NET}.1", addresses)
        ip("-n", self.network.switch, "addr", "add", f"{NET}.1/24", "dev", "bridge")
        if self.shape.proctrack == "cgroup" and warm.COLD not in os.environ:
            self.python = str(slurm_warm.write_client(self.root))
        for node in self.members.values():
            node.start()
        daemons = self._start_daemons()
        for name, node in self.members.items():
            node.wait()
            self._serve(name)
            node.start_slurmd()
        self._wait_until_idle(daemons)

    def _start_daemons(self) -> dict[str, Any]:
        """Start those of the login host; return their processes by name."""
        munge = self.root / "munge"
        files = [f"--{kind}-file={munge / kind}" for kind in ("key", "pid", "log", "seed")]
        socket = munge / "socket"
        munged = self._daemon("munged", "--foreground", f"--socket={socket}", "--num-threads=2", *files)
        wait_for(lambda: socket.exists() or munged.poll() is not None, "munged", 10)
        return {"munged": munged, "slurmctld": self._daemon("slurmctld", "-D")}

    def _wait_until_idle(self, daemons: Mapping[str, Any], seconds: float = 30) -> None:
        def is_up() -> bool:
            for name, process in daemons.items():
                assert process.poll() is None, f"{name} has ended"
            return sorted(self.idle()) == sorted(self.nodes)

        wait_for(is_up, "idle nodes", seconds, 0.2)

    def down(self) -> None:
        for node in self.members.values():
            node.kill()
        self.network.end()
        for node in self.members.values():
            node.remove_cgroup()

    def _serve(self, node: str) -> None:
        """Start the node's server of warm processes, where its tasks can be forked."""
        if self.python != sys.executable:
            socket = self.root / "spool" / node / slurm_warm.SERVER
            socket.unlink(missing_ok=True)
            slurm_warm.start_server(self.root, node, self.members[node].init)
            wait_for(socket.exists, f"the server of {node}", 30)

    def _daemon(self, *argv: str) -> Any:
        process = self.gate.daemon(argv, self.root / f"log/{argv[0]}.out")
        self.network.processes.append(process)
        return process


C = TypeVar("C", bound=Cluster)


@contextmanager
def in_service(kind: type[C], shape: Shape, network: Hosts) -> Iterator[C]:
    """One whose nodes are idle, gone afterwards. An error that leaves it carries the end of the daemons' logs."""
    # not TMPDIR: the path of a unix socket has to be short
    root = Path(tempfile.mkdtemp(prefix=f"{network.stem}-", dir="/tmp"))
    root.chmod(0o755)  # munged's socket is for everyone
    there = kind(root, shape, network)
    try:
        there.up()
        yield there
    except (Exception, pytest.fail.Exception) as error:
        error.add_note(there.logs())
        raise
    finally:
        there.down()
        shutil.rmtree(root)


@contextmanager
def cluster(
    nodes: int = 2,
    *,
    cpus: int = 4,
    gpus: int = 0,
    memory_mb: int = 64000,
    proctrack: Proctrack | None = None,
    accounting: Accounting = "none",
    rate: str = "1gbit",
    min_job_age_s: int = 3600,
) -> Iterator[Cluster]:
    """See ``in_service``.

    ``proctrack``: None is the better one that works here. ``accounting``: with "none" `sacct` says that it is disabled.
    ``rate``: of each node's link. ``min_job_age_s``: for how long an ended job is remembered.
    """
    shape = Shape(nodes, cpus, gpus, memory_mb, proctrack or best_proctrack(), accounting, min_job_age_s)
    with hosts(nodes, rate) as network, in_service(Cluster, shape, network) as there:
        yield there


def what_is_missing() -> str | None:
    if not can_make_namespaces():
        return "root and iproute2 for network namespaces"
    tools = ("slurmctld", "slurmd", "munged", "sbatch", "nsenter", "unshare", "setsid")
    if missing := [tool for tool in tools if shutil.which(tool, path=f"{os.environ['PATH']}:{SBIN}") is None]:
        return f"{', '.join(missing)} (apt-get install --no-install-recommends slurm-wlm munge)"
    isolate = ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(isolate, capture_output=True, check=False).returncode:
        return "the right to mount in a namespace of its own"
    return None


_missing = what_is_missing()
needs_slurm = pytest.mark.skipif(_missing is not None, reason=f"a Slurm cluster needs {_missing}")


def main() -> None:
    """Run a command, or a shell, on the login host of a fresh Slurm cluster. Exits with its status."""
    parser = argparse.ArgumentParser(prog="python -m tests.infra.slurm", description=main.__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--proctrack", choices=("cgroup", "linuxproc"))
    parser.add_argument("--accounting", choices=("none", "shim"), default="none")
    parser.add_argument("command", nargs="*", metavar="COMMAND")
    options = vars(parser.parse_args())
    command = options.pop("command") or [os.environ.get("SHELL", "sh")]
    if _missing:
        sys.exit(f"a Slurm cluster needs {_missing}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves nothing behind either
    with cluster(**options) as there:
        sys.exit(there.gate.interactive(command))


if __name__ == "__main__":
    main()
