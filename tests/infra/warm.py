"""Warm start of Python programs: forked from a process that has imported torch and the launcher, instead of executed.

What costs a test of real processes most is `import torch`, in each of them. ``run`` and ``Popen`` here are those of
``subprocess``, but a Python program that they recognise (``python -m launcher...``, torchrun, the command line) is
forked from a server, and so are the programs that it starts in its turn. Such a process is as real as any other: it
has a parent, a session, signals, files and memory of its own, and /proc shows the command line and the environment
that it was given. It differs in what is imported already, its configs come from a cache (tests/infra/composition.py),
and its hashes have the seed 0. Everything else is executed as usual, and so is every program if ``COLD`` is set in its
environment.

The server clones with CLONE_PARENT, so that the new process is a child of the one that asked for it; for this each
process has a server of its own, forked from it before it does anything else and starts threads.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import pickle
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import psutil

from launcher.process import handles

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable  # of the programs to be recognised; tests/infra/slurm_warm.py sets another one
COLD = "LAUNCHER_TEST_COLD"
PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
    "torch.distributed.launcher.api", "torch.distributed.run", "torch.utils.data", "launcher.api",
    "launcher.cli.train", "launcher.launch.agent", "launcher.launch.planner", "launcher.train.trainer",
    "launcher.extensions.forecast.memory_forecast", "launcher.train.inspection.task_probe", "wandb",
    "wandb.sdk.launch.inputs.internal",
)  # fmt: skip
COMMAND_LINE = "from launcher.cli import main; main()"
XDIST = "import sys;exec(eval(sys.stdin.readline()))"  # by which execnet starts a process of pytest-xdist
# they start no Python programs, and so need no server
LEAVES = (
    "launcher.train.worker", "launcher.launch.script_worker", "launcher.train.inspection.task_probe",
    "tests.infra.slurm_warm",
)  # fmt: skip
# variables that are read when Python or torch start, which is over in a fork
READ_AT_START = ("PYTHONWARNINGS", "PYTHONNOUSERSITE", "TORCH_LOGS", COLD)
SPACE = 100_000  # bytes for a command line, and as many for an environment
CLONE_PARENT, CLONE = 0x8000, {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)
CLONE_NEWNET = 0x40000000
HUGE, MADV_COLLAPSE = 2**21, 25  # bytes of a huge page; a number that older kernels refuse
FAR = 512  # file descriptors from here on are in nobody's way


def has_another(directory: str) -> bool:
    """Return True if an import finds a copy of the launcher in ``directory``, which is not the one imported here."""
    copy = Path(directory) / "launcher"
    return copy.exists() and not copy.samefile(ROOT / "launcher")


@dataclass(frozen=True)
class Program:
    """A Python program to be started, and what it inherits from the process that asks for it."""

    argv: list[str]
    cwd: str
    env: dict[str, str]
    descriptors: list[int]  # the numbers that the files sent along have in the new process
    new_session: bool
    blocked: list[int]  # signals
    ignored: list[int]
    first: str  # pickled, a function to be called before the program runs; or None

    @property
    def command(self) -> tuple[list[str], bool]:
        """The command without the interpreter and its options; whether it is kept from importing its directory."""
        words, safe = self.argv[1:], "PYTHONSAFEPATH" in self.env
        while words and words[0] in ("-P", "-u", "-B"):
            safe |= words.pop(0) == "-P"
        return words, safe

    @property
    def library(self) -> list[str]:
        return [place for place in self.env.get("PYTHONPATH", "").split(os.pathsep) if place]

    @property
    def is_known(self) -> bool:
        words, _ = self.command
        if self.argv[0] != PYTHON or len(words) < 2 or any(name in self.env for name in READ_AT_START):
            return False
        if self.env.get("PYTHONHASHSEED", "0") != "0" or any(has_another(p) for p in self.library):
            return False
        return (words[0] == "-c" and words[1] in (COMMAND_LINE, XDIST)) or (
            words[0] == "-m" and words[1].startswith(("launcher", "jobs.", "tests.", "torch.distributed.run"))
        )


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` with warm starts."""

    def _execute_child(self, *arguments: Any) -> None:
        _start(self, *arguments)


