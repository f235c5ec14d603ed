"""Hardware of this host or partition, natively computed number formats, and texts without secrets."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from launcher.config.schema import Device, PrecisionKind
from launcher.errors import ConfigError, SiteError, without_credentials
from launcher.process import cells_at_once
from launcher.quantities import count

# last parts of config keys whose texts no output shows, and of those that are addresses whose path may be a secret
_SECRET_KEYS = re.compile(
    r"(^|_)(password|passwd|pwd|secret|credentials?|api_?key|access_key|private_key|secret_key)$"
    r"|^token$|(auth|access|api|hf|hub|bot|secret|user|bearer|refresh)_?token$",
    re.IGNORECASE,
)
_ADDRESS_KEYS = re.compile(r"(^|_)(notify|webhooks?(_url)?)$", re.IGNORECASE)
_WEBHOOK = re.compile(
    r"(https?://(?:hooks\.[\w.-]+|[\w.-]*webhook[\w.-]*|discord(?:app)?\.com/api/webhooks))/[^\s\"',]*"
)

# file systems that are stored in a machine's memory
OWN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Resources of a Slurm partition.

    Attributes:
        nodes: number of its nodes.
        max_nodes: most nodes that one job may have; None: no limit.
        shapes: distinct (cores, GPUs) of its nodes.
        limit_s, default_s: longest and default time limit in seconds; None: no limit.
    """

    name: str
    nodes: int
    max_nodes: int | None
    shapes: tuple[tuple[int, int], ...]
    gres: tuple[str, ...]
    limit_s: int | None
    default_s: int | None

    @property
    def gpus(self) -> int:
        """Return the fewest GPUs of a node that has any; 0 if none has."""
        return min((gpus for _, gpus in self.shapes if gpus), default=0)

    @property
    def most_gpus(self) -> int:
        return max(gpus for _, gpus in self.shapes)

    @property
    def mixed(self) -> bool:
        """Return whether some nodes have GPUs and others have none."""
        return bool(self.most_gpus) and not all(gpus for _, gpus in self.shapes)

    @property
    def cores(self) -> int:
        """Return the fewest cores of a node."""
        return min(cores for cores, _ in self.shapes)

    @property
    def most_cores(self) -> int:
        return max(cores for cores, _ in self.shapes)

    def with_gpus(self, gpus: int) -> Partition:
        """Restrict to nodes with at least ``gpus`` GPUs; keep all if none qualifies."""
        return replace(self, shapes=tuple(shape for shape in self.shapes if shape[1] >= gpus) or self.shapes)

    @classmethod
    def joined(cls, several: Sequence[Partition]) -> Partition:
        """Return the resources that a job can rely on if it may run in any of ``several`` partitions."""

        def lowest(values: Iterable[int | None]) -> int | None:
            return min((value for value in values if value is not None), default=None)

        return cls(
            name=",".join(partition.name for partition in several),
            nodes=min(partition.nodes for partition in several),
            max_nodes=lowest(partition.max_nodes for partition in several),
            shapes=tuple(sorted({shape for partition in several for shape in partition.shapes})),
            gres=tuple(sorted({entry for partition in several for entry in partition.gres})),
            limit_s=lowest(partition.limit_s for partition in several),
            default_s=lowest(partition.default_s for partition in several),
        )


