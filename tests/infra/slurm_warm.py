"""Warm start of the tasks of Slurm jobs: forked on their node, from a server of the node, instead of executed.

What Slurm executes as a job's Python is ``CLIENT``, a small program that asks the node's server for a process, forwards
signals to it, and ends as it ends. Slurm sees the client as the task; the process and its children are in the task's
cgroup, so that Slurm finds and kills them as it does any task's. This needs ProctrackType=proctrack/cgroup, which sends
every signal but SIGKILL to the task alone: with proctrack/linuxproc tasks are executed.

The client is the ``sys.executable`` of the tasks, and of `launch` on the login host; programs that these start with it
are forked as elsewhere (tests/infra/warm.py). Every other program is executed: the client is the interpreter of a
virtual environment whose packages are those of the tests.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.infra import warm
from tests.infra.slurm_conf import FREEZER, LOGIN

TASKS = ("launcher.launch.slurm.node", "submitit.core._submit", "tests.infra.stand_in")
PRELOADED = (*TASKS[:2], "launcher.train.worker")
SERVER = "warm"  # the name of a node's socket, in its spool directory
CLIENT = """\
#!{python} -ISE
import ctypes, json, os, signal, socket, sys

PYTHON, SPOOL, TASKS, COLD = {python!r}, {spool!r}, {tasks!r}, {cold!r}
ALL = set(range(1, 32)) - {{signal.SIGKILL, signal.SIGSTOP}}
server = socket.socket(socket.AF_UNIX)
try:
    if sys.argv[1:4] != ["-P", "-u", "-m"] or sys.argv[4] not in TASKS or COLD in os.environ:
        raise OSError("not a task")
    server.connect(SPOOL + "/" + os.uname().nodename + "/{server}")
except OSError:
    os.execv(PYTHON, sys.argv)
blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: slurmstepd's death is this one's, and so the program's
message = json.dumps({{
    "argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ), "blocked": [int(number) for number in blocked],
    "ignored": [int(number) for number in ALL if signal.getsignal(number) == signal.SIG_IGN],
}}).encode()
socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
server.sendall(message)
for number in ALL - {{signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP}}:
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
status = int.from_bytes(server.recv(8) or signal.SIGKILL.to_bytes(8, "big"), "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


def write_client(root: Path) -> Path:
    """Write the client for the jobs of a cluster whose directory is ``root``, and return its path."""
    place = root / "warm"
    (place / "bin").mkdir(parents=True)
    (place / "lib").symlink_to(Path(sys.prefix) / "lib")
    if (configuration := Path(sys.prefix) / "pyvenv.cfg").exists():
        shutil.copy(configuration, place)
    client = place / "bin/python"
    client.write_text(
        CLIENT.format(python=sys.executable, spool=f"{root}/spool", tasks=TASKS, server=SERVER, cold=warm.COLD)
    )
    client.chmod(0o755)
    return client


def start_server(root: Path, node: str, init: int) -> None:
    """Start the server of a node whose process 1 is ``init``. It is there when its socket is."""
    command = server_command(root, node)
    null: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    assert warm.Popen(command, start_new_session=True, preexec_fn=partial(enter_node, init), **null).wait() == 0


def server_command(root: Path, host: str, *options: str) -> list[str]:
    """Return the command of the server of ``host``. ``options``: see ``main``."""
    return [sys.executable, "-P", "-m", "tests.infra.slurm_warm", str(root / "spool" / host / SERVER), *options]


def is_server(pid: int) -> bool:
    return b"tests.infra.slurm_warm" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def _call(function: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{function}{arguments}")


def enter_node(init: int) -> None:
    """Make this process a child of a node's process 1, and end the one that called."""
    spaces = [os.open(f"/proc/{init}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "pid", "mnt")]
    for space in spaces:
        _call("setns", space, 0)
        os.close(space)
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if os.fork():  # the first one has a parent outside, which would stay its parent
        os._exit(0)


def enter_login(namespace: str, hosts_file: str, python: str) -> None:
    """Make this process one of the login host, whose Python programs submit jobs that run ``python``."""
    space = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _call("setns", space, 0)
    os.close(space)
    _call("unshare", 0x20000 | 0x4000000)  # CLONE_NEWNS | CLONE_NEWUTS
    _call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    _call("mount", os.fsencode(hosts_file), b"/etc/hosts", None, 0x1000, None)  # MS_BIND
    socket.sethostname(LOGIN)
    sys.executable = warm.PYTHON = python


def main(place: str, *more: str) -> NoReturn:
    """Serve at the socket ``place``.

    ``more``: further modules to import. The processes of virtual nodes, which have no cgroup, start with "virtual".
    """
    virtual = more[:1] == ("virtual",)
    for module in (*PRELOADED, *more[virtual:]):
        importlib.import_module(module)
    gc.freeze()  # a collection in a process would copy every page of these modules
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}.new")
    listener.listen(1024)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody need wait for keepers
    Path(f"{place}.new").rename(place)
    while True:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            if not virtual:
                _join_cgroup(client)
            _keep(client)
        client.close()


def _join_cgroup(client: socket.socket) -> None:
    """Move this process into the cgroup of the client's process."""
    peer = int.from_bytes(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    cgroup = next(
        line.split(":")[2] for line in Path(f"/proc/{peer}/cgroup").read_text().splitlines() if ":freezer:" in line
    )
    # a node sees its part of the hierarchy in the place of slurmd's
    (FREEZER / f"slurm_{os.uname().nodename}" / Path(*Path(cgroup).parts[2:]) / "cgroup.procs").write_text("0")


def _keep(client: socket.socket) -> NoReturn:
    """Start the program that the client asks for, as a child of this process; forward its signals, and its end."""
    header, files, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as stream:
        fields = json.loads(stream.read(int.from_bytes(header, "big")))
    program = warm.Program(**fields, descriptors=[0, 1, 2], new_session=True, first=pickle.dumps(None).hex())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))  # one that comes early waits until the program takes it
    if not (pid := os.fork()):
        client.detach()  # the program's files may take its number
        sys.executable = warm.PYTHON = program.argv[0]
        warm.become(program, files)
    for file in files:
        os.close(file)
    end = os.pidfd_open(pid)
    while end not in select.select([client, end], [], [])[0]:
        numbers = client.recv(64)
        if not numbers:  # the client was killed; so is the program, unless it has asked for less
            os._exit(1)
        for number in numbers:
            os.kill(pid, number)
    client.sendall(os.waitpid(pid, 0)[1].to_bytes(8, "big"))
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
