"""Fixtures for all tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import launch as launch_in

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# These wait for others most of their time, for Slurm's timers and slow links, and take longest. `make test` begins with
# the first two, beside the fast ones, and goes on with the others. A file runs in one process, one test at a time.
WAITING = ("test_slurm", "test_sweep")
LONG = ("test_hosts", "test_trouble")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast ones early: a mistake in the arithmetic is said within seconds."""

    def place(item: pytest.Item) -> int:
        stem = item.path.stem if item.path.parent.name == "system" else ""
        if stem in WAITING:
            return WAITING.index(stem)
        if item.get_closest_marker("slow") is None:
            return len(WAITING)
        return len(WAITING) + (1 if stem in LONG else 2)

    items.sort(key=place)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch ...` typed in the test's own empty directory."""
    return partial(launch_in, cwd=tmp_path)
