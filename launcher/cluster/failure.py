"""What summary.json says of the failure that ended a run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

Failure = dict[str, Any]
# the kind of one that no worker could tell itself
HANG = "Hang"


def failure(
    error: str,
    log: object,
    *,
    rank: int | None = None,
    exit_code: int | None = None,
    kind: str | None = None,
    traceback: str | None = None,
    at: datetime | None = None,
) -> Failure:
    """One failure.

    Args:
        error: in one line or more, without a traceback.
        log: where more can be read; None where nothing is left to read.
        rank: which failed; None for the job as a whole.
        kind: the class, of the errors that this package raises on purpose; or HANG.
        at: when it happened, by this host's clock.
    """
    told: Failure = {
        "rank": rank,
        "exit_code": exit_code,
        "kind": kind,
        "error": error,
        "traceback": traceback,
        "log": None if log is None else str(log),
    }
    return told if at is None else told | {"at": at.isoformat(timespec="milliseconds")}
