"""Launch on this host: make the run's directory, start the node agent, follow it, and regroup after a lost host."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

from launcher.errors import EXIT_INTERRUPTED, RecordFailed, SiteError
from launcher.launch.agent import open_attempt
from launcher.plan.callback_plan import may_report, notify_entries
from launcher.plan.clusters import Peers, Regrouping
from launcher.plan.launch_plan import LaunchPlan, RunInfo
from launcher.plan.run_plan import RunPlan
from launcher.process import RUN_ID, STOP_SIGNALS, inherited_environment, signal_handler, unblock_stop_signals
from launcher.quantities import count
from launcher.rundir import history
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import read_json, write_json, write_text
from launcher.rundir.history import Submission
from launcher.rundir.job_end import CTRL_C, Summary, end_status, failed_summary, failure_record
from launcher.rundir.paths import RunPaths
from launcher.trackers.tracker_processes import wait_after_stop

POLL_S = 0.1
AGENT = (sys.executable, "-P", "-m", "launcher.launch.agent")
# in addition to cluster.grace_s, which the workers get
AGENT_LEAVES_WITHIN_S = 10
# time that callbacks have to report a run's outcome
REPORTS_WITHIN_S = 60


class Display(Protocol):
    """Display of a run in progress."""

    def refresh(self) -> None:
        """Show what was added to the run's files; called several times a second."""
        ...

    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """Outcome of a run. ``summary``: content of summary.json. ``plan``: the last one, perhaps for fewer hosts."""

    status: int
    summary: dict[str, Any]
    plan: LaunchPlan


def create(plan: LaunchPlan, config_yaml: str) -> None:
    """Make the run's directory, with its plan and config.

    Raises:
        SiteError: The directory exists or cannot be made; nothing is left behind.
    """
    make_directory(plan.run)
    paths = plan.paths
    try:
        paths.logs.mkdir()
        write_text(paths.config, config_yaml)
        plan.save()
    except OSError as error:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise _cannot_be_made(paths.root, error) from None


def make_directory(run: RunInfo) -> None:
    """Make the run's directory. Raises SiteError if it exists or cannot be made; nothing is left behind then."""
    root = Path(run.dir)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir()
    except FileExistsError:
        raise _occupied(run, root if root.exists() else root.parent) from None
    except OSError as error:
        raise _cannot_be_made(root, error) from None


def require_unused(run: RunInfo) -> None:
    """Raise SiteError if the run's directory exists, before slow work; `make_directory` checks it again."""
    if os.path.lexists(run.dir):
        raise _occupied(run, Path(run.dir))


def _occupied(run: RunInfo, occupied: Path) -> SiteError:
    resumes = f"`launch resume {run.name}` continues that run. " if RunPaths(Path(run.dir)).plan.exists() else ""
    return SiteError(
        f"run.name={run.name}: {occupied} exists, and a run never writes into another one's directory.\n"
        f"  {resumes}For a new run choose another run.name, or leave it out for a name of its own."
    )


def _cannot_be_made(root: Path, error: OSError) -> SiteError:
    return SiteError(f"run.dir: {root} cannot be made: {error.strerror}.\n  Choose a run.dir that you may write to.")


def run_job(plan: LaunchPlan, display: Display, peers: Peers) -> Verdict:
    """Run a created plan to its end.

    Ctrl-C asks the workers to stop after their window; a second one kills them. SIGTERM and SIGUSR2, the stop signals
    of an outer scheduler, only ask them to stop.

    On several hosts, a stop on one of them stops all. After a failure on another host the workers here get time to
    notice it by themselves, because their own errors may name the cause. If a host is lost and enough are left, these
    restart as a new attempt of the run.

    Raises:
        RecordFailed: The verdict cannot be written to the disk.
    """
    signals: list[int] = []
    recorded = _recorded(plan)

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if not signals or number == signal.SIGINT:
            signals.append(number)

    submission = history.add_submission(plan.paths, Submission.now().by_this_process()) if _writes(plan) else 0
    fence = Fence(plan.paths, Incarnation(submission))
    with signal_handler(STOP_SIGNALS, stop), closing(display):
        unblock_stop_signals()  # a cell beside others starts with them blocked
        if _writes(plan):
            attempt = open_attempt(fence, ranks=plan.cluster.world_size)
            if submission:
                history.note_event(plan.paths, "started", attempt=attempt, ranks=plan.cluster.world_size)
        _run_once(plan, plan.paths.plan_of(plan.node), fence, display, peers, signals)
        while len(signals) < 2 and (regrouping := peers.regroup()) is not None:
            plan, plan_file, fence = regroup(plan, regrouping, fence)
            display.say(describe_regrouping(plan, regrouping))
            peers.start_regrouped()
            _run_once(plan, plan_file, fence, display, peers, signals)
    summary = peers.conclude()
    stopped_by = _name_of_stop(signals) if signals else ""
    if summary["verdict"] == "stopped" or (signals and summary["verdict"] == "killed"):
        summary = {"stopped_by": stopped_by or "a signal to a worker"} | summary
    try:
        _write_summary(plan, fence, summary)
        if _writes(plan):
            history.amend_submission(plan.paths, ended=True)
    except OSError as error:
        raise RecordFailed(
            f"{plan.paths.root}: the verdict, {summary['verdict']}, cannot be written there: {error.strerror}.\n"
            f"  Free space there; `launch resume {plan.run.name}` resumes from the newest checkpoint."
        ) from None
    trained = plan.node != 0 or _recorded(plan) > recorded  # other hosts may not see the record
    resumable = isinstance(plan, RunPlan) and plan.checkpoint.enabled and signal.SIGINT not in signals
    return Verdict(end_status(summary, stopped_by, nothing_lost=resumable and not trained), summary, plan)


