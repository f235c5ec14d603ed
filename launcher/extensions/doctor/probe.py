"""Probe: collects the facts of one host, alone and together with the others, for the doctor to judge.

Under Slurm each task of the doctor's job runs it. Hosts publish their facts as files in the directory of the runs: a
run needs the same shared directory, so the exchange is itself a test.

The probe uses nothing that has to work before a job can start, neither torch nor a rendezvous: it must report what of
these does not work.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from launcher import DISTRIBUTION
from launcher.config.added_groups import CONF
from launcher.config.schema import Device
from launcher.errors import LauncherError, SiteError
from launcher.extensions.doctor import bandwidth
from launcher.extensions.doctor.bandwidth import Worker
from launcher.launch.credentials import require_wandb_key
from launcher.launch.network import GLOO, NCCL, Route, free_port, interface_env, interfaces
from launcher.launch.slurm.client import SlurmTask
from launcher.launch.slurm.node import route_to, route_to_others
from launcher.plan.host import file_system, missing_for_compiling, visible_gpus
from launcher.plan.launch_plan import EnvPlan
from launcher.process import inherited_environment, raise_open_files, wait_until
from launcher.rundir.files import read_json, write_json

PACKAGES = ("launcher", "torch", "hydra-core", "wandb", "submitit", "rich", "numpy")
SHM = Path("/dev/shm")
_SMI = ("nvidia-smi", "--query-gpu=index,memory.used,utilization.gpu", "--format=csv,noheader,nounits")
_SMI_WITHIN_S = 20


def host_facts() -> dict[str, Any]:
    """Return the facts of this host.

    ``packages``: versions, None for a missing one. ``devices``: number of GPUs, whether or not torch can use them.
    ``gpu_use``: [index, MiB in use, utilization in %] of each GPU, None without nvidia-smi. ``shm_bytes``: free space
    of /dev/shm, None without one. ``no_compiler``: what torch.compile lacks, by device.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "package_dir": str(Path(__file__).resolve().parent.parent),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": visible_gpus(os.environ, torch_version=""),
        "gpu_use": _gpu_use(),
        "shm_bytes": shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        "open_files": raise_open_files(),  # as a node's agent does
        "no_compiler": {
            device.value: missing_for_compiling(device, os.environ) for device in (Device.cpu, Device.cuda)
        },
        "infiniband": infiniband_facts(),
    }


def infiniband_facts(root: Path = Path("/")) -> dict[str, Any] | None:
    """Return what NCCL needs for InfiniBand, or for RoCE; None on a host without either.

    ``ports``: [name, whether it is active, Gbit/s] of each port. ``library``: libibverbs can be loaded. ``devices``:
    its device files exist. ``locked_bytes``: memory that a process may lock, None without a limit.
    """
    ports = sorted(root.glob("sys/class/infiniband/*/ports/*"))
    if not ports:
        return None
    try:
        ctypes.CDLL("libibverbs.so.1")  # by this name, as NCCL does
        library = True
    except OSError:
        library = False
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "ports": [[f"{port.parts[-3]}:{port.name}", *_port(port)] for port in ports],
        "library": library,
        "devices": any(root.glob("dev/infiniband/uverbs*")),
        "locked_bytes": None if locked == resource.RLIM_INFINITY or _may_lock(root) else locked,
    }


def _port(port: Path) -> tuple[bool, float]:
    """Return whether the port is active, and its rate: the files contain "4: ACTIVE" and "400 Gb/sec (4X NDR)"."""
    try:
        state, rate = (port / "state").read_text(), (port / "rate").read_text()
        return "ACTIVE" in state, float(rate.split()[0])
    except (OSError, ValueError, IndexError):
        return False, 0.0


def _may_lock(root: Path) -> bool:
    """Return whether this process has the capability to lock any amount of memory (CAP_IPC_LOCK, number 14)."""
    try:
        status = (root / "proc" / "self" / "status").read_text()
    except OSError:
        return False
    return any(int(line.split()[1], 16) >> 14 & 1 for line in status.splitlines() if line.startswith("CapEff:"))


