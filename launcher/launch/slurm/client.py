"""Client of Slurm's commands, and what Slurm writes into a job's output: what was killed, and whether srun has given
up a node. sacct is optional, because many clusters lack it.

All output is parsed from formats that Slurm documents as stable: sinfo and squeue with an explicit format, and the
key=value lines of `scontrol -o`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launcher.errors import SiteError
from launcher.plan.host import Partition
from launcher.plan.sbatch_options import count_gpus, seconds
from launcher.rundir.files import Unreadable, open_file
from launcher.rundir.paths import RunPaths, SweepPaths

_TIMEOUT_S = 60
# of all nodes of a job together, to Slurm's controller
QUERIES_PER_S = 50
# final states of a job; an unknown state, perhaps newer than this list, counts as one in which the job continues
ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
     "PREEMPTED", "REVOKED", "TIMEOUT"}
)  # fmt: skip
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})


class SlurmSilent(SiteError):
    """Slurm's controller did not answer."""


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job as shown by `scontrol show job`.

    Args:
        reason: why the job waits.
        nodes: node list in Slurm's notation; empty before the job has nodes.
        restarts: number of restarts by Slurm.
        end: end of the time limit, local time of the Slurm controller.
        preempted: True while the job is being preempted.
    """

    state: str
    reason: str
    nodes: str
    restarts: int
    end: datetime | None
    preempted: bool


def _missing() -> list[str]:
    return [command for command in ("sbatch", "squeue", "scontrol", "sinfo", "srun") if not shutil.which(command)]


def available() -> bool:
    """Return True if Slurm's commands are on this machine, srun perhaps excepted."""
    return _missing() in ([], ["srun"])


def require() -> None:
    """Check that Slurm's commands are on this machine. Raises SiteError."""
    if missing := _missing():
        raise SiteError(
            f"cluster=slurm: {missing[0]} is not on this machine's PATH.\n"
            "  Type this on a login node of the cluster, or use cluster=local."
        )


