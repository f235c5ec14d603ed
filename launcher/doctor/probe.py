"""Probe: collects the facts of one host, alone and together with the others, for the doctor to judge.

    python -m launcher.doctor.probe FOLDER PARENT_PID

Under Slurm each task of the job calls ``of_slurm``.
"""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from launcher.doctor import bandwidth, host_facts
from launcher.doctor.bandwidth import Worker
from launcher.doctor.host_facts import Desk
from launcher.errors import LauncherError, SiteError
from launcher.launch.network import GLOO, NCCL, Route, interfaces, socket_names
from launcher.launch.planner import require_wandb_key
from launcher.launch.slurm.client import Task
from launcher.launch.slurm.node import way_to, way_to_others
from launcher.plan.host import allowed_env
from launcher.plan.launch_plan import EnvPlan
from launcher.process import die_with_parent
from launcher.rundir.files import build, read_json

_WITHIN_S = 5.0
_ASKED = 8
_AT_ONCE = 16
_TIME = struct.Struct("!d")


class _Clock(socketserver.BaseRequestHandler):
    """Clock server: sends this host's time once for each byte that it receives."""

    def handle(self) -> None:
        self.request.settimeout(_WITHIN_S)
        while self.request.recv(1):
            self.request.sendall(_TIME.pack(time.time()))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that break; the caller reports them."""


@contextmanager
def listening(address: str) -> Generator[int]:
    """Run the clock server at ``address`` and yield its port. Raises OSError if no port can be opened."""
    with _Server((address, 0), _Clock) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def reach_all(places: dict[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """Call ``reach`` for all hosts, several at a time. Return its results, each with the host's ``node``."""
    if not places:
        return []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        calls = {node: pool.submit(reach, address, port) for node, (address, port) in places.items()}
    return [{"node": node} | call.result() for node, call in calls.items()]


def reach(address: str, port: int) -> dict[str, Any]:
    """Connect to a host's clock server and measure.

    Returns:
        ``problem``: why there is no connection, empty if there is. ``rtt_s``: shortest round trip in seconds.
        ``offset_s``: seconds by which the clock there is ahead, from that round trip, assuming equal times each way.
    """
    best: tuple[float, float] | None = None
    try:
        with socket.create_connection((address, port), timeout=_WITHIN_S) as there:
            for _ in range(_ASKED):
                before, begun = time.time(), time.monotonic()
                there.sendall(b"?")
                said = _TIME.unpack(_receive(there, _TIME.size))[0]
                took = time.monotonic() - begun
                if best is None or took < best[0]:
                    best = (took, said - (before + took / 2))
    except OSError as error:
        return {"address": address, "problem": error.strerror or str(error) or type(error).__name__}
    assert best is not None
    return {"address": address, "problem": "", "rtt_s": best[0], "offset_s": best[1]}


