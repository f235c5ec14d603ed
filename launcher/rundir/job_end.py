"""Ends of a job: its verdict, its exit status, and what follows.

| end                          | verdict | exit status           | agent restarts it    | Slurm requeues it            |
|------------------------------|---------|-----------------------|----------------------|------------------------------|
| finished                     | done    | 0; after Ctrl-C 130   | no                   | no                           |
| error that would occur again | failed  | 2 or 1, by its class  | no                   | no                           |
| only lost connections        | failed  | 1                     | cluster.max_restarts | yes, if it is `launch train` |
| any other error, or a hang   | failed  | 1                     | cluster.max_restarts | no                           |
| stopped and saved            | stopped | 75; by Ctrl-C 130     | no                   | if preempted or near its end |
| stopped without saving       | killed  | 130; nothing lost: 75 | no                   | -                            |
| the same in a Slurm job      | killed  | 75                    | no                   | if preempted or near its end |

launcher/launch/agent.py restarts, launcher/launch/slurm/outcome.py requeues.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
    NoGoodCheckpoint,
    Superseded,
    UserError,
    WrongCheckpoint,
    class_named,
)
from launcher.rundir.files import last_lines
from launcher.tracebacks import LOST, OF_TORCH

# content of summary.json, or fields to add to it
Summary = dict[str, Any]
Failure = dict[str, Any]
CTRL_C = "Ctrl-C"
# exit statuses of a job that a user or a scheduler stopped: a sweep does not continue either
STOPS = (EXIT_INTERRUPTED, EXIT_RESUMABLE)
# kinds of failures: one that no worker can report itself, that of a worker whose peer is gone, and that of a Slurm node
# whose slurmstepd is gone
HANG, LOST_PEER, LOST_STEP = "Hang", "LostPeer", "LostStep"


def failed_rank(failure: Mapping[str, Any]) -> int | None:
    """Return the rank that a message on ``failure`` names; None for the job as a whole, and for an error of this
    package that all ranks have raised and that says on which of them it arose."""
    named = class_named(str(failure.get("kind"))) is not None and re.search(r"\branks? \d", str(failure.get("error")))
    return None if named else failure.get("rank")


def error_of(failure: Mapping[str, Any]) -> str:
    """Return the rank that failed, if it was one, and its error, of one or more lines."""
    rank = failed_rank(failure)
    return ("" if rank is None else f"rank {rank}: ") + str(failure.get("error", ""))


def failure_record(
    error: str,
    log: object,
    *,
    rank: int | None = None,
    exit_code: int | None = None,
    kind: str | None = None,
    traceback: str | None = None,
    at: datetime | None = None,
) -> Failure:
    """Return one failure.

    Args:
        error: one or more lines, without a traceback.
        log: path with further information; None if there is none.
        rank: rank that failed; None for the job as a whole.
        kind: class of an error that this package raises intentionally, or one of those above.
        at: time by this host's clock.
    """
    record: Failure = {
        "rank": rank,
        "exit_code": exit_code,
        "kind": kind,
        "error": error,
        "traceback": traceback,
        "log": None if log is None else str(log),
    }
    return record if at is None else record | {"at": at.isoformat(timespec="milliseconds")}


def failed_summary(failure: Failure) -> Summary:
    """Return the verdict of a job that failed by ``failure``."""
    return {"verdict": "failed", "failure": failure}


def end_status(summary: Mapping[str, Any], stopped_by: str = "", *, nothing_lost: bool = False) -> int:
    """Return the exit status of a job.

    Args:
        stopped_by: how the job was stopped here; empty: as the summary says.
        nothing_lost: whether a job that was killed had nothing to save, and can resume.
    """
    if CTRL_C in (stopped_by, summary.get("stopped_by")):
        return EXIT_INTERRUPTED
    if (failure := summary.get("failure")) is not None:
        kind = class_named(str(failure.get("kind")))
        return EXIT_FAILED if kind is None else kind.exit_status
    killed = EXIT_RESUMABLE if nothing_lost else EXIT_INTERRUPTED
    return {"done": EXIT_DONE, "stopped": EXIT_RESUMABLE, "killed": killed}.get(summary["verdict"], EXIT_FAILED)


def fails_again(failure: Mapping[str, Any]) -> bool:
    """Return whether the same job would fail again: an error of its input, or of the checkpoint that it resumes."""
    kind = class_named(str(failure.get("kind")))
    return kind is not None and issubclass(kind, UserError | WrongCheckpoint | NoGoodCheckpoint | Superseded)


# the other end is gone, or has not answered for too long
_PERHAPS_LOST = re.compile(
    rf"{LOST.pattern}|[Ss]ocket [Tt]imeout|[Tt]imed out|recvValue failed|remote worker|NCCL|"
    "Dist(Backend|Network|Store)Error|did not come together"
)


def lost_its_peers(failure: Mapping[str, Any]) -> bool:
    """Return whether this is the error of a rank whose peer is gone, not an error of its own."""
    kind, text = failure.get("kind"), str(failure.get("error"))
    if kind in (LOST_PEER, LOST_STEP):
        return True
    if kind == HANG or fails_again(failure):  # the stacks of waiting ranks contain torch's texts
        return False
    if text == "killed by SIGABRT" and failure.get("log"):  # by NCCL's watchdog, which writes the cause into the log
        text += "\n".join(last_lines(Path(failure["log"]), 100))
    return bool(_PERHAPS_LOST.search(text) and OF_TORCH.search(text + str(failure.get("traceback"))))
