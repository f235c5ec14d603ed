"""Node agent: one process per node, which runs torchrun's elastic agent as a library and writes the verdict.

    python -m launcher.launch.agent RUN_DIR PLAN PARENT_PID INCARNATION

The exit status is that of the verdict (launcher/rundir/job_end.py). Under Slurm the agent runs in the job's task
(launcher/launch/slurm/node.py), which decides whether the job ends or is requeued.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from launcher import errors
from launcher.config.schema import Device
from launcher.errors import EXIT_FAILED, Superseded, class_named
from launcher.heartbeat import PROGRESS
from launcher.launch import flight_recorder, rendezvous
from launcher.launch.watchdog import HangWatch, NoWatch
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import (
    AGENT_PID,
    RUN_DIR,
    RUN_ID,
    StopShield,
    die_with_parent,
    environment,
    inherited_environment,
    living_children,
    raise_open_files,
)
from launcher.rundir import history
from launcher.rundir.fencing import INCARNATION, Fence, Incarnation
from launcher.rundir.files import clear_torn, object_from_json, read_json, write_json
from launcher.rundir.job_end import (
    HANG,
    LOST_PEER,
    Failure,
    Summary,
    end_status,
    error_of,
    failed_summary,
    fails_again,
    failure_record,
)
from launcher.rundir.paths import RunPaths
from launcher.tracebacks import lost_connection, users_traceback
from launcher.trackers.tracker_processes import GRACE_S, HURRIED_S, TrackerProcesses

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def main(run_dir: str, plan_name: str, parent: str, incarnation: str) -> int:
    """Run one node's workers and return the exit status. ``plan_name``: file name of the plan in ``run_dir``."""
    die_with_parent(int(parent), signal.SIGTERM)
    paths = RunPaths(Path(run_dir))
    plan_file = paths.root / plan_name
    plan, fence = load_plan(plan_file), Fence(paths, Incarnation.parse(incarnation))
    with StopShield() as shield:
        ended = serve(plan, plan_file, fence.own, shield)
    if ended:
        try:
            fence.check()
        except Superseded as error:  # this host was cut off; the summary now belongs to a newer attempt
            print(error, flush=True)
            return EXIT_FAILED
        path = paths.summary_of(plan.node)
        # "killed" if the workers left no summary; what this agent knows of the end goes before what they wrote
        ended = {"verdict": "killed"} | (read_json(path) or {}) | ended
        write_json(path, ended)
    return end_status({"verdict": "done"} | ended)


def open_attempt(fence: Fence, **fields: Any) -> int:
    """Open a new attempt, delete the verdicts of earlier ones, and return its number. ``fields``: for other nodes."""
    paths = fence.paths
    attempt = max(paths.next_attempt(), fence.newest().get("attempt", -1) + 1)  # one that failed early has no logs
    fence.claim(attempt=attempt, **fields)
    for directory in (paths.root, paths.checkpoints):
        clear_torn(directory)
    for file in (paths.summary, *paths.root.glob("summary.node*.json"), *paths.root.glob("failure.node*.json")):
        file.unlink(missing_ok=True)
    return attempt


def serve(plan: LaunchPlan, plan_file: Path, own: Incarnation, shield: StopShield) -> Summary:
    """Run this node's workers, and on node 0 the trackers, until they end. Return what to add to the workers' summary.

    Replaces ``os.environ`` by the workers' environment during the call. Must be called from the main thread, inside
    ``shield``. The caller decides whether the job ends or is requeued.
    """
    raise_open_files()
    inherited = plan.env.default | _allocator(plan) | inherited_environment(os.environ) | plan.env.set
    of_run = {AGENT_PID: str(os.getpid()), INCARNATION: str(own), RUN_ID: plan.run.id, RUN_DIR: plan.run.dir}
    trackers = TrackerProcesses(plan, own, of_agent=True)
    trackers.start()
    try:
        watch = _watch(plan, shield)
        with _flight_recorder(plan, watch) as recorder, environment(recorder | inherited | of_run):
            first = Fence(plan.paths, own).newest().get("attempt", 0)
            ended = _run_workers(plan, plan_file, first, shield, watch)
        if watch.last is not None and plan.node == 0:
            ended |= {"hang": watch.last.entry}
        if "failure" in ended and plan.node == 0 and not Fence(plan.paths, own).superseded:
            write_json(plan.paths.summary, (read_json(plan.paths.summary) or {}) | ended)  # the trackers deliver it
        return ended
    finally:
        # neither a scheduler that reclaims the node nor a person who stops the run waits for a server: the next attempt
        # sends what is missing
        trackers.finish(GRACE_S if shield.received is None else HURRIED_S)


