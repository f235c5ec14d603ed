"""Configuration of the tests' Slurm cluster: slurm.conf, its companions, and the program that answers `sacct`."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FREEZER = Path("/sys/fs/cgroup/freezer")
Proctrack = Literal["cgroup", "linuxproc", "pgid"]
Accounting = Literal["none", "shim"]
FIRST_PORT = 20000  # of virtual nodes, whose numbers are added to it
LOGIN = "login"  # the host of slurmctld, munged and whoever submits


@dataclass(frozen=True)
class Shape:
    """Size of a cluster. ``cpus``, ``gpus`` and ``memory_mb`` are those of each node, and need not exist.

    ``virtual``: all nodes are on one host, each a slurmd with a port of its own.
    """

    nodes: int
    cpus: int
    gpus: int
    memory_mb: int
    proctrack: Proctrack
    accounting: Accounting
    min_job_age_s: int
    virtual: bool = False

    @property
    def names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]


def best_proctrack() -> Proctrack:
    """cgroup finds processes that left their tree, but wants the root of cgroup v1's freezer, not a part of it."""
    return "cgroup" if os.access(FREEZER / "release_agent", os.W_OK) else "linuxproc"


def write(root: Path, shape: Shape, login: str, addresses: dict[str, str]) -> None:
    """Everything that the daemons read, under ``root``."""
    for name in ("etc", "log", "state", "spool", "munge", "bin", "dev", "freezer"):
        (root / name).mkdir()
    (root / "munge/key").write_bytes(os.urandom(1024))
    (root / "munge/key").chmod(0o600)
    lines = [f"{address} {name}" for name, address in {LOGIN: login, **addresses}.items()]
    (root / "etc/hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    gres = ""
    if shape.gpus:
        devices = [root / f"dev/gpu{number}" for number in range(shape.gpus)]
        for device in devices:
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # another /dev/null
        gres = "".join(f"NodeName={name} Name=gpu File={file}\n" for name in shape.names for file in devices)
    (root / "etc/gres.conf").write_text(gres)
    (root / "etc/cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={FREEZER.parent}\n")
    (root / "etc/slurm.conf").write_text(slurm_conf(root, shape, login, addresses))
    if shape.accounting == "shim":
        shim = (Path(__file__).parent / "sacct.py").read_text()
        (root / "bin/sacct").write_text(f"#!{sys.executable} -SE\n{shim}")
        (root / "bin/sacct").chmod(0o755)


def slurm_conf(root: Path, shape: Shape, login: str, addresses: dict[str, str]) -> str:
    each = f"CPUs={shape.cpus} RealMemory={shape.memory_mb}" + f" Gres=gpu:{shape.gpus}" * bool(shape.gpus)
    if shape.virtual:
        at, last = f"NodeHostname={LOGIN} NodeAddr={login}", shape.nodes
        nodes = f"NodeName=node[1-{last}] {at} Port=[{FIRST_PORT + 1}-{FIRST_PORT + last}] {each}"
    else:
        nodes = "\n".join(f"NodeName={name} NodeAddr={address} {each}" for name, address in addresses.items())
    return f"""\
ClusterName=tests
SlurmctldHost={LOGIN}({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits for its old credentials to expire, at least 5 s, by default 120, in which all nodes must start
AuthInfo=socket={root}/munge/socket,cred_expire={120 if shape.virtual else 5}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/state/slurmctld.pid
SlurmdPidFile={root}/spool/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
ProctrackType=proctrack/{shape.proctrack}
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
GresTypes=gpu
# the machine has fewer cores and less memory than its nodes say
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# a preempted job gets the signal of its --signal, then GraceTime, and is requeued
SlurmctldParameters=preempt_send_user_signal
KillWait=10
SlurmdTimeout=10
SlurmctldTimeout=30
MessageTimeout=10
BatchStartTimeout=10
MinJobAge={shape.min_job_age_s}
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=node1 MaxTime=10 DefaultTime=5 PriorityTier=1
"""
