"""Checks of the hosts: software, GPUs, directories, links, W&B. Pure functions from the probes' answers to checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from launcher.config.choices import WandbMode
from launcher.config.schema import Device
from launcher.extensions.doctor.bandwidth import KINDS, Sample
from launcher.extensions.doctor.check import Check, failure, ok, warning
from launcher.extensions.doctor.probe import PACKAGES, Answer
from launcher.launch.network import GLOO
from launcher.plan.host import INSTALL_COMPILER, OWN_MEMORY
from launcher.rundir.files import value_from_json

TORCH = (2, 11)
_OPTIONAL = ("numpy",)
_BUSY_MIB, _BUSY_PERCENT = 1024, 10
_SHM_BYTES = 2**30
_OPEN_FILES = 1024
_FREE_BYTES = 10e9


def python(login: Answer, answer: Answer) -> Iterator[Check]:
    """Check that the Python version is that of the host which submits the job. ``login``: facts of that host."""
    facts = answer["facts"]
    found = f"Python {facts['python']}, {facts['executable']}"
    if facts["python"] == login["python"]:
        yield ok("python", found)
    else:
        remedy = "Use an environment on the disk that all hosts share, or install the same Python on each."
        yield failure("python", f"{found}; on {login['host']} it is {login['python']}", remedy)


def packages(login: Answer, answer: Answer) -> Iterator[Check]:
    """Check that all packages are installed, in the versions of ``login``, and that torch is new enough."""
    facts = answer["facts"]
    versions: dict[str, str | None] = facts["packages"]
    missing = [name for name in PACKAGES if versions[name] is None and name not in _OPTIONAL]
    other = [
        f"{name} {versions[name] or 'missing'} ({login['host']}: {login['packages'][name] or 'missing'})"
        for name in PACKAGES
        if versions[name] != login["packages"][name]
    ]
    if facts["package_dir"] != login["package_dir"]:
        other.append(f"launcher from {facts['package_dir']} ({login['host']}: {login['package_dir']})")
    torch = versions["torch"] or ""
    if missing:
        yield failure("packages", f"not installed: {', '.join(missing)}", "Install launcher with its dependencies.")
    elif other:
        remedy = "Use one environment on the disk that all hosts share, or install the same versions on each host."
        yield failure("packages", f"not those of {login['host']}: {', '.join(other)}", remedy)
    elif tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < TORCH:
        remedy = f"Install it: pip install 'torch>={'.'.join(map(str, TORCH))}'."
        yield failure("packages", f"torch {torch} is too old", remedy)
    else:
        yield ok("packages", ", ".join(f"{name} {versions[name]}" for name in PACKAGES if versions[name]))


def torch(answer: Answer) -> Iterator[Check]:
    """Yield a failure if a worker that inspects torch on its own has failed."""
    measured: Answer = answer.get("bandwidth", {})
    if "error" in measured and measured["world"] == 1:
        yield failure("torch", f"a worker failed: {measured['error']}", "Try `python -c 'import torch'` there.")


def gpus(device: Device, workers: int, answer: Answer) -> Iterator[Check]:
    """Check that torch sees enough idle GPUs. ``workers``: workers on this host, which need one GPU each."""
    facts: Answer = answer["facts"]
    measured: Answer = answer.get("bandwidth") or {}
    use: list[list[int]] = facts["gpu_use"] or []
    devices, build = facts["devices"], facts["packages"]["torch"]
    slurm_gpus = answer.get("slurm_gpus")
    by_slurm = f", {slurm_gpus} given by Slurm" if slurm_gpus else ""
    busy = [f"GPU {n}: {used} MiB, {work}%" for n, used, work in use if used > _BUSY_MIB or work > _BUSY_PERCENT]
    if device is Device.cpu and not devices:
        yield ok("gpu", "no GPU: CPU workers")
    elif device is Device.cpu and build is not None and build.endswith("+cpu"):
        remedy = "Install the CUDA build of torch, or set cluster.device=cpu."
        yield warning("gpu", f"{devices} GPUs, and torch {build} is a build for CPUs{by_slurm}", remedy)
    elif device is Device.cpu:
        yield ok("gpu", f"{devices} GPUs, not used with cluster.device=cpu")
    elif "gpus" not in measured:
        yield warning("gpu", f"{devices} GPUs{by_slurm}; the number that torch sees is unknown", "See the other lines.")
    elif measured["gpus"] < workers:
        yield failure(
            "gpu", f"torch {build} ({_versions(measured)}) sees {measured['gpus']} GPUs of {devices}{by_slurm}, and "
            f"{workers} workers need one each", _OLD_DRIVER if _driver_is_old(measured) else
            "Compare the driver (`nvidia-smi`) with torch's CUDA, and CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip
    elif wrong := [*_wrong_gpus(measured)]:
        yield from wrong
    elif busy:
        yield warning("gpu", f"in use: {'; '.join(busy)}", "See `nvidia-smi` for the processes that use them.")
    else:
        idle = "idle" if use else "use not known: no nvidia-smi"
        right = "; each that a worker gets computes as the CPU does" if measured.get("tried") else ""
        yield ok("gpu", f"{measured['gpus']} GPUs seen by torch ({_versions(measured)}){by_slurm}, {idle}{right}")


_OLD_DRIVER = (
    "Update the driver, or install a build of torch for its CUDA, such as `pip install torch --index-url "
    "https://download.pytorch.org/whl/cu126`."
)
# a product in bf16 rounds its operands equally on both devices, and its result to 8 bits
_PRODUCT_ERROR = 0.02


def _versions(measured: Answer) -> str:
    driver, nccl = measured.get("driver"), measured.get("nccl")
    known = f", driver for up to {driver // 1000}.{driver % 1000 // 10}" if driver else ""
    return f"CUDA {measured['cuda']}{known}{f', NCCL {nccl}' if nccl else ''}"


def _driver_is_old(measured: Answer) -> bool:
    """Return whether the driver's CUDA has a lower major version than torch's: minor ones are compatible (CUDA
    Compatibility guide, minor version compatibility)."""
    driver, cuda = measured.get("driver") or 0, measured["cuda"] or ""
    return 0 < driver < 1000 * int(cuda.partition(".")[0] or 0)


def _wrong_gpus(measured: Answer) -> Iterator[Check]:
    """Yield a failure for each GPU on which torch does not compute, or computes otherwise than the CPU."""
    for gpu in measured.get("tried", ()):
        name = f"GPU {gpu['index']} ({gpu['name'] or 'unknown'})"
        if gpu["error"] is None:
            remedy = f"See `nvidia-smi -q -i {gpu['index']}` for its errors and processes, and `dmesg` for Xid."
            if "no kernel image" in gpu["problem"]:  # CUDA's words for a GPU that the build was not made for
                remedy = "Install a build of torch for this GPU, such as one for another CUDA (https://pytorch.org)."
            yield failure("gpu", f"{name} does not compute: {gpu['problem']}", remedy)
        elif gpu["error"] > _PRODUCT_ERROR:
            found = f"{name} computes a product of matrices that is {gpu['error']:.0%} off the CPU's"
            yield failure("gpu", found, "Do not use it: it is defective. See `nvidia-smi -q` for errors of its memory.")


def compiler(device: Device, compiles: bool, answer: Answer) -> Iterator[Check]:
    """Check that torch.compile can build kernels. ``compiles``: the job uses it."""
    missing = answer["facts"]["no_compiler"][device.value]
    if not missing:
        yield ok("compiler", "torch.compile can build kernels")
    elif compiles:
        yield warning("compiler", f"{missing}: torch.compile cannot build kernels", INSTALL_COMPILER)
    else:
        yield ok("compiler", f"{missing}: only train.compile and flex attention need them")


# memory that NCCL may lock for its buffers, of all connections
_LOCKED_BYTES = 2**30


def infiniband(device: Device, hosts: int, answer: Answer) -> Iterator[Check]:
    """Check what NCCL needs to use the host's InfiniBand ports; gloo does not use them."""
    facts: Answer | None = answer["facts"]["infiniband"]
    if device is Device.cpu or facts is None:
        return
    active = _active_ports(answer)
    found = f"{len(active)} of {len(facts['ports'])} ports active"
    found += f" ({', '.join(f'{name} {gbit:g} Gbit/s' for name, gbit in active)})" if active else ""
    locked, tcp = facts["locked_bytes"], "NCCL uses TCP instead, several times slower"
    if hosts == 1:
        yield ok("infiniband", f"{found}; one host does not use them")
    elif not active:
        yield warning("infiniband", f"{found}: {tcp}", "See `ibstat`.")
    elif not facts["library"]:
        remedy = "Install it, on Debian and Ubuntu: apt-get install libibverbs1 ibverbs-providers."
        yield warning("infiniband", f"{found}, and no libibverbs.so.1: {tcp}", remedy)
    elif not facts["devices"]:
        remedy = "Give the container its devices: docker run --device=/dev/infiniband --ulimit memlock=-1."
        yield warning("infiniband", f"{found}, and no /dev/infiniband/uverbs*: {tcp}", remedy)
    elif locked is not None and locked < _LOCKED_BYTES:
        remedy = "Raise it: docker run --ulimit memlock=-1, /etc/security/limits.conf, LimitMEMLOCK of slurmd's unit."
        found = f"{found}; a process may lock {locked / 2**20:,.3g} MiB of memory, and NCCL locks more for its buffers"
        yield warning("infiniband", found, remedy)
    else:
        yield ok("infiniband", f"{found}, libibverbs, lockable memory")


