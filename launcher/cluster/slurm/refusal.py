"""Slurm does not take a job: why, in its own words, and what there is instead."""

from __future__ import annotations

import re
import shutil

from launcher.cluster.jobfile import Submission
from launcher.cluster.slurm import client
from launcher.errors import ConfigError, SiteError, UserError
from launcher.plan import LaunchPlan

# options that say which nodes will do
_OF_NODES = (
    "partition", "nodes", "cpus-per-task", "mem", "gpus-per-node", "gres", "gpus", "constraint", "exclude", "nodelist",
    "exclusive", "reservation",
)  # fmt: skip


def refusal(plan: LaunchPlan, said: str) -> UserError:
    """Slurm's own words (``said``: what sbatch printed), with the key they are about and what there is."""
    lines = [line.strip() for line in said.splitlines() if "error:" in line]
    words = "; ".join(re.sub(r"^sbatch: error: ", "", line) for line in lines) or " ".join(said.split())
    assert plan.cluster.slurm is not None
    options = plan.cluster.slurm.options
    for pattern, key, option, there in (
        (r"partition name|invalid partition", "cluster.partition", "partition", _partitions),
        (r"account|Account", "cluster.account", "account", _accounts),
        (r"qos|QOS", "cluster.qos", "qos", _qos),
        (r"gres|generic resource|GRES|gpus", "cluster.workers_per_node", "gpus-per-node", _gres),
        (r"[Ff]eature", "cluster.constraint", "constraint", _features),
        (r"[Dd]ependency", "cluster.dependency", "dependency", None),
        (r"[Mm]emory", "cluster.mem", "mem", _memory),
        (r"--time|[Tt]ime limit", "cluster.time", "time", None),
    ):
        # a wrong --gres is an "invalid feature" in Slurm's last line: what was asked for decides
        value = options.get(option) or (options.get("gres") if option == "gpus-per-node" else None)
        if re.search(pattern, words) and value is not None:
            if option == "gpus-per-node" and "gres" in options:
                key = "cluster.sbatch.gres"
            return ConfigError(key, value, f"Slurm refuses it: {words}.", there() if there is not None else "")
    asked = ", ".join(f"{name}={value}" for name, value in options.items() if name in _OF_NODES)
    return SiteError(
        f"Slurm refuses the job: {words}.\n  Asked for: {asked}.\n  {_nodes()}\n"
        "  `launch plan` with the same overrides shows the batch script."
    )


def _partitions() -> str:
    return f"There are: {', '.join(partition.name for partition in client.partitions())}."


def _nodes() -> str:
    lines = client.ask("sinfo", "--all", "--noheader", "--format=%R: %D of %c cores, %m MB, gres %G, features %f")
    return f"Nodes by partition: {'; '.join(lines.replace('(null)', 'none').splitlines())}."


def _gres() -> str:
    there = [f"{p.name}: {', '.join(p.gres) or 'none'}" for p in client.partitions()]
    return f"A node of each partition has: {'; '.join(there)}."


def _features() -> str:
    return f"There are: {_listed('sinfo', '--all', '--noheader', '--format=%f')}."


def _memory() -> str:
    return f"Nodes have (MB): {_listed('sinfo', '--all', '--noheader', '--format=%m')}."


def _accounts() -> str:
    return f"Yours are: {_association('account')}."


def _qos() -> str:
    return f"Yours are: {_association('qos')}."


def _association(field: str) -> str:
    if shutil.which("sacctmgr") is None:
        return "not known here"
    user = f"user={Submission.now().user}"
    return _listed("sacctmgr", "--noheader", "--parsable2", "show", "assoc", user, f"format={field}")


def _listed(*command: str) -> str:
    names = {name for name in client.ask(*command, check=False).replace(",", "\n").split() if name != "(null)"}
    return ", ".join(sorted(names)) or "none that Slurm tells of"
