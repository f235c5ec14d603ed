"""Signals, output and exit of this process, and /proc data of others."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import logging
import math
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TextIO, TypeVar, cast

from launcher.errors import LauncherError

T = TypeVar("T")

# Ask a worker to stop after its window; sent by the agent, a scheduler, or a person.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
# Makes a worker write the stacks of its threads into its log.
STACK_SIGNAL = signal.SIGUSR1
_PR_SET_PDEATHSIG = 1


# Environment variable with the agent's process id, for its workers.
AGENT_PID = "LAUNCHER_AGENT_PID"
# Environment variable with the run's id, for all processes that the launcher starts for a run, and their children.
RUN_ID = "LAUNCHER_RUN_ID"
# Environment variable: the run's directory, for a script of `launch run`.
RUN_DIR = "LAUNCHER_RUN_DIR"
# Environment variable with the number of cells of a sweep that may run at the same time on this machine, for their
# processes.
CELLS_AT_ONCE = "LAUNCHER_CELLS_AT_ONCE"


# Environment variable: set if `launch` is to end as with Ctrl-C when its standard input ends.
ENDS_WITH_INPUT = "LAUNCHER_ENDS_WITH_INPUT"


def interrupt_at_end_of_input() -> None:
    """Have this process interrupted, as by Ctrl-C, when its standard input ends, which is the end of a connection.

    Children get an empty standard input instead.
    """
    connection, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def wait() -> None:
        with suppress(OSError):
            while os.read(connection, 4096):
                pass
        # to the main thread, whose system call it interrupts
        signal.pthread_kill(cast("int", threading.main_thread().ident), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``number`` to this process when ``parent`` dies in any way, so that no orphan is left.

    Does nothing on a system without prctl(2).

    Args:
        parent: process id of the parent, as the parent passed it on; getppid() here is too late if it died already.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), number)


class StopShield:
    """Context in which a parent of workers keeps the first stop signal in ``received`` instead of raising an exception.

    An exception could surface in any code, such as logging or an import, which would take it for its own error.

    Children start with these signals blocked until they have handlers and call ``unblock_stop_signals``, so that no
    signal reaches them too early. They inherit the mask from the main thread; therefore another thread receives the
    signals here, while Python still runs the handlers in the main thread.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._over = threading.Event()
        self._taker = threading.Thread(target=self._take, daemon=True)

    def _take(self) -> None:
        unblock_stop_signals()
        self._over.wait()

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = self.received or signal.Signals(number)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._taker.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._taker.join()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def unblock_stop_signals() -> None:
    """Unblock the stop signals; one that came meanwhile is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class _StreamWithoutErrors:
    """Stream that ignores a full disk: unwritten text stays in its buffer, and training continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def never_fail_to_print() -> None:
    """Ignore errors of printing, so that a full log disk does not end the run.

    A full disk ends the run only if checkpoints or the record cannot be written.
    """
    sys.stdout, sys.stderr = (
        cast("TextIO", _StreamWithoutErrors(sys.stdout)),
        cast("TextIO", _StreamWithoutErrors(sys.stderr)),
    )


def show_stacks_when_asked() -> None:
    """Have STACK_SIGNAL write the stacks of all threads to standard error, even while Python is blocked."""
    faulthandler.register(STACK_SIGNAL, file=sys.stderr, all_threads=True)


# Line in a rank's log before its final traceback. The terminal echoes rank 0's log up to this line: the verdict shows
# the traceback of the rank that failed first, not of one that merely lost its peer.
EXCEPTION_MARK = "=== this rank ended with an exception ==="
# Line of faulthandler, before the stack of a worker that crashed in compiled code: innermost frame first.
CRASH_MARK = "Fatal Python error"


def prepare_worker() -> None:
    """Prepare a worker process: it dies with its agent, has one log in chronological order, and marks its exceptions.

    An uncaught exception writes EXCEPTION_MARK into the log before its traceback. A crash in compiled code, such as a
    segmentation fault, writes CRASH_MARK and the stack.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        print(EXCEPTION_MARK, file=sys.stderr, flush=True)
        sys.__excepthook__(kind, error, trace)

    if AGENT_PID in os.environ:
        die_with_parent(int(os.environ[AGENT_PID]))
    sys.stderr.flush()
    os.dup2(1, 2)
    sys.excepthook = hook
    faulthandler.enable(file=2, all_threads=False)


class StopRequest:
    """Flag that is set by a signal. The ranks share it in the window's collective, and stop after the same window."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}
        self.take()
        unblock_stop_signals()

    def take(self) -> None:
        """Handle the signals, if ``release`` has restored the earlier handlers."""
        if not self._before:
            self._before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}

    def release(self) -> None:
        """Restore the earlier handlers in a process without an agent: a notebook continues after its loop."""
        if AGENT_PID not in os.environ and threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.received = True

    def __call__(self) -> bool:
        return self.received


