"""What Slurm is set to do with a job: time limits, requeue, preemption, accounting. Its settings in, checks out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.check import Check, ok, warning
from launcher.config import ClusterConfig
from launcher.sbatch import clock, least_s
from launcher.site import Partition, torch_has_cuda


def partition(found: Partition, state: str) -> Check:
    """``state``: UP, or why no job starts there."""
    cores = str(found.cores) if found.cores == found.most_cores else f"{found.cores} to {found.most_cores}"
    gres = f", {' or '.join([*found.gres, *(['none'] if found.mixed else [])])} a node" if found.gres else ""
    told = f"{found.name}: {found.nodes} nodes, {cores} cores{gres}"
    if state != "UP":
        remedy = "Choose another cluster.partition (see `sinfo`)."
        return warning("partition", f"{told}; its state is {state}: no job starts there", remedy)
    return ok("partition", told)


def gpus(found: Partition, torch: str) -> list[Check]:
    """Whether torch, by its version here, can use those that the nodes have."""
    if not found.gpus or torch_has_cuda(torch):
        return []
    told = f"a node of {found.name} has {found.gpus}, and torch {torch} is a build for CPUs"
    return [warning("gpu", told, "Install the CUDA build of torch; CPU workers run until then.")]


def time_limits(found: Partition, config: ClusterConfig) -> Check:
    """What a job gets that names none, against what one checkpoint needs."""
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
    """``partition``: its settings. ``grace_s``: seconds that workers may need to save."""
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
    """``sacct``: whether the command is there. Nothing depends on it."""
    kept = settings.get("AccountingStorageType", "?")
    age = settings.get("MinJobAge", "?")
    if sacct and not kept.endswith("/none"):
        return ok("accounting", f"sacct ({kept}); Slurm itself remembers ended jobs for {age}")
    why = "no sacct" if not sacct else f"nothing is kept ({kept})"
    return ok("accounting", f"{why}: not needed; Slurm itself remembers ended jobs for {age}")
