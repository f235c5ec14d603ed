"""The record of login nodes: whose it is, and several writers at once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from launcher.extensions.login.login_shell import RemoteProject, places, project_id, record_file, remember


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def _remember(number: int) -> None:
    remember(RemoteProject(f"login{number}", (), "/home/me/work", "runs"))


def test_writers_at_the_same_time_lose_nothing() -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_remember, range(40), chunksize=1)
    assert {place.login for place in places(Path("runs"))} == {f"login{number}" for number in range(40)}


def test_a_place_is_that_of_one_directory_of_runs(tmp_path: Path) -> None:
    place = RemoteProject("login", ("source a",), "/home/me/work", "runs")
    remember(place)
    remember(RemoteProject("login", ("source b",), "/home/me/work", "runs"))
    assert [each.setup for each in places(Path("runs"))] == [("source b",)], "the newest shell lines"
    assert places(tmp_path / "runs") == places(Path("runs"))
    assert places(tmp_path / "clone/runs") == []


def test_projects_have_numbers_of_their_own(tmp_path: Path) -> None:
    first = project_id(tmp_path)
    assert first == project_id(tmp_path) != project_id(tmp_path / "other")
    record_file().unlink()
    assert project_id(tmp_path) != first, "that of another user or machine"