def ask(*command: str, check: bool = True) -> str:
    """Run one of Slurm's commands and return its output.

    Raises:
        SlurmSilent: The controller does not answer.
        SiteError: The command fails otherwise; the message quotes its error output.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=command_environment()
        )
    except FileNotFoundError:
        raise SiteError(f"{command[0]} is not on this machine's PATH.") from None
    except subprocess.TimeoutExpired:
        raise SlurmSilent(f"Slurm does not answer: `{command[0]}` waited {_TIMEOUT_S} s.\n  Is slurmctld up?") from None
    if done.returncode and check:
        message = " ".join(done.stderr.split()) or f"status {done.returncode}"
        if re.search(r"[Uu]nable to contact slurm|Connection refused|timed out|configuration source", message):
            raise SlurmSilent(f"Slurm does not answer: {message}")
        raise SiteError(f"`{' '.join(command)}`: {message}")
    return done.stdout


def command_environment() -> dict[str, str]:
    """Return the environment without variables that change the commands' output format or the cluster they address."""
    ours = ("SLURM_CONF",)
    foreign = ("SLURM", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SBATCH_")
    return {name: value for name, value in os.environ.items() if name in ours or not name.startswith(foreign)}


def partitions() -> list[Partition]:
    """Return all partitions, the default one first."""
    rows: dict[str, list[list[str]]] = {}
    default = ""
    for line in ask("sinfo", "--all", "--exact", "--noheader", "--format=%P|%D|%s|%c|%G|%l|%L").splitlines():
        name, *values = line.split("|")
        default = name.rstrip("*") if name.endswith("*") else default
        rows.setdefault(name.rstrip("*"), []).append(values)
    nodes = _shapes()
    every = [_partition(name, groups, nodes.get(name)) for name, groups in rows.items()]
    return sorted(every, key=lambda partition: partition.name != default)


def _shapes() -> dict[str, set[tuple[int, int]]]:
    """Return the distinct (cores, GPUs) of each partition's nodes, without cores that are reserved for the system
    (CoreSpecCount), which sinfo counts."""
    shapes = defaultdict[str, set[tuple[int, int]]](set)
    for line in ask("scontrol", "--all", "--oneliner", "show", "node").splitlines():
        node = dict(re.findall(r"(\w+)=(\S*)", line))
        cores = node.get("CPUEfctv") or node.get("CPUTot", "")
        for partition in node.get("Partitions", "").split(",") if cores.isdecimal() else ():
            shapes[partition].add((int(cores), count_gpus(node.get("Gres", ""))))
    return shapes


def _partition(name: str, groups: list[list[str]], shapes: set[tuple[int, int]] | None) -> Partition:
    """Return the partition ``name``.

    Args:
        groups: sinfo's fields, one entry per group of equal nodes.
        shapes: distinct (cores, GPUs) of its nodes; None: those of sinfo.
    """
    counts, sizes, cores, gres, limits, defaults = zip(*groups, strict=True)
    most = sizes[0].rpartition("-")[2]
    return Partition(
        name=name,
        nodes=sum(map(int, counts)),
        max_nodes=int(most) if most.isdecimal() else None,
        shapes=tuple(
            sorted(shapes or {(int(n.rstrip("+")), count_gpus(has)) for n, has in zip(cores, gres, strict=True)})
        ),
        gres=tuple(sorted({entry for entry in gres if entry not in ("(null)", "")})),
        limit_s=seconds(limits[0]),
        default_s=seconds(defaults[0]),
    )


def job(job_id: str) -> SlurmJob | None:
    """Return a job, or None if Slurm has forgotten it. Raises SlurmSilent if the controller does not answer."""
    try:
        text = ask("scontrol", "--oneliner", "show", "job", job_id)
    except SlurmSilent:
        raise
    except SiteError as error:
        if "Invalid job id" in str(error):
            return None
        raise SlurmSilent(str(error)) from None  # while slurmctld starts, it reports this in many ways
    # the job's name comes second and may contain anything, such as key=value; the real fields come later and win
    fields = dict(re.findall(r"(?:^| )([A-Z][A-Za-z/:]*)=(\S*)", text))
    if "JobState" not in fields:
        return None
    return SlurmJob(
        state=fields["JobState"],
        reason=fields.get("Reason", "None"),
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        restarts=int(fields.get("Restarts", "0")),
        end=_moment(fields.get("EndTime", "")),
        preempted=_moment(fields.get("PreemptTime", "None")) is not None,
    )


def _moment(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # None, Unknown
        return None


@dataclass(frozen=True)
class Listed:
    """A job as listed by squeue or sacct. ``folder``: directory of its batch script, if it was asked for."""

    state: str
    name: str
    reason: str
    nodes: str
    folder: str = ""


def jobs(job_ids: Sequence[str]) -> dict[str, Listed]:
    """Return those of these jobs that Slurm knows, by id: from squeue, then from sacct, which remembers longer.

    Raises:
        SlurmSilent: The controller does not answer.
    """
    if not job_ids:
        return {}
    # ask for whole arrays; squeue fails for a single unknown id but omits it from a list, so the list has at least two
    wanted = list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
    wanted.append(wanted[0])
    try:
        queued = _queued(f"--jobs={','.join(wanted)}")
    except SiteError as error:
        raise SlurmSilent(str(error)) from None
    forgotten = [job_id for job_id in job_ids if job_id not in queued]
    return queued | _accounted(forgotten)


def _accounted(job_ids: Sequence[str]) -> dict[str, Listed]:
    """Return the jobs that sacct knows; empty on a cluster without accounting, or if it does not answer."""
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
    """Return the names of the nodes in a list in Slurm's notation, in its order."""
    return ask("scontrol", "show", "hostnames", node_list).split()


def node_address(node: str) -> str:
    """Return the name or IPv4 address at which Slurm reaches a node."""
    match = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "--oneliner", "show", "node", node))
    return match[1] if match else node


def settings() -> dict[str, str]:
    """Return the settings of slurm.conf as in force, such as SlurmdTimeout."""
    return dict(re.findall(r"^([\w\[\]]+)\s*=\s*(.*?)\s*$", ask("scontrol", "show", "config"), re.MULTILINE))


def partition_settings(name: str) -> dict[str, str]:
    """Return the settings of a partition, such as GraceTime."""
    return dict(re.findall(r"(\w+)=(\S*)", ask("scontrol", "--oneliner", "show", "partition", name)))


def controller_address() -> str | None:
    """Return the address of slurmctld's machine, or None if slurm.conf has none."""
    match = re.search(r"\((.+)\)", settings().get("SlurmctldHost[0]", ""))
    return match[1] if match else None


def requeue(job_id: str) -> None:
    ask("scontrol", "requeue", job_id)


def cancel(*job_ids: str) -> None:
    ask("scancel", *job_ids)


def named(names: Collection[str]) -> dict[str, Listed]:
    """Return all jobs of these names that Slurm has in its queue, by id, those included that have just ended.

    Raises:
        SiteError: The controller does not answer.
    """
    # squeue would take a name with a comma for two
    wanted = [] if any("," in name for name in names) else [f"--name={','.join(sorted(set(names)))}"]
    return {job_id: each for job_id, each in _queued(*wanted).items() if each.name in names}


