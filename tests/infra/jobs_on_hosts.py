"""A small job over several hosts, typed on each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers import CORPUS, launch_command, patience
from tests.infra.hosts import Hosts

SMALL = (
    CORPUS, "precision=fp32", "task.width=64", "task.depth=1", "task.heads=2", "task.seq_len=16",
    "task.eval_samples=32",
    "batch.global_size=16", "batch.micro_size=1", "wandb.mode=disabled", "run.calibrate_s=0",
    "checkpoint.enabled=false", "schedule=constant", "schedule.warmup_steps=0", "run.name=job",
)  # fmt: skip


def start(there: Hosts, tmp_path: Path, *overrides: str, shared: bool = False, each: Any = ((), (), ())) -> list[Any]:
    """`launch train` on every host: in a directory of its own, or all in one."""
    processes: list[Any] = []
    for host in range(len(there.names)):
        place = tmp_path / ("all" if shared else f"host{host}")
        place.mkdir(exist_ok=True)
        job = (*SMALL, "cluster=hosts", f"cluster.nodes={len(there.names)}", "cluster.workers_per_node=1")
        where = f"cluster.rendezvous={there.address(0)}:29400"
        processes.append(there.start(host, launch_command("train", *job, where, *overrides, *each[host]), place))
    return processes


def finish(processes: list[Any], *statuses: int) -> list[str]:
    outputs = [process.communicate(timeout=patience(90))[0] for process in processes]
    assert tuple(process.returncode for process in processes) == statuses, "\n---\n".join(outputs)
    return outputs
