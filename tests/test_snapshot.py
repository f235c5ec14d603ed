"""The copy of the user's code: what is in it, what is not, and that it is what a job imports."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher import snapshot
from launcher.errors import SiteError
from launcher.paths import read_json


def files(copy: str) -> set[str]:
    return {str(path.relative_to(copy)) for path in Path(copy).rglob("*") if path.is_file()}


def git(root: Path, *command: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *identity, *command], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "tasks.py").write_text("x = 1\n")
    (root / "pkg" / "words.json").write_text("[]\n")
    (root / "runs" / "old" / "code").mkdir(parents=True)
    (root / "runs" / "old" / "code" / "tasks.py").write_text("x = 0\n")
    (root / "venv").mkdir()
    (root / "venv" / "pyvenv.cfg").write_text("")
    (root / "venv" / "module.py").write_text("")
    (root / "data.bin").write_bytes(bytes(2 * 2**20))
    return root


def test_of_a_plain_directory_what_is_small(project: Path, tmp_path: Path) -> None:
    (copy,) = snapshot.take([project], tmp_path / "code", project / "runs")
    assert files(copy) == {"pkg/tasks.py", "pkg/words.json"}


def test_of_a_git_tree_what_git_knows_with_uncommitted_changes(project: Path, tmp_path: Path) -> None:
    (project / ".gitignore").write_text("venv/\nruns/\n")
    git(project, "init")
    git(project, "add", ".gitignore", "pkg/tasks.py", "data.bin")
    git(project, "commit", "-m", "first")
    (project / "pkg" / "tasks.py").write_text("x = 2\n")
    (project / "pkg" / "new.py").write_text("y = 1\n")
    (copy,) = snapshot.take([project], tmp_path / "code", project / "runs")
    assert files(copy) == {".gitignore", "pkg/tasks.py", "pkg/new.py", "pkg/words.json", "data.bin"}
    assert (Path(copy) / "pkg" / "tasks.py").read_text() == "x = 2\n"
    notes = read_json(tmp_path / "code" / "code.json")
    assert isinstance(notes, list)
    assert len(notes[0]["commit"]) == 40
    assert notes[0]["from"] == str(project)


def test_the_roots_are_the_tasks_and_pythonpaths(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(other))
    assert snapshot.roots_of_task("pkg.tasks.Task", str(project)) == [project, other]
    monkeypatch.delenv("PYTHONPATH")
    assert snapshot.roots_of_task("launcher.tasks.bytes_gpt.BytesGPT", str(tmp_path)) == []  # installed, like torch


def test_a_directory_of_data_is_refused(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_MOST_FILES", 1)
    with pytest.raises(SiteError, match="holds more than 1 files"):
        snapshot.take([project], tmp_path / "code", project / "runs")
