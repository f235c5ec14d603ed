"""Outer job in which a command is typed: copies of it by torchrun, srun or mpirun, or an allocation of Slurm."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.config.choices import ClusterKind
from launcher.errors import EXIT_USER, UserError
from launcher.plan.clusters import cluster_of, typed_kinds
from launcher.quantities import count

SRUN = "srun"
# (starter, rank, copies, copies on this host) by variables; None: not known, so all of them
_STARTERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    (SRUN, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)
# longer than another copy needs for its message; torchrun and mpirun end all copies once one has failed
_OTHERS_END_WITHIN_S = 60
_PORT = 29500


@dataclass(frozen=True)
class Copies:
    """Processes that run the same command, of which this is one.

    Attributes:
        starter: torchrun, srun or mpirun.
        rank: number of this one, from 0.
        on_each_host: most copies on one host.
    """

    starter: str
    rank: int
    number: int
    on_each_host: int

    @property
    def hosts(self) -> int:
        return math.ceil(self.number / self.on_each_host)

    @classmethod
    def of(cls, env: Mapping[str, str], *, interactive: bool) -> Copies | None:
        """Return the copies that ``env`` describes; None for a process that is the only one.

        Args:
            interactive: the command is typed at a terminal, perhaps in the shell of `srun --pty`.
        """
        for starter, rank, number, local in _STARTERS:
            copies = _number(env, number)
            if rank not in env or copies < 2:
                continue
            if starter == SRUN and interactive:
                return None
            on_each = _number(env, local) if local else math.ceil(copies / (_number(env, "SLURM_STEP_NUM_NODES") or 1))
            return cls(starter, _number(env, rank), copies, on_each or copies)
        return None


def require_one_copy(kind: str | None, words: Sequence[str]) -> None:
    """Check that no other process starts the same job. Of several copies only that of rank 0 shows the message.

    Args:
        kind: kind of the cluster; None: that of a run that exists.
        words: words of the command.

    Raises:
        UserError: torchrun, srun or mpirun has started several copies. One on each host is right for a kind of cluster
            whose command the user types there.
    """
    copies = Copies.of(os.environ, interactive=os.isatty(0))
    if copies is None or (kind and copies.on_each_host == 1 and cluster_of(kind).typed_on_each_host):
        return
    if copies.rank:
        time.sleep(0 if copies.starter == SRUN else _OTHERS_END_WITHIN_S)
        raise SystemExit(EXIT_USER)
    command = _command_for(copies, os.environ, words) if kind == ClusterKind.local else _command(words, {})
    raise UserError(
        f"{copies.starter} has started {copies.number} copies of this command, and each would start the whole job.\n"
        f"  `launch` starts the workers itself: {command}"
    )


def _command_for(copies: Copies, env: Mapping[str, str], words: Sequence[str]) -> str:
    workers = {"cluster.workers_per_node": copies.on_each_host} if copies.on_each_host > 1 else dict[str, object]()
    if copies.hosts == 1 and copies.starter != SRUN:
        return _command(words, workers)
    job = _command(words, {"cluster": ClusterKind.slurm.value, "cluster.nodes": copies.hosts} | workers)
    if copies.hosts > 1 and not typed_kinds():
        return job
    if "SLURM_JOB_ID" in env:
        return f"{job}\n  In an allocation: {_in_allocation(copies.hosts, env, words, workers)}"
    there = {"cluster.rendezvous": f"{env.get('MASTER_ADDR', 'HOST')}:{_PORT}"}
    each = _command(words, {"cluster": typed_kinds()[0], "cluster.nodes": copies.hosts} | there | workers)
    return f"{each}\n  on each host; with Slurm: {job}"


def allocation_note(env: Mapping[str, str], words: Sequence[str]) -> str:
    """Return a note on how a job on this host uses its allocation of Slurm; empty if it has no other node."""
    if "SLURM_JOB_ID" not in env:
        return ""
    nodes = _number(env, "SLURM_STEP_NUM_NODES") or _number(env, "SLURM_JOB_NUM_NODES") or 1
    inside = "SLURMD_NODENAME" in env or "SLURM_PROCID" in env
    if (nodes == 1 and inside) or (nodes > 1 and not typed_kinds()):
        return ""
    here = "this host only" if inside else "this host, which need not be one of them"
    return (
        f"launch: note: job {env['SLURM_JOB_ID']} of Slurm has {count(nodes, 'node')}, and the run uses {here}.\n"
        f"  To use its nodes: {_in_allocation(nodes, env, words, {})}"
    )


def _in_allocation(nodes: int, env: Mapping[str, str], words: Sequence[str], workers: Mapping[str, object]) -> str:
    """Return the command that starts the job on all nodes of the allocation: one task with all cores on each."""
    cores = _number(env, "SLURM_CPUS_ON_NODE") or _number(env, "SLURM_JOB_CPUS_PER_NODE")
    step = f"srun --nodes={nodes} --ntasks-per-node=1{f' --cpus-per-task={cores}' if cores else ''}"
    if nodes == 1:
        return f"{step} {_command(words, workers)}"
    words = [word for word in words if not word.startswith("cluster.rendezvous=")]
    keys = {"cluster": typed_kinds()[0], "cluster.nodes": nodes, **workers}
    # the shell replaces the rendezvous before srun starts
    return f"{step} {_command(words, keys, f' cluster.rendezvous=$(scontrol show hostnames | head -n 1):{_PORT}')}"


def _command(words: Sequence[str], keys: Mapping[str, object], first: str = "") -> str:
    """Return `launch` with ``words``, in which ``keys`` replace those of the same names.

    Args:
        first: text for the shell, after the verb.
    """
    verb, *rest = words or ("train",)
    rest = [word for word in rest if word.partition("=")[0] not in keys]
    return f"launch {verb}{first} {shlex.join([*(f'{key}={value}' for key, value in keys.items()), *rest])}".rstrip()


def _number(env: Mapping[str, str], name: str) -> int:
    """Return the number at the beginning of a variable, such as 4 of "4(x2)"; 0 without one."""
    digits = env.get(name, "").partition("(")[0].partition(",")[0]
    return int(digits) if digits.isdecimal() else 0
