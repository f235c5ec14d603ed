"""Live output of a job: rank 0's log and progress, and the logs of its processes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import EXCEPTION_MARK
from launcher.quantities import Interval, duration_text, printable, seconds_left
from launcher.rundir.files import Tail, last_lines, read_json
from launcher.rundir.paths import RunPaths, SweepPaths
from launcher.runs.status import Run
from launcher.trackers.installed import described_tracker, recorded_trackers

PLAIN_LINE_EVERY_S = 10.0
TIMED_STEPS = 5  # timed steps before the run's length is predicted
_BAR_FROM = 90  # characters of a terminal in which the progress has a bar besides its numbers
_MOST_LINES = 200  # of rank 0's output at once
_SHOWN_LINES = 15  # of the log of a failed run


class NoDisplay:
    """Display that shows nothing, for --quiet; base class of the others."""

    def refresh(self) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class MessageDisplay(NoDisplay):
    """Display that shows only messages, for a host that joined another host's job."""

    def __init__(self, console: Console) -> None:
        self._console = console
        if isinstance(console.file, Output):
            console.file.unblock()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay(MessageDisplay):
    """Rank 0's output, and a line for each evaluation, with one progress line below; without a terminal, occasional
    plain lines.

    Args:
        whole: show all logs of rank 0, for a run of another process. Default: those of this start up to an exception,
            which is printed at the end of the run, and of each refresh the last lines only.
    """

    def __init__(self, plan: LaunchPlan, console: Console, *, whole: bool = False) -> None:
        super().__init__(console)
        self._paths, self._whole = plan.paths, whole
        self._output = rank_logs(plan.paths, 0, up_to_exception=not whole)
        self._metrics = Tail(plan.paths.metrics)
        self._events = Tail(plan.paths.events)
        if not whole:
            self._output.lines()  # skip lines of earlier starts
        self._events.lines()
        recorded = self._metrics.lines()
        self._steps = plan.train.steps if isinstance(plan, RunPlan) else None
        self._trackers = plan.trackers if isinstance(plan, RunPlan) else ()
        self._warned = set[str]()
        self._last: dict[str, Any] | None = None
        self._printed_at = -PLAIN_LINE_EVERY_S
        self._printed_step: int | None = None
        self._first: dict[str, Any] | None = None  # record from which steps are timed
        self._announced = False
        self._progress: Progress | None = None
        if console.is_terminal and isinstance(plan, RunPlan):
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.table import Column

            bar = [BarColumn(bar_width=None, table_column=Column(ratio=1))] if console.width >= _BAR_FROM else []
            self._progress = Progress(
                TextColumn("{task.description}"), *bar, TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
                console=console, transient=True, expand=True,
            )  # fmt: skip
            done = json.loads(recorded[-1])["step"] if recorded else 0
            self._bar = self._progress.add_task("starting", total=self._steps, completed=done, rate="")
            self._progress.start()

    def refresh(self) -> None:
        for line in self._events.lines():
            if '"event": "hang"' in line:
                self.say(f"--- {json.loads(line)['what']} ---")
        self._print_output()
        replaced = self._metrics.replaced
        records = [json.loads(line) for line in self._metrics.lines()]
        if self._metrics.replaced > replaced:  # the run was restarted, and its record truncated to the resume point
            self._restart_from(records[-1] if records else None)
        elif records:
            self._last = records[-1]
            self._first = self._first or records[0]
            self._announce(records[-1])
            for record in records:
                # the last step is shown anyway
                if record.get("eval/loss") is not None and record["step"] != self._steps:
                    self._print_step(record)
            step, text = records[-1]["step"], _step_text(records[-1], self._steps)
            if self._progress is not None:
                self._progress.update(self._bar, completed=step, description=text, rate=_rate(records[-1]))
            elif time.monotonic() - self._printed_at >= PLAIN_LINE_EVERY_S or step == self._steps:
                self._print_step(records[-1])
        self._trackers = self._trackers or recorded_trackers(self._paths)  # a script's engine makes its plan later
        for tracker in self._trackers:
            status = {} if tracker in self._warned else read_json(self._paths.tracker_status(tracker)) or {}
            if status.get("problem"):
                self._warned.add(tracker)
                self.say(f"{described_tracker(tracker).title}: {status['problem']}")

    def _print_output(self, *, ended: bool = False) -> None:
        output = self._output.lines(ended=ended)
        if len(output) > _MOST_LINES and not self._whole:  # more than can be read must not delay a stop
            left_out = f"{len(output) - _MOST_LINES:,} lines are left out; all are in {self._paths.newest_rank_log(0)}"
            output = [f"--- {left_out} ---", *output[-_MOST_LINES:]]
        if output:  # as it is: the user's program may have coloured it
            self._console.print(Text("\n".join(output)), soft_wrap=True)

    def _restart_from(self, record: dict[str, Any] | None) -> None:
        """Reset the progress to ``record``, the last record kept, which has been displayed before."""
        step = 0 if record is None else min(record["step"], self._paths.newest_step())  # new steps may follow already
        self._last, self._first, self._printed_step = record, None, None
        if self._progress is not None:
            self._progress.update(self._bar, completed=step)
        self.say(f"--- resumed after step {step} ---")

    def _print_step(self, record: dict[str, Any]) -> None:
        """Print one line for a record, once."""
        if record["step"] == self._printed_step:
            return
        self._printed_step, self._printed_at = record["step"], time.monotonic()
        left = self._seconds_left(record)
        until = "" if not left else f"  {duration_text(left)} left"
        self.say(f"{_step_text(record, self._steps)}  {_rate(record)}{until}")

    def _announce(self, record: dict[str, Any]) -> None:
        """Print once how long the run will take, as soon as a few steps have been timed."""
        left = self._seconds_left(record)
        if self._announced or not left or self._first is None or record["step"] - self._first["step"] < TIMED_STEPS:
            return
        self._announced = True
        whole = duration_text(record["time/total_s"] + left)
        self.say(f"The {self._steps:,} steps take about {whole}; {duration_text(left)} left.")

    def _seconds_left(self, record: dict[str, Any]) -> float | None:
        """Return the time to the last step at the mean rate since the display started; None if unknown."""
        return None if self._first is None else seconds_left(self._first, record, self._steps)

    def close(self) -> None:
        self._print_output(ended=True)
        if self._progress is not None:
            self._progress.stop()
            if self._last is not None:
                self._print_step(self._last)