def _receive(there: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = there.recv(size - len(got))
        if not part:
            raise ConnectionError("closed by the other host")
        got += part
    return got


# seconds within which every host publishes its first facts; a later one is taken not to see the directory
_HELLO_WITHIN_S = 45
_TELL_WITHIN_S = 60
_WANDB_WITHIN_S = 5


@dataclass(frozen=True, kw_only=True)
class Question:
    """Question of the doctor to all probes.

    Args:
        cwd_token: file that the login host has written in the working directory ``cwd``; empty if it could not.
        nodes, workers: number of hosts, and of workers on each.
        device: cpu or cuda.
        online: True if wandb.mode is online.
    """

    cwd: str
    cwd_token: str
    nodes: int
    workers: int
    device: str
    interface: str | None
    env: EnvPlan
    online: bool


def of_slurm(folder: str) -> None:
    """Run the probe as a task of a Slurm job."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it; the probe has nothing to save
    task = Task.here()
    answer(Path(folder), task.node, os.environ["SLURMD_NODENAME"])


def answer(folder: Path, node: int, node_name: str | None) -> None:
    """Collect and publish the facts of this host. ``node_name``: Slurm's name of it, None without Slurm."""
    question = build(Question, read_json(host_facts.question_of(folder)) or {})
    told = Desk(folder, node, question.nodes)
    try:
        told.tell(host=node_name or socket.gethostname())
        _look_around(question, told)
        wire = _look_at_links(question, told) if question.nodes > 1 else None
        names = {} if wire is None else wire.names
        env = {**question.env.default, **names, **os.environ, **question.env.set}
        told.tell(bandwidth=_measure(question, told, allowed_env(env, question.env.allow), wire))
        if node == 0 and question.online:
            told.tell(wandb=_wandb())
    except LauncherError as error:
        told.tell(error=str(error))
    except Exception as error:  # the doctor reports it with the host's name
        told.tell(error=f"{type(error).__name__}: {error}")
    finally:
        told.tell(done=True)


def _look_around(question: Question, told: Desk) -> None:
    cwd, seen = host_facts.directory(Path(question.cwd)), False
    if question.cwd_token:
        token = Path(question.cwd) / question.cwd_token
        seen = token.exists()
        if seen and not cwd["problem"]:
            token.with_name(f"{token.name}.node{told.node}").touch()
    told.tell(
        facts=host_facts.here(),
        slurm_gpus=os.environ.get("SLURM_GPUS_ON_NODE"),
        run_dir=host_facts.directory(told.folder),
        cwd=cwd | {"same": seen},
        interfaces=[interface.name for interface in interfaces()],
        said_interfaces={name: os.environ[name] for name in (GLOO, NCCL) if os.environ.get(name)},
    )


@dataclass(frozen=True)
class Wire:
    """Connection to the other hosts.

    Args:
        names: environment variables that select the interface for gloo and NCCL.
        store: HOST:PORT where the workers meet.
        whole: True if every host has answered and reaches every other one.
    """

    names: dict[str, str]
    store: str
    whole: bool


def _look_at_links(question: Question, told: Desk) -> Wire:
    route = _route(question, told)
    names = socket_names(route, question.interface)
    address, everyone = route.interface.address, set(range(question.nodes))
    # a free port for the workers, as in any run
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    with listening(address) as clock:
        told.tell(address=address, interface=route.interface.name, clock_port=clock, store=f"{address}:{port}")
        present = told.wait("clock_port", everyone, _HELLO_WITHIN_S)
        others = {k: (one["address"], one["clock_port"]) for k, one in present.items() if k != told.node}
        told.tell(absent=sorted(everyone - present.keys()), reached=reach_all(others))
        done = told.wait("reached", set(present), _TELL_WITHIN_S)
    linked = all(not one["absent"] and not any(link["problem"] for link in one["reached"]) for one in done.values())
    whole = linked and done.keys() == everyone
    return Wire(names, present[0]["store"] if whole else "", whole)


def _route(question: Question, told: Desk) -> Route:
    """Return the route to node 0, found as a run finds it."""
    if told.node == 0:
        return way_to_others(question.interface)
    first = told.wait("address", {0}, _HELLO_WITHIN_S)
    if not first:
        raise SiteError("the first node has told no address.\n  What it says of itself is the reason.")
    return way_to(first[0]["address"], question.interface)


def _measure(question: Question, told: Desk, env: dict[str, str], wire: Wire | None) -> dict[str, Any]:
    """Measure the bandwidth with one worker per host or, on a single host, with all its workers.

    If the hosts do not reach each other, each runs one worker alone, to report what torch sees there.
    """
    pid, device = os.getpid(), question.device
    if wire is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            store = f"127.0.0.1:{free.getsockname()[1]}"
        world = question.workers
        workers = [Worker(rank, world, rank, store, device, pid) for rank in range(world)]
    else:
        workers = [Worker(told.node, question.nodes if wire.whole else 1, 0, wire.store, device, pid)]
    return {"world": workers[0].world} | bandwidth.measure(workers, env)


def _wandb() -> dict[str, str]:
    """Return ``no_key``, the message on a missing key, and ``silent``, why the server does not answer; empty if ok."""
    try:
        require_wandb_key(os.environ)
    except SiteError as error:
        return {"no_key": str(error), "silent": ""}
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    said: list[str] = []
    # name resolution has no time limit, so it runs in a thread
    asking = threading.Thread(target=lambda: said.append(_call(server)), daemon=True)
    asking.start()
    asking.join(_WANDB_WITHIN_S)
    silent = said[0] if said else f"{server} does not answer within {_WANDB_WITHIN_S} s"
    return {"no_key": "", "silent": silent}


def _call(server: str) -> str:
    try:
        urlopen(server, timeout=_WANDB_WITHIN_S).close()
    except HTTPError:
        pass  # any HTTP status is an answer
    except (URLError, OSError, ValueError) as error:
        return f"{server} does not answer: {getattr(error, 'reason', error)}"
    return ""


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    answer(Path(sys.argv[1]), 0, None)
