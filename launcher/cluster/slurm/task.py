"""One node's part of a job of Slurm's."""

from __future__ import annotations

import os
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
            job=env["SLURM_JOB_ID"],
            node=int(env["SLURM_NODEID"]),
            nodes=int(env["SLURM_JOB_NUM_NODES"]),
            node_list=env["SLURM_JOB_NODELIST"],
            restart=int(env.get("SLURM_RESTART_COUNT", "0")),
        )
