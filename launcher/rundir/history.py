"""History of a run: its submissions (job.json), its events (events.jsonl), and the failure in summary.json.

A submission is recorded before the job is submitted, so that no job is without one.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.rundir.files import object_from_json, read_bytes, read_json, write_json
from launcher.rundir.paths import RunPaths


@dataclass(frozen=True)
class Submission:
    """One submission of a run.

    Attributes:
        at: ISO 8601, UTC.
        host, user: submitting host and user.
        job: Slurm's id; None for a local job, and until Slurm has assigned one.
        pid, born: process id and start time of the `launch` that runs a local job.
        cancelled: whether a user cancelled it.
        refused: whether Slurm refused it.
        name: the job's name if it is not the run's.
        array_task: number of the job in its array, which identifies it until its id is recorded.
        ended: whether the `launch` of a local job is done with it; its process may continue with other runs.
    """

    at: str
    host: str
    user: str
    job: str | None = None
    pid: int | None = None
    born: str | None = None
    cancelled: bool = False
    refused: bool = False
    name: str | None = None
    array_task: int | None = None
    ended: bool = False

    @classmethod
    def now(cls) -> Submission:
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), socket.gethostname(), _user())

    def by_this_process(self) -> Submission:
        return dataclasses.replace(self, pid=os.getpid(), born=process_start_id(os.getpid()))

    def runs_here(self) -> bool | None:
        """Return whether the `launch` of a local job is alive; None if only another host can tell."""
        if self.host != socket.gethostname():
            return None
        return not self.ended and self.pid is not None and process_start_id(self.pid) == self.born


def submissions(paths: RunPaths) -> list[Submission]:
    return parse_submissions(read_json(paths.job) or {})


def parse_submissions(job: dict[str, Any]) -> list[Submission]:
    """Return the submissions in job.json's object; none if it is not one. Fields of newer versions are ignored."""
    names = {field.name for field in dataclasses.fields(Submission)}
    try:
        return [
            Submission(**{name: value for name, value in entry.items() if name in names})
            for entry in job.get("submissions", [])
        ]
    except (AttributeError, TypeError):
        return []


def last_accepted(entries: Sequence[Submission]) -> int:
    """Return the number of the last submission that was not refused, from 0; -1 without one."""
    return max((number for number, entry in enumerate(entries) if not entry.refused), default=-1)


def has_started(newest_incarnation: Mapping[str, Any], number: int) -> bool:
    """Return whether the newest attempt, the object in incarnation.json, is of submission ``number``."""
    return newest_incarnation.get("incarnation", "").partition(".")[0] == str(number)


def verdict_of(
    summary: Mapping[str, Any], newest_incarnation: Mapping[str, Any], entries: Sequence[Submission]
) -> str | None:
    """Return the verdict of the last submission; None until it starts, because the summary is of an earlier one."""
    number = last_accepted(entries)
    return summary.get("verdict") if number < 0 or has_started(newest_incarnation, number) else None


def early_end(summary: Mapping[str, Any]) -> str:
    """Return why a run that is done ended before its last step; empty if it did not."""
    return f"stopped early: {summary['stopped_early']}" if "stopped_early" in summary else ""


def add_submission(paths: RunPaths, submission: Submission) -> int:
    """Record one more submission and return its number, from 0.

    No two submissions have the same number, because both could then write.

    Raises:
        UserError: somebody else is submitting the run at the same time.
    """
    earlier = submissions(paths)
    require_nobody_runs(paths)
    marker = paths.submission(len(earlier))
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        raise UserError(
            f"{paths.root.name}: is being submitted by another `launch` at this moment.\n"
            f"  Wait, then look: launch status {paths.root.name}."
        ) from None
    try:
        _write(paths, [*earlier, submission])
    except OSError:
        marker.unlink()
        raise
    return len(earlier)


def require_nobody_runs(paths: RunPaths) -> None:
    """Check that no other `launch` on this host has started the run in the meantime.

    Raises:
        UserError: one has.
    """
    newest = submissions(paths)[-1:]
    if newest and newest[0].pid != os.getpid() and newest[0].runs_here():
        raise UserError(
            f"{paths.root.name}: is running: another `launch`, process {newest[0].pid}, has just started it."
        )


def amend_submission(paths: RunPaths, **fields: Any) -> None:
    """Add information to the last submission: its job, or that it was cancelled."""
    *earlier, last = submissions(paths)
    _write(paths, [*earlier, dataclasses.replace(last, **fields)])


def _write(paths: RunPaths, entries: list[Submission]) -> None:
    write_json(paths.job, {"submissions": [dataclasses.asdict(entry) for entry in entries]})


def process_start_id(pid: int) -> str | None:
    """Return boot id and start time, which identify a process beyond its id; None if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[0] == "Z" else f"{boot}/{fields[19]}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # user id without a name
        return str(os.getuid())


def note_event(paths: RunPaths, event: str, **fields: Any) -> None:
    """Append an event.

    Args:
        event: submitted, changed, started, resumed, not resumed, restarted, stopped, killed, requeued, not requeued,
            hang, disconnected, lost, failed, done, cancelled.
    """
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields})
    with paths.events.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_events(paths: RunPaths) -> list[dict[str, Any]]:
    """Return the events without lines that are torn or interleaved by two hosts."""
    try:
        lines = read_bytes(paths.events).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    # the end of a torn line may also be valid JSON: part of an event
    return [event for line in lines if is_event(event := object_from_json(line) or {})]


def is_event(fields: Mapping[str, Any]) -> bool:
    """Return whether ``fields`` has the time and the name of an event."""
    try:
        datetime.fromisoformat(fields["at"])
        return isinstance(fields["event"], str)
    except (KeyError, TypeError, ValueError):
        return False
