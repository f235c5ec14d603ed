"""Checks of Slurm: its settings, and the probes, run as one small job with one task per node."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config.schema import ClusterConfig
from launcher.doctor import host_facts, probe
from launcher.doctor.check import Check, failure, ok, warning
from launcher.doctor.host_facts import Answer
from launcher.launch.slurm import client, submit
from launcher.launch.slurm.client import ENDED, WAITING, Job
from launcher.plan.host import Partition, torch_has_cuda
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.sbatch import clock, least_s
from launcher.plan.worlds import node_range
from launcher.process import wait_until


def partition(found: Partition, state: str) -> Check:
    """Check a partition. ``state``: UP, or the reason why no job starts there."""
    cores = str(found.cores) if found.cores == found.most_cores else f"{found.cores} to {found.most_cores}"
    gres = f", {' or '.join([*found.gres, *(['none'] if found.mixed else [])])} a node" if found.gres else ""
    told = f"{found.name}: {found.nodes} nodes, {cores} cores{gres}"
    if state != "UP":
        remedy = "Choose another cluster.partition (see `sinfo`)."
        return warning("partition", f"{told}; its state is {state}: no job starts there", remedy)
    return ok("partition", told)


def gpus(found: Partition, torch: str) -> list[Check]:
    """Return a warning if the nodes have GPUs and the torch installed here is a CPU build."""
    if not found.gpus or torch_has_cuda(torch):
        return []
    told = f"a node of {found.name} has {found.gpus}, and torch {torch} is a build for CPUs"
    return [warning("gpu", told, "Install the CUDA build of torch; CPU workers run until then.")]


def time_limits(found: Partition, config: ClusterConfig) -> Check:
    """Check that the time limit of a job without cluster.time suffices for one checkpoint."""
    most = "none" if found.limit_s is None else clock(found.limit_s)
    told = f"longest {most}, by default {'the longest' if found.default_s is None else clock(found.default_s)}"
    if config.time is not None:
        return ok("time limit", f"cluster.time={config.time}; the partition's: {told}")
    given_s = found.limit_s if found.default_s is None else found.default_s
    least = least_s(config)
    if given_s is None:
        remedy = 'Set cluster.time, such as "04:00:00": Slurm then finds it a place sooner, and it goes on in turns.'
        return warning("time limit", f"{told}: a job has no end", remedy)
    if given_s < least:
        remedy = f'Set cluster.time="{clock(-(-least // 60) * 60)}" or more.'
        return warning("time limit", f"{told}: too short for one checkpoint, which needs {clock(least)}", remedy)
    return ok("time limit", told)


def requeue(settings: Mapping[str, str]) -> Check:
    by_default = "requeued by default" if settings.get("JobRequeue") == "1" else "not requeued by default"
    return ok(
        "requeue",
        f"the launcher asks for it (JobRequeue={settings.get('JobRequeue', '?')}: other jobs are {by_default}); "
        f"KillWait {settings.get('KillWait', '?')}",
    )


def preemption(settings: Mapping[str, str], partition: Mapping[str, str], grace_s: int) -> Check:
    """Check that preempted workers get time to save.

    Args:
        settings: slurm.conf.
        partition: settings of the partition.
        grace_s: seconds that the workers may take to save (cluster.grace_s).
    """
    kind = settings.get("PreemptType", "preempt/none")
    mode = partition.get("PreemptMode", settings.get("PreemptMode", "OFF"))
    if kind == "preempt/none" or mode == "OFF":
        return ok("preemption", f"none ({kind}, PreemptMode={mode})")
    grace = re.match(r"\d+", partition.get("GraceTime", "0"))
    given_s = int(grace[0]) if grace else 0
    told = f"PreemptMode={mode}, GraceTime={given_s} s"
    remedy = "Lower checkpoint.every_minutes, or ask the administrators for "
    if "preempt_send_user_signal" not in settings.get("SlurmctldParameters", ""):
        return warning(
            "preemption", f"{told}, without the signal to save: what came after the last checkpoint is lost",
            f"{remedy}SlurmctldParameters=preempt_send_user_signal.",
        )  # fmt: skip
    if given_s < grace_s:
        return warning(
            "preemption", f"{told}: shorter than cluster.grace_s={grace_s}, which workers may take to save",
            f"{remedy}a GraceTime of {grace_s} s; or lower cluster.grace_s where a save is quick.",
        )  # fmt: skip
    return ok("preemption", f"{told}, and the signal to save comes first")


def accounting(settings: Mapping[str, str], *, sacct: bool) -> Check:
    """Describe the accounting, which is optional. ``sacct``: True if the command exists."""
    kept = settings.get("AccountingStorageType", "?")
    age = settings.get("MinJobAge", "?")
    if sacct and not kept.endswith("/none"):
        return ok("accounting", f"sacct ({kept}); Slurm itself remembers ended jobs for {age}")
    why = "no sacct" if not sacct else f"nothing is kept ({kept})"
    return ok("accounting", f"{why}: not needed; Slurm itself remembers ended jobs for {age}")


NAME = "launch-doctor"
_LIMIT_S = 300
_LOOK_EVERY_S = 0.5
# seconds; a network file system may show new files late
_SHOWN_WITHIN_S = 10
_ENDS_WITHIN_S = 60
# seconds; if the queue is longer than this, the user had better ask again later
QUEUED_AT_MOST_S = 180
# a failing task does not end the others, and all output goes through the first node, even from nodes that do not see
# the directory
_APART = ("--kill-on-bad-exit=0", "--output=all", "--label")


@dataclass(frozen=True)
class Asked:
    """Result of the doctor's job.

    Args:
        job: last state of the job; None if Slurm has forgotten it.
        hosts: names of its nodes, in order; empty if it never ran.
        answers: answers by node.
        words: last output line by task.
    """

    id: str
    job: Job | None
    hosts: list[str]
    answers: dict[int, Answer]
    words: dict[int, str]


def small(config: ClusterConfig, partition: Partition | None) -> ClusterConfig:
    """Return the user's cluster options for the doctor's job: short time limit, no grace period, no dependency."""
    longest = None if partition is None else partition.limit_s
    time_s = _LIMIT_S if longest is None else min(_LIMIT_S, longest)
    # for a range, the smallest number of nodes
    nodes = node_range(config.nodes).least
    return dataclasses.replace(config, nodes=nodes, time=clock(time_s), grace_s=1, dependency=None)


def ask_nodes(plan: LaunchPlan, say: Callable[[str], None]) -> Asked:
    """Submit the doctor's job, wait for its end, and read the answers. The job is cancelled if it does not end.

    Raises:
        ConfigError, SiteError: Slurm refuses the job, or does not answer.
    """
    folder, nodes = plan.paths.root, plan.cluster.nodes
    job_id = submit.hand_over(_once(plan), probe.of_slurm, str(folder), srun=_APART)
    try:
        job = _follow(job_id, folder, nodes, say)
    finally:
        _end(job_id)
    hosts = client.host_names(job.nodes) if job is not None and job.nodes else []
    answers = _all(folder, nodes, patient=job is not None and job.state == "COMPLETED")
    return Asked(job_id, job, hosts, answers, _last_words(plan.paths.slurm))


def _once(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan without requeueing, which would double the user's wait."""
    assert plan.cluster.slurm is not None
    options = {name: value for name, value in plan.cluster.slurm.options.items() if name != "requeue"}
    slurm = dataclasses.replace(plan.cluster.slurm, options=options | {"no-requeue": True})
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, slurm=slurm))