def limits(answer: Answer) -> Iterator[Check]:
    """Check what loader processes need: shared memory for batches, and open files."""
    shm, files = answer["facts"]["shm_bytes"], answer["facts"]["open_files"]
    found = "no /dev/shm" if shm is None else f"/dev/shm has {gigabytes(shm)} free"
    if shm is None or shm < _SHM_BYTES:
        remedy = "Make it larger (docker run --ipc=host, or --shm-size=8g), and remove old files there."
        yield warning("shared memory", f"{found}: loader processes and NCCL pass data through it", remedy)
    else:
        yield ok("shared memory", found)
    found = "no limit" if files < 0 else f"{files:,}"
    if 0 <= files < _OPEN_FILES:
        remedy = f"Raise it: `ulimit -n {4 * _OPEN_FILES}` in your shell, or in cluster.setup."
        yield warning("open files", f"limit of {found} a process", remedy)
    else:
        yield ok("open files", f"{found} a process")


def gigabytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB"


def run_dir(run_dir: Path, login: str | None, answers: dict[int, Answer], answer: Answer) -> Iterator[Check]:
    """Check the run directory. A host that has answered sees what ``login`` wrote there, and vice versa.

    Args:
        login: host that submits the job, if that is another one.
        answers: answers of all hosts, by node.
    """
    directory: Answer | None = answer.get("run_dir")
    if directory is None:
        return
    if unseen := sorted({answers[k]["host"] for k in answer.get("absent", ()) if k in answers}):
        found = f"{run_dir}: what {', '.join(unseen)} wrote did not appear within a minute"
        yield failure("run directory", found, "Use a run.dir on a disk that all nodes share.")
    elif directory["kind"] in OWN_MEMORY:
        yield in_memory(run_dir, directory, shared=login is not None)
    else:
        shared = "" if login is None else f", written on {login} and read here, and the other way round"
        found = f"{run_dir} ({directory['kind']}): writable{shared}; {gigabytes(directory['free_bytes'])} free"
        if directory["free_bytes"] < _FREE_BYTES:
            remedy = "Free some space, or lower checkpoint.keep: checkpoints are stored there."
            yield warning("run directory", found, remedy)
        else:
            yield ok("run directory", found)


