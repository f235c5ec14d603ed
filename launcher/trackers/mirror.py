"""Tracker process: copies metrics.jsonl to one tracker, line by line, beside the job.

    python -m launcher.trackers.mirror RUN_DIR INCARNATION TRACKER        end of standard input: no further records

Each start of a run has its own process for each tracker. It continues after the last step that the tracker's store has,
so that each step arrives once, however often this process is killed and whatever the run repeats after a resume.

Records are on disk before this process reads them, so nothing here can slow the job, stop it, or lose a step. A problem
is reported in TRACKER.json, for the commands that show the run, and the delivery is tried again, in a new interpreter:
at once the first time, then after longer and longer pauses. As soon as a newer attempt of the run starts, its process
owns the tracker's run, and this one exits silently.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.config.schema import PrecisionKind
from launcher.errors import EXIT_DONE, EXIT_FAILED, Superseded, UserError, without_credentials
from launcher.plan.run_plan import RunPlan
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import Tail, open_file, read_json, write_json, write_line
from launcher.rundir.paths import RunPaths
from launcher.trackers.installed import described_tracker, mirrors_of, tracker_class
from launcher.trackers.tracker import Tracker, entries_of
from launcher.trackers.tracker_processes import rest_text

POLL_S = 0.5
# seconds after which a tracker that does not return is reported; W&B itself gives up after 30
SILENT_AFTER_S = 60
# longest pause between two tries, seconds
LONGEST_PAUSE_S = 300
# a process that lived so long, in seconds, and delivered starts counting its trials again
WORKED_S = 120
AT_ONCE = 100  # entries of one delivery
LOOK_EVERY_S = 5  # for the log of another attempt; and how often the position in it is kept
MOST_OUTPUT = 2**18  # bytes of rank 0's output in one delivery
MOST_LETTERS = 300  # of an error's own text in a message
# Limit after the end of input: W&B waits for an unresponsive server without a limit, and a killed agent cannot end
# this process. A live agent waits less long (launcher/trackers/tracker_processes.py).
ENDS_WITHIN_S = 90


class Status:
    """Status file of a tracker, TRACKER.json in the run's directory."""

    def __init__(self, fence: Fence, tracker: str) -> None:
        self._fence, self._path = fence, fence.paths.tracker_status(tracker)

    @property
    def fields(self) -> dict[str, Any]:
        return read_json(self._path) or {}

    def set(self, **fields: Any) -> None:
        """Write ``fields`` if one of them has changed. If the disk is full, print that; the delivery continues.

        Raises:
            Superseded: a newer start of the run exists.
        """
        try:
            self._fence.check()
            before = self.fields
            if before | fields != before:
                write_json(self._path, before | fields)
        except OSError as error:
            write_line(f"The status cannot be written: {error}")


def main(run_dir: str, incarnation: str, tracker: str, trial: str = "0") -> int:
    """Mirror the run's record to one tracker.

    Args:
        incarnation: SUBMISSION.RESTART, the start of the agents that this process belongs to.
        trial: how often this failed in succession.
    """
    paths = RunPaths(Path(run_dir).resolve())
    fence = Fence(paths, Incarnation.parse(incarnation))
    while (plan := RunPlan.of_record(paths)) is None:  # a script of `launch run` has yet to make its engine
        if _ended():
            return EXIT_DONE
    if tracker not in mirrors_of(plan):
        return EXIT_DONE
    status = Status(fence, tracker)
    try:
        return _mirror_with_retry(plan, fence, tracker, status, int(trial))
    except Superseded as error:
        write_line(str(error))
        os._exit(EXIT_DONE)  # a normal exit would let W&B finish the run, which now belongs to the newer process


def _mirror_with_retry(plan: RunPlan, fence: Fence, tracker: str, status: Status, trial: int) -> int:
    mirror, began = _Mirror(plan, fence, tracker, status), time.monotonic()
    try:
        mirror.run()
        return EXIT_DONE
    except Superseded:
        raise
    except Exception as error:
        write_line(redacted(traceback.format_exc()), 2)
        # one that worked for a while and fails now is a new problem
        trial = 0 if mirror.delivered_any and time.monotonic() - began > WORKED_S else trial
        missing = isinstance(error, ImportError | UserError)
        ended = missing or (trial > 0 and _ended())
        if trial or missing:
            then = rest_text(plan.paths) if ended else "It is tried again, and training is not affected."
            status.set(problem=f"{problem_of(tracker, error, plan)} {then}")
        if ended:
            return EXIT_FAILED
        # the first time at once: a scheduler that ends a job may have killed W&B's own process too
        _pause(min(LONGEST_PAUSE_S, 2**trial) if trial else 0)
        again = ["launcher.trackers.mirror", plan.run.dir, str(fence.own), tracker, str(trial + 1)]
        with suppress(OSError):
            sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-P", "-m", *again])


