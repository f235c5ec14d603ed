"""The node agent: one process a node, which runs torchrun's elastic agent as a library and writes the verdict.

    python -m launcher.launch.agent RUN_DIR PLAN PARENT_PID INCARNATION

Exit status: 0 the workers are done; 1 they failed; 130 they were stopped. Under Slurm the agent runs in the job's task,
launcher/launch/slurm/node.py, which says what becomes of the job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from launcher import errors
from launcher.config.schema import WandbMode
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, Superseded, class_named
from launcher.heartbeat import PROGRESS
from launcher.launch import rendezvous
from launcher.launch.watchdog import HangWatch, NoWatch
from launcher.plan.host import WANDB_ENV, allowed_env
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import AGENT_PID, StopShield, children, die_with_parent, state_of
from launcher.rundir import records
from launcher.rundir.fencing import INCARNATION, Fence, Incarnation
from launcher.rundir.files import clear_torn, read_json, write_json
from launcher.rundir.paths import RunPaths
from launcher.rundir.records import HANG, failure

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


@dataclass(frozen=True)
class Ended:
    """How the workers of this node ended. ``words``: what is to be written of it, beside what they wrote themselves."""

    status: int
    words: dict[str, Any]


def main(run_dir: str, plan_name: str, parent: str, incarnation: str) -> int:
    """``plan_name``: of the file in ``run_dir``."""
    die_with_parent(int(parent), signal.SIGTERM)
    paths = RunPaths(Path(run_dir))
    plan_file = paths.root / plan_name
    plan, fence = load_plan(plan_file), Fence(paths, Incarnation.parse(incarnation))
    with StopShield() as shield:
        ended = serve(plan, plan_file, fence.own, shield)
    if ended.words:
        try:
            fence.check()
        except Superseded as error:  # a host that was cut off; by now the file is another one's
            print(error, flush=True)
            return EXIT_FAILED
        path = paths.summary_of(plan.node)
        write_json(path, {"verdict": "killed"} | (read_json(path) or {}) | ended.words)
    return ended.status


def begin(fence: Fence, **known: Any) -> None:
    """Open a new incarnation: what earlier ones said of their end is over. ``known``: what the nodes are to know."""
    paths = fence.paths
    fence.claim(attempt=paths.next_attempt(), **known)
    clear_torn(paths.root)
    for said in (paths.summary, *paths.root.glob("summary.node*.json"), *paths.root.glob("failure.node*.json")):
        said.unlink(missing_ok=True)


def serve(plan: LaunchPlan, plan_file: Path, own: Incarnation, shield: StopShield) -> Ended:
    """Run this node's workers, and on node 0 the W&B mirror, to their end. The caller says what becomes of the job.

    The environment is that of the workers meanwhile. Must be called from the main thread, in ``shield``.
    """
    environment = dict(os.environ)
    mirror = start_mirror(plan, own)
    try:
        for name in set(os.environ) - set(allowed_env(os.environ, plan.env.allow)):
            del os.environ[name]  # W&B's key was for the mirror alone
        os.environ |= {**plan.env.default, **os.environ, **plan.env.set}
        os.environ |= {AGENT_PID: str(os.getpid()), INCARNATION: str(own)}
        watch = _watch(plan, shield)
        ended = _run_workers(plan, plan_file, Fence(plan.paths, own).newest().get("attempt", 0), shield, watch)
        if watch.last is not None and plan.node == 0:
            ended = dataclasses.replace(ended, words=ended.words | {"hang": watch.last.entry})
        return ended
    finally:
        # a scheduler that wants the node back does not wait for W&B's server: the next mirror delivers what is missing
        hurried = shield.asked is not None and plan.cluster.slurm is not None
        finish_mirror(mirror, plan.paths, MIRROR_HURRIED_S if hurried else MIRROR_GRACE_S)
        os.environ.clear()
        os.environ |= environment


def load_plan(path: Path) -> LaunchPlan:
    fields = read_json(path) or {}
    return (RunPlan if "batch" in fields else LaunchPlan).load(path)


def _watch(plan: LaunchPlan, shield: StopShield) -> HangWatch | NoWatch:
    """A script of the user's own does not say how far it is."""
    if not isinstance(plan, RunPlan) or plan.train.hang_timeout is None or not sys.platform.startswith("linux"):
        return NoWatch()
    return HangWatch(plan, plan.cluster.place or rendezvous.ALONE, plan.train.hang_timeout, lambda: shield.asked)