def _allocator(plan: LaunchPlan, dev: Path = Path("/dev")) -> dict[str, str]:
    """Return torch's setting against fragmented GPU memory for `launch train`, unless the user has configured the
    allocator. WSL2 and ROCm do not have it, and scripts may use memory pools, which do not work with it."""
    set_already = any(re.fullmatch("PYTORCH_(CUDA_|HIP_)?ALLOC_CONF", name) for name in os.environ)
    nvidia = plan.cluster.device is Device.cuda and (dev / "nvidiactl").exists()
    if set_already or not nvidia or not isinstance(plan, RunPlan):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@contextmanager
def _flight_recorder(plan: LaunchPlan, watch: HangWatch | NoWatch) -> Generator[dict[str, str]]:
    """Yield the variables with which NCCL's traces get to the run's logs. The pipes, by which only a hang watch asks
    for them, are on this host's own disk: a shared one may have none."""
    if plan.cluster.device is not Device.cuda:
        yield {}
    elif isinstance(watch, NoWatch):
        yield flight_recorder.variables("", plan.paths.logs)
    else:
        with tempfile.TemporaryDirectory(prefix="launcher-nccl-", ignore_cleanup_errors=True) as pipes:
            yield flight_recorder.variables(pipes, plan.paths.logs)


def load_plan(path: Path) -> LaunchPlan:
    """Return the plan in ``path``: a RunPlan for `launch train`, else a LaunchPlan."""
    fields = read_json(path) or {}
    return (RunPlan if "batch" in fields else LaunchPlan).load(path)


def _watch(plan: LaunchPlan, shield: StopShield) -> HangWatch | NoWatch:
    """Return the hang watch; a `launch run` script has no heartbeat, so nothing watches it."""
    if not isinstance(plan, RunPlan) or plan.train.hang_timeout is None or not sys.platform.startswith("linux"):
        return NoWatch()
    place = plan.cluster.place or rendezvous.ALONE
    return HangWatch(plan, place, plan.train.hang_timeout, lambda: shield.received)


