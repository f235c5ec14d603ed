"""Checks of the hosts: software, GPUs, directories, links, W&B. Pure functions from the probes' answers to checks."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.config.schema import Device, WandbMode
from launcher.doctor.check import Check, failure, merge, ok, warning
from launcher.doctor.probe import PACKAGES, Answer
from launcher.launch.network import GLOO
from launcher.plan.host import OWN_MEMORY

TORCH = (2, 11)
_OPTIONAL = ("numpy",)
_BUSY_MIB, _BUSY_PERCENT = 1024, 10
_SHM_BYTES = 2**30
_OPEN_FILES = 1024


def python(login: Answer, answer: Answer) -> Check:
    """Check that the Python version is that of the host which submits the job. ``login``: facts of that host."""
    facts, host = answer["facts"], answer["host"]
    found = f"Python {facts['python']}, {facts['executable']}"
    if facts["python"] != login["python"]:
        return failure(
            "python", f"{found}; on {login['host']} it is {login['python']}",
            "Use an environment on the disk that all hosts share, or install the same Python on each.", host,
        )  # fmt: skip
    return ok("python", found, host)


def packages(login: Answer, answer: Answer) -> Check:
    """Check that all packages are installed, in the versions of ``login``, and that torch is new enough."""
    facts, host = answer["facts"], answer["host"]
    versions: dict[str, str | None] = facts["packages"]
    missing = [name for name in PACKAGES if versions[name] is None and name not in _OPTIONAL]
    if missing:
        return failure(
            "packages", f"not installed: {', '.join(missing)}", "Install launcher with its dependencies.", host
        )
    other = [
        f"{name} {versions[name] or 'missing'} ({login['host']}: {login['packages'][name] or 'missing'})"
        for name in PACKAGES
        if versions[name] != login["packages"][name]
    ]
    if facts["package_dir"] != login["package_dir"]:
        other.append(f"launcher from {facts['package_dir']} ({login['host']}: {login['package_dir']})")
    if other:
        return failure(
            "packages", f"not those of {login['host']}: {', '.join(other)}",
            "Use one environment on the disk that all hosts share, or install the same versions on each host.", host,
        )  # fmt: skip
    torch = versions["torch"] or ""
    if tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < TORCH:
        wanted = ".".join(map(str, TORCH))
        return failure("packages", f"torch {torch} is too old", f"Install it: pip install 'torch>={wanted}'.", host)
    return ok("packages", ", ".join(f"{name} {versions[name]}" for name in PACKAGES if versions[name]), host)


def torch(answer: Answer) -> Check | None:
    """Return a failure if a worker that inspects torch on its own has failed, else None."""
    measured: Answer | None = answer.get("bandwidth")
    if measured is None or "error" not in measured or measured["world"] > 1:
        return None
    return failure(
        "torch", f"a worker failed: {measured['error']}", "Try `python -c 'import torch'` there.", answer["host"]
    )


def gpus(answer: Answer, device: Device, workers: int) -> Check:
    """Check that torch sees enough idle GPUs. ``workers``: workers on this host, which need one GPU each."""
    facts, host = answer["facts"], answer["host"]
    devices, use = facts["devices"], facts["gpu_use"]
    build = facts["packages"]["torch"]
    measured: Answer = answer.get("bandwidth") or {}
    slurm_gpus = answer.get("slurm_gpus")
    by_slurm = f", {slurm_gpus} given by Slurm" if slurm_gpus else ""
    if device is Device.cpu:
        if not devices:
            return ok("gpu", "no GPU: CPU workers", host)
        if build is not None and build.endswith("+cpu"):
            return warning(
                "gpu", f"{devices} GPUs, and torch {build} is a build for CPUs{by_slurm}",
                "Install the CUDA build of torch, or set cluster.device=cpu.", host,
            )  # fmt: skip
        return ok("gpu", f"{devices} GPUs, not used with cluster.device=cpu", host)
    if "gpus" not in measured:
        remedy = "See the other lines."
        return warning("gpu", f"{devices} GPUs{by_slurm}; not known how many torch sees", remedy, host)
    if measured["gpus"] < workers:
        return failure(
            "gpu", f"torch {build} (CUDA {measured['cuda']}) sees {measured['gpus']} GPUs of {devices}{by_slurm}, and "
            f"{workers} workers need one each",
            "Compare the driver (`nvidia-smi`) with torch's CUDA, and CUDA_VISIBLE_DEVICES.", host,
        )  # fmt: skip
    if busy := _busy(use or []):
        return warning("gpu", f"in use: {'; '.join(busy)}", "See `nvidia-smi` for the processes that use them.", host)
    idle = "idle" if use else "use not known: no nvidia-smi"
    return ok("gpu", f"{measured['gpus']} GPUs seen by torch (CUDA {measured['cuda']}){by_slurm}, {idle}", host)


def _busy(use: list[list[int]]) -> list[str]:
    return [f"GPU {n}: {used} MiB, {work}%" for n, used, work in use if used > _BUSY_MIB or work > _BUSY_PERCENT]


def limits(answer: Answer) -> list[Check]:
    """Check what loader processes need: shared memory for batches, and open files."""
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


_FREE_BYTES = 10e9


def run_dir(run_dir: Path, login: str, answers: dict[int, Answer], *, shared: bool) -> list[Check]:
    """Check the run directory. A host that has answered sees what ``login`` wrote there, and vice versa.

    Args:
        shared: True if hosts other than ``login`` were asked.
    """
    checks: list[Check] = []
    for answer in answers.values():
        directory: Answer | None = answer.get("run_dir")
        if directory is None:
            continue
        if unseen := sorted({answers[k]["host"] for k in answer.get("absent", ()) if k in answers}):
            checks.append(_unseen(run_dir, unseen, answer["host"]))
        elif directory["kind"] in OWN_MEMORY:
            checks.append(in_memory(run_dir, directory, answer["host"], shared=shared))
        else:
            checks.append(_space(run_dir, directory, answer["host"], login if shared else None))
    return checks


def _unseen(run_dir: Path, unseen: list[str], host: str) -> Check:
    return failure(
        "run directory", f"{run_dir}: what {', '.join(unseen)} wrote did not appear within a minute",
        "Use a run.dir on a disk that all nodes share.", host,
    )  # fmt: skip


def in_memory(run_dir: Path, directory: Answer, host: str | None, *, shared: bool) -> Check:
    found = f"{run_dir} is in this machine's memory ({directory['kind']} on {directory['mount']})"
    if shared:
        remedy = "Use a run.dir on a disk that the login node and all nodes share."
        return failure("run directory", f"{found}: others do not see it", remedy, host)
    return warning("run directory", f"{found}: a reboot deletes the runs", "Use a run.dir on a disk.", host)


def _space(run_dir: Path, directory: Answer, host: str, login: str | None) -> Check:
    """Check the free space. ``login``: the other host that reads and writes the directory; None without one."""
    shared = "" if login is None else f", written on {login} and read here, and the other way round"
    found = f"{run_dir} ({directory['kind']}): writable{shared}; {gigabytes(directory['free_bytes'])} free"
    if directory["free_bytes"] < _FREE_BYTES:
        remedy = "Free some space, or lower checkpoint.keep: checkpoints are stored there."
        return warning("run directory", found, remedy, host)
    return ok("run directory", found, host)


def unusable(run_dir: Path, problem: str) -> Check:
    return failure("run directory", f"{run_dir} cannot be used: {problem}", "Choose a run.dir that you may write to.")


def working_directory(login: str, unwritten: str, answers: dict[int, Answer], *, shared: bool) -> list[Check]:
    """Check the working directory. ``unwritten``: why ``login`` could not write there; empty if it could."""
    checks: list[Check] = []
    for answer in answers.values():
        directory: Answer | None = answer.get("cwd")
        if directory is None:
            continue
        host, path = answer["host"], directory["path"]
        if shared and not unwritten and not directory["same"]:
            found = f"{path} is another directory there than on {login}" if directory["kind"] else f"there is no {path}"
            remedy = "Type `launch` in a directory on the disk that the login node and all nodes share."
            checks.append(failure("working directory", found, remedy, host))
        elif problem := unwritten or directory["problem"]:
            found = f"{path} is not writable: {problem}"
            checks.append(warning("working directory", found, "Go to a directory that you may write to.", host))
        else:
            checks.append(ok("working directory", f"{path}: writable{', the same everywhere' if shared else ''}", host))
    return checks


def unfinished(answer: Answer) -> Check | None:
    """Return a failure if a host's probe did not finish, else None."""
    if "error" not in answer and answer.get("done"):
        return None
    problem, _, remedy = answer.get("error", "its probe ended early").partition("\n")
    return failure("probe", problem, remedy.strip() or "See the lines above for what it has checked.", answer["host"])