def run_display(plan: LaunchPlan, console: Console) -> NoDisplay:
    """Return the display of a run on this host: live on the first one, messages only on the others."""
    if console.quiet:
        return NoDisplay()
    if plan.node == 0:
        return LiveDisplay(plan, console)
    assert plan.cluster.place is not None
    first, display = plan.cluster.place.store.rpartition(":")[0], MessageDisplay(console)
    display.say(f"This is node {plan.node} of run {plan.run.name}: {plan.run.dir}; the live view is on {first}.")
    return display


def _step_text(record: dict[str, Any], steps: int | None) -> str:
    held_out = f"  held-out {record['eval/loss']:.4f}" if record.get("eval/loss") is not None else ""
    loss = "-" if record["train/loss"] is None else f"{record['train/loss']:.4f}"  # None: the last window had no items
    return f"step {record['step']}{f'/{steps}' if steps else ''}  loss {loss}{held_out}"


def _rate(record: dict[str, Any]) -> str:
    """Return the throughput, and the exposed communication if the job has measured some."""
    rate = f"{record['throughput/samples_per_s']:,.0f} samples/s"
    exposed, step_s = Interval.of_record(record, "comm/exposed_s"), record.get("comm/step_s")
    if exposed is None or exposed.low <= 0 or not step_s:
        return rate
    return f"{rate}  {exposed.value / step_s:.0%} exposed communication"


class _PrintableConsole(Console):
    """Console that shows control characters of plain texts; only a rich.text.Text sends them to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().render_str(printable(text), **options)


def console(*, quiet: bool = False) -> Console:
    if sys.stdout.isatty():
        return _PrintableConsole(file=cast("TextIO", Output(sys.stdout)), quiet=quiet)
    # lines are not wrapped in a file, so that a printed command can be pasted
    return _PrintableConsole(file=cast("TextIO", Output(sys.stdout, trim=True)), quiet=quiet, width=200)


def finish_output(console: Console, *, patient: bool) -> bool:
    """Wait until everything is written that a display has printed; return False if nobody reads it (``Output``)."""
    return not isinstance(console.file, Output) or console.file.finish(patient=patient)


@contextmanager
def waiting(text: str, *, quiet: bool = False) -> Generator[None]:
    """Return a context during which a terminal shows that something is being done."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(text):
        yield


class LogSource:
    """Log files of one rank or node in the order of their creation, and the lines added to them.

    Args:
        name: of the rank or node.
        candidates: returns the paths of its files, whether they exist or not.
        up_to_exception: leave out the part of each file from an uncaught exception on.
    """

    def __init__(
        self, name: str, paths: RunPaths, candidates: Callable[[], Iterable[Path]], *, up_to_exception: bool = False
    ) -> None:
        self._name, self._paths, self._candidates = name, paths, candidates
        self._up_to_exception = up_to_exception
        self._tails: dict[Path, Tail] = {}
        self._raised = set[Path]()

    def _files(self) -> list[Path]:
        return [file for file in self._candidates() if file.exists()]

    def exists(self) -> bool:
        return bool(self._files())

    def lines(self, *, ended: bool = False) -> list[str]:
        """Return the lines added since the last call; each further file is preceded by a line with its name.

        Args:
            ended: no call follows, so an unterminated last line is returned too. For all files but the newest it always
                is, because their writers have exited.
        """
        lines: list[str] = []
        files = self._files()
        for file in files:
            if file not in self._tails:
                if self._tails:
                    lines.append(f"--- {file.name} ---")
                self._tails[file] = Tail(file)
            for line in self._tails[file].lines(over=ended or file != files[-1]):
                if self._up_to_exception and EXCEPTION_MARK in line:  # torch prefixes the line with the rank
                    self._raised.add(file)
                if file not in self._raised:
                    lines.append(line)
        return lines

    def missing(self) -> str:
        names = sorted(path.name for path in self._paths.logs.glob("*.log"))
        return f"{self._name} has no log yet.\n  Existing logs: {', '.join(names) or 'none, the run has not started'}."


