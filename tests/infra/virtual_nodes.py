"""A Slurm cluster of many virtual nodes on one host: a real slurmctld, and a real slurmd and slurmstepd for each node.

    python -m tests.infra.virtual_nodes --nodes 512 -- COMMAND ...      # on its login host

All nodes share the login host's name, address, network and processes (Slurm's MULTIPLE_SLURMD); only their ports and
names in Slurm differ. A job's Python is forked from one server, as on the nodes of tests/infra/slurm.py: 512 processes
that import torch need more memory than a developer's machine has, 512 forks of one that has imported it do not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tests.infra import slurm_conf, slurm_warm, warm
from tests.infra.hosts import NET, hosts, ip
from tests.infra.runs import wait_for
from tests.infra.slurm import Cluster, in_service, what_is_missing
from tests.infra.slurm_conf import LOGIN, Shape

# starts a slurmd for each node; a node whose slurmd ends is down
_ALL_SLURMD = 'for number in $(seq "$0"); do slurmd -D -N "node$number" & done; wait'


class VirtualCluster(Cluster):
    def up(self) -> None:
        slurm_conf.write(self.root, self.shape, f"{NET}.1", {})
        for name in (LOGIN, *self.nodes):
            (self.root / "spool" / name).mkdir()
        ip("-n", self.network.switch, "addr", "add", f"{NET}.1/24", "dev", "bridge")
        self.python = str(slurm_warm.write_client(self.root))
        daemons = self._start_daemons()
        self._start_server()
        self._daemon("sh", "-c", _ALL_SLURMD, str(self.shape.nodes))
        self._wait_until_idle(daemons, 60 + self.shape.nodes)

    def _start_server(self) -> None:
        command = slurm_warm.server_command(self.root, LOGIN, "virtual", "tests.infra.stand_in")
        with (self.root / "log/server.out").open("a") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            enter = partial(slurm_warm.enter_login, self.network.switch, str(self.gate.hosts_file), sys.executable)
            server = warm.Popen(command, start_new_session=True, preexec_fn=enter, **streams)
        self.network.processes.append(server)
        wait_for((self.root / "spool" / LOGIN / slurm_warm.SERVER).exists, "the server of warm processes", 60)

    def logs(self, lines: int = 15) -> str:
        """Return the ends of the logs of the login host's daemons."""
        names = ("server.out", "slurmctld.log", "sh.out")
        texts = {name: (self.root / "log" / name).read_text(errors="replace").splitlines() for name in names}
        return "\n".join(line for name, text in texts.items() for line in (f"--- {name}", *text[-lines:]))


@contextmanager
def virtual_cluster(nodes: int, *, cpus: int = 8) -> Iterator[VirtualCluster]:
    """One whose nodes are idle; all gone afterwards."""
    shape = Shape(nodes, cpus, 0, 64000, "pgid", "none", 3600, virtual=True)
    with hosts(0) as network, in_service(VirtualCluster, shape, network) as there:
        yield there


def main() -> None:
    """Run a command on the login host of a fresh cluster of virtual nodes. Exits with its status."""
    parser = argparse.ArgumentParser(prog="python -m tests.infra.virtual_nodes", description=main.__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args()
    if missing := what_is_missing():
        sys.exit(f"a Slurm cluster needs {missing}")
    with virtual_cluster(options.nodes) as there:
        sys.exit(there.gate.interactive(options.command))


if __name__ == "__main__":
    main()
