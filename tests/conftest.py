"""Fixtures for all tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import launch as launch_in

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# These wait for others most of their time: Slurm's timers, slow links, processes that end. `make test` runs them beside
# the rest, which keep the cores busy: the former in order, one test at a time, and of the rest a file at a time.
WAITING = {"test_slurm", "test_slurm_fixture", "test_doctor_slurm", "test_hosts", "test_sweep", "test_trouble"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast ones first: a mistake in the arithmetic is said within seconds."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    for item in items:
        item.add_marker(pytest.mark.xdist_group("waiting" if item.path.stem in WAITING else str(item.path)))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch ...` typed in the test's own empty directory."""
    return partial(launch_in, cwd=tmp_path)
