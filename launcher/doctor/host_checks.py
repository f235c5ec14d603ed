"""Checks of the hosts: software, GPUs, directories, links, W&B. Pure functions from the probes' answers to checks."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.config.schema import Device, WandbMode
from launcher.doctor.check import Check, failure, merge, ok, warning
from launcher.doctor.host_facts import PACKAGES, Answer
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
    """Return a failure if a worker alone could not start torch; None otherwise, or if it was not tried."""
    seen: Answer | None = answer.get("bandwidth")
    if seen is None or "error" not in seen or seen["world"] > 1:
        return None
    return failure(
        "torch", f"a worker got nowhere: {seen['error']}", "Try `python -c 'import torch'` there.", answer["host"]
    )


def gpus(answer: Answer, device: Device, workers: int) -> Check:
    """Check that torch sees enough idle GPUs. ``workers``: workers on this host, which need one GPU each."""
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
    for node, answer in answers.items():
        place: Answer | None = answer.get("run_dir")
        if place is None:
            continue
        if unseen := sorted({answers[k]["host"] for k in answer.get("absent", ()) if k in answers}):
            checks.append(_unseen(run_dir, unseen, answer["host"]))
        elif place["kind"] in OWN_MEMORY:
            checks.append(in_memory(run_dir, place, answer["host"], shared=shared))
        else:
            checks.append(_space(run_dir, place, answer["host"], shared and node in answers, login))
    return checks


def _unseen(run_dir: Path, unseen: list[str], host: str) -> Check:
    return failure(
        "run directory", f"{run_dir}: what {', '.join(unseen)} wrote did not appear within a minute",
        "Use a run.dir on a disk that all nodes share.", host,
    )  # fmt: skip


def in_memory(run_dir: Path, place: Answer, host: str | None, *, shared: bool) -> Check:
    found = f"{run_dir} lies in this machine's memory ({place['kind']} on {place['mount']})"
    if shared:
        remedy = "Use a run.dir on a disk that the login node and all nodes share."
        return failure("run directory", f"{found}: others do not see it", remedy, host)
    return warning("run directory", f"{found}: a reboot takes the runs with it", "Use a run.dir on a disk.", host)


def _space(run_dir: Path, place: Answer, host: str, shared: bool, login: str) -> Check:
    seen = f", written on {login} and read here, and the other way round" if shared else ""
    found = f"{run_dir} ({place['kind']}): writable{seen}; {gigabytes(place['free_bytes'])} free"
    if place["free_bytes"] < _FREE_BYTES:
        return warning("run directory", found, "Make room, or lower checkpoint.keep: checkpoints lie there.", host)
    return ok("run directory", found, host)


def unusable(run_dir: Path, problem: str) -> Check:
    return failure("run directory", f"{run_dir} cannot be used: {problem}", "Choose a run.dir that you may write to.")


def working_directory(login: str, written: str, answers: dict[int, Answer], *, shared: bool) -> list[Check]:
    """Check the working directory. ``written``: why ``login`` could not write there; empty if it could."""
    checks: list[Check] = []
    for answer in answers.values():
        place: Answer | None = answer.get("cwd")
        if place is None:
            continue
        host, path = answer["host"], place["path"]
        if shared and not written and not place["same"]:
            what = f"{path} is another directory there" if place["kind"] else f"there is no {path}"
            remedy = "Type `launch` in a directory on the disk that the login node and all nodes share."
            checks.append(
                failure("working directory", f"{what} than on {login}" if place["kind"] else what, remedy, host)
            )
        elif problem := written or place["problem"]:
            found = f"{path}: nothing can be written there: {problem}"
            checks.append(warning("working directory", found, "Go to a directory that you may write to.", host))
        else:
            checks.append(ok("working directory", f"{path}: writable{', the same everywhere' if shared else ''}", host))
    return checks


def left_by_nodes(cwd: Path, token: str) -> list[Path]:
    """Return the files that the hosts which see the token have written beside it."""
    return sorted(cwd.glob(f"{token}.node*"))


_CLOCK_WARNING_S, _CLOCK_FAILURE_S = 0.1, 2.0
# fraction of the link's rate below which something is wrong
_FAR_BELOW = 0.5


def interfaces(answers: dict[int, Answer]) -> list[Check]:
    """List each host's interface and address, and check that it has the interfaces that its environment names."""
    looked = [answer for answer in answers.values() if "interfaces" in answer]
    hosts = [answer["host"] for answer in answers.values()]
    checks = merge((missing for answer in looked if (missing := _missing(answer)) is not None), hosts)
    used = [
        f"{answer['host']} {answer['interface']} {answer['address']}{_own_name(answer)}"
        for answer in looked
        if "address" in answer
    ]
    return [*checks, ok("interface", ", ".join(used))] if used else checks