def join_network(path: str) -> None:
    """Move this process to the network namespace of ``path``: a ``preexec_fn``, for a program and what it starts."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns: {path}")
    os.close(descriptor)


def run(command: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with a warm start, and the output captured as text.

    Raises:
        AssertionError: it did not end within ``timeout`` seconds; with its output, and the stacks of its workers.
    """
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end_with_stacks(process)
            out, err = process.communicate()
            raise AssertionError(f"No end within {timeout:g} s.\n{out[-10000:]}\n{err[-10000:]}") from None
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _end_with_stacks(process: Popen) -> None:
    """End a process and those that it started; each worker in turn writes the stack of its main thread before."""
    everyone = [(parent := psutil.Process(process.pid)), *parent.children(recursive=True)]
    workers = [each for each in everyone if handles(each.pid, signal.SIGABRT)]  # faulthandler
    for each in everyone:
        with suppress(psutil.NoSuchProcess):
            if each not in workers:  # an agent would end the other workers
                each.suspend()
    for each in workers:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGABRT)
            limit = time.monotonic() + 60
            while each.status() != psutil.STATUS_ZOMBIE and time.monotonic() < limit:
                time.sleep(0.02)
    for each in everyone:
        with suppress(psutil.NoSuchProcess):
            each.kill()


def install() -> None:
    """Start known programs warm, whoever starts them in this process, such as the launcher's own probes."""
    subprocess.Popen._execute_child = _start  # pyright: ignore


_execute = subprocess.Popen._execute_child  # pyright: ignore
_signature = inspect.signature(_execute)
_lock = threading.Lock()
_server: socket.socket | None = None  # of this process
started = 0  # programs and forks of this process so far


def _note_start() -> None:
    global started
    started += 1


os.register_at_fork(after_in_parent=_note_start)


def _start(process: subprocess.Popen[Any], *arguments: Any) -> None:
    """Fork the program if it is a known one; does the work of ``Popen._execute_child``."""
    _note_start()
    given = _signature.bind(process, *arguments).arguments
    program = _program(given)
    if program is None or not CLONE:
        _execute(process, *arguments)
        return
    streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    files = [number if file == -1 else file for number, file in enumerate(streams)]
    message = json.dumps(asdict(program)).encode()
    with _lock:
        channel = start_server()
        socket.send_fds(channel, [len(message).to_bytes(8, "big")], [*files, *given["pass_fds"]])
        channel.sendall(message)
        process.pid = int.from_bytes(channel.recv(8), "big")
    process._child_created = True  # pyright: ignore
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(given[name] for name in ends))  # pyright: ignore


def _program(given: Mapping[str, Any]) -> Program | None:
    argv = given["args"]
    if given["shell"] or given["executable"] or not isinstance(argv, list | tuple):
        return None
    try:
        first = pickle.dumps(given["preexec_fn"]).hex()
    except (pickle.PicklingError, AttributeError):  # a function in a function
        return None
    program = Program(
        argv=[os.fsdecode(word) for word in argv],
        cwd=os.path.abspath(os.fsdecode(given["cwd"] or ".")),  # noqa: PTH100
        env=dict(os.environ if given["env"] is None else given["env"]),
        descriptors=[0, 1, 2, *given["pass_fds"]],
        new_session=given["start_new_session"],
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        first=first,
        ignored=[number for number in range(1, 32) if signal.getsignal(number) == signal.SIG_IGN],
    )
    return program if program.is_known and Path(program.cwd).is_dir() else None


def start_server() -> socket.socket:
    """Execute the server of this process if it has none, because it is not a warm one itself."""
    global _server
    if _server is not None:
        return _server
    _server, theirs = socket.socketpair()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCH", "LAUNCHER"))}
    code = "import sys; from tests.infra.warm import main; main(int(sys.argv[1]))"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(theirs.fileno()), " " * SPACE],
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "SPACE": " " * SPACE},
        cwd="/",
        pass_fds=(theirs.fileno(),),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()

    def end(channel: socket.socket) -> None:
        channel.close()
        process.wait()

    atexit.register(end, _server)
    return _server


def main(descriptor: int) -> NoReturn:
    """Import what the programs need, and serve until the client ends."""
    for module in PRELOADED:
        importlib.import_module(module)
    composition = importlib.import_module("tests.infra.composition")
    composition.install()
    composition.fill()
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    vars(rendezvous)["get_method_name"] = _calling_function
    for finalizer, of in weakref.finalize._registry.items():  # pyright: ignore
        if of.func.__module__ == "torch.library":  # removing every operator at the end takes each process 45 ms
            finalizer.atexit = False
    gc.freeze()  # a collection would copy every page of theirs
    _use_huge_pages()
    _serve(socket.socket(fileno=descriptor))