def _follow(job_id: str, folder: Path, nodes: int, say: Callable[[str], None]) -> Job | None:
    """Wait until the job is over, all nodes that see the directory are done, or the job was pending for too long."""
    told = ""
    end = time.monotonic() + QUEUED_AT_MOST_S
    while True:
        job = client.job(job_id)
        if job is None or job.state in ENDED:
            return job
        why = "" if job.reason == "None" else f": {job.reason}"
        news = f"pending{why}" if job.state in WAITING else f"{job.state.lower()} on {job.nodes}"
        if news != told and job.state != "COMPLETING":
            say(f"job {job_id} is {news}")
            told = news
        if job.state in WAITING and time.monotonic() > end:
            return job
        said = host_facts.answers(folder, nodes)
        if 0 < len(said) < nodes and all(answer.get("done") for answer in said.values()):
            return job
        time.sleep(_LOOK_EVERY_S)


def _end(job_id: str) -> None:
    """Cancel the job and wait for its end, because its processes write to the directory that is removed next."""
    job = client.job(job_id)
    if job is not None and job.state not in ENDED | {"COMPLETING"}:
        client.cancel(job_id)
    wait_until(lambda: (job := client.job(job_id)) is None or job.state in ENDED, _ENDS_WITHIN_S, _LOOK_EVERY_S)