def _run_workers(
    plan: LaunchPlan,
    plan_file: Path,
    first_attempt: int,
    shield: StopShield,
    watch: HangWatch | NoWatch,
) -> Summary:
    """Run torchrun's elastic agent until the workers end, perhaps after several attempts."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    place = plan.cluster.place or rendezvous.ALONE
    leave = rendezvous.register(plan, place, lambda: shield.received)
    arguments = (*plan.command, str(plan_file)) if isinstance(plan, RunPlan) else plan.command
    failures = _Failures(plan, watch, DeathWatch())
    config = LaunchConfig(
        min_nodes=plan.cluster.nodes,
        max_nodes=plan.cluster.nodes,
        nproc_per_node=plan.cluster.workers_per_node,
        run_id=plan.run.id,
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=place.store,
        local_addr=place.address,
        max_restarts=plan.cluster.max_restarts,
        signals_to_handle="SIGHUP",  # the shield takes the stop signals; the agent sees them in its monitoring loop
        logs_specs=_logs(plan, first_attempt, watch, failures),
    )

    try:
        with failures.deaths, watch, _workers_end_within(partial(_grace_s, plan, shield), failures.end):
            elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stop:
        leave()
        return _end_of_stop(plan, stop.sigval)
    except ChildFailedError as error:
        record = failures.first({rank: (each.pid, each.exitcode) for rank, each in error.failures.items()})
        # a scheduler may signal every process of a job, which kills a script that has no handler
        if shield.received is not None and record["exit_code"] == -shield.received:
            return _end_of_stop(plan, shield.received)
        return failed_summary(record)
    except _FailsAgain as error:
        return failed_summary(error.failure)
    except RendezvousClosedError as closed:
        if str(closed) == rendezvous.GIVEN_UP:
            return {"verdict": "killed"}
        why = f"the hosts' agents did not come together: {closed}"
        return failed_summary(failure_record(why, plan.paths.node_log(plan.node), at=datetime.now(UTC)))
    if shield.received is not None:  # the workers stopped before the agent saw the signal
        return _end_of_stop(plan, shield.received)
    if isinstance(plan, RunPlan) and plan.node == 0 and not plan.paths.summary.exists():
        why = "the workers left before the run was over, with status 0: does the task call sys.exit or os._exit?"
        return failed_summary(failure_record(why, plan.paths.newest_rank_log(0), exit_code=0))
    return {}


def _end_of_stop(plan: LaunchPlan, by: int) -> Summary:
    """Return what to add to the summary after a stop request; nothing if the run had already finished."""
    done = (read_json(plan.paths.summary) or {}).get("verdict") == "done"
    return {} if done else {"stopped_by": signal.Signals(by).name}


def _logs(plan: LaunchPlan, first: int, watch: HangWatch | NoWatch, failures: _Failures) -> LogsSpecs:
    """Return torch's log specification, which torch asks at each start of the workers. ``first``: first attempt."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    paths = plan.paths

    class RankLogs(LogsSpecs):
        """One log file per global rank; the worker redirects its standard error there too."""

        def __init__(self) -> None:
            self._attempt = first - 1

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            logs: dict[int, str] = {}
            # torch's counter only counts failures of this host, in this attempt, not restarts caused by another host
            self._attempt = attempt = self._attempt + 1
            if attempt > first and any(env["RANK"] == "0" for env in envs.values()):
                history.note_event(paths, "restarted", attempt=attempt, why=failures.cause_of_restart())
            ranks: dict[int, tuple[int, Path]] = {}
            for local_rank, env in envs.items():
                rank, env["TORCHELASTIC_RESTART_COUNT"] = int(env["RANK"]), str(attempt)
                ranks[local_rank] = rank, paths.rank_log(rank, attempt)
                logs[local_rank] = str(paths.rank_log(rank, attempt))
                env["TORCHELASTIC_ERROR_FILE"] = str(paths.rank_error(rank, attempt))
            failures.begin({local_rank: rank for local_rank, (rank, _) in ranks.items()}, attempt)
            for local_rank, address in watch.begin(ranks).items():
                envs[local_rank][PROGRESS] = address
            # torch's agent raises if a worker was killed while it wrote its error file: name none, read them here
            return LogsDest(stdouts=logs, stderrs=dict.fromkeys(envs, ""), error_files=dict.fromkeys(envs, ""))

        @property
        def root_log_dir(self) -> str:
            return str(paths.logs)

    return RankLogs()


class _FailsAgain(Exception):
    """Failure after which a restart is useless."""

    def __init__(self, failure: Failure) -> None:
        super().__init__()
        self.failure = failure


