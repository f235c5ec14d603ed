"""One node's part of a job of Slurm's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


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
