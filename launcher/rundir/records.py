"""Records of a run: job.json (submissions), events.jsonl, and the failure in summary.json.

It is what the ledger begins with. Written before a job is submitted, so that none is ever without it.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from launcher.errors import UserError
from launcher.rundir.files import read_json, write_json
from launcher.rundir.paths import RunPaths


@dataclass(frozen=True)
class Submission:
    """``at``: ISO 8601, UTC. ``host``, ``user``: from where and by whom. ``job``: Slurm's id; None for a job of this
    host's own, and until Slurm has given one. ``pid``, ``born``: of the `launch` that runs such a job. ``cancelled``:
    whether a person wanted no more of it; ``refused``: whether Slurm did not take it. ``name``: the
    job's, where that is not the run's. ``ended``: whether the `launch` of a job of this host's own is through with it:
    its process may live on, and run others."""

    at: str
    host: str
    user: str
    job: str | None = None
    pid: int | None = None
    born: str | None = None
    cancelled: bool = False
    refused: bool = False
    name: str | None = None
    ended: bool = False

    @classmethod
    def now(cls) -> Submission:
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname(), _user())

    def by_this_process(self) -> Submission:
        return dataclasses.replace(self, pid=os.getpid(), born=born(os.getpid()))

    def runs_here(self) -> bool | None:
        """Whether the `launch` of a job without a scheduler is alive; None where only its own host can tell."""
        if self.host != socket.gethostname():
            return None
        return not self.ended and self.pid is not None and born(self.pid) == self.born


def submissions(paths: RunPaths) -> list[Submission]:
    return parse_submissions(read_json(paths.job) or {})


def parse_submissions(known: dict[str, Any]) -> list[Submission]:
    """What a newer version knows beside is left out; none where it is no job.json at all."""
    names = {field.name for field in dataclasses.fields(Submission)}
    try:
        return [
            Submission(**{name: value for name, value in entry.items() if name in names})
            for entry in known.get("submissions", [])
        ]
    except (AttributeError, TypeError):
        return []


def add_submission(paths: RunPaths, submission: Submission) -> int:
    """Note one more; its number, from 0, which no other one ever has: two that had it could both write.

    Raises:
        UserError: somebody else is about to send off the run too.
    """
    earlier = submissions(paths)
    require_nobody_runs(paths)
    taken = paths.submission(len(earlier))
    try:
        taken.touch(exist_ok=False)
    except FileExistsError:
        raise UserError(f"{paths.root.name}: is being sent off by somebody else at this moment.") from None
    try:
        _write(paths, [*earlier, submission])
    except OSError:
        taken.unlink()
        raise
    return len(earlier)


def require_nobody_runs(paths: RunPaths) -> None:
    """Raises UserError where another `launch` on this host has begun the run since one looked how it stands."""
    newest = submissions(paths)[-1:]
    if newest and newest[0].pid != os.getpid() and newest[0].runs_here():
        raise UserError(f"{paths.root.name}: is running: another `launch`, {newest[0].pid}, has just begun it.")


def amend_submission(paths: RunPaths, **known: Any) -> None:
    """Something more is known of the last one: its job, or that it was cancelled."""
    *earlier, last = submissions(paths)
    _write(paths, [*earlier, dataclasses.replace(last, **known)])


def _write(paths: RunPaths, entries: list[Submission]) -> None:
    write_json(paths.job, {"submissions": [dataclasses.asdict(entry) for entry in entries]})


def born(pid: int) -> str | None:
    """What tells this process from a later one of the same number; None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] == "Z" else f"{boot}/{fields[19]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return str(os.getuid())


def note_event(paths: RunPaths, event: str, **known: Any) -> None:
    """Append an event. ``event``: submitted, changed, started, restarted, stopped, killed, requeued, not requeued,
    hang, disconnected, lost, failed, done, cancelled."""
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **known})
    with paths.events.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_events(paths: RunPaths) -> list[dict[str, Any]]:
    """Without lines that are torn, or were written into each other by two hosts: the others still tell the story."""
    try:
        lines = paths.events.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event: Any = json.loads(line)
    except ValueError:
        return None
    # the end of a torn line may be JSON too: a part of the event
    whole = isinstance(event, dict) and "at" in event and "event" in event
    return cast("dict[str, Any]", event) if whole else None


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