def _recorded(plan: LaunchPlan) -> int:
    """Return the size of the run's record in bytes."""
    return plan.paths.metrics.stat().st_size if plan.paths.metrics.exists() else 0


def _run_once(
    plan: LaunchPlan, plan_file: Path, fence: Fence, display: Display, peers: Peers, signals: list[int]
) -> None:
    """Run one attempt until it is over on all hosts. ``signals``: stop signals that this process has received."""
    agent = _start_agent(plan, plan_file, fence.own)
    forwarder = _StopForwarder(agent, display, peers, plan.cluster.grace_s, wait_after_stop(plan))
    over = False
    while not (over and (peers.complete() or len(signals) > 1)):
        display.refresh()
        forwarder.forward(signals)
        peers.listen(POLL_S)
        if not over and agent.poll() is not None:
            over = True
            # a second Ctrl-C, or one before the agent had handlers, kills it by the signal itself
            own = EXIT_INTERRUPTED if signals else agent.returncode
            summary = _summary(plan, own)
            if signals and "stopped_by" in summary:  # the agent knows only the SIGTERM that was forwarded
                summary["stopped_by"] = _name_of_stop(signals)
            peers.ended(summary)
    display.refresh()


def _name_of_stop(signals: Sequence[int]) -> str:
    return CTRL_C if signals[0] == signal.SIGINT else signal.Signals(signals[0]).name


class _StopForwarder:
    """Forwards stop requests of a person or of another host to the agent."""

    def __init__(
        self, agent: subprocess.Popen[bytes], display: Display, peers: Peers, grace_s: float, then: str = ""
    ) -> None:
        """``then``: end of the message about a stop."""
        self._then = then
        self._agent, self._display, self._peers, self._grace_s = agent, display, peers, grace_s
        self._forwarded = 0
        self._noticed: float | None = None
        self._asked_to_stop = False

    def forward(self, signals: Sequence[int]) -> None:
        """Send the agent the signals that are due. ``signals``: the stop signals that this process has received."""
        received = len(signals)
        if received > self._forwarded:
            if not self._forwarded:
                self._peers.stop(_name_of_stop(signals))
                if not self._asked_to_stop:
                    again = " Ctrl-C now kills the workers at once." if signals[0] == signal.SIGINT else ""
                    self._display.say(f"Stopping at the end of this window.{again}{self._then}")
            self._forwarded = received
            # the workers and the mirror notice a killed agent by themselves
            self._signal(signal.SIGTERM if received == 1 and not self._asked_to_stop else signal.SIGKILL)
        elif not self._forwarded and self._peers.stopped_by is not None and not self._asked_to_stop:
            self._display.say(f"Stopped on {self._peers.stopped_by}: stopping at the end of this window.{self._then}")
            self._ask_to_stop()
        elif self._peers.trouble is not None:
            self._end_after_trouble(self._peers.trouble)

    def _end_after_trouble(self, trouble: str) -> None:
        if self._noticed is None:
            self._noticed = time.monotonic()
            if self._agent.poll() is None:
                self._display.say(f"{trouble[0].upper()}{trouble[1:]}; the workers here end too.")
        waited = time.monotonic() - self._noticed
        if not self._asked_to_stop and (self._peers.lost or waited > self._grace_s):
            self._ask_to_stop()
        if waited > 2 * self._grace_s + AGENT_LEAVES_WITHIN_S:  # the agent hangs in a call to a host that is gone
            self._signal(signal.SIGKILL)

    def _ask_to_stop(self) -> None:
        self._asked_to_stop = True
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._agent.poll() is None:
            self._agent.send_signal(number)