_CLOCK_WARNING_S, _CLOCK_FAILURE_S = 0.1, 2.0
# fraction of the link's rate below which something is wrong
_FAR_BELOW = 0.5


def interfaces(answers: dict[int, Answer]) -> list[Check]:
    """List each host's interface and address, and check that it has the interfaces that its environment names."""
    known = [answer for answer in answers.values() if "interfaces" in answer]
    hosts = [answer["host"] for answer in answers.values()]
    checks = merge((missing for answer in known if (missing := _missing(answer)) is not None), hosts)
    used = [
        f"{answer['host']} {answer['interface']} {answer['address']}{_own_name(answer)}"
        for answer in known
        if "address" in answer
    ]
    return [*checks, ok("interface", ", ".join(used))] if used else checks


def _missing(answer: Answer) -> Check | None:
    present: list[str] = answer["interfaces"]
    for name, value in answer["named_interfaces"].items():
        # NCCL matches prefixes of names, or whole names after "="; "^" excludes names
        wanted, exact = tuple(value.lstrip("=").split(",")), name == GLOO or value.startswith("=")
        if value.startswith("^") or any(own in wanted or (not exact and own.startswith(wanted)) for own in present):
            continue
        return failure(
            "interface", f"{name}={value} in the environment names an interface that this host does not have",
            f"Unset {name}, or name one of these: {', '.join(present)}.", answer["host"],
        )  # fmt: skip
    return None