def in_memory(run_dir: Path, directory: Answer, *, shared: bool) -> Check:
    found = f"{run_dir} is in this machine's memory ({directory['kind']} on {directory['mount']})"
    if shared:
        remedy = "Use a run.dir on a disk that the login node and all nodes share."
        return failure("run directory", f"{found}: others do not see it", remedy)
    return warning("run directory", f"{found}: a reboot deletes the runs", "Use a run.dir on a disk.")


def unusable(run_dir: Path, problem: str) -> Check:
    return failure("run directory", f"{run_dir} cannot be used: {problem}", "Choose a run.dir that you may write to.")


def working_directory(login: str | None, unwritten: str, answer: Answer) -> Iterator[Check]:
    """Check the working directory.

    Args:
        login: host that submits the job, if that is another one.
        unwritten: why ``login``, or this host, could not write there; empty if it could.
    """
    directory: Answer | None = answer.get("cwd")
    if directory is None:
        return
    path = directory["path"]
    if login is not None and not unwritten and not directory["same"]:
        found = f"{path} is another directory there than on {login}" if directory["kind"] else f"there is no {path}"
        remedy = "Type `launch` in a directory on the disk that the login node and all nodes share."
        yield failure("working directory", found, remedy)
    elif problem := unwritten or directory["problem"]:
        remedy = "Go to a directory that you may write to."
        yield warning("working directory", f"{path} is not writable: {problem}", remedy)
    else:
        yield ok("working directory", f"{path}: writable{'' if login is None else ', the same everywhere'}")


