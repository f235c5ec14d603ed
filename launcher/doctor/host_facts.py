"""Facts about hosts as plain values, and the files through which hosts exchange them with each other and the doctor.

The exchange itself is a test: a run needs the same shared directory for its plan, checkpoints and logs.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.config.hydra import CONF
from launcher.plan.host import file_system, visible_gpus
from launcher.process import wait_until
from launcher.rundir.files import read_json, write_json

PACKAGES = ("launcher", "torch", "hydra-core", "wandb", "submitit", "rich", "numpy")
SHM = Path("/dev/shm")
_SMI = ("nvidia-smi", "--query-gpu=index,memory.used,utilization.gpu", "--format=csv,noheader,nounits")
_SMI_WITHIN_S = 20


def here() -> dict[str, Any]:
    """Return the facts of this host.

    ``packages``: versions, None for a missing one. ``devices``: number of GPUs, whether or not torch can use them.
    ``gpu_use``: [index, MiB in use, utilization in %] of each GPU, None without nvidia-smi. ``hostname_address``: what
    this host's own name resolves to. ``shm_bytes``: size of /dev/shm, None without one.
    """
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "package_dir": str(Path(__file__).resolve().parent.parent),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": visible_gpus(os.environ, torch_version=""),
        "gpu_use": _gpu_use(),
        "hostname_address": _hostname_address(),
        "shm_bytes": shutil.disk_usage(SHM).total if SHM.is_dir() else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def directory(path: Path) -> dict[str, Any]:
    """Return the facts of a directory.

    ``problem``: why it is not writable, empty if it is. ``kind``, ``mount``: type and mount point of its file system.
    ``free_bytes``: free space for this user.
    """
    found: dict[str, Any] = {"path": str(path), "problem": "", "kind": "", "mount": "", "free_bytes": None}
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".launch-doctor-"):
            pass
    except OSError as error:
        found["problem"] = error.strerror or str(error)
    if path.is_dir():
        mount, kind = file_system(path.resolve())
        found |= {"kind": kind, "mount": str(mount), "free_bytes": shutil.disk_usage(path).free}
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        # a checkout on PYTHONPATH is not installed
        return "a checkout" if package == "launcher" and CONF.is_dir() else None


def _hostname_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _gpu_use() -> list[list[int]] | None:
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_WITHIN_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines()]
    # a slice of a GPU shows "[N/A]" instead of numbers
    return [[int(word) for word in row] for row in rows if len(row) == 3 and all(word.isdecimal() for word in row)]


_LOOK_EVERY_S = 0.1

# facts of one host by subject, as values that JSON can hold
Answer = dict[str, Any]


def question_of(folder: Path) -> Path:
    return folder / "question.json"


def answers(folder: Path, nodes: int) -> dict[int, Answer]:
    """Return the answers so far, by node."""
    list(folder.iterdir())  # makes a network file system refresh its cached directory
    found = {node: read_json(_answer_of(folder, node)) for node in range(nodes)}
    return {node: answer for node, answer in found.items() if answer is not None}


def _answer_of(folder: Path, node: int) -> Path:
    return folder / f"node{node}.json"


class Desk:
    """Exchange of facts between this host and the others, through files in ``folder``."""

    def __init__(self, folder: Path, node: int, nodes: int) -> None:
        self.folder, self.node, self.nodes = folder, node, nodes
        self._told: Answer = {}

    def tell(self, **known: Any) -> None:
        """Publish further facts of this host."""
        self._told |= known
        write_json(_answer_of(self.folder, self.node), self._told)

    def wait(self, key: str, of: set[int], within_s: float) -> dict[int, Answer]:
        """Wait until the hosts ``of`` have published ``key`` or are done, for at most ``within_s`` seconds.

        Returns:
            The answers that contain ``key``, by node.
        """

        def complete() -> bool:
            published = answers(self.folder, self.nodes)
            return of <= {node for node, answer in published.items() if key in answer or answer.get("done")}

        wait_until(complete, within_s, _LOOK_EVERY_S)
        published = answers(self.folder, self.nodes)
        return {node: answer for node, answer in published.items() if node in of and key in answer}