@dataclass(frozen=True, kw_only=True)
class Site:
    """Machine that workers run on; for a partition, the minimum over its nodes.

    Attributes:
        gpus: CUDA devices that a job may use there; for a partition, the fewest of the nodes that have any.
        cores: CPU cores.
        cwd: working directory.
        partition: Slurm partition that the machine is a node of.
        bf16: whether the workers' device computes bf16 natively; None if unknown before they start.
        no_gpu: why the workers cannot use a GPU although one was to be expected; otherwise empty.
        shared_by: number of cells of a sweep that share the machine; ``gpus`` and ``cores`` are then those of one cell.
    """

    gpus: int
    cores: int
    cwd: str
    partition: Partition | None = None
    bf16: bool | None = None
    no_gpu: str = ""
    shared_by: int = 1

    def share(self, at_once: int, device: Device) -> Site:
        """Return the part of this machine that each of ``at_once`` cells of a sweep has.

        Raises:
            ConfigError: the cells are to use GPUs, and there are fewer than cells.
        """
        cores, gpus = max(1, self.cores // at_once), self.gpus
        if not shares_gpus():
            every = len(gpu_names(os.environ))
            gpus = min(gpus, every // at_once)
            if self.gpus and not gpus and device is not Device.cpu:
                raise ConfigError(
                    "sweep.at_once", at_once,
                    f"this machine has {count(every, 'usable GPU')}, and each cell needs one.",
                    f"Use sweep.at_once={every} or less, or cluster.device=cpu.",
                )  # fmt: skip
        return replace(self, cores=cores, gpus=gpus, shared_by=at_once)

    @classmethod
    def here(cls) -> Site:
        gpus, no_gpu = visible_gpus(os.environ), ""
        if not gpus:
            no_gpu = _cpu_build(visible_gpus(os.environ, torch_version=""), "here")
            if torch_has_cuda():
                no_gpu = f"torch {importlib.metadata.version('torch')} finds no GPU on this machine"
        return cls(gpus=gpus, cores=len(os.sched_getaffinity(0)), cwd=str(Path.cwd()), no_gpu=no_gpu)

    @classmethod
    def of(cls, partition: Partition, image: str | None = None) -> Site:
        """Return the site that Slurm reports for ``partition``.

        Args:
            image: container image with its own torch; None: the job uses the torch installed here.
        """
        gpus = partition.gpus if image is not None or torch_has_cuda() else 0
        no_gpu = "" if gpus else _cpu_build(partition.gpus, f"on a node of partition {partition.name}")
        return cls(gpus=gpus, cores=partition.cores, cwd=str(Path.cwd()), partition=partition, no_gpu=no_gpu)


def _cpu_build(gpus: int, where: str) -> str:
    """Return the text on ``gpus`` that the installed torch, a build for CPUs, cannot use; empty without any."""
    version = importlib.metadata.version("torch")
    return f"torch {version} is a build for CPUs, with {count(gpus, 'GPU')} {where}" if gpus else ""


def shares_gpus() -> bool:
    """Return whether several ranks of a host may use one GPU (LAUNCHER_SHARE_GPU=1): for tests on a single GPU."""
    return os.environ.get("LAUNCHER_SHARE_GPU") == "1"


def torch_has_cuda(torch_version: str | None = None) -> bool:
    """Return whether the installed torch is more than a CPU build, which sees no GPU on any machine.

    Raises:
        SiteError: torch is not installed.
    """
    if torch_version is None:
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            raise SiteError(
                "torch is not installed in this Python.\n  Install it: pip install 'torch>=2.11'."
            ) from None
    return not torch_version.endswith("+cpu")


def visible_gpus(env: Mapping[str, str], dev: Path = Path("/dev"), torch_version: str | None = None) -> int:
    """Return the number of GPUs that torch will see: device nodes minus those hidden by CUDA_VISIBLE_DEVICES.

    A machine whose GPUs have other device nodes (WSL2, ROCm) asks torch itself, in a process of its own.

    Raises:
        SiteError: torch is not installed.
    """
    names = gpu_names(env, dev, torch_version)
    return 1 if names and names[0].startswith(_MIG) else len(names)  # CUDA uses one slice, however many are listed


_MIG = "MIG-"


def gpu_names(env: Mapping[str, str], dev: Path = Path("/dev"), torch_version: str | None = None) -> tuple[str, ...]:
    """Return the values of CUDA_VISIBLE_DEVICES for each of the GPUs that ``visible_gpus`` counts; if it lists slices
    of MIG, all of them, as each process can have one."""
    if not torch_has_cuda(torch_version):
        return ()
    present = sum(1 for node in dev.glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdecimal())
    of_torch = not present and any((dev / name).exists() for name in ("dxg", "kfd"))
    listed = env.get("HIP_VISIBLE_DEVICES") if of_torch else None  # HIP prefers it
    listed = env.get("CUDA_VISIBLE_DEVICES") if listed is None else listed
    seen = _gpus_of_torch(tuple(env.items())) if of_torch else present
    names = [*map(str, range(seen))] if listed is None else [name.strip() for name in listed.split(",")]
    if of_torch:
        return tuple(names[:seen])
    if names and names[0].startswith(_MIG):
        return tuple(dict.fromkeys(itertools.takewhile(lambda name: name.startswith(_MIG), names)))
    if len(set(names)) < len(names):  # CUDA has no device then
        return ()

    def known(name: str) -> bool:
        return (name.isdecimal() and int(name) < present) or re.fullmatch(r"GPU-[0-9a-fA-F-]+", name) is not None

    # CUDA ignores everything after the first name it does not know
    return tuple(itertools.takewhile(known, names))[:present]


@cache
def _gpus_of_torch(env: tuple[tuple[str, str], ...]) -> int:
    count = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", count], env=dict(env), capture_output=True, text=True, check=False)
    return int(done.stdout) if done.stdout.strip().isdecimal() else 0


# compilers by device: the variable that names another, and the programs that are looked for. Inductor builds kernels
# for CPUs (torch._inductor.config.cpp.cxx), Triton the code that starts kernels on GPUs (triton/runtime/build.py)
_COMPILERS = {Device.cpu: ("C++", "CXX", ("g++",)), Device.cuda: ("C", "CC", ("gcc", "clang"))}


def missing_for_compiling(device: Device, env: Mapping[str, str], include: str | None = None) -> str:
    """Return what torch.compile lacks on this machine, such as "no C compiler"; empty if it can build kernels.

    Args:
        env: the workers' environment.
        include: directory of Python's headers; by default, that of this Python.
    """
    language, variable, programs = _COMPILERS[device]
    named = env.get(variable)
    found = any(shutil.which(program, path=env.get("PATH")) for program in ((named,) if named else programs))
    looked_for = f"{variable}={named}" if named else " or ".join(programs)
    lacking = [] if found else [f"no {language} compiler ({looked_for})"]
    variables = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    folders = [include or sysconfig.get_path("include"), *":".join(env.get(name, "") for name in variables).split(":")]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders if folder):
        lacking.append(f"no Python.h in {folders[0]}")
    return " and ".join(lacking)


INSTALL_COMPILER = "Install them, on Debian and Ubuntu: apt-get install g++ python3-dev."


def without_path(word: str) -> str:
    """Return an entry of ``notify`` for people to read: the path of a web address may be a secret."""
    return re.sub(r"^(https?://[^/?#\s]+)[/?#].*", r"\1/...", word)


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a value of a config or a plan as every output shows it, trackers and reports included.

    Args:
        value: JSON value.
        key: config key; only its last part matters.
    """
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        in_webhook = str(fields.get("_target_", "")).endswith("Webhook")
        names = {name: "webhook" if in_webhook and name == "url" else str(name) for name in fields}
        return {name: without_secrets(each, names[name]) for name, each in fields.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each, key) for each in cast("Sequence[Any]", value)]
    if not isinstance(value, str) or not value:
        return value
    last = key.rpartition(".")[2]
    if _SECRET_KEYS.search(last):
        return "***"
    return _WEBHOOK.sub(r"\1/...", without_credentials(without_path(value) if _ADDRESS_KEYS.search(last) else value))


def file_system(directory: Path) -> tuple[Path, str]:
    """Return (mount point, type) of the file system of the absolute path ``directory``, which need not exist."""
    mounts: list[tuple[Path, str]] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        mounts.append((Path(fields.split()[4].replace("\\040", " ")), rest.split()[0]))
    # if several are mounted on the same point, the last one is visible
    return max(reversed([m for m in mounts if directory.is_relative_to(m[0])]), key=lambda m: len(m[0].parts))


def free_host_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory available to this process in bytes: the host's, or less if its cgroup (version 2) or a parent
    of it has less left.

    Inactive file cache counts as available: the kernel reclaims it at the limit.
    """
    available = 1024 * _numbers(proc / "meminfo")["MemAvailable:"]
    lines = (proc / "self" / "cgroup").read_text().splitlines()
    own = cgroups / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for group in (own, *own.parents):
        if group.is_relative_to(cgroups):
            with suppress(OSError, ValueError):  # no memory controller; no limit: "max"
                limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
                cached = _numbers(group / "memory.stat").get("inactive_file", 0)
                available = min(available, max(0, limit - used + cached))
    return available


def _numbers(file: Path) -> dict[str, int]:
    """Parse a file of lines "NAME NUMBER ..." and return the numbers by name."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


# by format: CPU flags of native arithmetic units, first the one that suffices for oneDNN
_UNITS = {
    PrecisionKind.bf16: ("avx512_bf16", "amx_bf16", "avx_ne_convert"),
    PrecisionKind.fp16: ("avx512_fp16", "amx_fp16", "avx_ne_convert"),
}
NARROW = tuple(_UNITS)
# least compute capability of GPUs with units: torch's rule
_BF16_CAPABILITY = 8.0
_AVX512_CORE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def computes(kind: PrecisionKind, device: Device, env: Mapping[str, str]) -> bool | None:
    """Return whether this machine computes in ``kind`` without emulation; None if only torch can tell.

    Args:
        kind: bf16 or fp16.
        device: cpu or cuda.
        env: the workers' environment: oneDNN reads from it which instructions it may use.
    """
    if device is Device.cuda:
        return True if kind is PrecisionKind.fp16 else gpus_have(_BF16_CAPABILITY)
    if platform.machine() != "x86_64":
        return None
    flags, units = cpu_flags(), _UNITS[kind]
    if not flags & {*units}:
        return False
    limited = env.get("ONEDNN_MAX_CPU_ISA") or env.get("DNNL_MAX_CPU_ISA")
    return True if units[0] in flags and flags >= _AVX512_CORE and not limited else None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the first core's flags; the kernel lists only those that programs may use."""
    with cpuinfo.open(encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


@cache
def device_model(device: Device, proc: Path = Path("/proc")) -> str:
    """Return the model of this machine's GPUs, or of its processors and their number; empty if it is unknown."""
    if device is Device.cuda:
        files, name = sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information")), "Model"
    else:
        files, name = [proc / "cpuinfo"], "model name"
    for file in files:
        try:
            text = file.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if (found := re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE)) is not None:
            cores = "" if device is Device.cuda else f", {len(os.sched_getaffinity(0))} cores"
            return found[1].strip() + cores
    return ""


def measured_device(model: str) -> str:
    """Return the device of measurements: its model, and that other cells of a sweep may have run beside this one, as
    measurements of a job that ran alone must not be compared with those."""
    others = cells_at_once() - 1
    return f"{model}, beside {count(others, 'other cell')}" if others else model


@cache
def gpus_have(least: float) -> bool | None:
    """Return whether compute capability is at least ``least``; None if GPUs differ or cannot be queried."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        native = {float(capability) >= least for capability in answer.split()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return native.pop() if len(native) == 1 else None


def has_units(kind: PrecisionKind) -> bool:
    """Return whether this x86 CPU has arithmetic units for ``kind``."""
    return bool(cpu_flags() & {*_UNITS[kind]})


def emulation_reason(kind: PrecisionKind, device: str) -> str:
    """Return why ``precision=auto`` became ``kind``."""
    return f"auto: {device} computes bf16 natively" if kind is PrecisionKind.bf16 else f"auto: {device} emulates bf16"


def emulation_warning(kind: PrecisionKind, device: str) -> str:
    """Return the warning that ``device`` emulates ``kind``."""
    return (
        f"precision={kind.value}: {device} emulates it, which is slower than fp32. precision=auto takes what is "
        "computed natively."
    )