def _queued(*which: str) -> dict[str, Listed]:
    queue = ask("squeue", "--states=all", "--array", "--noheader", *which, "--format=%i|%T|%r|%N|%j|%o")
    rows = (line.split("|", 5) for line in queue.splitlines() if line.count("|") >= 5)
    return {
        job_id: Listed(state, name, reason, nodes, os.path.dirname(script))  # noqa: PTH120
        for job_id, state, reason, nodes, name, script in rows
    }


@dataclass(frozen=True)
class SlurmTask:
    """This node's task of the Slurm job.

    Args:
        job: job id, ``12`` or ``12_3`` for an array task.
        node: number of this node, from 0.
        restart: number of restarts of the job by Slurm.
        can_ask: True if Slurm's commands are here and Slurm answers them.
        parent: process id of the slurmstepd that runs the task; 0 if it is not known.
    """

    job: str
    node: int
    nodes: int
    node_list: str
    restart: int
    can_ask: bool = True
    parent: int = 0

    @property
    def lost_parent(self) -> bool:
        """True if the task's slurmstepd has ended before the task."""
        return self.parent not in (0, os.getppid())

    @classmethod
    def here(cls) -> SlurmTask:
        env = os.environ
        array = env.get("SLURM_ARRAY_JOB_ID")
        return cls(
            # the plain number of an array task may also mean the whole array
            job=env["SLURM_JOB_ID"] if array is None else f"{array}_{env['SLURM_ARRAY_TASK_ID']}",
            node=int(env["SLURM_NODEID"]),
            nodes=int(env["SLURM_JOB_NUM_NODES"]),
            node_list=env["SLURM_JOB_NODELIST"],
            restart=int(env.get("SLURM_RESTART_COUNT", "0")),
            parent=os.getppid(),
        )


# lines of Slurm, and of bash, in the output of a job's batch script
_KILLED = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (?!Exited with )(.+?)\s*$", re.MULTILINE)
# bash's message, in the batch script
_KILLED_SRUN = re.compile(r": line \d+: +\d+ (Killed|Segmentation fault|Aborted|Bus error)\b.* srun --")
_SETUP = re.compile(r"^cluster\.setup: .+", re.MULTILINE)  # of submit.py
_GIVEN_UP = re.compile(r"^srun: error: (Cannot communicate with node|Aborting, io error)", re.MULTILINE)
_MOST_OUTPUT = 2**16


@dataclass(frozen=True)
class KilledTask:
    """Task of a job step that a signal ended. ``node``: number of the task, which is that of its node in the job."""

    host: str
    node: int
    how: str

    def __str__(self) -> str:
        return f"Slurm's task {self.node} on {self.host}, which ran the launcher's agent, was killed: {self.how}"


def file_of_output(paths: RunPaths, job: str) -> Path:
    """Return the file with the output of the job's batch script; cells of a sweep have it in the sweep's directory."""
    name = f"{job}_0_log.out"
    files = [folder / name for folder in (paths.slurm, SweepPaths(paths.root.parent).slurm)]
    return next((file for file in files if file.exists()), files[0])


def output_size(paths: RunPaths, job: str) -> int:
    """Return the size of that file in bytes: a restarted job appends to it."""
    try:
        return file_of_output(paths, job).stat().st_size
    except OSError:
        return 0


def killed_task(paths: RunPaths, job: str, begin: int) -> KilledTask | None:
    """Return the first task of the job that srun reports as killed after byte ``begin`` of the output, or None."""
    if (match := _KILLED.search(_output(paths, job, begin))) is None:
        return None
    return KilledTask(match[1], int(match[2]), _signal_name(match[3].removesuffix(" (core dumped)")))


def cause_of_end(paths: RunPaths, job: str, begin: int) -> str:
    """Return what ended the job, from its output after byte ``begin``: a killed task or srun, or a line of
    cluster.setup; empty if none of them."""
    if (task := killed_task(paths, job, begin)) is not None:
        return str(task)
    text = _output(paths, job, begin)
    if match := _KILLED_SRUN.search(text):
        return f"srun, which ran the tasks from the job's first node, was killed: {_signal_name(match[1])}"
    return match[0] if (match := _SETUP.search(text)) else ""


def _signal_name(text: str) -> str:
    return next((each.name for each in signal.Signals if signal.strsignal(each) == text), text)


def gave_up(paths: RunPaths, job: str, begin: int) -> bool:
    """Return True if srun aborts the step because it does not reach one of the nodes' slurmstepd."""
    return _GIVEN_UP.search(_output(paths, job, begin)) is not None


def _output(paths: RunPaths, job: str, begin: int) -> str:
    """Return the first 64 KiB of the output after byte ``begin``."""
    try:
        with open_file(file_of_output(paths, job)) as file:
            file.seek(begin, os.SEEK_SET)
            return file.read(_MOST_OUTPUT).decode(errors="replace")
    except (OSError, Unreadable):
        return ""
