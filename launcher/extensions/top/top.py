"""Live view of all runs in a terminal: `launch top`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Label, RichLog, Static

from launcher.errors import LauncherError
from launcher.extensions.top.run_progress import ProgressReader, RunProgress, device_use, sparkline
from launcher.quantities import count, duration_text, exposed_text, first_lines, printable, speedup_text
from launcher.report.live import LogSource, rank_logs
from launcher.report.run_list import COLOURS, LISTED, progress_text, states_text
from launcher.rundir.files import last_lines
from launcher.rundir.job_end import error_of
from launcher.rundir.paths import RunPaths
from launcher.runs.status import ACTIVE, Run, RunState

# seconds between two updates; a Slurm controller is asked less often than a directory
_LOOK_S, _LOOK_AT_SLURM_S, _LOG_S = 2.0, 5.0, 0.5
_RESUMED_WITHIN_S = 10.0  # a resume that is refused has ended by then
_NAME_WIDTH, _BETWEEN = 20, 2  # least width of the names, and between columns
_MESSAGE_LINES, _LOG_LINES = 6, 2_000


@dataclass(frozen=True)
class TopColumn:
    """Column of the table. ``text``: returns a run's cell."""

    title: str
    width: int
    text: Callable[[RunProgress], str | Text]


def _left(progress: RunProgress) -> str:
    return "" if progress.run.left_s is None else duration_text(progress.run.left_s)


def _rate(progress: RunProgress) -> str:
    value = progress.record.get("throughput/samples_per_s")
    return "" if value is None else f"{value:,.0f}"


# the first ones are shown in narrow terminals, too
COLUMNS = (
    TopColumn("state", 9, lambda each: Text(each.run.state.value, COLOURS[each.run.state])),
    TopColumn("step", 11, lambda each: progress_text(each.run)),
    TopColumn("loss", 7, lambda each: "" if each.run.loss is None else f"{each.run.loss:.4f}"),
    TopColumn("", 10, lambda each: sparkline(each.losses, 10)),
    TopColumn("left", 9, _left),
    TopColumn("samples/s", 9, _rate),
    TopColumn("speed-up", 8, lambda each: each.speedup),
    TopColumn("ranks", 5, lambda each: "" if each.run.ranks is None else str(each.run.ranks)),
    TopColumn("job", 8, lambda each: each.run.job or each.run.kind),
    TopColumn("last event", 40, lambda each: each.event),
)


class Confirmation(ModalScreen[bool]):
    """Question that is answered with y or n."""

    CSS = "Confirmation { align: center middle; } Confirmation Label { border: round $primary; padding: 1 2; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"), Binding("n,escape,q", "dismiss(False)", "no"),
    ]  # fmt: skip

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Label(Text(f"{printable(self._text)}\n\ny: yes    n: no"))
        yield Footer()