def _run_workers(
    plan: LaunchPlan, plan_file: Path, attempt: int, shield: StopShield, watch: HangWatch | NoWatch
) -> Ended:
    """``attempt``: the number of this first one."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    place = plan.cluster.place or rendezvous.ALONE
    rendezvous.register(plan, place, lambda: shield.asked)
    arguments = (*plan.command, str(plan_file)) if isinstance(plan, RunPlan) else plan.command
    config = LaunchConfig(
        min_nodes=plan.cluster.nodes,
        max_nodes=plan.cluster.nodes,
        nproc_per_node=plan.cluster.workers_per_node,
        run_id=plan.run.id,
        rdzv_backend=rendezvous.BACKEND,
        rdzv_endpoint=place.store,
        local_addr=place.address,
        max_restarts=plan.cluster.max_restarts,
        signals_to_handle="SIGHUP",  # the others are the shield's: the agent finds them in its next round of looking
        shutdown_timeout=plan.cluster.grace_s,
        logs_specs=_logs(plan.paths, attempt, watch),
    )
    deaths = DeathWatch()
    try:
        with deaths, watch:
            elastic_launch(config, sys.executable)(*arguments)
    except SignalException as stop:
        return _stopped(plan, stop.sigval)
    except ChildFailedError as failed:
        # where a scheduler signals every process of a job, a script without a handler is killed by it
        if shield.asked is not None and failed.get_first_failure()[1].exitcode == -shield.asked:
            return _stopped(plan, shield.asked)
        return _failed(plan, failed, deaths, watch)
    except RendezvousClosedError as closed:
        return _parted(plan, str(closed))
    if shield.asked is not None:  # the workers were quicker than the agent
        return _stopped(plan, shield.asked)
    if isinstance(plan, RunPlan) and plan.node == 0 and not plan.paths.summary.exists():
        return _unfinished(plan.paths)
    return Ended(EXIT_DONE, {})


def _stopped(plan: LaunchPlan, by: int) -> Ended:
    """Told to stop, unless that came when all was done."""
    if (read_json(plan.paths.summary) or {}).get("verdict") == "done":
        return Ended(EXIT_DONE, {})
    return Ended(EXIT_INTERRUPTED, {"stopped_by": signal.Signals(by).name})


def _logs(paths: RunPaths, first: int, watch: HangWatch | NoWatch) -> LogsSpecs:
    """``first``: the number of the first attempt; torch counts from 0 in each incarnation of the run."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class RankLogs(LogsSpecs):
        """One file a rank, by its global number; the worker sends its standard error there too."""

        def __init__(self) -> None:
            self._attempt = -1

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            logs: dict[int, str] = {}
            errors: dict[int, str] = {}
            # torch counts the failures of this host; where another one's made it start again, its count stays
            self._attempt = attempt = self._attempt + 1
            if attempt and any(env["RANK"] == "0" for env in envs.values()):
                records.note_event(paths, "restarted", attempt=first + attempt)
            for local_rank, env in envs.items():
                rank, env["TORCHELASTIC_RESTART_COUNT"] = int(env["RANK"]), str(attempt)
                logs[local_rank] = str(paths.rank_log(rank, first + attempt))
                errors[local_rank] = env["TORCHELASTIC_ERROR_FILE"] = str(paths.rank_error(rank, first + attempt))
            ranks = {local_rank: (int(env["RANK"]), Path(logs[local_rank])) for local_rank, env in envs.items()}
            for local_rank, way in watch.begin(ranks).items():
                envs[local_rank][PROGRESS] = way
            return LogsDest(stdouts=logs, stderrs=dict.fromkeys(envs, ""), error_files=errors)

        @property
        def root_log_dir(self) -> str:
            return str(paths.logs)

    return RankLogs()


def _failed(plan: LaunchPlan, error: ChildFailedError, deaths: DeathWatch, watch: HangWatch | NoWatch) -> Ended:
    """The failure that came first: the others lost their peer, or were ended by torch itself."""
    rank, first = min(error.failures.items(), key=lambda item: _when(item[1], deaths))
    if (hang := watch.of(first.pid)) is not None:
        log, at = plan.paths.newest_rank_log(rank), _when(first, deaths)
        told = failure(hang.text, log, rank=hang.rank, kind=HANG, traceback=hang.stack or None, at=at)
        return Ended(EXIT_FAILED, {"verdict": "failed", "failure": told})
    message, trace = _own_words(first)
    kind, _, text = message.partition(": ")
    # by its full name: a user's own class may have the same short one
    ours = class_named(kind) if trace and f"\n{errors.__name__}.{kind}: " in trace else None
    told = failure(
        text if ours else message,
        plan.paths.newest_rank_log(rank),
        rank=rank,
        exit_code=first.exitcode,
        kind=kind if ours else None,
        traceback=None if ours else trace,  # the text of our own errors says it all
        at=_when(first, deaths),
    )
    return Ended(EXIT_FAILED, {"verdict": "failed", "failure": told})