def _missing(answer: Answer) -> Check | None:
    there: list[str] = answer["interfaces"]
    for name, said in answer["said_interfaces"].items():
        # NCCL matches prefixes of names, or whole names after "="; "^" excludes names
        wanted, exact = tuple(said.lstrip("=").split(",")), name == GLOO or said.startswith("=")
        if said.startswith("^") or any(have in wanted or (not exact and have.startswith(wanted)) for have in there):
            continue
        return failure(
            "interface", f"the environment says {name}={said}, which it has not",
            f"Unset {name}, or name one of these: {', '.join(there)}.", answer["host"],
        )  # fmt: skip
    return None


def _own_name(answer: Answer) -> str:
    own = answer["facts"]["hostname_address"]
    return f" (its own name means {own} there, which is not used)" if own and own.startswith("127.") else ""


def connections(answers: dict[int, Answer]) -> list[Check]:
    """Check that every host reaches every other one on an arbitrary free port."""
    checks: list[Check] = []
    tried, slowest = 0, 0.0
    for answer in answers.values():
        for link in answer.get("reached", ()):
            tried += 1
            slowest = max(slowest, link.get("rtt_s", 0.0))
            if link["problem"]:
                there = answers[link["node"]]["host"] if link["node"] in answers else f"node {link['node']}"
                checks.append(
                    failure(
                        "connections",
                        f"does not reach {there} at {link['address']}: {link['problem']}",
                        "Open all ports between the nodes, or name another cluster.interface.",
                        answer["host"],
                    )
                )
    if tried and not checks:
        checks.append(ok("connections", f"all {tried} ways on arbitrary ports; {slowest * 1e3:.2f} ms there and back"))
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
    kind = failure if apart > _CLOCK_FAILURE_S else warning
    remedy = "Keep them in step (chronyd, ntpd): which failure was first is told by them."
    return [kind("clocks", found, remedy, f"{one}, {other}")]


def all_reduce(answers: dict[int, Answer], device: str, link_gbit: float | None, *, hosts: bool) -> list[Check]:
    """Check the bandwidth of an all-reduce, computed by ``bandwidth``.

    Args:
        answers: answers by node.
        link_gbit: Gbit/s of a host's link (cluster.link_gbit), or None.
        hosts: True if there was one worker on each of several hosts.
    """
    name, who = "all-reduce", "nodes" if hosts else "workers"
    measured = {k: answer["bandwidth"] for k, answer in answers.items() if "bandwidth" in answer}
    errors = [(answers[k]["host"], one["error"]) for k, one in measured.items() if "error" in one and one["world"] > 1]
    if errors:
        host, error = errors[0]
        remedy = "See the lines above: interface, connections, gpu."
        return [failure(name, f"none came about: {error}", remedy, host)]
    first: Answer | None = next((one for one in measured.values() if one.get("times")), None)
    if first is None:
        if hosts and measured:
            return [warning(name, "not measured: not all nodes reach each other", "See the lines above.")]
        return [ok(name, "one worker: nothing to sum")] if measured else []
    gbit, size, latency_s = bandwidth(first["times"], first["world"])
    library = "NCCL" if device == "cuda" else "gloo"
    found = f"{gbit:,.3g} Gbit/s of {first['world']} {who} ({library}, {size / 2**20:,.3g} MiB"
    found += f"; {first['times'][0][0] / 1024:.0f} KiB take {latency_s * 1e3:,.2f} ms)"
    if hosts and link_gbit is not None and gbit < _FAR_BELOW * link_gbit:
        remedy = "Look at cluster.interface, at who else uses the link, and at the link itself (`ethtool`)."
        return [warning(name, f"{found}: far below cluster.link_gbit={link_gbit:g}", remedy)]
    return [ok(name, found)]


def bandwidth(times: list[list[float]], world: int) -> tuple[float, float, float]:
    """Return (Gbit/s, bytes, seconds): rate and size of the largest all-reduce, and time of the smallest.

    The rate counts the wire bytes of a ring, 2(W-1)/W of the payload (NCCL's "bus bandwidth"). The largest size counts,
    because no buffer on the way can hold it.
    """
    size, took = times[-1]
    return 8e-9 * size * 2 * (world - 1) / world / took, size, times[0][1]


_OFFLINE = "use wandb.mode=offline and `wandb sync` later."


def wandb(mode: WandbMode, version: str | None, answer: Answer) -> Check | None:
    """Check W&B; None if the probe did not get to it. ``answer``: answer of the host on which rank 0 will run."""
    if mode is not WandbMode.online:
        return ok("W&B", f"wandb {version}, wandb.mode={mode.value}: no server is needed")
    said: dict[str, str] | None = answer.get("wandb")
    if said is None:
        return None
    if said["no_key"]:
        problem, _, remedy = said["no_key"].partition("\n")
        return failure("W&B", problem, remedy.strip(), answer["host"])
    if said["silent"]:
        return warning(
            "W&B", f"wandb.mode=online: {said['silent']}", f"The run would be kept offline. Or {_OFFLINE}",
            answer["host"],
        )  # fmt: skip
    return ok("W&B", f"wandb {version}, key found, the server answers", answer["host"])