def _use_huge_pages() -> None:
    """Move the heap to huge pages where the kernel can: a fork copies the table of pages, which takes 15 ms less."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *name = line.split()
        if rights == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(number, 16) for number in place.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


def _calling_function(depth: int = 2) -> str:
    """Stand in for torch's function, which looks for the source of each frame in all modules, whenever the rendezvous
    logs something: 0.4 s of CPU for each start of torchrun."""
    return sys._getframe(depth).f_code.co_name


def _serve(channel: socket.socket) -> NoReturn:
    """Fork a process for each request; each has a server of its own."""
    while True:
        _silence(channel)
        header, files, _, _ = socket.recv_fds(channel, 8, 16)
        if not header:  # the client has ended
            os._exit(0)
        with channel.makefile("rb") as stream:
            program = Program(**json.loads(stream.read(int.from_bytes(header, "big"))))
        if pid := _clone():
            for file in files:
                os.close(file)
            channel.sendall(pid.to_bytes(8, "big"))
            continue
        channel.detach()  # the program's files may take its number
        become(program, files)


def become(program: Program, files: list[int]) -> NoReturn:
    """Run the program in this process, which was forked for it. ``files``: the program's, by ``descriptors``."""
    global _server
    _inherit(program, files)
    _server = None
    if program.command[0][1] not in LEAVES:
        _server, channel = socket.socketpair()
        if not os.fork():
            _server.close()
            _serve(channel)
        channel.close()
    _show(program)
    _leave(_run(program))


def _silence(channel: socket.socket) -> None:
    """Let go of the client's files, and stay when its process group is sent a signal."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))  # those for a new process wait until it takes them
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, FAR)


def _clone() -> int:
    """Fork a sibling of this process. Returns its id, and 0 in it."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    (ctypes.pythonapi.PyOS_AfterFork_Parent if pid else ctypes.pythonapi.PyOS_AfterFork_Child)()
    return pid


def _inherit(program: Program, files: list[int]) -> None:
    """Take the session, signals, files and directory that an executed program would have."""
    if program.new_session:
        os.setsid()
    for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in program.ignored else signal.SIG_DFL)
    for number, action in ((signal.SIGPIPE, signal.SIG_IGN), (signal.SIGINT, signal.default_int_handler)):
        if number not in program.ignored:
            signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, FAR) for file in files]
    os.closerange(0, FAR)
    for file, number in zip(out_of_the_way, program.descriptors, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(program.cwd)
    if first := pickle.loads(bytes.fromhex(program.first)):
        first()


def _show(program: Program) -> None:
    """Set the environment and have /proc show it, and the command line, in the place of the server's."""
    os.environ.clear()
    os.environ |= program.env
    arg_start, arg_end, env_start, env_end = map(
        int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    )
    variables = [f"{name}={value}" for name, value in program.env.items()]
    for start, end, words in ((arg_start, arg_end, program.argv), (env_start, env_end, variables)):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(text) < end - start, f"{len(text)} bytes are more than there is space for"
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _run(program: Program) -> int:
    """Run the program as the interpreter would; return its exit status."""
    words, safe = program.command
    unbuffered = "-u" in program.argv[: -len(words)] or "PYTHONUNBUFFERED" in program.env
    out = open(1, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, "utf-8", line_buffering=os.isatty(1), write_through=unbuffered)
    sys.stderr = sys.__stderr__ = open(2, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
    install()
    sys.path[:0] = [*([] if safe else [program.cwd]), *program.library]
    importlib.invalidate_caches()
    if program.library:  # packages may be installed there
        sys.modules["launcher.targets"]._entry_points.cache_clear()
    tempfile.tempdir = None  # TMPDIR may be another one
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    torch.set_num_threads(int(program.env.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    numpy.random.seed()
    sys.argv, sys.modules["__main__"] = [words[0], *words[2:]], ModuleType("__main__")
    try:
        if words[0] == "-c":
            exec(words[1], vars(sys.modules["__main__"]))
        else:
            sys.modules.pop(words[1], None)  # what is imported runs once more as the program
            runpy._run_module_as_main(words[1])  # pyright: ignore
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _leave(status: int) -> NoReturn:
    """End as the interpreter would, but for the teardown of its modules."""
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
