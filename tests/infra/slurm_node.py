"""A node of the Slurm cluster of the tests: a host with a name, processes and mounts of its own, and slurmd."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers import patience
from tests.infra.netns import pids_in
from tests.infra.slurm_conf import FREEZER
from tests.infra.slurm_warm import is_server

# Process 1 of a node. It ignores SIGCHLD, so that the kernel reaps the orphans that Slurm's double forks leave to it.
# slurmd names its cgroup after the node only, so that the nodes of two clusters would share it: each sees a freezer
# with the files of the real root, and in the place of slurmd's cgroup one of its own ($4).
INIT = r"""
set -e
hostname "$1"
mount --bind "$2/etc/hosts" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
if [ -n "$4" ]; then
    mount --bind "$3" "$2/freezer"
    mount -t tmpfs tmpfs "$3"
    for file in cgroup.procs tasks release_agent notify_on_release cgroup.clone_children; do
        : > "$3/$file"
        mount --bind "$2/freezer/$file" "$3/$file"
    done
    mkdir "$3/slurm_$1"
    mount --bind "$2/freezer/$4" "$3/slurm_$1"
fi
echo ready
exec env --ignore-signal=CHLD sleep infinity < /dev/null > /dev/null 2>&1
"""


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


@dataclass
class Node:
    name: str
    namespace: str  # of its network
    root: Path  # the cluster's directory
    cgroup: Path | None  # every process that Slurm starts on the node is under it
    environment: dict[str, str]
    holder: subprocess.Popen[str] | None = field(default=None, init=False)  # unshare, outside; process 1 is its child
    init: int = field(default=0, init=False)

    @property
    def log(self) -> Path:
        return self.root / f"log/{self.name}.out"

    def start(self) -> None:
        """Begin to boot; ``wait`` ends it."""
        if self.cgroup is not None:
            self.cgroup.mkdir(exist_ok=True)
        (self.root / "spool" / self.name).mkdir(exist_ok=True)
        spaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        cgroup = self.cgroup.name if self.cgroup else ""
        own = ["sh", "-c", INIT, "init", self.name, str(self.root), str(FREEZER), cgroup]
        with self.log.open("a") as log:
            self.holder = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespace}", *spaces, *own],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C is not for the cluster
            )

    def wait(self) -> None:
        """Until it has booted."""
        assert self.holder is not None
        assert self.holder.stdout is not None
        with self.holder.stdout as output:
            said = output.readline() if select.select([output], [], [], patience(10))[0] else "nothing"
        assert said == "ready\n", f"{self.name} does not boot: {said!r}"
        self.init = next(pid for pid in pids_in(self.namespace) if status(pid).get("PPid") == str(self.holder.pid))

    def inside(self, *argv: str) -> list[str]:
        """The command that runs ``argv`` on the node."""
        assert self.init, f"{self.name} is down"
        return ["nsenter", f"--target={self.init}", "--net", "--uts", "--mount", "--pid", "--", *argv]

    def start_slurmd(self) -> None:
        """As a child of process 1: what enters a node is itself outside and would stay its parent."""
        command = self.inside("setsid", "--fork", "slurmd", "-D", "-N", self.name)
        with self.log.open("a") as log:
            subprocess.run(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
                timeout=patience(10),
            )

    def processes(self) -> list[int]:
        """All of the node, process 1 included."""
        found: list[int] = []
        if self.init:
            space = Path(f"/proc/{self.init}/ns/pid").readlink()
            for place in Path("/proc").glob("[0-9]*"):
                with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    if (place / "ns/pid").readlink() == space:
                        found.append(int(place.name))
        return sorted(found)

    def slurmd(self) -> int | None:
        """Its process; a fork of it that has yet to become slurmstepd is a later child of process 1."""
        for pid in self.processes():
            facts = status(pid)
            if facts.get("Name") == "slurmd" and facts["PPid"] == str(self.init):
                return pid
        return None

    def warm(self) -> int | None:
        """Its server of warm processes; a process that was forked from it has another parent."""
        for pid in self.processes():
            with suppress(FileNotFoundError, ProcessLookupError):
                if status(pid).get("PPid") == str(self.init) and is_server(pid):
                    return pid
        return None

    def kill(self) -> None:
        """Process 1, and the kernel kills all others."""
        if self.holder is None:
            return
        if self.init:
            os.kill(self.init, signal.SIGKILL)
        elif self.holder.poll() is None:
            self.holder.kill()
        end = time.monotonic() + patience(10)
        while self.holder.poll() is None:
            assert time.monotonic() < end, f"{self.name} does not die: {self.processes()}"
            self.thaw()
            time.sleep(0.005)
        self.holder, self.init = None, 0

    def thaw(self) -> None:
        """Slurm freezes what it is about to kill, and no signal reaches a frozen process."""
        for state in self.cgroup.rglob("freezer.state") if self.cgroup is not None else ():
            with suppress(OSError):
                state.write_text("THAWED")

    def remove_cgroup(self) -> None:
        """Once the node is dead. A process that has just died may still count in its cgroup."""
        end = time.monotonic() + patience(5)
        while self.cgroup is not None and self.cgroup.exists():
            for directory, _, _ in os.walk(self.cgroup, topdown=False):
                with suppress(OSError):
                    Path(directory).rmdir()
            assert time.monotonic() < end, f"{self.cgroup} cannot be removed"