def unfinished(answer: Answer) -> Iterator[Check]:
    """Yield a failure if a host's probe did not finish."""
    if "error" in answer or not answer.get("done"):
        problem, _, remedy = answer.get("error", "its probe ended early").partition("\n")
        yield failure("probe", problem, remedy.strip() or "See the lines above for what it has checked.")


_CLOCK_WARNING_S, _CLOCK_FAILURE_S = 0.1, 2.0
# relative error of the fit above which the measured times vary too much
_VARIES = 0.3


def named_interfaces(answer: Answer) -> Iterator[Check]:
    """Check that a host has the interfaces that its environment names."""
    present: list[str] = answer.get("interfaces", [])
    for name, value in answer.get("named_interfaces", {}).items():
        # NCCL matches prefixes of names, or whole names after "="; "^" excludes names
        wanted, exact = tuple(value.lstrip("=").split(",")), name == GLOO or value.startswith("=")
        if value.startswith("^") or any(own in wanted or (not exact and own.startswith(wanted)) for own in present):
            continue
        found = f"{name}={value} in the environment names an interface that this host does not have"
        yield failure("interface", found, f"Unset {name}, or name one of these: {', '.join(present)}.")


def addresses(answers: dict[int, Answer]) -> list[Check]:
    """List the interface and address of each host."""
    used = [
        f"{answer['host']} {answer['interface']} {answer['address']}"
        for answer in answers.values()
        if "address" in answer
    ]
    return [ok("interface", ", ".join(used))] if used else []


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


def links(answers: dict[int, Answer], device: str, *, hosts: int) -> list[Check]:
    """Check the collectives that ``bandwidth`` has measured, and show their latencies and bandwidths.

    Args:
        answers: answers by node.
        hosts: number of hosts of the job.
    """
    name = "links"
    levels = "inside a host", "between hosts"
    measured: list[Answer] = [answer["bandwidth"] for answer in answers.values() if "bandwidth" in answer]
    for answer in answers.values():
        result: Answer = answer.get("bandwidth", {})
        if "error" in result and result["world"] > 1:
            remedy = "See the lines above: interface, connections, gpu."
            return [failure(name, f"no collective ran: {result['error']}", remedy, answer["host"])]
    samples = samples_of(answers)
    if not samples:
        if hosts > 1 and measured:
            return [warning(name, "not measured: not all nodes reach each other", "See the lines above.")]
        return [ok(name, "one worker: no collectives")] if measured else []
    of_level = [[one for one in samples if (one.hosts == 1) == (where == levels[0])] for where in levels]
    gbit = (None, _ports_gbit(answers.values(), samples[-1].groups) if device == "cuda" else None)
    return [_level(*each, device) for each in zip(of_level, levels, gbit, strict=True) if each[0]]


def _ports_gbit(answers: Iterable[Answer], workers: int) -> float | None:
    """Return the Gbit/s of a host's active InfiniBand ports, of the slowest host; None if one has none.

    Args:
        workers: workers on each host. Each uses the port next to its GPU, so no more ports count.
    """
    rates = (sorted(gbit for _, gbit in _active_ports(answer))[-workers:] for answer in answers)
    return min(map(sum, rates), default=0) or None


def _active_ports(answer: Answer) -> list[tuple[str, float]]:
    facts: Answer = answer["facts"]["infiniband"] or {"ports": []}
    return [(name, gbit) for name, active, gbit in facts["ports"] if active]


def samples_of(answers: dict[int, Answer]) -> list[Sample]:
    """Return the measured collectives, which are the same in every host's answer."""
    found = (answer["bandwidth"].get("samples", ()) for answer in answers.values() if "bandwidth" in answer)
    return [value_from_json(Sample, sample) for sample in next((samples for samples in found if samples), ())]


# payloads that show the latency, and those that show the bandwidth and count for the error
_SMALL_BYTES, _LARGE_BYTES = 2**14, 2**20
_LEAST_ERROR = 0.03
_ROUNDS = 4


@dataclass(frozen=True)
class Rate:
    """Seconds of one step of a kind of collective, bytes per second, and the relative errors of large ``samples``."""

    latency_s: float
    bytes_per_s: float
    errors: tuple[float, ...]