class _Mirror:
    """One trial to copy the record to the tracker, until the end of input."""

    def __init__(self, plan: RunPlan, fence: Fence, tracker: str, status: Status) -> None:
        self._plan, self._fence, self._tracker, self._status = plan, fence, tracker, status
        self.delivered_any = False

    def run(self) -> None:
        self._fence.check()
        plan = self._plan
        while plan.precision.kind is PrecisionKind.auto and not _ended():  # wait for the workers' decision
            plan = RunPlan.of_record(plan.paths) or plan
        before = self._status.fields
        adapter = tracker_class(self._tracker)(plan, before)
        with watched(self._tracker, self._status):
            opened = adapter.open()
        done = opened.pop("delivered")
        # an earlier problem is over when the first delivery succeeds, not yet
        self._status.set(**(opened if opened.get("problem") else {**opened, "problem": before.get("problem")}))
        problem = opened.get("problem")
        takes_output = type(adapter).log_output is not Tracker.log_output
        tail, output, more = Tail(plan.paths.metrics), RankOutput(plan.paths, before.get("output")), True
        kept = -math.inf
        while more:
            # check for the job's end before reading, so that the last read includes everything written before it
            more = not _ended()
            new = list(entries_of(plan, tail.lines(), done))
            for start in range(0, len(new), AT_ONCE):
                self._fence.check()  # after reading: a newer start registers before it writes records
                with watched(self._tracker, self._status):
                    problem = adapter.log(new[start : start + AT_ONCE]) or problem
                self.delivered_any = True
            while takes_output and (lines := output.lines(ended=not more)):
                self._fence.check()
                with watched(self._tracker, self._status):
                    adapter.log_output(lines)
                if more:  # a program that prints very much does not delay its steps
                    break
            if new or not more:
                done = new[-1].step if new else done
                position: dict[str, Any] = {}
                # it changes all the time, and each write waits for the disk: a killed process repeats some seconds
                if takes_output and (not more or time.monotonic() - kept >= LOOK_EVERY_S):
                    position, kept = {"output": [*output.position]}, time.monotonic()
                self._status.set(problem=problem, **position)
        signal.alarm(ENDS_WITHIN_S)
        summary = read_json(plan.paths.summary) or {}
        self._fence.check()
        adapter.finish(summary)
        self._status.set(delivered=done)


class RankOutput:
    """Output of rank 0, from the logs of all attempts in turn.

    Attributes:
        position: (attempt, bytes) up to which it was read.
    """

    def __init__(self, paths: RunPaths, position: Sequence[int] | None) -> None:
        self._paths = paths
        self.position = (0, 0) if position is None else (position[0], position[1])
        self._looked = -math.inf

    def lines(self, *, ended: bool) -> list[str]:
        """Return the next lines; none if there are no more for now. ``ended``: nothing is added to the logs any more.

        Of a line that was overwritten, as that of a progress bar, the last state is returned.
        """
        if lines := self._read(whole=ended):
            return lines
        if ended or time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._looked = time.monotonic()
            for attempt in range(self.position[0] + 1, self._paths.next_attempt()):
                if lines := self._read(whole=True):  # the end of the attempt before
                    return lines
                self.position = (attempt, 0)
                if lines := self._read(whole=ended):
                    return lines
        return []

    def _read(self, *, whole: bool) -> list[str]:
        """Return the next lines of the present attempt; ``whole``: also an incomplete last one."""
        attempt, offset = self.position
        try:
            with open_file(self._paths.rank_log(0, attempt)) as file:
                file.seek(offset)
                data = file.read(MOST_OUTPUT)
        except FileNotFoundError:
            return []
        if not whole or len(data) == MOST_OUTPUT:
            data = data[: data.rfind(b"\n") + 1] or (data if len(data) == MOST_OUTPUT else b"")
        if not data:
            return []
        self.position = (attempt, offset + len(data))
        text = data.decode(errors="replace").removesuffix("\n")
        return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]


@contextmanager
def watched(tracker: str, status: Status) -> Generator[None]:
    """Return a context that reports a tracker which does not return; the next status withdraws the report."""
    text = f"{described_tracker(tracker).title} has not answered for {SILENT_AFTER_S} s; it is still being tried."

    def report() -> None:
        with suppress(Superseded):  # the main thread will notice
            status.set(problem=text)

    timer = threading.Timer(SILENT_AFTER_S, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


# pattern of an error's text, and what it means; the first that matches counts
_CAUSES = (
    (
        r"(?i)(error|status|code|http)\W{0,3}40[13]\b|\b40[13] (client error|unauthorized|forbidden|!=)"
        r"|unauthenticated|permission.denied",
        "The server refuses the login",
    ),
    (r"(?i)NameResolution|name or service not known|getaddrinfo|name resolution", "There is no host of this name"),
    (r"(?i)connection refused|Max retries|timed out|connection (aborted|reset)", "The server does not answer"),
)


def problem_of(tracker: str, error: Exception, plan: RunPlan) -> str:
    """Return one line on an error of a tracker: what it means, where that is known, and what to do."""
    kind = described_tracker(tracker)
    if isinstance(error, ImportError) and kind.install:
        return f"{error}: install it on the host of rank 0 ({kind.install})."
    whole = " ".join(redacted(str(error)).split())
    if isinstance(error, UserError):
        return whole
    text = f"{type(error).__name__}: {_shortened(whole)}"
    cause = next((cause for pattern, cause in _CAUSES if re.search(pattern, whole)), None)
    if cause is None or not kind.remedy:
        return f"{text}."
    return f"{cause} ({without_credentials(kind.destination(plan, os.environ))}). {kind.remedy} ({text})."


def _shortened(text: str) -> str:
    """Return an error's text without its causes, which libraries of the network nest in it."""
    outer = re.split(r" ?\(Caused by ", text)[0]
    return (outer if len(outer) <= MOST_LETTERS else f"{outer[:MOST_LETTERS].rstrip('. ')}...").rstrip(".")


def redacted(text: str) -> str:
    """Return ``text`` without the passwords of URLs and the values of variables that are named like secrets."""
    text = without_credentials(text)
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|PASSWORD|SECRET", name) and len(value) >= 4:
            text = text.replace(value, "***")
    return text


def _pause(seconds: float) -> None:
    """Wait, but not after the end of input."""
    waited = 0.0
    while waited < seconds and not _ended():
        waited += POLL_S


def _ended() -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return bool(ready) and not os.read(sys.stdin.fileno(), 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
