"""What each host has: Python and packages, GPUs, limits. Answers of the probes in, checks out."""

from __future__ import annotations

import re

from launcher.check import Check, failure, ok, warning
from launcher.config import Device
from launcher.doctor.desk import Answer
from launcher.doctor.facts import PACKAGES

TORCH = (2, 11)
_OPTIONAL = ("numpy",)
_BUSY_MIB, _BUSY_PERCENT = 1024, 10
_SHM_BYTES = 2**30
_OPEN_FILES = 1024


def python(login: Answer, answer: Answer) -> Check:
    """The same interpreter at the same place as where the job is submitted. ``login``: that host's facts."""
    facts, host = answer["facts"], answer["host"]
    found = f"Python {facts['python']}, {facts['executable']}"
    if facts["python"] != login["python"]:
        return failure(
            "python", f"{found}; on {login['host']} it is {login['python']}",
            "Use an environment on the disk that all hosts share, or install the same Python on each.", host,
        )  # fmt: skip
    return ok("python", found, host)


def packages(login: Answer, answer: Answer) -> Check:
    facts, host = answer["facts"], answer["host"]
    there: dict[str, str | None] = facts["packages"]
    missing = [name for name in PACKAGES if there[name] is None and name not in _OPTIONAL]
    if missing:
        return failure("packages", f"not installed: {', '.join(missing)}", "Install launcher with what it needs.", host)
    other = [
        f"{name} {there[name] or 'missing'} ({login['host']}: {login['packages'][name] or 'missing'})"
        for name in PACKAGES
        if there[name] != login["packages"][name]
    ]
    if facts["package_dir"] != login["package_dir"]:
        other.append(f"launcher from {facts['package_dir']} ({login['host']}: {login['package_dir']})")
    if other:
        return failure(
            "packages", f"not those of {login['host']}: {', '.join(other)}",
            "Use one environment on the disk that all hosts share, or install the same versions on each host.", host,
        )  # fmt: skip
    torch = there["torch"] or ""
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < TORCH:
        wanted = ".".join(map(str, TORCH))
        return failure("packages", f"torch {torch} is too old", f"Install it: pip install 'torch>={wanted}'.", host)
    return ok("packages", ", ".join(f"{name} {there[name]}" for name in PACKAGES if there[name]), host)


def torch(answer: Answer) -> Check | None:
    """Whether torch comes up. None where it has not come to that."""
    seen: Answer | None = answer.get("bandwidth")
    if seen is None or "error" not in seen or seen["world"] > 1:
        return None
    return failure(
        "torch", f"a worker got nowhere: {seen['error']}", "Try `python -c 'import torch'` there.", answer["host"]
    )


def gpus(answer: Answer, device: Device, workers: int) -> Check:
    """As many as the workers need, seen by torch, and idle. ``workers``: on this host."""
    facts, host = answer["facts"], answer["host"]
    devices, use = facts["devices"], facts["gpu_use"]
    build = facts["packages"]["torch"]
    seen: Answer = answer.get("bandwidth") or {}
    given = answer.get("slurm_gpus")
    by_slurm = f", {given} given by Slurm" if given else ""
    if device is Device.cpu:
        if not devices:
            return ok("gpu", "no GPU: CPU workers", host)
        if build is not None and build.endswith("+cpu"):
            return warning(
                "gpu", f"{devices} GPUs, and torch {build} is a build for CPUs{by_slurm}",
                "Install the CUDA build of torch, or say cluster.device=cpu.", host,
            )  # fmt: skip
        return ok("gpu", f"{devices} GPUs that cluster.device=cpu leaves alone", host)
    if "gpus" not in seen:
        return warning("gpu", f"{devices} GPUs{by_slurm}; torch was not asked", "See the other lines.", host)
    if seen["gpus"] < workers:
        return failure(
            "gpu", f"torch {build} (CUDA {seen['cuda']}) sees {seen['gpus']} GPUs of {devices}{by_slurm}, and "
            f"{workers} workers need one each",
            "Compare the driver (`nvidia-smi`) with torch's CUDA, and CUDA_VISIBLE_DEVICES.", host,
        )  # fmt: skip
    if busy := _busy(use or []):
        return warning("gpu", f"in use: {'; '.join(busy)}", "See `nvidia-smi` for whose process it is.", host)
    idle = "idle" if use else "use not known: no nvidia-smi"
    return ok("gpu", f"{seen['gpus']} GPUs seen by torch (CUDA {seen['cuda']}){by_slurm}, {idle}", host)


def _busy(use: list[list[int]]) -> list[str]:
    return [f"GPU {n}: {used} MiB, {work}%" for n, used, work in use if used > _BUSY_MIB or work > _BUSY_PERCENT]


def limits(answer: Answer) -> list[Check]:
    """What loader processes need: shared memory for batches, and open files."""
    facts, host = answer["facts"], answer["host"]
    shm, files = facts["shm_bytes"], facts["open_files"]
    checks: list[Check] = []
    if shm is None or shm < _SHM_BYTES:
        size = "no /dev/shm" if shm is None else f"/dev/shm has {gigabytes(shm)}"
        remedy = "Make it larger (docker run --shm-size=8g), or use train.loader_workers=0."
        checks.append(warning("shared memory", f"{size}: loader processes pass batches through it", remedy, host))
    else:
        checks.append(ok("shared memory", f"/dev/shm has {gigabytes(shm)}", host))
    shown = "no limit" if files < 0 else f"{files:,}"
    if 0 <= files < _OPEN_FILES:
        remedy = f"Raise it: `ulimit -n {4 * _OPEN_FILES}` in your shell, or in cluster.setup."
        checks.append(warning("open files", f"limit of {shown} a process", remedy, host))
    else:
        checks.append(ok("open files", f"{shown} a process", host))
    return checks


def gigabytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB"
