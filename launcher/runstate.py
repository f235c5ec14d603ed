"""How a run stands: what the ledger finds out, and what is shown of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """``requeued``: it has run, and Slurm will begin it again. ``stopped``: it was told to stop, and has saved.
    ``lost``: nobody runs it, and it left no verdict. ``unknown``: another host, or a Slurm that does not answer, could
    tell. ``impossible``: of a sweep's cell: its configuration cannot run."""

    pending = "pending"
    running = "running"
    requeued = "requeued"
    done = "done"
    stopped = "stopped"
    failed = "failed"
    cancelled = "cancelled"
    lost = "lost"
    unknown = "unknown"
    impossible = "impossible"


ACTIVE = frozenset({State.pending, State.running, State.requeued})


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as it stands. ``detail``: why, in a few words. ``step``, ``steps``: optimizer steps recorded, and
    planned. ``nodes``: that it runs on, or ran on last; ``ranks``: on all of them, None before it has begun.
    ``submissions``: how often it was sent off. ``sweep``, ``cell``: the directory of the sweep that it is of, and what
    tells its cell from the others. ``precision``: number format of the forward and backward pass; auto before it was
    decided, None for a script of the user's own."""

    name: str
    dir: str
    kind: str
    state: State
    detail: str
    user: str
    created: str
    job: str | None
    nodes: str
    ranks: int | None
    submissions: int
    step: int | None
    steps: int | None
    loss: float | None
    failure: dict[str, Any] | None
    sweep: str | None = None
    cell: str | None = None
    precision: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