def _start_agent(plan: LaunchPlan, plan_file: Path, own: Incarnation) -> subprocess.Popen[bytes]:
    with plan.paths.node_log(plan.node).open("ab") as log:
        return subprocess.Popen(
            [*AGENT, plan.run.dir, plan_file.name, str(os.getpid()), str(own)],
            env=inherited_environment(os.environ) | {RUN_ID: plan.run.id},
            cwd=plan.cluster.cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C must only reach this process, which forwards it
        )


def _summary(plan: LaunchPlan, status: int) -> Summary:
    """Return this host's summary; one derived from the exit status if the workers were killed before writing it."""
    if summary := read_json(plan.paths.summary_of(plan.node)):
        return summary
    if status == EXIT_INTERRUPTED:
        return {"verdict": "killed"}
    if status == 0:  # a `launch run` script writes no summary, nor do workers on nodes other than 0
        return {"verdict": "done"}
    error = f"the node agent ended with status {status}"
    summary = failed_summary(failure_record(error, plan.paths.node_log(plan.node), exit_code=status))
    return summary | {"verdict": "killed"} if status < 0 else summary


def _write_summary(plan: LaunchPlan, fence: Fence, summary: dict[str, Any]) -> None:
    """Write the job's summary, if that is this host's part.

    A host that shares its disk with node 0 leaves it to node 0, unless node 0 is gone without a summary. A host that
    was cut off writes nothing once the others have continued without it.
    """
    path = plan.paths.summary
    if (_writes(plan) or (not path.exists() and not fence.superseded)) and read_json(path) != summary:
        write_json(path, summary)


def _writes(plan: LaunchPlan) -> bool:
    """Return True if this host writes the job-wide files: node 0, and every host with its own disk."""
    place = plan.cluster.place
    return place is None or place.node == 0 or not place.shared


def report_outcome(plan: LaunchPlan, summary: Mapping[str, Any], within_s: float = REPORTS_WITHIN_S) -> None:
    """Send the messages of ``notify``, and let the run's callbacks act on its outcome (``on_outcome``), in a separate
    process. Whatever goes wrong is only printed.

    Args:
        summary: content of summary.json.
        within_s: seconds after which the process is killed.
    """
    recorded = RunPlan.of_record(plan.paths) if plan.node == 0 else None
    reports = recorded is not None and any(may_report(each, summary["verdict"]) for each in recorded.callbacks)
    if plan.node or not (reports or notify_entries(plan.notify)):
        return
    deadline = time.monotonic() + 0.9 * within_s  # the process itself then names the messages that hang
    command = [
        sys.executable, "-P", "-m", "launcher.launch.run_outcome", plan.run.dir, str(os.getpid()), str(deadline),
    ]  # fmt: skip
    try:
        # its own session: a second Ctrl-C must not reach it; standard output is for what `launch` itself prints
        subprocess.run(
            command, input=json.dumps(summary), text=True, stdout=2, cwd=plan.cluster.cwd, start_new_session=True,
            timeout=within_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        print(f"The outcome of the run was not reported: {error}", file=sys.stderr, flush=True)


P = TypeVar("P", bound=LaunchPlan)


def regroup(plan: P, regrouping: Regrouping, fence: Fence) -> tuple[P, Path, Fence]:
    """Return this host's plan, its file and its fence in the attempt that follows that of ``fence``.

    The workers of the old attempt have ended on all hosts that are left. Node 0 opens the new one before any other
    host can start.

    Raises:
        Superseded: The run was restarted elsewhere.
    """
    assert plan.cluster.place is not None
    place = dataclasses.replace(plan.cluster.place, node=regrouping.node, store=regrouping.store)
    plan = plan.on(regrouping.nodes).at(place)
    fence = Fence(fence.paths, dataclasses.replace(fence.own, restart=fence.own.restart + 1))
    ranks = plan.cluster.world_size
    if regrouping.node == 0:
        attempt = open_attempt(fence, ranks=ranks)
        history.note_event(fence.paths, "lost", host=regrouping.lost, attempt=attempt, ranks=ranks)
    file = fence.paths.plan_for(regrouping.nodes, regrouping.node)
    write_text(file, plan.to_json() + "\n")
    return plan, file, fence


def describe_regrouping(plan: LaunchPlan, regrouping: Regrouping) -> str:
    """Return the line for the display. ``plan``: the new plan of this host."""
    lost, hosts, ranks = regrouping.lost, count(regrouping.nodes, "host"), count(plan.cluster.world_size, "rank")
    return (
        f"{lost[0].upper()}{lost[1:]} is gone: continuing with {hosts}, {ranks}, from the newest checkpoint. "
        f"This is node {regrouping.node} now."
    )