def directory_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a directory.

    ``problem``: why it is not writable, empty if it is. ``kind``, ``mount``: type and mount point of its file system.
    ``free_bytes``: free space for this user.
    """
    facts: dict[str, Any] = {"path": str(path), "problem": "", "kind": "", "mount": "", "free_bytes": None}
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".launch-doctor-"):  # nameless: a Ctrl-C removes the directory
            pass
    except OSError as error:
        facts["problem"] = error.strerror or str(error)
    if path.is_dir():
        mount, kind = file_system(path.resolve())
        facts |= {"kind": kind, "mount": str(mount), "free_bytes": shutil.disk_usage(path).free}
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(DISTRIBUTION if package == "launcher" else package)
    except metadata.PackageNotFoundError:
        # a checkout on PYTHONPATH is not installed
        return "a checkout" if package == "launcher" and CONF.is_dir() else None


def _gpu_use() -> list[list[int]] | None:
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_WITHIN_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    # a slice of a GPU shows "[N/A]" instead of numbers
    return [[int(word) for word in row] for row in rows if len(row) == 3 and all(word.isdecimal() for word in row)]


# facts of one host by subject, as values that JSON can hold
Answer = dict[str, Any]


class Exchange:
    """Exchange of facts between this host and the others, through one file per host in ``folder``."""

    def __init__(self, folder: Path, node: int, nodes: int) -> None:
        self.folder, self.node, self.nodes = folder, node, nodes
        self._answer: Answer = {}

    def publish(self, **facts: Any) -> None:
        """Publish further facts of this host."""
        self._answer |= facts
        write_json(_answer_file(self.folder, self.node), self._answer)

    def wait(self, key: str, nodes: set[int], within_s: float) -> dict[int, Answer]:
        """Wait until all ``nodes`` have published ``key`` or are done, for at most ``within_s`` seconds.

        Returns:
            The answers that contain ``key``, by node.
        """

        def complete() -> bool:
            answers = read_answers(self.folder, self.nodes)
            return nodes <= {node for node, answer in answers.items() if key in answer or answer.get("done")}

        wait_until(complete, within_s)
        answers = read_answers(self.folder, self.nodes)
        return {node: answer for node, answer in answers.items() if node in nodes and key in answer}


def read_answers(folder: Path, nodes: int) -> dict[int, Answer]:
    """Return the answers so far, by node."""
    list(folder.iterdir())  # makes a network file system refresh its cached directory
    answers = {node: read_json(_answer_file(folder, node)) for node in range(nodes)}
    return {node: answer for node, answer in answers.items() if answer is not None}


def _answer_file(folder: Path, node: int) -> Path:
    return folder / f"node{node}.json"


_CONNECT_WITHIN_S = 5.0
_ROUND_TRIPS = 8
_CONNECTIONS_AT_ONCE = 16
_TIME = struct.Struct("!d")


class _Clock(socketserver.StreamRequestHandler):
    """Clock server: sends this host's time once for each byte that it receives."""

    timeout = _CONNECT_WITHIN_S

    def handle(self) -> None:
        while self.rfile.read(1):
            self.wfile.write(_TIME.pack(time.time()))


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that break; the caller reports them."""


@contextmanager
def clock_server(address: str) -> Generator[int]:
    """Run the clock server at ``address`` and yield its port. Raises OSError if no port can be opened."""
    with _Server((address, 0), _Clock) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def reach_all(servers: dict[int, tuple[str, int]]) -> list[dict[str, Any]]:
    """Call ``reach`` for the clock servers of all nodes, several at a time. Return its results, with the ``node``."""
    with ThreadPoolExecutor(_CONNECTIONS_AT_ONCE) as pool:
        calls = {node: pool.submit(reach, address, port) for node, (address, port) in servers.items()}
    return [{"node": node} | call.result() for node, call in calls.items()]


def reach(address: str, port: int) -> dict[str, Any]:
    """Connect to a host's clock server and measure.

    Returns:
        ``problem``: why there is no connection, empty if there is. ``rtt_s``: shortest round trip in seconds.
        ``offset_s``: seconds by which the clock there is ahead, from that round trip, assuming equal times each way.
    """
    measured: list[tuple[float, float]] = []
    try:
        with (
            socket.create_connection((address, port), timeout=_CONNECT_WITHIN_S) as connection,
            connection.makefile("rb") as answers,
        ):
            for _ in range(_ROUND_TRIPS):
                before, started = time.time(), time.monotonic()
                connection.sendall(b"?")
                answer = answers.read(_TIME.size)
                if len(answer) < _TIME.size:
                    raise ConnectionError("closed by the other host")
                rtt_s = time.monotonic() - started
                measured.append((rtt_s, _TIME.unpack(answer)[0] - (before + rtt_s / 2)))
    except OSError as error:
        return {"address": address, "problem": error.strerror or str(error) or type(error).__name__}
    rtt_s, offset_s = min(measured)
    return {"address": address, "problem": "", "rtt_s": rtt_s, "offset_s": offset_s}


# seconds within which every host publishes its first facts; a later one is taken not to see the directory
_FIRST_FACTS_WITHIN_S = 45
_LINKS_WITHIN_S = 60
_WANDB_WITHIN_S = 5


@dataclass(frozen=True)
class Network:
    """Network of the hosts.

    Args:
        node, nodes: number of this host, and of all hosts.
        names: environment variables that select the interface for gloo and NCCL.
        store: HOST:PORT of the workers' rendezvous; None unless every host has answered and reaches every other one.
    """

    node: int
    nodes: int
    names: dict[str, str]
    store: str | None


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """Request of the doctor to all probes.

    Args:
        cwd_token: file that the login host has written in the working directory ``cwd``; empty if it could not.
        nodes, workers: number of hosts that answer, and of workers on each.
        met: network of hosts that have met without a scheduler; each of them answers its own doctor.
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
    met: Network | None = None


