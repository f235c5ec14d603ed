"""Checks of a command that torchrun, srun or mpirun started several times, or that runs in an allocation of Slurm."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence

from launcher.config.choices import ClusterKind
from launcher.errors import EXIT_USER, UserError
from launcher.plan.clusters import cluster_of, typed_kinds
from launcher.process import SRUN, Copies, first_number
from launcher.quantities import count

# longer than another copy needs for its message; torchrun and mpirun end all copies once one has failed
_OTHERS_END_WITHIN_S = 60
_PORT = 29500


def require_one_copy(kind: str | None, words: Sequence[str], *, in_python: bool = False) -> None:
    """Check that no other process starts the same job. Only rank 0 shows the message, if the others can wait for it.

    Args:
        kind: kind of the cluster; None: that of a run that exists.
        words: words of the command.
        in_python: the job is started by a function of the Python API, which raises the error in each copy.

    Raises:
        UserError: torchrun, srun or mpirun has started several copies. One on each host is right for a kind of cluster
            whose command the user types there.
    """
    copies = Copies.of(os.environ, interactive=os.isatty(0))
    typed = kind is not None and cluster_of(kind).typed_on_each_host
    if copies is None or (typed and copies.on_each_host in (None, 1)):
        return
    if copies.rank and copies.on_each_host and not in_python:
        time.sleep(0 if copies.starter == SRUN else _OTHERS_END_WITHIN_S)
        raise SystemExit(EXIT_USER)
    workers = {"cluster.workers_per_node": copies.on_each_host} if (copies.on_each_host or 1) > 1 else {}
    remedy = f"`launch` starts the workers itself: {_command(words, workers if kind == ClusterKind.local else {})}"
    hosts = copies.number // (copies.on_each_host or 1)
    if typed:
        step = "srun --ntasks-per-node=1 " if copies.starter == SRUN else ""
        remedy = f"Start it once on each host: {step}{_command(words, {})}"
    elif kind == ClusterKind.local and hosts > 1:
        kinds = [ClusterKind.slurm.value, *(f"{each} on each host" for each in typed_kinds())]
        remedy += f"\n  On {hosts} hosts: add cluster.nodes={hosts} and cluster={' or cluster='.join(kinds)}."
    raise UserError(
        f"{copies.starter} has started {copies.number} copies of this command, and each would start the whole job.\n"
        f"  {remedy}\n  A copy that is to start a job of its own: env -u {' -u '.join(copies.ranks)} launch ..."
    )


def allocation_note(env: Mapping[str, str], words: Sequence[str]) -> str:
    """Return a note on how a job on this host uses its allocation of Slurm; empty if it has no other node."""
    if "SLURM_JOB_ID" not in env:
        return ""
    nodes = first_number(env, "SLURM_STEP_NUM_NODES") or first_number(env, "SLURM_JOB_NUM_NODES") or 1
    inside = "SLURMD_NODENAME" in env or "SLURM_PROCID" in env
    if (nodes == 1 and inside) or (nodes > 1 and not typed_kinds()):
        return ""
    here = "this host only" if inside else "this host, which need not be one of them"
    cores = first_number(env, "SLURM_CPUS_ON_NODE") or first_number(env, "SLURM_JOB_CPUS_PER_NODE")
    command = _command(words, {})
    if nodes > 1:
        words = [word for word in words if not word.startswith("cluster.rendezvous=")]
        # the shell replaces the rendezvous before srun starts
        first = f" cluster.rendezvous=$(scontrol show hostnames | head -n 1):{_PORT}"
        command = _command(words, {"cluster": typed_kinds()[0], "cluster.nodes": nodes}, first)
    return (
        f"launch: note: job {env['SLURM_JOB_ID']} of Slurm has {count(nodes, 'node')}, and the run uses {here}.\n"
        f"  To use its nodes: srun --nodes={nodes} --ntasks-per-node=1{f' --cpus-per-task={cores}' if cores else ''} "
        f"{command}"
    )


def _command(words: Sequence[str], keys: Mapping[str, object], first: str = "") -> str:
    """Return `launch` with ``words``, in which ``keys`` replace those of the same names.

    Args:
        first: text for the shell, after the verb.
    """
    verb, *rest = words or ("train",)
    rest = [word for word in rest if word.partition("=")[0] not in keys]
    return f"launch {verb}{first} {shlex.join([*(f'{key}={value}' for key, value in keys.items()), *rest])}".rstrip()
