"""Cells side by side on this machine: the share of its GPUs and cores that each has, and their processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launcher.config.schema import Device
from launcher.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_RESUMABLE, UserError
from launcher.plan.host import gpu_names, shares_gpus
from launcher.plan.launch_plan import LaunchPlan
from launcher.process import CELLS_AT_ONCE, STOP_SIGNALS, signal_handler
from launcher.quantities import count
from launcher.rundir import history
from launcher.rundir.job_end import STOPS

CELL = (sys.executable, "-P", "-m", "launcher.cli.cell")
_POLL_S = 0.1
_WATCH_EVERY_S = 2.0


P = TypeVar("P", bound=LaunchPlan)


@dataclass(frozen=True)
class Share:
    """Part of this machine: values of CUDA_VISIBLE_DEVICES, and cores; empty if there are fewer than cells."""

    gpus: tuple[str, ...]
    cores: tuple[int, ...]


def shares(at_once: int, sys_cpus: Path = Path("/sys/devices/system/cpu")) -> list[Share]:
    """Return equal parts of what this process may use, one for each of ``at_once`` cells; some may be left over."""

    def place(core: int) -> tuple[int, int]:
        """Return a sort key by which the hardware threads of one core are neighbours."""
        try:
            siblings = (sys_cpus / f"cpu{core}/topology/thread_siblings_list").read_text()
            return int(siblings.replace("-", ",").split(",")[0]), core
        except (OSError, ValueError):
            return core, core

    gpus, cores = gpu_names(os.environ), sorted(os.sched_getaffinity(0), key=place)
    of_gpus, of_cores = len(gpus) // at_once, len(cores) // at_once
    return [
        Share(gpus[number * of_gpus :][:of_gpus], tuple(cores[number * of_cores :][:of_cores]))
        for number in range(at_once)
    ]


def run_cells(
    starts: Sequence[Callable[[], P]],
    at_once: int,
    run_here: Callable[[P], int],
    watch: Callable[[], object],
    say: Callable[[str], object],
) -> list[int]:
    """Run cells on this machine, and return the exit statuses of those that ran.

    A failed cell leaves the others. After a stop signal, and after a cell that was stopped by itself, no further cell
    starts.

    Args:
        starts: each makes the directory of a cell's run, and returns its plan.
        at_once: number of cells that run at the same time; several run in processes of their own.
        run_here: runs a single cell in this process, and returns its exit status.
        watch: called every two seconds while several run.
        say: shows a message.

    Raises:
        UserError: the directory of a cell cannot be made. All cells that ran by then have ended.
    """
    if min(at_once, len(starts)) > 1:
        return _run_beside(starts, at_once, watch, say)
    statuses: list[int] = []
    for start in starts:
        statuses.append(run_here(start()))
        if statuses[-1] in STOPS:
            break
    return statuses


def _run_beside(
    starts: Sequence[Callable[[], LaunchPlan]], at_once: int, watch: Callable[[], object], say: Callable[[str], object]
) -> list[int]:
    signals: list[int] = []
    waiting, free, beside = deque(starts), shares(at_once), min(at_once, len(starts))
    running: dict[subprocess.Popen[bytes], tuple[Share, LaunchPlan]] = {}
    statuses: list[int] = []
    error: UserError | None = None
    sent, watched = 0, 0.0
    with signal_handler(STOP_SIGNALS, lambda number, _: signals.append(number)):
        while True:
            while waiting and free and not (signals or error or {*statuses} & {*STOPS}):
                try:
                    plan = waiting.popleft()()
                    _require_gpus(plan, free[0], at_once)
                except UserError as raised:
                    error = raised
                else:
                    share = free.pop(0)
                    running[_start(plan, share, beside)] = share, plan
            if not running:
                break
            if signals and not sent:
                again = " Ctrl-C now kills their workers at once." if signals[0] == signal.SIGINT else ""
                say(f"Stopping all cells at the end of their windows.{again}")
            for number in signals[sent:]:
                for process in running:
                    process.send_signal(number)
            sent = len(signals)
            for process in [each for each in running if each.poll() is not None]:
                free.append(running.pop(process)[0])
                killed = EXIT_INTERRUPTED if signals else EXIT_FAILED
                statuses.append(process.returncode if process.returncode >= 0 else killed)
            # until a cell's process has recorded that it runs the cell, the cell looks lost
            if time.monotonic() - watched >= _WATCH_EVERY_S and all(
                [entry.pid for entry in history.submissions(plan.paths)][-1:] == [process.pid]
                for process, (_, plan) in running.items()
            ):
                watch()
                watched = time.monotonic()
            time.sleep(_POLL_S)
    if error is not None:
        raise error
    if signals and waiting:
        statuses.append(EXIT_INTERRUPTED if signals[0] == signal.SIGINT else EXIT_RESUMABLE)
    return statuses


def _require_gpus(plan: LaunchPlan, share: Share, at_once: int) -> None:
    """Check that a cell which was planned when other GPUs were visible has enough of them. Raises UserError."""
    workers = plan.cluster.workers_per_node
    if plan.cluster.device is Device.cuda and not shares_gpus() and len(share.gpus) < workers:
        raise UserError(
            f"{plan.run.name}: was planned for {count(workers, 'GPU')}, and with sweep.at_once={at_once} each cell has "
            f"{len(share.gpus)} here.\n  Make as many GPUs visible as before (CUDA_VISIBLE_DEVICES), or name one cell, "
            "which then has all of them."
        )


def _start(plan: LaunchPlan, share: Share, at_once: int) -> subprocess.Popen[bytes]:
    on_gpus = plan.cluster.device is Device.cuda
    # HIP ignores the first if the second is set, CUDA the second
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if on_gpus and share.gpus else ()
    cores = [] if on_gpus else [",".join(map(str, share.cores))]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # inherited, until the cell has handlers
    try:
        return subprocess.Popen(
            [*CELL, plan.run.dir, str(os.getpid()), *cores],
            env={**os.environ, CELLS_AT_ONCE: str(at_once), **dict.fromkeys(names, ",".join(share.gpus))},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C must only reach this process, which sends it on
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