def _own_name(answer: Answer) -> str:
    own = answer["facts"]["hostname_address"]
    return f" (its own name means {own} there, which is not used)" if own and own.startswith("127.") else ""


def connections(answers: dict[int, Answer]) -> list[Check]:
    """Check that every host reaches every other one on an arbitrary free port."""
    checks: list[Check] = []
    count, slowest_s = 0, 0.0
    for answer in answers.values():
        for link in answer.get("reached", ()):
            count += 1
            slowest_s = max(slowest_s, link.get("rtt_s", 0.0))
            if link["problem"]:
                other = answers[link["node"]]["host"] if link["node"] in answers else f"node {link['node']}"
                found = f"does not reach {other} at {link['address']}: {link['problem']}"
                remedy = "Open all ports between the nodes, or name another cluster.interface."
                checks.append(failure("connections", found, remedy, answer["host"]))
    if count and not checks:
        checks.append(ok("connections", f"all {count} ways on arbitrary ports; {slowest_s * 1e3:.2f} ms round trip"))
    return checks


def clocks(answers: dict[int, Answer]) -> list[Check]:
    """Check that the hosts' clocks agree, because failures on several hosts are ordered by them."""
    pairs = [
        (abs(link["offset_s"]), link["rtt_s"], answer["host"], answers[link["node"]]["host"])
        for answer in answers.values()
        for link in answer.get("reached", ())
        if not link["problem"] and link["node"] in answers
    ]
    if not pairs:
        return []
    apart, _, one, other = max(pairs)
    found = f"{apart:,.3f} s apart at most"
    if apart <= _CLOCK_WARNING_S:
        return [ok("clocks", found)]
    verdict = failure if apart > _CLOCK_FAILURE_S else warning
    remedy = "Synchronise them (chronyd, ntpd): they decide which of several failures was the first."
    return [verdict("clocks", found, remedy, f"{one}, {other}")]


def all_reduce(answers: dict[int, Answer], device: str, link_gbit: float | None, *, hosts: bool) -> list[Check]:
    """Check the bandwidth of an all-reduce, computed by ``bandwidth``.

    Args:
        answers: answers by node.
        link_gbit: Gbit/s of a host's link (cluster.link_gbit), or None.
        hosts: True if there was one worker on each of several hosts.
    """
    name, who = "all-reduce", "nodes" if hosts else "workers"
    measured: list[Answer] = [answer["bandwidth"] for answer in answers.values() if "bandwidth" in answer]
    for answer in answers.values():
        result: Answer = answer.get("bandwidth", {})
        if "error" in result and result["world"] > 1:
            remedy = "See the lines above: interface, connections, gpu."
            return [failure(name, f"it failed: {result['error']}", remedy, answer["host"])]
    first = next((one for one in measured if one.get("times")), None)
    if first is None:
        if hosts and measured:
            return [warning(name, "not measured: not all nodes reach each other", "See the lines above.")]
        return [ok(name, "one worker: nothing to sum")] if measured else []
    gbit, size, latency_s = bandwidth(first["times"], first["world"])
    library = "NCCL" if device == "cuda" else "gloo"
    found = f"{gbit:,.3g} Gbit/s of {first['world']} {who} ({library}, {size / 2**20:,.3g} MiB"
    found += f"; {first['times'][0][0] / 1024:.0f} KiB take {latency_s * 1e3:,.2f} ms)"
    if hosts and link_gbit is not None and gbit < _FAR_BELOW * link_gbit:
        remedy = "Check cluster.interface, who else uses the link, and the link itself (`ethtool`)."
        return [warning(name, f"{found}: far below cluster.link_gbit={link_gbit:g}", remedy)]
    return [ok(name, found)]


def bandwidth(times: list[list[float]], world: int) -> tuple[float, float, float]:
    """Return (Gbit/s, bytes, seconds): rate and size of the largest all-reduce, and time of the smallest.

    The rate counts the wire bytes of a ring, 2(W-1)/W of the payload (NCCL's "bus bandwidth"). The largest size counts,
    because no buffer on the way can hold it.
    """
    size, seconds = times[-1]
    return 8e-9 * size * 2 * (world - 1) / world / seconds, size, times[0][1]


def wandb(mode: WandbMode, version: str | None, answer: Answer) -> Check | None:
    """Check W&B; None if the probe did not get to it. ``answer``: answer of the host on which rank 0 will run."""
    if mode is not WandbMode.online:
        return ok("W&B", f"wandb {version}, wandb.mode={mode.value}: no server is needed")
    probed: dict[str, str] | None = answer.get("wandb")
    if probed is None:
        return None
    if probed["no_key"]:
        problem, _, remedy = probed["no_key"].partition("\n")
        return failure("W&B", problem, remedy.strip(), answer["host"])
    if probed["silent"]:
        remedy = "The run would be recorded offline. Or use wandb.mode=offline, and `wandb sync` later."
        return warning("W&B", f"wandb.mode=online: {probed['silent']}", remedy, answer["host"])
    return ok("W&B", f"wandb {version}, key found, the server answers", answer["host"])