# seconds that threads get to end after the main thread
_THREADS_WITHIN_S = 10


def exit_without_teardown(status: int, *, beat: Callable[[], object] | None = None) -> NoReturn:
    """Exit as the interpreter would, but without tearing down its modules.

    gloo's threads may still hold tensors of the last collective. If they release them during the teardown, the process
    aborts ("terminate called without an active exception"), and a finished job looks failed (pytorch/pytorch#190489;
    three of eight exits of a ten-line DDP script with torch 2.13).

    Args:
        beat: called while threads are waited for, which is then limited: everything is written, and a thread of the
            user's that never ends must not look like a hang. None: wait for them as the interpreter does.
    """
    if beat is None:
        threading._shutdown()  # pyright: ignore  (waits for threads, including those of executors)
    else:
        _wait_for_threads(beat)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    exit_at_once(status)


def run_and_exit(run: Callable[[], object], *, beat: Callable[[], object] | None = None) -> NoReturn:
    """Run a worker, and exit without a teardown however it ends: that of NCCL's communicators can hang after a failure.

    Args:
        run: the worker's work, which writes torchrun's error file if it fails.
        beat: see ``exit_without_teardown``.
    """
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = error.exit_status if isinstance(error, LauncherError) else 1
    exit_without_teardown(status, beat=beat)


def exit_at_once(status: int = 0) -> NoReturn:
    """Exit without waiting for threads, for a process whose answer is written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait_for_threads(beat: Callable[[], object]) -> None:
    def others() -> list[threading.Thread]:
        # a daemon thread ends with the process; main is the caller
        return [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]

    def end() -> None:
        for end_executor in reversed(threading._threading_atexits):  # pyright: ignore
            end_executor()

    # it waits for the executors' tasks
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    limit = time.monotonic() + _THREADS_WITHIN_S
    while (ending.is_alive() or others()) and time.monotonic() < limit:
        beat()
        time.sleep(0.02)
    if names := [each.name for each in others()]:
        print(f"The process ends, although threads of the task still run: {', '.join(names)}.", flush=True)


# more than the connections of the largest job; some containers have a hard limit of a billion
_OPEN_FILES = 2**18


def raise_open_files() -> int:
    """Raise the soft limit of open files of this process, and of those that it starts, to the hard limit. Return it.

    Most systems and Slurm give a process 1,024. The agent of node 0 needs two for each node, rank 0 one for each rank,
    and gloo one for each pair of ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = _OPEN_FILES if hard == unlimited else min(hard, _OPEN_FILES)
    if soft == unlimited or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # the system has a limit below its hard one
        return soft
    return wanted


def cells_at_once() -> int:
    """Return the number of cells of a sweep that may run at the same time on this machine, if this process belongs to
    one of them; else 1."""
    return first_number(os.environ, CELLS_AT_ONCE) or 1


