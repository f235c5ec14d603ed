"""Slurm's answers, from its own commands, and this node's part of a job. sacct is not needed: many have none.

Every answer is parsed from formats that Slurm documents as stable: sinfo and squeue with a format of ours, and the
key=value lines of `scontrol -o`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from launcher.errors import SiteError
from launcher.plan.host import Partition
from launcher.plan.sbatch import seconds

_TIMEOUT_S = 60
# what no job comes back from; a state that is not here, and may be newer than this list, is one that goes on
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
     "PREEMPTED", "REVOKED", "TIMEOUT"}
)  # fmt: skip
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})


class SlurmSilent(SiteError):
    """Slurm's controller did not answer."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as `scontrol show job` has it. ``reason``: why it waits; ``restarts``: how often Slurm has begun it again;
    ``end``: when its time is over, by Slurm's clock; ``preempted``: whether a preemption is under way."""

    state: str
    reason: str
    nodes: str
    restarts: int
    end: datetime | None
    preempted: bool


def available() -> bool:
    """Whether Slurm's commands are on this machine."""
    return all(shutil.which(command) for command in ("sbatch", "squeue", "scontrol", "sinfo"))


def require() -> None:
    """Raises SiteError where Slurm's commands are not on this machine."""
    missing = [command for command in ("sbatch", "srun", "squeue", "scontrol", "sinfo") if not shutil.which(command)]
    if missing:
        raise SiteError(
            f"cluster=slurm: {missing[0]} is not on this machine's PATH.\n"
            "  Type this on a login node of the cluster, or use cluster=local."
        )


def ask(*command: str, check: bool = True) -> str:
    """The output of one of Slurm's commands.

    Raises:
        SlurmSilent: the controller does not answer.
        SiteError: the command fails otherwise; its own words.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=_environment()
        )
    except FileNotFoundError:
        raise SiteError(f"{command[0]} is not on this machine's PATH.") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"Slurm does not answer: `{command[0]}` waited {_TIMEOUT_S} s.\n  Is slurmctld up?") from None
    if done.returncode and check:
        words = " ".join(done.stderr.split()) or f"status {done.returncode}"
        if re.search(r"[Uu]nable to contact slurm|Connection refused|timed out|configuration source", words):
            raise SlurmSilent(f"Slurm does not answer: {words}")
        raise SiteError(f"`{' '.join(command)}`: {words}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Without what would make the commands answer in another form, or for another cluster than jobs are sent to."""
    ours = ("SLURM_CONF",)
    foreign = ("SLURM", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SBATCH_")
    return {name: value for name, value in os.environ.items() if name in ours or not name.startswith(foreign)}


def partitions() -> list[Partition]:
    """All of them, the default one first."""
    rows: dict[str, list[list[str]]] = {}
    default = ""
    for line in ask("sinfo", "--all", "--exact", "--noheader", "--format=%P|%D|%s|%c|%G|%l|%L").splitlines():
        name, *values = line.split("|")
        default = name.rstrip("*") if name.endswith("*") else default
        rows.setdefault(name.rstrip("*"), []).append(values)
    found = [_partition(name, groups) for name, groups in rows.items()]
    return sorted(found, key=lambda partition: partition.name != default)


def _partition(name: str, groups: list[list[str]]) -> Partition:
    """``groups``: its nodes, those that are alike together."""
    counts, sizes, cores, gres, limits, defaults = zip(*groups, strict=True)
    most = sizes[0].rpartition("-")[2]
    return Partition(
        name=name,
        nodes=sum(map(int, counts)),
        max_nodes=int(most) if most.isdecimal() else None,
        shapes=tuple(sorted({(int(n.rstrip("+")), count_gpus(has)) for n, has in zip(cores, gres, strict=True)})),
        gres=tuple(sorted({entry for entry in gres if entry not in ("(null)", "")})),
        limit_s=seconds(limits[0]),
        default_s=seconds(defaults[0]),
    )


def count_gpus(gres: str) -> int:
    """GPUs in a list of generic resources: ``gpu:4``, ``gpu:a100:4(S:0-1)``, ``(null)``."""
    total = 0
    for entry in re.sub(r"\(.*?\)", "", gres).split(","):
        kind, *rest = entry.split(":")
        if kind == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    return total


def job(job_id: str) -> Job | None:
    """A job as Slurm knows it, or None for one that it has forgotten."""
    try:
        text = ask("scontrol", "--oneliner", "show", "job", job_id)
    except SlurmSilent:
        raise
    except SiteError as error:
        if "Invalid job id" in str(error):
            return None
        raise SlurmSilent(str(error)) from None  # while slurmctld starts, it has many words for no answer
    # a job's name comes second and may hold anything; what is read here stands in its own words after it
    known = dict(re.findall(r"(?:^| )([A-Z][A-Za-z/:]*)=(\S*)", text))
    if "JobState" not in known:
        return None
    return Job(
        state=known["JobState"],
        reason=known.get("Reason", "None"),
        nodes=known.get("NodeList", "").replace("(null)", ""),
        restarts=int(known.get("Restarts", "0")),
        end=_moment(known.get("EndTime", "")),
        preempted=_moment(known.get("PreemptTime", "None")) is not None,
    )


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # None, Unknown
        return None


@dataclass(frozen=True)
class Listed:
    """A job as a list has it."""

    state: str
    name: str
    reason: str
    nodes: str


def jobs(job_ids: Sequence[str]) -> dict[str, Listed]:
    """What Slurm says of these jobs; those that it has forgotten are left out. squeue first, then sacct where there is
    one: it remembers longer.

    Raises:
        SlurmSilent: the controller does not answer.
    """
    if not job_ids:
        return {}
    # of an array all tasks; of a single id that it does not know squeue says that it is invalid, of several, nothing
    wanted = list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
    wanted.append(wanted[0])
    try:
        queue = ask(
            "squeue", "--states=all", "--array", "--noheader", f"--jobs={','.join(wanted)}", "--format=%i|%T|%r|%N|%j"
        )
    except SiteError as error:
        raise SlurmSilent(str(error)) from None
    found = {
        words[0]: Listed(words[1], words[4], words[2], words[3])
        for words in (line.split("|", 4) for line in queue.splitlines() if line.count("|") >= 4)
    }
    forgotten = [job_id for job_id in job_ids if job_id not in found]
    return found | _accounted(forgotten)


def _accounted(job_ids: Sequence[str]) -> dict[str, Listed]:
    """What sacct says; nothing on a cluster without accounting, or where that does not answer."""
    if not job_ids or not shutil.which("sacct"):
        return {}
    fields = "--format=JobID,State,NodeList,JobName"
    try:
        text = ask(
            "sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={','.join(job_ids)}", fields, check=False
        )
    except SiteError:
        return {}
    rows = (line.split("|", 3) for line in text.splitlines() if line.count("|") >= 3)
    return {job_id: Listed(state.partition(" ")[0], name, "", nodes) for job_id, state, nodes, name in rows}


def host_names(node_list: str) -> list[str]:
    return ask("scontrol", "show", "hostnames", node_list).split()


def node_address(node: str) -> str:
    """Where Slurm itself reaches a node: a name or an IPv4 address."""
    found = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "--oneliner", "show", "node", node))
    return found[1] if found else node


