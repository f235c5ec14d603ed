"""Checks of Slurm: its settings, and the probes, run as one small job with one task per node."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.config.schema import ClusterConfig, ContainerRuntime
from launcher.errors import ConfigError
from launcher.extensions.doctor.check import Check, failure, ok, warning
from launcher.extensions.doctor.probe import Answer, ProbeRequest, read_answers, run_slurm_task
from launcher.launch.slurm import client, submit
from launcher.launch.slurm.client import ENDED, WAITING, SlurmJob
from launcher.plan.host import Partition
from launcher.plan.launch_plan import LaunchPlan, node_range
from launcher.plan.sbatch_options import clock, least_s
from launcher.process import wait_until


def partition(found: Partition, state: str) -> Check:
    """Check a partition. ``state``: UP, or the reason why no job starts there."""
    cores = str(found.cores) if found.cores == found.most_cores else f"{found.cores} to {found.most_cores}"
    gres = f", {' or '.join([*found.gres, *(['none'] if found.mixed else [])])} a node" if found.gres else ""
    shown = f"{found.name}: {found.nodes} nodes, {cores} cores{gres}"
    if state != "UP":
        remedy = "Choose another cluster.partition (see `sinfo`)."
        return warning("partition", f"{shown}; its state is {state}: no job starts there", remedy)
    return ok("partition", shown)


def time_limits(found: Partition, config: ClusterConfig) -> Check:
    """Check that the time limit of a job without cluster.time suffices for one checkpoint."""
    longest = "none" if found.limit_s is None else clock(found.limit_s)
    shown = f"longest {longest}, by default {'the longest' if found.default_s is None else clock(found.default_s)}"
    if config.time is not None:
        return ok("time limit", f"cluster.time={config.time}; the partition's: {shown}")
    limit_s = found.limit_s if found.default_s is None else found.default_s
    least = least_s(config)
    if limit_s is None:
        remedy = (
            'Set cluster.time, such as "04:00:00": Slurm starts short jobs sooner, and the run resumes in later ones.'
        )
        return warning("time limit", f"{shown}: jobs have no time limit", remedy)
    if limit_s < least:
        remedy = f'Set cluster.time="{clock(-(-least // 60) * 60)}" or more.'
        return warning("time limit", f"{shown}: too short for one checkpoint, which needs {clock(least)}", remedy)
    return ok("time limit", shown)


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
    shown = f"PreemptMode={mode}, GraceTime={given_s} s"
    remedy = "Lower checkpoint.every_minutes, or ask the administrators for "
    if "preempt_send_user_signal" not in settings.get("SlurmctldParameters", ""):
        return warning(
            "preemption", f"{shown}, without the signal to save: progress since the last checkpoint is lost",
            f"{remedy}SlurmctldParameters=preempt_send_user_signal.",
        )  # fmt: skip
    if given_s < grace_s:
        return warning(
            "preemption", f"{shown}: shorter than cluster.grace_s={grace_s}, which workers may take to save",
            f"{remedy}a GraceTime of {grace_s} s; or lower cluster.grace_s if a save is quick.",
        )  # fmt: skip
    return ok("preemption", f"{shown}, and the signal to save comes first")


def container(plan: LaunchPlan) -> list[Check]:
    """Check what is known here of the job's container, if it has one."""
    slurm = plan.cluster.slurm
    if slurm is None or slurm.container is None:
        return []
    try:
        submit.require_container(plan)
    except ConfigError as error:
        found, _, remedy = str(error).partition("\n")
        return [failure("container", found, remedy.strip())]
    shown = f"{slurm.container}, for {slurm.container_runtime.value}"
    if slurm.container_runtime is ContainerRuntime.pyxis and "--container-image" not in client.ask("srun", "--help"):
        found = f"{shown}; srun on this host has no --container-image"
        return [warning("container", found, "Without pyxis on the nodes make a .sif file of it, for apptainer.")]
    tracking = client.settings().get("ProctrackType")
    if slurm.container_runtime is ContainerRuntime.apptainer and tracking != "proctrack/cgroup":
        found = f"{shown}; ProctrackType={tracking}: stop signals also end the process that mounts the image"
        return [warning("container", found, "Without proctrack/cgroup use an apptainer that is installed with setuid.")]
    return [ok("container", shown)]


NAME = "launch-doctor"
_LIMIT_S = 420
_POLL_S = 0.5
# seconds; a network file system may show new files late
_SHOWN_WITHIN_S = 10
_ENDS_WITHIN_S = 60
# seconds; if the queue is longer than this, the user had better ask again later
QUEUED_AT_MOST_S = 180
# a failing task does not end the others, and all output goes through the first node, even from nodes that do not see
# the directory
_SRUN = ("--kill-on-bad-exit=0", "--output=all", "--label")


@dataclass(frozen=True)
class ProbeJob:
    """Result of the doctor's job.

    Args:
        job: last state of the job; None if Slurm has forgotten it.
        hosts: names of its nodes, in order; empty if it never ran.
        answers: answers by node.
        output: last output line by task.
    """

    id: str
    job: SlurmJob | None
    hosts: list[str]
    answers: dict[int, Answer]
    output: dict[int, str]


def probe_options(config: ClusterConfig, partition: Partition | None) -> ClusterConfig:
    """Return the user's cluster options for the doctor's job: short time limit, no grace period, no dependency."""
    longest = None if partition is None else partition.limit_s
    time_s = _LIMIT_S if longest is None else min(_LIMIT_S, longest)
    # for a range, the smallest number of nodes
    nodes = node_range(config.nodes).least
    return dataclasses.replace(config, nodes=nodes, time=clock(time_s), grace_s=1, dependency=None)