def _parted(plan: LaunchPlan, why: str) -> Ended:
    """This host's workers could not begin, or begin again, together with those of the others."""
    if why == rendezvous.GIVEN_UP:
        return Ended(EXIT_FAILED, {"verdict": "killed"})
    error = f"the hosts' agents did not come together: {why}"
    told = failure(error, plan.paths.node_log(plan.node), at=datetime.now(UTC))
    return Ended(EXIT_FAILED, {"verdict": "failed", "failure": told})


def _unfinished(paths: RunPaths) -> Ended:
    """All workers left with status 0, and none has said that the run is over."""
    error = "the workers left before the run was over, with status 0: does the task call sys.exit or os._exit?"
    told = failure(error, paths.newest_rank_log(0), exit_code=0)
    return Ended(EXIT_FAILED, {"verdict": "failed", "failure": told})


def _when(death: ProcessFailure, deaths: DeathWatch) -> datetime:
    """When it failed: it writes its error down before its connections close, and so before any peer can notice. One
    that was killed wrote nothing, and was last seen alive before that."""
    file = Path(death.error_file)
    if death.error_file and file.exists():
        return datetime.fromtimestamp(file.stat().st_mtime, UTC)
    return deaths.time(death.pid)


def _own_words(death: ProcessFailure) -> tuple[str, str | None]:
    """The exception's message and traceback, or how the process ended."""
    file = Path(death.error_file)
    if death.error_file and file.exists():
        words = json.loads(file.read_text(encoding="utf-8"))["message"]
        return words["message"], words["extraInfo"]["py_callstack"]
    if death.exitcode < 0:
        return f"killed by {signal.Signals(-death.exitcode).name}", None
    return f"left with exit status {death.exitcode}", None


POLL_S = 0.02


class DeathWatch(threading.Thread):
    """Watches this process's children while it is entered. torch's own time stamps are whole seconds, and it counts the
    workers that it killed itself among the failed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._seen: dict[int, float] = {}
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self.join()

    def time(self, pid: int) -> datetime:
        """When ``pid`` was last seen alive, by the clock on the wall; now, for one whose end was not seen."""
        return datetime.now(UTC) - timedelta(seconds=time.monotonic() - self._seen.get(pid, time.monotonic()))

    def run(self) -> None:
        living: set[int] = set()
        looked = time.monotonic()
        while not self._over.wait(POLL_S):
            before, looked = looked, time.monotonic()
            now = {pid for pid in children(os.getpid()) if state_of(pid) not in (None, "Z")}
            for pid in living - now:
                self._seen.setdefault(pid, before)
            living = now


# the mirror has everything on disk already; what it cannot deliver in this time, `wandb sync` delivers later
MIRROR_GRACE_S, MIRROR_HURRIED_S = 60, 5


def start_mirror(plan: LaunchPlan, own: Incarnation) -> subprocess.Popen[bytes] | None:
    """W&B runs beside the job, reading its record: it can neither slow nor stop it.

    It inherits from the agent that signals to stop are blocked, and keeps them so: it ends when its input does.
    """
    if not isinstance(plan, RunPlan) or plan.node != 0 or plan.wandb.mode is WandbMode.disabled:
        return None
    with plan.paths.wandb_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.report.trackers", plan.run.dir, str(own)],
            env=allowed_env(os.environ, (*plan.env.allow, *WANDB_ENV)),
            stdin=subprocess.PIPE,  # its end tells the mirror that no record follows, even when this process is killed
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that a Ctrl-C meant for the job does not reach it
        )


def finish_mirror(mirror: subprocess.Popen[bytes] | None, paths: RunPaths, within_s: float) -> None:
    if mirror is None or mirror.stdin is None:
        return
    mirror.stdin.close()
    try:
        mirror.wait(within_s)
    except subprocess.TimeoutExpired:
        mirror.kill()
        problem = f"W&B had not taken everything {within_s} s after the end; `wandb sync` sends the rest."
        write_json(paths.wandb_status, (read_json(paths.wandb_status) or {}) | {"problem": problem})


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
