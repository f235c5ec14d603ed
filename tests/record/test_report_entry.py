"""The entry that a run leaves is what its files say, or it does not count."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.record import report_entry
from launcher.record.measurements import read_run
from launcher.record.report_entry import identity_of, leave_entry, read_entry
from launcher.rundir import history
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths
from launcher.runs.status import RunState, statuses_of
from tests.infra.made_runs import make_run
from tests.test_imports import MODULES, own_imports


def left(paths: RunPaths) -> bool:
    """Return whether the run has an entry that counts, after checking that it is what the files say."""
    entry = read_entry(paths.root, identity_of(paths.root))
    if entry is None:
        return False
    done, data = entry
    (run,) = statuses_of([paths], brief=True)
    assert data == read_run(paths.root)
    assert done == ([run.name, run.detail] if run.state is RunState.done else None)
    return True


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    paths = make_run(tmp_path / "runs", "one", "cluster.workers_per_node=2")
    ended = Submission.now().by_this_process()
    history.add_submission(paths, ended)
    write_json(paths.newest_incarnation, {"incarnation": "0.0"})
    history.amend_submission(paths, ended=True)
    write_json(paths.summary, {"verdict": "done", "stopped_early": "enough"})
    leave_entry(paths)
    return paths


def test_an_entry_is_what_the_files_say(run: RunPaths) -> None:
    assert left(run)
    entry = read_entry(run.root, identity_of(run.root))
    assert entry is not None
    assert entry[0] == ["one", "stopped early: enough"]
    assert entry[1].figures["step"] == 30
    assert entry[1].curves["training loss"]


def replace_by_itself(file: Path) -> None:
    content, status = file.read_bytes(), file.stat()
    file.rename(file.with_suffix(".before"))
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def write_in_place(file: Path) -> None:
    """Keep number, size and time; the second time of a file, of its last change, cannot be set."""
    status = file.stat()
    with file.open("r+b") as opened:
        first = opened.read(1)
        opened.seek(0)
        opened.write(first)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [Path.unlink, replace_by_itself, write_in_place])
@pytest.mark.parametrize(
    "name", ["plan.json", "config.yaml", "metrics.jsonl", "summary.json", "job.json", "incarnation.json"]
)
def test_an_entry_does_not_count_once_a_file_has_changed(
    run: RunPaths, name: str, change: Callable[[Path], object]
) -> None:
    change(run.root / name)
    assert not left(run)
    leave_entry(run)
    assert left(run) == run.metrics.exists()


@pytest.mark.parametrize("name", ["precision.json", "loop_plan.json"])
def test_a_file_that_was_not_there_ends_it_too(run: RunPaths, name: str) -> None:
    (run.root / name).write_text("{}")
    assert not left(run)


def test_a_resumed_run_has_none_until_it_ends_again(run: RunPaths) -> None:
    history.add_submission(run, Submission.now().by_this_process())
    assert not left(run)
    write_json(run.newest_incarnation, {"incarnation": "1.0"})
    write_json(run.summary, {"verdict": "failed", "failure": {"rank": 1, "error": "out of luck"}})
    history.amend_submission(run, ended=True)
    leave_entry(run)
    assert left(run)


@pytest.mark.parametrize(
    "damage", [lambda _: "", lambda text: text[:-1], lambda text: text.replace("2.0", "1.0"), lambda _: "3\n4"]
)
def test_a_damaged_entry_does_not_count(run: RunPaths, damage: Callable[[str], str]) -> None:
    before = run.report_entry.read_text()
    run.report_entry.write_text(damage(before))
    assert run.report_entry.read_text() != before
    assert not left(run)


def test_an_entry_of_other_code_does_not_count(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of another format of plans, which would not be read. Its version is that of the process that left it."""
    monkeypatch.setattr(report_entry, "_version", lambda: "installed since")
    leave_entry(run)
    assert left(run)
    monkeypatch.undo()
    monkeypatch.setattr(report_entry, "PLAN_FORMAT", "another")
    monkeypatch.setattr(report_entry, "_VERSION", report_entry._version())
    assert not left(run)


def test_the_code_that_makes_an_entry_is_that_of_its_version() -> None:
    """All that the package imports, but for names and places, and the schema, which computes nothing."""
    root, sources = Path(report_entry.__file__).parents[1], report_entry._SOURCES
    assert all((root / name).exists() for name in sources)
    others = {"launcher.config.schema", "launcher.plan.launch_plan", "launcher.rundir.files", "launcher.rundir.paths"}
    for module in (module for module in MODULES if module.startswith("launcher.record.")):
        for imported in own_imports(module) - others - {"launcher.rundir"}:
            name = imported.removeprefix("launcher.").replace(".", "/")
            assert name.split("/")[0] == "record" or f"{name}.py" in sources, f"{module} imports {imported}"


def test_no_entry_of_a_record_that_takes_long_to_read(run: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    run.report_entry.unlink()
    monkeypatch.setattr(report_entry, "MOST_BYTES", run.metrics.stat().st_size - 1)
    leave_entry(run)
    assert not run.report_entry.exists()


@pytest.mark.parametrize("name", ["plan.json", "job.json", "summary.json", "metrics.jsonl"])
def test_files_that_others_have_damaged_are_no_error_at_the_end_of_a_run(run: RunPaths, name: str) -> None:
    for content in ("3", "[]", '{"run": 3', '{"run": 3, "submissions": 3, "verdict": []}'):
        (run.root / name).write_text(content)
        leave_entry(run)
    run.report_entry.unlink()
    run.report_entry.mkdir()  # nor is a place where nothing can be written
    leave_entry(run)