class Log(Screen[None]):
    """Output of one rank of a run, which is followed; a digit shows that rank."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "dismiss", "back"),
        Binding("0", "rank(0)", "rank", key_display="0-9"),
        *(Binding(str(rank), f"rank({rank})", show=False) for rank in range(1, 10)),
    ]

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._paths = RunPaths(Path(run.dir))
        self._caption = Label()
        self._output = RichLog(max_lines=_LOG_LINES, wrap=True)

    def compose(self) -> ComposeResult:
        yield self._caption
        yield self._output
        yield Footer()

    def on_mount(self) -> None:
        self.action_rank(0)

    def action_rank(self, rank: int) -> None:
        """Follow the output of ``rank`` from its start."""
        self._caption.update(Text(printable(f"{self._paths.root.name}, rank {rank}"), "bold"))
        self._output.clear()
        self.run_worker(self._follow(rank_logs(self._paths, rank)), exclusive=True)

    async def _follow(self, source: LogSource) -> None:
        self._output.write(Text("no output yet" if source.exists() else source.missing(), "dim"))
        first = True
        while True:
            try:
                lines = await asyncio.to_thread(source.lines)
            except OSError as error:
                lines = [f"{error}"]
            if lines and first:
                self._output.clear()
                first = False
            for line in lines[-_LOG_LINES:]:
                self._output.write(Text.from_ansi(line))
            await asyncio.sleep(_LOG_S)


class Top(App[None]):
    """Table of the runs of a directory, and details of the one under the cursor.

    Args:
        runs: directory of the runs.
    """

    CSS = """
    #states { height: 1; padding: 0 1; text-style: bold; }
    DataTable { height: 1fr; }
    #details { height: auto; max-height: 12; padding: 0 1; border-top: solid $primary; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "logs", "logs"), Binding("c", "cancel", "cancel"), Binding("r", "resume", "resume"),
        Binding("q", "quit", "quit"),
    ]  # fmt: skip

    def __init__(self, runs: Path) -> None:
        super().__init__()
        self._runs = runs
        self._table = DataTable[str | Text](cursor_type="row", zebra_stripes=True)
        self._headline = Static("reading ...", id="states")
        self._facts = Static("", id="details")
        self._shown: list[RunProgress] = []
        self._columns: tuple[TopColumn, ...] = ()
        self._use: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        with Vertical():
            yield self._headline
            yield self._table
            yield self._facts
        yield Footer()

    def on_mount(self) -> None:
        self._table.focus()
        self.run_worker(self._watch())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:  # noqa: ARG002
        """Return False for the table's keys while a log or a question covers it."""
        return len(self.screen_stack) == 1 or action not in ("logs", "cancel", "resume")

    async def _watch(self) -> None:
        """Show the runs until the view is closed. Reading them may take long where Slurm or a disk is slow."""
        reader = ProgressReader(self._runs, LISTED)
        while True:
            try:
                self._show(await asyncio.to_thread(reader.newest))
                self._use = await asyncio.to_thread(device_use, [each.run for each in self._shown])
            except (
                OSError,
                ValueError,
                LookupError,
                LauncherError,
            ) as error:  # a file is damaged, or just gone
                self._headline.update(Text(printable(f"{type(error).__name__}: {error}"), "red"))
            asks_slurm = any(each.run.job is not None and each.run.state is not RunState.done for each in self._shown)
            await asyncio.sleep(_LOOK_AT_SLURM_S if asks_slurm else _LOOK_S)

    def on_resize(self) -> None:
        if self._shown:
            self._show(self._shown)

    def _show(self, shown: list[RunProgress]) -> None:
        """Fill the table, with the cursor on the run on which it was."""
        table, chosen = self._table, self._chosen
        active = {each.run.dir for each in self._shown if each.run.state in ACTIVE}
        if any(each.rings and each.run.dir in active and each.run.state not in ACTIVE for each in shown):
            self.bell()
        self._shown = shown
        states = states_text([each.run for each in shown], noun="run") if shown else "no run yet"
        self._headline.update(Text(printable(f"{states}  ({self._runs})")))
        if self._columns != (columns := _fitting(self.size.width)):
            self._columns = columns
            table.clear(columns=True)
            left = self.size.width - sum(column.width + _BETWEEN for column in columns) - 2 * _BETWEEN
            table.add_column("run", width=max(left, _NAME_WIDTH))
            for column in columns:
                table.add_column(column.title, width=column.width)
        table.clear()
        for each in shown:
            name = Text(printable(each.name), no_wrap=True, overflow="ellipsis")
            cells = (column.text(each) for column in columns)  # a plain string would be taken for markup
            table.add_row(name, *(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells))
        rows = [number for number, each in enumerate(shown) if chosen is not None and each.run.dir == chosen.run.dir]
        table.move_cursor(row=rows[0] if rows else 0)
        self._detail()

    @property
    def _chosen(self) -> RunProgress | None:
        row = self._table.cursor_row
        return self._shown[row] if 0 <= row < len(self._shown) else None

    @on(DataTable.RowHighlighted)
    def _detail(self) -> None:
        text = Text()
        if (chosen := self._chosen) is not None:
            for name, value in self._details(chosen):
                text.append(f"{name:9} ", "bold").append(f"{printable(value)}\n")
        text.right_crop(1)
        self._facts.update(text)

    def _details(self, each: RunProgress) -> Iterator[tuple[str, str]]:
        run, record = each.run, each.record
        ranks = "" if run.ranks is None else count(run.ranks, "rank")
        yield "run", ", ".join(filter(None, (each.name, run.job or run.kind, run.nodes, ranks, run.precision)))
        if run.failure is not None:
            yield "why", "\n          ".join(first_lines(error_of(run.failure).splitlines(), 3))
        elif run.detail:
            yield "why", run.detail
        if each.losses:
            yield "loss", f"{sparkline(each.losses, max(10, self.size.width - 30))} {each.losses[-1]:.4f}"
        if (speedup := speedup_text(record)) is not None:
            yield "speed-up", speedup
        if (exposed := exposed_text(record)) is not None:
            yield "waiting", exposed
        mfu = record.get("throughput/mfu")
        rate = f"{_rate(each)} samples/s" if _rate(each) else ""
        left = f"{_left(each)} left" if each.run.left_s is not None else ""
        used = ", ".join(
            filter(None, (rate, left, self._use.get(run.dir, ""), "" if mfu is None else f"{mfu:.0%} of peak FLOP/s"))
        )
        if used:
            yield "rate", used
        if each.event and run.failure is None:
            yield "event", each.event

    @on(DataTable.RowSelected)
    def action_logs(self) -> None:
        if (chosen := self._chosen) is not None:
            self.push_screen(Log(chosen.run))

    def action_cancel(self) -> None:
        """Ask, and cancel the run; its workers save a checkpoint first."""
        self._ask("cancel", "Cancel {}? Its workers save a checkpoint first.")

    def action_resume(self) -> None:
        """Ask, and resume the run from its newest checkpoint."""
        self._ask("resume", "Resume {} from its newest checkpoint?")

    def _ask(self, verb: str, question: str) -> None:
        if (chosen := self._chosen) is None:
            return
        if (chosen.run.state in ACTIVE) != (verb == "cancel") or chosen.run.state is RunState.done:
            self.notify(f"{printable(chosen.name)} is {chosen.run.state.value}.", severity="warning", markup=False)
            return
        earlier = _CONTROLLING.get((chosen.run.dir, "resume"))  # a cancel that is done may be about to end
        if earlier is not None and earlier.poll() is None and verb == "resume":
            self.notify(
                f"{printable(chosen.name)} is being resumed by process {earlier.pid}.", severity="warning", markup=False
            )
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._control(verb, chosen))

        self.push_screen(Confirmation(question.format(chosen.name)), answered)

    async def _control(self, verb: str, each: RunProgress) -> None:
        """Cancel or resume a run by a `launch` of its own, which continues if this view is closed."""
        log = RunPaths(Path(each.run.dir)).launch_log
        try:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [*_LAUNCH, verb, each.run.dir], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self.notify(f"{error}", severity="error", markup=False)
            return
        _CONTROLLING[each.run.dir, verb] = process
        end = time.monotonic() + _RESUMED_WITHIN_S
        while (status := process.poll()) is None and (verb == "cancel" or time.monotonic() < end):
            await asyncio.sleep(_LOOK_S / 10)
        if status is None:
            self.notify(f"{printable(each.name)} resumes. Its output: {log}", markup=False)
            return
        text = "\n".join(last_lines(log, _MESSAGE_LINES)) or f"{each.name}: exit status {status}"
        self.notify(
            printable(text), severity="error" if status else "information", timeout=20 if status else 8, markup=False
        )


# they may outlive the view, and are not ended with their objects
_CONTROLLING: dict[tuple[str, str], subprocess.Popen[bytes]] = {}  # by directory and verb
_LAUNCH = (sys.executable, "-P", "-m", "launcher")


def _fitting(width: int) -> tuple[TopColumn, ...]:
    """Return the first columns, as many as fit beside the names in a terminal of ``width`` characters."""
    left = width - _NAME_WIDTH - 2 * _BETWEEN
    ends = accumulate(column.width + _BETWEEN for column in COLUMNS)
    return tuple(column for column, end in zip(COLUMNS, ends, strict=True) if end <= left)