def run_probes(plan: LaunchPlan, request: ProbeRequest, say: Callable[[str], None]) -> ProbeJob:
    """Submit the doctor's job, wait for its end, and read the answers. The job is cancelled if it does not end.

    Raises:
        ConfigError, SiteError: Slurm refuses the job, or does not answer.
    """
    folder, nodes = plan.paths.root, plan.cluster.nodes
    job_id = submit.submit_function(_without_requeue(plan), run_slurm_task, request, str(folder), srun=_SRUN)
    try:
        job = _follow(job_id, folder, nodes, say)
    finally:
        _end(job_id)
    hosts = client.host_names(job.nodes) if job is not None and job.nodes else []
    completed = job is not None and job.state == "COMPLETED"
    wait_until(lambda: len(_done(folder, nodes)) == nodes, _SHOWN_WITHIN_S if completed else 0, _POLL_S)
    return ProbeJob(job_id, job, hosts, read_answers(folder, nodes), _last_lines(plan.paths.slurm))


def _done(folder: Path, nodes: int) -> set[int]:
    """Return the nodes whose probes have finished."""
    return {node for node, answer in read_answers(folder, nodes).items() if answer.get("done")}


def _without_requeue(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan without requeueing, which would double the user's wait."""
    assert plan.cluster.slurm is not None
    options = {name: value for name, value in plan.cluster.slurm.options.items() if name != "requeue"}
    slurm = dataclasses.replace(plan.cluster.slurm, options=options | {"no-requeue": True})
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, slurm=slurm))


def _follow(job_id: str, folder: Path, nodes: int, say: Callable[[str], None]) -> SlurmJob | None:
    """Wait until the job is over, all nodes that see the directory are done, or the job was pending for too long."""
    shown = ""
    end = time.monotonic() + QUEUED_AT_MOST_S
    while True:
        job = client.job(job_id)
        if job is None or job.state in ENDED:
            return job
        reason = "" if job.reason == "None" else f": {job.reason}"
        state = f"pending{reason}" if job.state in WAITING else f"{job.state.lower()} on {job.nodes}"
        if state != shown and job.state != "COMPLETING":
            say(f"job {job_id} is {state}")
            shown = state
        if job.state in WAITING and time.monotonic() > end:
            return job
        if 0 < len(_done(folder, nodes)) == len(read_answers(folder, nodes)) < nodes:
            return job
        time.sleep(_POLL_S)


def _end(job_id: str) -> None:
    """Cancel the job and wait for its end, because its processes write to the directory that is removed next."""
    job = client.job(job_id)
    if job is not None and job.state not in ENDED | {"COMPLETING"}:
        client.cancel(job_id)
    wait_until(lambda: (job := client.job(job_id)) is None or job.state in ENDED, _ENDS_WITHIN_S, _POLL_S)


def _last_lines(folder: Path) -> dict[int, str]:
    """Return the last output line of each task; srun prefixes every line with the task's number."""
    lines = [line for log in sorted(folder.glob("*_log.out")) for line in log.read_text(errors="replace").splitlines()]
    labelled = [re.fullmatch(r"\s*(\d+): (.*\S)\s*", line) for line in lines]
    return {int(match[1]): match[2] for match in labelled if match}


def judge_job(probes: ProbeJob, nodes: int, folder: Path, *, in_container: bool = False) -> list[Check]:
    """Return failures of the job itself, and of each node without an answer, with the likely cause."""
    job, checks = probes.job, list[Check]()
    if job is not None and job.state in WAITING:
        found = f"Slurm gave none within {QUEUED_AT_MOST_S} s: job {probes.id} was pending ({job.reason})"
        return [failure("nodes", found, "See `sinfo` and `sinfo -R`; or ask again when the queue is shorter.")]
    if job is not None and job.state in ENDED - {"COMPLETED", "FAILED"}:
        remedy = "See `sinfo -R` and Slurm's logs of the nodes; a job that trains would have ended the same way."
        checks.append(failure("job", f"Slurm ended job {probes.id}: {job.state} ({job.reason})", remedy))
    run_dir = folder.parent
    shared = "Use a run.dir on a disk that the login node and all nodes share."
    # if the first node cannot write its output, Slurm reports nothing else
    if not probes.answers and (job is None or (job.state != "COMPLETED" and not probes.output)):
        state = "forgotten" if job is None else f"{job.state} ({job.reason})"
        found = f"the nodes do not see {run_dir}: job {probes.id} ended without output, {state}"
        return [*checks, failure("run directory", found, shared, probes.hosts[0] if probes.hosts else None)]
    for node in sorted(set(range(nodes)) - probes.answers.keys()):
        host = probes.hosts[node] if node < len(probes.hosts) else f"node {node}"
        output = probes.output.get(node, "")
        if not output or str(folder) in output:
            found = f"the node does not see {run_dir}: it wrote no answer there"
            checks.append(failure("run directory", found, shared, host))
        else:
            name, remedy = (
                "python",
                "The interpreter, its packages and launcher must have the same paths as on the login node.",
            )
            if in_container:
                name, remedy = (
                    "container",
                    "The image needs this version of launcher in its python3, and the node its runtime.",
                )
            checks.append(failure(name, f"no probe ran: {output}", remedy, host))
    return checks
