"""Tracker of another package: the example of the guide, installed in a directory of its own."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import ROOT, patience
from tests.infra.installed_package import install
from tests.infra.mirrored import Steps, differences, kill_often, saved_plan
from tests.infra.runs import OWN
from tests.system.test_wandb import ALONE, SMALL
from tests.test_docs_blocks import write_programs


@pytest.fixture
def example(tmp_path: Path) -> dict[str, str]:
    """Environment in which the packages of the guide are installed, and the example's file."""
    place = tmp_path / "site"
    place.mkdir()
    write_programs(ROOT / "docs" / "development" / "extensions.md", place)
    project = tomllib.loads((place / "pyproject.toml").read_text())["project"]
    points = project["entry-points"] | {"launcher.commands": {"hello": "hello_command:launch_hello"}}
    env = install(place, project["name"], points, project["version"])
    return env | {"SQLITE_TRACKER_FILE": str(tmp_path / "all.sqlite")}


def in_sqlite(file: Path, name: str) -> Steps:
    """Return the numbers of a run by step."""
    database = sqlite3.connect(file)
    rows = database.execute(
        "select step, metrics.name, value from metrics join runs on run = id where runs.name = ? order by step", (name,)
    ).fetchall()
    database.close()
    steps: Steps = {}
    for step, metric, value in rows:
        steps.setdefault(step, {})[metric] = float("nan") if value is None else value
    return steps


@pytest.mark.slow
def test_a_job_uses_the_tracker_of_another_package(launch: Launch, example: dict[str, str], tmp_path: Path) -> None:
    file = Path(example["SQLITE_TRACKER_FILE"])
    done = launch("train", *SMALL, *ALONE, "trackers=[wandb,sqlite]", env=example, status=0)
    assert "SQLite" in done.stdout
    record = [json.loads(line) for line in (tmp_path / "runs" / "w" / "metrics.jsonl").read_text().splitlines()]
    stored = in_sqlite(file, "w")
    assert [*stored] == [each["step"] for each in record] == [*range(1, 13)]
    assert [values["train/loss"] for values in stored.values()] == [each["train/loss"] for each in record]
    # where it is not installed, the run is shown, and its delivery is refused
    assert json.loads(launch("status", "w", "--json").stdout)["trackers"]["sqlite"]["dir"] == str(file)
    again = launch("mirror", "w")
    assert again.returncode == 1
    assert "sqlite: trackers=sqlite: no tracker of this name is installed" in " ".join(again.stdout.split())
    assert launch("mirror", "w", env=example).returncode == 0
    refused = launch("plan", *SMALL, "trackers=[sqlite]", env=example | {"SQLITE_TRACKER_FILE": "/no/such/file"})
    assert refused.returncode == 2
    assert "SQLITE_TRACKER_FILE=/no/such/file: its directory does not exist." in refused.stderr


@pytest.mark.slow
def test_each_step_is_there_once_however_often_it_is_killed(example: dict[str, str], tmp_path: Path) -> None:
    steps = kill_often(saved_plan(tmp_path / "run", "trackers=[sqlite]"), "sqlite", 3, env=example)
    assert differences(in_sqlite(Path(example["SQLITE_TRACKER_FILE"]), "run"), steps) == []


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_run_that_failed_has_failed_in_the_store_too(launch: Launch, example: dict[str, str]) -> None:
    launch("train", *OWN, "task.trouble=raise", "train.steps=50", "trackers=[sqlite]", env=example, status=1)
    database = sqlite3.connect(example["SQLITE_TRACKER_FILE"])
    assert database.execute("select name, verdict from runs").fetchall() == [("own", "failed")]
    database.close()


@pytest.mark.slow
def test_the_test_of_the_guide_passes(example: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sqlite_tracker.py"]
    done = subprocess.run(
        command, cwd=tmp_path / "site", env=os.environ | example, capture_output=True, text=True,
        check=False, timeout=patience(120),
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_command_of_another_package(launch: Launch, example: dict[str, str]) -> None:
    assert launch("hello", "--loud", "Ada", env=example).stdout == "HELLO ADA\n"
    assert "launch hello [--loud] NAME" in launch("--help", env=example).stdout
