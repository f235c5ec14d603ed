"""Fixtures of all tests; their order, and which of them run in one process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.helpers import launch as launch_in

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# These have a Slurm of their own, and wait for its timers most of the time: `make test` begins with them, in all of its
# processes but one, which begins with the fast tests. Of all the others the longest come first, so that none of the
# processes is left with one at the end.
WAITING = ("system/test_slurm", "system/test_slurm_lost", "system/test_sweep")
LONG = (
    "system/test_elastic", "system/test_hosts", "system/test_links", "system/test_drill", "system/test_chaos",
    "train/test_verify",
)  # fmt: skip
# A file's tests run in one process, where they may share something long in the making. These are long, and do not.
DEALT_OUT = (
    "system/test_drill", "system/test_hangs", "system/test_resume", "system/test_saving", "system/test_sharding",
    "system/test_trouble", "system/test_wandb", "equivalence/test_grid", "train/test_forecast", "train/test_noise",
    "train/test_resume",
)  # fmt: skip


def _file(path: PurePath) -> str:
    return f"{path.parent.name}/{path.stem}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast ones early: a mistake in the arithmetic is said within seconds."""

    def place(item: pytest.Item) -> int:
        file = _file(item.path)
        if file in WAITING:
            return WAITING.index(file)
        if item.get_closest_marker("slow") is None:
            return len(WAITING)
        return len(WAITING) + 1 + (LONG.index(file) if file in LONG else len(LONG))

    items.sort(key=place)


class ByFile(LoadScopeScheduling):
    """Gives a process that has little left to do the next file, or the next test of those that are dealt out."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid if _file(PurePath(path)) in DEALT_OUT else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    return ByFile(config, log) if config.getvalue("dist") == "load" else None  # which is that of `-n`


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch ...` typed in the test's own empty directory."""
    return partial(launch_in, cwd=tmp_path)
