"""Fixtures for all tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import launch as launch_in

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast ones first: a mistake in the arithmetic is said within seconds."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """`launch ...` typed in the test's own empty directory."""
    return partial(launch_in, cwd=tmp_path)