def rank_logs(paths: RunPaths, rank: int, *, up_to_exception: bool = False) -> LogSource:
    logs = lambda: (paths.rank_log(rank, attempt) for attempt in range(paths.next_attempt()))  # noqa: E731
    return LogSource(f"rank {rank}", paths, logs, up_to_exception=up_to_exception)


def node_log(paths: RunPaths, node: int) -> LogSource:
    return LogSource(f"node {node}", paths, lambda: [paths.node_log(node)])


class LogFollower(NoDisplay):
    """Display that prints a log's lines as they arrive, and messages. ``file``: default: standard output."""

    def __init__(self, log: LogSource, file: TextIO | None = None) -> None:
        self._log, self._file = log, file

    def refresh(self, *, ended: bool = False) -> None:
        for line in self._log.lines(ended=ended):
            self.say(line)

    def say(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def close(self) -> None:
        self.refresh(ended=True)


def end_of_log(paths: RunPaths, run: Run) -> list[str]:
    """Return the end of the log of Slurm's script or of the first node, for a run that writes nothing more."""
    slurm_folders = (paths.slurm, SweepPaths(paths.root.parent).slurm)  # the second: of a job array
    for file in [*(folder / f"{run.job}_0_log.out" for folder in slurm_folders), paths.node_log(0)]:
        if lines := last_lines(file, _SHOWN_LINES):
            return ["", *lines, f"  From: {file}"]
    if run.job is None:
        return []
    return [
        "",
        f"Nothing was written to {paths.root}: can the nodes see that directory?",
        "  `launch doctor` checks it.",
    ]


# characters that wait for the reader; further text is left out
_MOST_WAITING = 2**20
_CHUNK_BYTES = 4096
_LOOK_EVERY_S = 0.05
# seconds without progress after which a reader counts as stalled
_STALLED_AFTER_S = 2.0


class Output:
    """Text file whose ``write`` never blocks between ``unblock`` and ``finish``: a thread writes then.

    A terminal that was stopped by Ctrl-S, or a pipe that nobody reads, would hold a stop request otherwise.

    Args:
        trim: strip trailing blanks, because rich pads every line of a table to the table's width.
    """

    def __init__(self, file: TextIO, *, trim: bool = False) -> None:
        self._file, self._trim = file, trim
        self._waiting = deque[str]()
        self._condition = threading.Condition()
        self._size = self._left_out = self._written = 0
        self._error: OSError | None = None
        self._descriptor: int | None = None  # None: write directly
        self._thread = threading.Thread()

    def write(self, text: str) -> int:
        """Write ``text``. Raises OSError; in unblocked mode, perhaps for an earlier text."""
        text = "\n".join(line.rstrip(" ") for line in text.split("\n")) if self._trim else text
        if self._descriptor is None:
            return self._file.write(text)
        with self._condition:
            if self._error is not None:
                raise self._error
            if self._size > _MOST_WAITING:
                self._left_out += text.count("\n")
            else:
                text = self._gap() + text
                self._waiting.append(text)
                self._size += len(text)
                self._condition.notify()
        return len(text)

    def _gap(self) -> str:
        lines, self._left_out = self._left_out, 0
        return f"\n--- {lines:,} lines are left out: the reader was too slow ---\n" if lines else ""

    def flush(self) -> None:
        if self._descriptor is None:
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def unblock(self) -> None:
        """From now on a thread writes; nothing changes for a file without a descriptor."""
        if self._descriptor is not None:
            return
        try:
            self._file.flush()
            descriptor = os.dup(self._file.fileno())
        except (OSError, ValueError):
            return
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._run, args=(descriptor,), daemon=True)
        self._thread.start()

    def finish(self, *, patient: bool) -> bool:
        """Wait until everything is written, and write directly again. Return False if the reader is stalled.

        Args:
            patient: wait for a stalled reader without limit.
        """
        if self._descriptor is None:
            return True
        seen, since = self._written, time.monotonic()
        while self._size and self._error is None:
            time.sleep(_LOOK_EVERY_S)
            if self._written != seen:
                seen, since = self._written, time.monotonic()
            elif not patient and time.monotonic() - since > _STALLED_AFTER_S:
                return False
        with self._condition:
            self._descriptor = None
            self._condition.notify()
        self._thread.join()
        if self._error is None and (gap := self._gap()):
            self.write(gap)
        return True

    def _run(self, descriptor: int) -> None:
        """Write to the descriptor, without Python's buffer: its lock would block the end of the interpreter."""
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._descriptor is None)
                if not self._waiting:
                    break
                text = self._waiting.popleft()
            try:
                data = memoryview(text.encode(encoding, errors="replace"))
                while data:
                    data = data[os.write(descriptor, data[:_CHUNK_BYTES]) :]
                    self._written += 1
            except OSError as error:
                self._error = error
                break
            with self._condition:
                self._size -= len(text)
        os.close(descriptor)
