"""A short chaos. `python -m tests.system.chaos --deaths 50` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.chaos import run_chaos
from tests.system.deaths import JOB

pytestmark = pytest.mark.slow


def test_deaths_cost_nothing_but_time(tmp_path: Path) -> None:
    kinds = ("at the start", "two in a row")  # the others are other tests' too, and so are trackers
    assert run_chaos(tmp_path, deaths=2, seed=3, kinds=kinds, job=(*JOB, "wandb.mode=disabled")) == []


@pytest.mark.nightly
def test_twenty_deaths_of_all_kinds(tmp_path: Path) -> None:
    assert run_chaos(tmp_path, deaths=20, seed=20) == []
