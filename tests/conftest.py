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
# them, beside the rest, which keep the cores busy. A file runs in one process, one test at a time.
FIRST = ("test_slurm", "test_sweep", "test_hosts", "test_trouble")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the rest fast ones first: a mistake in the arithmetic is said within seconds."""

    def place(item: pytest.Item) -> tuple[int, bool]:
        stem = item.path.stem
        first = FIRST.index(stem) if stem in FIRST and item.path.parent.name == "system" else len(FIRST)
        return first, item.get_closest_marker("slow") is not None

    items.sort(key=place)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch ...` typed in the test's own empty directory."""
    return partial(launch_in, cwd=tmp_path)