def run_slurm_task(request: ProbeRequest, folder: str) -> None:
    """Run the probe as a task of a Slurm job."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it; the probe has nothing to save
    answer(request, Path(folder), SlurmTask.here().node, os.environ["SLURMD_NODENAME"])


def answer(request: ProbeRequest, folder: Path, node: int, host: str) -> None:
    """Collect the facts of this host, and publish them in ``folder``. ``host``: its name in the report."""
    exchange = Exchange(folder, node, request.nodes)
    try:
        exchange.publish(host=host)
        _publish_host(request, exchange)
        network = _connect(request, exchange) if request.nodes > 1 else request.met
        _publish_bandwidth(request, exchange, network)
        if node == 0 and request.online:
            exchange.publish(wandb=_wandb())
    except LauncherError as error:
        exchange.publish(error=str(error))
    except Exception as error:  # the doctor reports it with the host's name
        exchange.publish(error=f"{type(error).__name__}: {error}")
    finally:
        exchange.publish(done=True)


def _publish_host(request: ProbeRequest, exchange: Exchange) -> None:
    cwd, same = directory_facts(Path(request.cwd)), False
    if request.cwd_token:
        token = Path(request.cwd) / request.cwd_token
        same = token.exists()
        if same and not cwd["problem"]:
            token.with_name(f"{token.name}.node{exchange.node}").touch()
    exchange.publish(
        facts=host_facts(),
        slurm_gpus=os.environ.get("SLURM_GPUS_ON_NODE"),
        run_dir=directory_facts(exchange.folder),
        cwd=cwd | {"same": same},
        interfaces=[interface.name for interface in interfaces()],
        named_interfaces={name: os.environ[name] for name in (GLOO, NCCL) if os.environ.get(name)},
    )


def _connect(request: ProbeRequest, exchange: Exchange) -> Network:
    """Publish this host's address, and which of the others it reaches."""
    route = _route(request, exchange)
    names = interface_env(route, request.interface)
    address, nodes = route.interface.address, set(range(request.nodes))
    with clock_server(address) as clock:
        store = f"{address}:{free_port(address)}"
        exchange.publish(address=address, interface=route.interface.name, clock_port=clock, store=store)
        present = exchange.wait("clock_port", nodes, _FIRST_FACTS_WITHIN_S)
        others = {k: (one["address"], one["clock_port"]) for k, one in present.items() if k != exchange.node}
        exchange.publish(absent=sorted(nodes - present.keys()), reached=reach_all(others))
        done = exchange.wait("reached", set(present), _LINKS_WITHIN_S)
    linked = all(not one["absent"] and not any(link["problem"] for link in one["reached"]) for one in done.values())
    store = present[0]["store"] if linked and done.keys() == nodes else None
    return Network(exchange.node, request.nodes, names, store)


def _route(request: ProbeRequest, exchange: Exchange) -> Route:
    """Return the route to node 0, found as a run finds it."""
    if exchange.node == 0:
        return route_to_others(request.interface)
    first = exchange.wait("address", {0}, _FIRST_FACTS_WITHIN_S)
    if not first:
        raise SiteError("the first node has published no address.\n  See the lines about the first node.")
    return route_to(first[0]["address"], request.interface)


def _publish_bandwidth(request: ProbeRequest, exchange: Exchange, network: Network | None) -> None:
    """Measure collectives of all workers of this host, together with those of the other hosts.

    If the hosts do not reach each other, each runs one worker alone, to report what torch sees there.
    """
    device, count = request.device, request.workers
    if network is None:
        network = Network(0, 1, {}, f"127.0.0.1:{free_port('127.0.0.1')}")
    world, first = network.nodes * count, network.node * count
    if network.store is None:
        count = world = 1
    workers = [
        Worker(first + local, world, local, count, network.store or "", device, os.getpid()) for local in range(count)
    ]
    env = {**request.env.default, **network.names, **inherited_environment(os.environ), **request.env.set}
    measured = bandwidth.measure(workers, env)
    exchange.publish(bandwidth={"world": world} | measured)


def _wandb() -> dict[str, str]:
    """Return ``no_key``, the message on a missing key, and ``silent``, why the server does not answer; empty if ok."""
    try:
        require_wandb_key(os.environ)
    except SiteError as error:
        return {"no_key": str(error), "silent": ""}
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    problems: list[str] = []
    # name resolution has no time limit, so it runs in a thread
    thread = threading.Thread(target=lambda: problems.append(_request(server)), daemon=True)
    thread.start()
    thread.join(_WANDB_WITHIN_S)
    return {"no_key": "", "silent": problems[0] if problems else f"{server} does not answer within {_WANDB_WITHIN_S} s"}


def _request(server: str) -> str:
    """Return why ``server`` does not answer; empty if it does."""
    try:
        urlopen(server, timeout=_WANDB_WITHIN_S).close()
    except HTTPError:
        pass  # any HTTP status is an answer
    except (OSError, ValueError) as error:
        return f"{server} does not answer: {getattr(error, 'reason', error)}"
    return ""