def setting(name: str) -> str | None:
    """A line of slurm.conf as it is in force, such as SlurmdTimeout."""
    return settings().get(name)


def settings() -> dict[str, str]:
    """All of them."""
    return dict(re.findall(r"^([\w\[\]]+)\s*=\s*(.*?)\s*$", ask("scontrol", "show", "config"), re.MULTILINE))


def partition_settings(name: str) -> dict[str, str]:
    """What slurm.conf says of a partition, such as GraceTime."""
    return dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "--oneliner", "show", "partition", name)))


def controller_address() -> str | None:
    """The address of the machine that slurmctld runs on, where slurm.conf has it."""
    found = re.search(r"\((.+)\)", setting("SlurmctldHost[0]") or "")
    return found[1] if found else None


def requeue(job_id: str) -> None:
    ask("scontrol", "requeue", job_id)


def cancel(*job_ids: str) -> None:
    ask("scancel", *job_ids)


def cancel_named(name: str, user: str) -> None:
    """All jobs of this name, if there are any."""
    ask("scancel", f"--name={name}", f"--user={user}", check=False)


@dataclass(frozen=True)
class Task:
    """This node's part of the job: its number, the job's id, how often Slurm has restarted it, and its nodes.
    ``can_ask``: whether Slurm's commands are here, and Slurm answers them."""

    job: str
    node: int
    nodes: int
    node_list: str
    restart: int
    can_ask: bool = True

    @classmethod
    def here(cls) -> Task:
        env = os.environ
        return cls(
            job=_job_id(env),
            node=int(env["SLURM_NODEID"]),
            nodes=int(env["SLURM_JOB_NUM_NODES"]),
            node_list=env["SLURM_JOB_NODELIST"],
            restart=int(env.get("SLURM_RESTART_COUNT", "0")),
        )


def _job_id(env: Mapping[str, str]) -> str:
    """``12``, or ``12_3`` for a task of an array: a plain number may also mean the whole array."""
    array = env.get("SLURM_ARRAY_JOB_ID")
    return env["SLURM_JOB_ID"] if array is None else f"{array}_{env['SLURM_ARRAY_TASK_ID']}"