def _all(folder: Path, nodes: int, *, patient: bool) -> dict[int, Answer]:
    def complete() -> bool:
        found = host_facts.answers(folder, nodes)
        return len(found) == nodes and all(answer.get("done") for answer in found.values())

    wait_until(complete, _SHOWN_WITHIN_S if patient else 0, _LOOK_EVERY_S)
    return host_facts.answers(folder, nodes)


def _last_words(folder: Path) -> dict[int, str]:
    """Return the last output line of each task; srun prefixes every line with the task's number."""
    lines = [line for log in sorted(folder.glob("*_log.out")) for line in log.read_text(errors="replace").splitlines()]
    labelled = [re.fullmatch(r"\s*(\d+): (.*\S)\s*", line) for line in lines]
    return {int(found[1]): found[2] for found in labelled if found}


def judge(asked: Asked, nodes: int, folder: Path) -> list[Check]:
    """Return failures of the job itself; the probes' findings are in their answers."""
    if asked.job is not None and asked.job.state in WAITING:
        found = f"Slurm gave none within {QUEUED_AT_MOST_S} s: job {asked.id} was pending ({asked.job.reason})"
        return [failure("nodes", found, "See `sinfo` and `sinfo -R`; or ask again when the queue is shorter.")]
    return [*_ended(asked), *_silent(asked, nodes, folder)]


def _ended(asked: Asked) -> list[Check]:
    """Return a failure if Slurm ended the job."""
    if asked.job is None or asked.job.state not in ENDED - {"COMPLETED", "FAILED"}:
        return []
    remedy = "See `sinfo -R` and Slurm's logs of the nodes; a job that trains would have ended the same way."
    return [failure("job", f"Slurm ended job {asked.id}: {asked.job.state} ({asked.job.reason})", remedy)]


def _silent(asked: Asked, nodes: int, folder: Path) -> list[Check]:
    """Return a failure for each node without an answer, with the likely cause."""
    run_dir = folder.parent
    shared = "Use a run.dir on a disk that the login node and all nodes share."
    job = asked.job
    if not asked.answers and (job is None or job.state != "COMPLETED"):
        state = "forgotten" if job is None else f"{job.state} ({job.reason})"
        # if the first node cannot write its output, Slurm reports nothing else
        if job is None or not asked.words:
            first = asked.hosts[0] if asked.hosts else None
            found = f"the nodes do not see {run_dir}: job {asked.id} ended without a word, {state}"
            return [failure("run directory", found, shared, first)]
    checks: list[Check] = []
    for node in sorted(set(range(nodes)) - asked.answers.keys()):
        host = asked.hosts[node] if node < len(asked.hosts) else f"node {node}"
        words = asked.words.get(node, "")
        if not words or str(folder) in words:
            found = f"the node does not see {run_dir}: nothing of it came back"
            checks.append(failure("run directory", found, shared, host))
        else:
            remedy = "The interpreter, its packages and launcher must be where they are on the login node."
            checks.append(failure("python", f"no probe ran: {words}", remedy, host))
    return checks