SRUN = "srun"
# (starter, variable of the rank, of the number of copies, of those on this host)
_STARTERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    (SRUN, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", None),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


@dataclass(frozen=True)
class Copies:
    """Processes that run the same command, of which this is one.

    Attributes:
        starter: program that has started them.
        rank: number of this one, from 0.
        on_each_host: largest number of copies on one host; None: not known.
        ranks: variables that number them. A process without these is no copy.
    """

    starter: str
    rank: int
    number: int
    on_each_host: int | None
    ranks: tuple[str, ...]

    @classmethod
    def of(cls, env: Mapping[str, str], *, interactive: bool) -> Copies | None:
        """Return the copies that ``env`` describes; None for a process that is the only one.

        Args:
            interactive: the command is typed at a terminal, perhaps in the shell of `srun --pty`.
        """
        found = [each for each in _STARTERS if each[1] in env and first_number(env, each[2]) > 1]
        if not found or (interactive and found[0][0] == SRUN):
            return None
        starter, rank, number, local = found[0]
        copies = first_number(env, number)
        if starter == SRUN:
            on_each = math.ceil(copies / (first_number(env, "SLURM_STEP_NUM_NODES") or 1))
        else:
            on_each = first_number(env, local) if local else 0
        if starter == "torchrun" and "TORCHELASTIC_RUN_ID" not in env:
            starter = "a program that sets RANK and WORLD_SIZE"
        return cls(starter, first_number(env, rank), copies, on_each or None, tuple(each[1] for each in found))


def first_number(env: Mapping[str, str], name: str) -> int:
    """Return the number at the beginning of a variable or setting, such as 4 of "4(x2)"; 0 without one."""
    digits = re.match(r"\d+", env.get(name, ""))
    return int(digits[0]) if digits else 0


# variables that describe one process of a job: of torchrun, of a step of Slurm, of MPI, of an outer run
_OF_ONE_PROCESS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
    r"|SLURM_(PROCID|LOCALID|TASK_PID|GTIDS)|PMI_(RANK|SIZE|FD|PORT|ID)|PMIX_(RANK|NAMESPACE|SERVER_.*)"
    r"|(OMPI|MV2)_COMM_WORLD_.*|MPI_LOCAL\w+|PALS_(LOCAL_)?RANKID"
    r"|LAUNCHER_(AGENT_PID|INCARNATION|PROGRESS|RUN_(DIR|ID))"
)


def inherited_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` as the processes of a run inherit it: without what describes one process of an outer job."""
    return {name: value for name, value in env.items() if not _OF_ONE_PROCESS.fullmatch(name)}


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Context in which ``os.environ`` has ``variables`` and no others."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


@contextmanager
def signal_handler(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Generator[None]:
    """Context in which ``handler`` handles the signals ``numbers``."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def deferred_interrupts() -> Generator[None]:
    """Context at whose end Ctrl-C, SIGTERM and SIGHUP take effect; processes that it starts do not receive them."""
    numbers, received = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), list[int]()
    try:
        with signal_handler(numbers, lambda number, _: received.append(number)):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # which processes inherit
            try:
                yield
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        for number in received[:1]:
            signal.raise_signal(number)


@contextmanager
def no_collection() -> Generator[None]:
    """Context without garbage collection, for commands that make millions of objects and few cycles.

    The collector would go through all of them again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def wait_until(condition: Callable[[], T], within_s: float = math.inf, every_s: float = 0.1) -> T:
    """Call ``condition`` every ``every_s`` seconds until its result is true, for at most ``within_s`` seconds.

    Returns:
        The last result, which is false only if the time is over.
    """
    end = time.monotonic() + within_s
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(every_s)
    return result


def shared_interval(least_s: float, askers: int, per_s: float = 1000) -> float:
    """Return the seconds between two requests of one of ``askers`` processes that poll the same server.

    The server then receives at most ``per_s`` requests per second. ``least_s``: interval of few processes.
    """
    return max(least_s, askers / per_s)


def children(pid: int) -> list[int]:
    """Return the process ids of the children of ``pid``. Called fifty times a second; psutil reads all processes."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids += map(int, task.read_text().split())
        except OSError:  # that thread has ended
            continue
    return pids


def living_children() -> list[int]:
    """Return the process ids of this process's children that have not ended."""
    return [pid for pid in children(os.getpid()) if state_of(pid) not in (None, "Z")]


def state_of(pid: int) -> str | None:
    """Return the state letter of proc(5): Z zombie, T stopped, D waiting for a disk; None without such a process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def has_variable(pid: int, name: str, value: str) -> bool:
    """Return True if the process was started with ``name=value`` in its environment."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def handles(pid: int, signal: int) -> bool:
    """Return True if the process has a handler for ``signal``, which would kill it otherwise."""
    try:
        caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (signal - 1) & 1)


# what torchao 0.18 logs when it is imported, which transformers and peft do too: libraries with kernels for other
# machines and formats, which are not used here, and its use of a function of torch that is deprecated since torch 2.13
_KNOWN_MESSAGES = {
    "torchao": re.compile("Failed to load .*_C.*[.]so|Skipping import of cpp extensions"),
    "torch.utils._pytree": re.compile(r"register_constant\(\) on Enum subclasses is deprecated"),
}


@cache
def quiet_torchao() -> None:
    """Hide the messages that torchao logs whenever it is imported."""
    for name, pattern in _KNOWN_MESSAGES.items():
        logging.getLogger(name).addFilter(lambda record, known=pattern: known.search(record.getMessage()) is None)