class _Failures:
    """Failures of this node's workers."""

    def __init__(self, plan: LaunchPlan, watch: HangWatch | NoWatch, deaths: DeathWatch) -> None:
        self.deaths = deaths
        self._plan, self._watch = plan, watch
        self._attempt = 0
        self._ranks: dict[int, int] = {}
        self._ended: dict[int, tuple[int, int]] = {}

    def begin(self, ranks: dict[int, int], attempt: int) -> None:
        """Forget the failures of earlier attempts. ``ranks``: rank by local rank."""
        self._ranks, self._attempt, self._ended = ranks, attempt, {}

    def end(self, workers: PContext) -> None:
        """Store which workers have failed. Torch calls it before it ends the others.

        Raises:
            _FailsAgain: at the first call after a failure for which torch must not restart the workers.
        """
        if self._ended:
            return
        ended: Iterable[ProcessFailure] = getattr(workers, "_failures", {}).values()
        self._ended = {self._ranks[each.local_rank]: (each.pid, each.exitcode) for each in ended}
        if self._ended and fails_again(first := self.first(self._ended)):
            raise _FailsAgain(first)

    def first(self, ended: Mapping[int, tuple[int, int]]) -> Failure:
        """Return the earliest of some failures: later ones lost their peer, or were ended by torch itself.

        A worker writes its report before its connections close, so before any peer can notice. A killed worker writes
        none: the last time at which it was seen alive counts.

        Args:
            ended: process id and exit status by rank.
        """
        plan = self._plan
        reports = {rank: _report(plan.paths.rank_error(rank, self._attempt)) for rank in ended}
        times = {rank: report[2] if (report := reports[rank]) else self.deaths.time(ended[rank][0]) for rank in reports}
        rank = min(times, key=times.__getitem__)
        (pid, exit_code), at, report = ended[rank], times[rank], reports[rank]
        log = plan.paths.rank_log(rank, self._attempt)
        if (hang := self._watch.hang_of(pid)) is not None:
            return failure_record(hang.text, log, rank=hang.rank, kind=HANG, traceback=hang.stack or None, at=at)
        killed = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exited with status {exit_code}"
        message, trace = report[:2] if report else (killed, None)
        kind, _, text = message.partition(": ")
        if trace and isinstance(plan, RunPlan):  # a script's own frames may be few: it gets the whole traceback
            trace = users_traceback(trace)
        # compare the qualified name: a user's class may have the same short name
        own_class = class_named(kind) if trace and f"\n{errors.__name__}.{kind}: " in trace else None
        lost = lost_connection(message) if isinstance(plan, RunPlan) and own_class is None else ""
        if lost:  # the log has torch's text, and the stack of C++
            return failure_record(lost, log, rank=rank, exit_code=exit_code, kind=LOST_PEER, at=at)
        return failure_record(
            text if own_class else message,
            log,
            rank=rank,
            exit_code=exit_code,
            kind=kind if own_class else None,
            traceback=None if own_class else trace,  # messages of the launcher's own errors need no traceback
            at=at,
        )

    def cause_of_restart(self) -> str:
        """Return in one line why the workers start again."""
        record = self.first(self._ended) if self._ended else None
        lost = record is not None and (record["kind"] == LOST_PEER or bool(lost_connection(record["error"])))
        if record is None or (lost and self._plan.cluster.nodes > 1):
            return "a worker on another node failed: see its log"
        return error_of(record).partition("\n")[0]


def _report(file: Path) -> tuple[str, str, datetime] | None:
    """Return message, traceback and time of a worker's exception, as torch's ``@record`` wrote it; None if there is
    none, or if the worker was killed before it had written it whole."""
    if not file.exists():
        return None
    content = object_from_json(file.read_text(encoding="utf-8", errors="replace"))
    try:
        message = (content or {})["message"]
        at = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        return message["message"], message["extraInfo"]["py_callstack"], at
    except (KeyError, TypeError):  # a script may write what it likes
        return None


# from SIGTERM to SIGKILL for workers whose job failed: one that is blocked in C, as in NCCL, runs no handler
AFTER_FAILURE_S = 3


def _grace_s(plan: LaunchPlan, shield: StopShield) -> int:
    """Return the seconds from SIGTERM to SIGKILL: ``cluster.grace_s``, unless no stop was requested."""
    return plan.cluster.grace_s if shield.received is not None else min(plan.cluster.grace_s, AFTER_FAILURE_S)


@contextmanager
def _workers_end_within(grace_s: Callable[[], int], before: Callable[[PContext], None]) -> Generator[None]:
    """Have torch's agent send SIGKILL ``grace_s()`` seconds after SIGTERM, in every way in which workers are ended.

    ``before`` is called first. torch's own time, 30 s, has no setting after a failure or at a restart, and in torch
    2.11 none at all.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_within(self: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:  # noqa: ARG001
        before(self)
        close(self, death_sig, grace_s())

    PContext.close = close_within
    try:
        yield
    finally:
        PContext.close = close


POLL_S = 0.02


class DeathWatch(threading.Thread):
    """Thread that records when this process's children die, while the context is open.

    torch's own time stamps are whole seconds, and torch reports workers that it killed itself as failed.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._last_seen: dict[int, float] = {}
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()

    def time(self, pid: int) -> datetime:
        """Return the wall-clock time at which ``pid`` was last seen alive; the present time if it was never seen."""
        return datetime.fromtimestamp(time.time() - time.monotonic() + self._last_seen.get(pid, time.monotonic()), UTC)

    def run(self) -> None:
        while not self._over.wait(POLL_S):
            checked = time.monotonic()
            self._last_seen |= dict.fromkeys(living_children(), checked)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
