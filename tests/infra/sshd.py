"""A login node for the tests: a real sshd with keys of its own, and the `ssh` of a laptop that knows it as `login`.

The account is that of the tests, with another home directory. Its login shell finds `launch` as a user's would: by what
`.bash_profile` sets.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launcher.launch.network import free_port
from tests.helpers import launch_command
from tests.infra.runs import wait_for
from tests.infra.slurm import SBIN

_TOOLS = ("sshd", "ssh", "ssh-keygen")
_MISSING = [tool for tool in _TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:{SBIN}") is None]
needs_sshd = pytest.mark.skipif(
    bool(_MISSING) or os.geteuid() != 0, reason="needs root and OpenSSH (apt-get install openssh-server openssh-client)"
)
_CONFIG = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {root}/host_key
AuthorizedKeysFile {root}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication yes
KbdInteractiveAuthentication no
PrintMotd no
SetEnv HOME={home}
"""
_CLIENT = """\
Host login
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {root}/key
    IdentitiesOnly yes
    UserKnownHostsFile {root}/known_hosts
    StrictHostKeyChecking yes
Host nowhere
    HostName 127.0.0.1
    Port {closed}
Host stranger
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {root}/host_key
    IdentitiesOnly yes
    UserKnownHostsFile {root}/known_hosts
    StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class LoginNode:
    root: Path
    home: Path  # of the account there
    port: int
    process: subprocess.Popen[bytes]

    @property
    def env(self) -> dict[str, str]:
        """Environment of a laptop, with its own `ssh` first on PATH."""
        return {"PATH": f"{self.root}/bin:{os.environ['PATH']}"}

    def install(self, text: str) -> None:
        """Write the program `launch` of the login node."""
        program = self.home / "bin/launch"
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)

    def install_launcher(self) -> None:
        self.install(f'#!/bin/sh\nexec {shlex.join(launch_command())} "$@"\n')

    def cut(self) -> None:
        """Cut all connections; what runs on the login node is not told."""
        for session in psutil.Process(self.process.pid).children():
            session.send_signal(signal.SIGKILL)


@contextmanager
def login_node(root: Path, profile: Mapping[str, str] | None = None, enter: Sequence[str] = ()) -> Iterator[LoginNode]:
    """One that listens, and is gone afterwards.

    Args:
        root: a new directory for its files.
        profile: variables that its login shell sets.
        enter: beginning of a command line that runs the rest of it on another host.
    """
    home = root / "home"
    for place in (home, root / "bin"):
        place.mkdir(parents=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root / name)], check=True)
    port, user = free_port("127.0.0.1"), psutil.Process().username()
    shutil.copy(root / "key.pub", root / "authorized_keys")
    key = " ".join((root / "host_key.pub").read_text().split()[:2])
    (root / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}\n")
    (root / "sshd_config").write_text(_CONFIG.format(port=port, root=root, home=home))
    (root / "config").write_text(_CLIENT.format(port=port, root=root, user=user, closed=free_port("127.0.0.1")))
    client = root / "bin/ssh"
    there = shutil.which("ssh")
    client.write_text(f'#!/bin/sh\nexec {shlex.join([*enter, str(there), "-F", f"{root}/config"])} "$@"\n')
    client.chmod(0o755)
    path = f"{home}/bin:{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin:{SBIN}"  # noqa: PTH120
    variables = {"PATH": path, **(profile or {})}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    (home / ".bash_profile").write_text("\n".join([*lines, "echo welcome to the cluster", ""]))
    sshd = str(shutil.which("sshd", path=f"{os.environ['PATH']}:{SBIN}"))
    with (root / "log").open("wb") as log:
        command = [*enter, sshd, "-D", "-e", "-f", f"{root}/sshd_config"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            node = LoginNode(root, home, port, process)
            wait_for(lambda: b"listening" in (root / "log").read_bytes(), "sshd")
            yield node
        finally:
            everyone = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            for each in everyone:
                if each.is_running():
                    each.kill()
