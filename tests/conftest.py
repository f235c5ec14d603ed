"""Fixtures of all tests; their order, and which of them run in one process."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from launcher.launch.network import free_port
from tests.helpers import SLOWNESS, patience
from tests.helpers import launch as launch_in
from tests.infra import warm
from tests.infra.runs import PROJECT

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# A limit for one example, or for making it, is a timed assertion: it fails on a busy machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Importing torch in a new process takes this long where the limits in the tests were chosen.
IMPORT_S = 2.5
LIMIT_S = 300  # of one test, on that machine
# Workers inherit TORCH_* names, so that this one marks every process that a test starts.
MARK = "TORCH_LAUNCHER_TEST"
_numbers = itertools.count()

# Until the tests run, whatever the environment says: all processes of pytest-xdist import the same modules.
sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine once, in the process that the others inherit from, and stretch every limit accordingly."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
    # Inherited by all processes of the tests: one that wakes up does not interrupt another one. Gloo's thread would
    # interrupt the thread that has the lock of its connection, and then poll until it gets that lock.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if SLOWNESS not in os.environ:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        os.environ[SLOWNESS] = f"{max(1.0, (time.perf_counter() - began) / IMPORT_S):.2f}"
    if config.getoption("timeout", None) is None:
        config.option.timeout = patience(LIMIT_S)
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist inherit it
        cache = tempfile.TemporaryDirectory(prefix="launcher-test-cache-")
        # what a user has must not decide a test
        os.environ["XDG_CACHE_HOME"], os.environ["XDG_STATE_HOME"] = f"{cache.name}/cache", f"{cache.name}/state"
        config.add_cleanup(cache.cleanup)
        if config.getoption("numprocesses", None):
            warm.start_server()
            rewrite_assertions(config.pluginmanager.rewrite_hook)


def rewrite_assertions(hook: Any) -> None:
    """Have pytest store the modules of tests as it rewrites them, which takes each of its processes seconds."""

    class Rewritten(Exception):
        pass

    def stop(*_: object) -> None:
        raise Rewritten

    for path in Path(__file__).parent.rglob("test_*.py"):
        spec = importlib.util.spec_from_file_location(path.stem, path, loader=hook)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        vars(module)["__builtins__"] = {"__import__": stop}  # the module is not run
        with suppress(Rewritten):
            hook.exec_module(module)


def pytest_collection_finish() -> None:
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    """Kill what a test has started, whatever ended it: a limit, an assertion or a signal.

    Test hosts and Slurm nodes have network namespaces of their own, and their fixtures end what runs there.
    """
    mark, before = f"{os.getpid()}-{next(_numbers)}", warm.started
    os.environ[MARK] = mark
    yield
    del os.environ[MARK]
    for pid in _marked(mark) if warm.started > before else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Return the processes of this network namespace that carry ``mark`` in their environment."""
    entry, here = f"{MARK}={mark}".encode(), Path("/proc/self/ns/net").readlink()
    pids: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # multiprocessing keeps one of these for as long as this process runs
            if (
                entry in (place / "environ").read_bytes().split(b"\0")
                and b"resource_tracker" not in (place / "cmdline").read_bytes()
                and (place / "ns/net").readlink() == here
            ):
                pids.append(int(place.name))
    return [pid for pid in pids if pid != os.getpid()]


# These have a Slurm of their own or wait for timers, and leave the cores idle most of the time: `make test` begins with
# the first three of them, and with fast tests in its other processes, and comes to the others in the course of these.
WAITING = (
    "test_slurm_lost",
    "test_slurm",
    "test_sweep",
    "test_containers",
    "test_elastic",
    "test_laptop",
    "test_chaos",
)
FIRST = 3
# a fixture that several tests share: one of the file itself, or one of a conftest.py beside it
SHARED_FIXTURE = re.compile(
    r'scope="(module|class|package)"|\b(by_cgroup|by_process_tree|undisturbed|two_hosts|pair)\b'
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put fast tests before slow ones, and of the slow ones those that one process takes a file at a time before the
    others, so that all processes end at about the same time."""
    fast = [item for item in items if item.get_closest_marker("slow") is None]
    places = {item: number / len(fast) for number, item in enumerate(fast)}

    def order(item: pytest.Item) -> float:
        if item.path.stem in WAITING:
            return max(0, WAITING.index(item.path.stem) + 1 - FIRST) / (len(WAITING) + 1 - FIRST) - 0.001
        if item in places:
            return places[item]
        return 1 if shares_fixture(item.path) else 2

    items.sort(key=order)


@functools.cache
def shares_fixture(path: Path) -> bool:
    """Return True if tests of the file share a fixture."""
    return SHARED_FIXTURE.search(path.read_text(encoding="utf-8")) is not None


class SharedFixtureScheduling(LoadScopeScheduling):
    """Runs the tests of a file in one process if they share a fixture, and deals out all others one by one.

    `--dist loadgroup` does not: pytest-xdist 3.8 writes its groups to an attribute that pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if shares_fixture(self.config.rootpath / path) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedFixtureScheduling | None:
    return SharedFixtureScheduling(config, log) if config.getvalue("dist") == "load" else None  # that of `-n`


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch ...` typed in the test's own empty directory."""
    return partial(launch_in, cwd=tmp_path)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The test's own directory with a stranger's package in it."""
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    return tmp_path


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the only rank of a job."""
    here = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port("127.0.0.1")}
    for name, value in here.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    yield
    import torch.distributed as dist

    dist.destroy_process_group()