def fit_rate(samples: Sequence[Sample], *, gloo: bool) -> Rate | None:
    """Return the latency and bandwidth of one kind; None if the payloads were all small, or all large.

    Medians of what single measurements give: small payloads the latency, large ones the bandwidth. Unlike least
    squares, a measurement during which another process had the machine does not move them, nor do payloads between,
    which buffers on the way may hold.
    """
    small = [(*one.work(gloo=gloo), one.seconds) for one in samples if one.payload_bytes <= _SMALL_BYTES]
    large = [(*one.work(gloo=gloo), one.seconds) for one in samples if one.payload_bytes >= _LARGE_BYTES]
    if not small or not large:
        return None
    latency_s = second_per_byte = 0.0
    for _ in range(_ROUNDS):  # each needs the other
        latency_s = max(0.0, median((seconds - moved * second_per_byte) / steps for steps, moved, seconds in small))
        # if the small ones were measured on a busy machine, at least half of the time is still that of the bytes
        second_per_byte = median(
            max(seconds - steps * latency_s, seconds / 2) / moved for steps, moved, seconds in large
        )
    errors = (abs(seconds / (steps * latency_s + moved * second_per_byte) - 1) for steps, moved, seconds in large)
    return Rate(latency_s, 1 / second_per_byte, tuple(errors))


# part of the ports' rate below which NCCL does not use them: TCP reaches a fifth of it at most
_PART_OF_PORTS = 1 / 3


def _level(samples: list[Sample], where: str, ports_gbit: float | None, device: str) -> Check:
    """Return the check of one level: the rates of a rank inside a host, and of a host's link between hosts."""
    library = "NCCL" if device == "cuda" else "gloo"
    largest = max(sample.payload_bytes for sample in samples)
    fits = [fit_rate([one for one in samples if one.kind is kind], gloo=library == "gloo") for kind in KINDS]
    if fits[0] is None:
        found = f"too slow to measure more than {largest / 1024:,.0f} KiB"
        return warning(where, found, "Check who else uses the machines, and the link itself (`ethtool`).")
    names, rates = [kind.value.replace("_", "-") for kind in KINDS], [rate or fits[0] for rate in fits]
    speeds = ", ".join(f"{name} {8e-9 * rate.bytes_per_s:,.3g}" for name, rate in zip(names, rates, strict=True))
    latencies = ", ".join(f"{rate.latency_s * 1e3:,.2g}" for rate in rates)
    errors = sorted(error for rate in fits if rate is not None for error in rate.errors)
    error = max(_LEAST_ERROR, errors[math.ceil(0.9 * len(errors)) - 1])  # 90% of the large samples do not exceed it
    whose = "of a host's link" if samples[0].hosts > 1 else "of a worker"
    found = f"{speeds} Gbit/s {whose}; {latencies} ms a step; fits within {error:.0%} "
    found += f"({library}, up to {largest / 2**20:,.3g} MiB)"
    if ports_gbit is not None:
        found += f"; its ports have {ports_gbit:,g} Gbit/s"
        if 8e-9 * max(rate.bytes_per_s for rate in rates) < _PART_OF_PORTS * ports_gbit:
            remedy = "With NCCL_DEBUG=INFO a run's logs name what NCCL uses: NET/IB, or NET/Socket, which is TCP."
            return warning(where, f"{found}: the network is slower than its ports", remedy)
    if error > _VARIES:
        remedy = "Run it again while nothing else uses the machines."
        return warning(where, f"{found}: the times vary too much", remedy)
    return ok(where, found)


def wandb(mode: WandbMode, version: str | None, answer: Answer) -> Iterator[Check]:
    """Check W&B, if the probe got to it. ``answer``: answer of the host on which rank 0 will run."""
    if mode is not WandbMode.online:
        yield ok("W&B", f"wandb {version}, wandb.mode={mode.value}: no server is needed")
    elif probed := answer.get("wandb"):
        host = answer["host"]
        if probed["no_key"]:
            problem, _, remedy = probed["no_key"].partition("\n")
            yield failure("W&B", problem, remedy.strip(), host)
        elif probed["silent"]:
            remedy = "The run would be recorded offline. Or use wandb.mode=offline, and `wandb sync` later."
            yield warning("W&B", f"wandb.mode=online: {probed['silent']}", remedy, host)
        else:
            yield ok("W&B", f"wandb {version}, key found, the server answers", host)
