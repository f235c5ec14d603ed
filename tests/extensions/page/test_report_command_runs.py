"""A report from the entries that runs have left is the report of the files as they are now."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.extensions.page import report_command
from launcher.extensions.page.report_command import ReportedRuns, read_all
from launcher.record.measurements import RunData
from launcher.record.report_entry import leave_entry
from launcher.rundir import history
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths
from launcher.runs.status import Run, RunState, statuses_of
from tests.infra.made_runs import make_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Runs that have left entries, but the last: one recorded nothing, and has none."""
    directories = [make_run(tmp_path / "runs", f"run{n}", f"train.seed={n}", loss=2.0 + n).root for n in range(4)]
    (directories[3] / "metrics.jsonl").unlink()
    for directory in directories:
        leave_entry(RunPaths(directory))
    return directories


def report(runs: Sequence[Path]) -> list[str]:
    """Return which of the runs were read, after checking that the data are those of the files."""
    read: list[str] = []

    def reader(places: Sequence[Path]) -> dict[Path, RunData]:
        read.extend(place.name for place in places)
        return read_all(places)

    reported, paths = ReportedRuns(), [RunPaths(run) for run in runs]
    assert shown(reported.statuses(paths)) == shown(statuses_of(paths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_command, "read_all", reader)
        assert reported.measurements(runs) == read_all(runs)
    return read


def shown(statuses: Sequence[Run]) -> list[tuple[str, ...]]:
    return [(run.name, run.dir, run.state, run.detail) for run in statuses]


def test_only_runs_without_an_entry_are_read(runs: list[Path]) -> None:
    before = {path: path.stat().st_mtime_ns for path in [runs[0].parent, *runs[0].parent.rglob("*")]}
    assert report(runs) == ["run3"]
    assert {path: path.stat().st_mtime_ns for path in before} == before, "their directory may be read-only"


def test_a_run_whose_files_changed_is_read(runs: list[Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", "run0", "train.seed=0", loss=9.0)
    os.replace(other.metrics, runs[0] / "metrics.jsonl")  # noqa: PTH105
    (runs[1] / "config.yaml").unlink()
    assert report(runs) == ["run0", "run1", "run3"]


def test_a_renamed_and_a_deleted_run(runs: list[Path]) -> None:
    shutil.rmtree(runs[1])
    runs[0].rename(runs[1])
    assert report(runs[1:]) == ["run3"], "its entry is still that of its files"


def test_the_files_of_a_finished_run_are_not_read(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Path] = []
    read_bytes, read_text = Path.read_bytes, Path.read_text
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read_bytes(path))
    monkeypatch.setattr(Path, "read_text", lambda path, **how: opened.append(path) or read_text(path, **how))
    reported = ReportedRuns()
    assert {run.state for run in reported.statuses(map(RunPaths, runs[:3]))} == {RunState.done}
    reported.measurements(runs[:3])
    assert [path.name for path in opened if path.is_relative_to(runs[0].parent)] == []


@pytest.mark.parametrize(
    ("summary", "submission", "state"),
    [
        ({"verdict": "failed", "failure": {"rank": 1, "error": "out of luck"}}, {}, RunState.failed),
        ({"verdict": "done"}, {"host": "elsewhere"}, RunState.unknown),
        ({"verdict": "done", "stopped_early": "enough"}, None, RunState.done),
    ],
)
def test_the_state_of_a_run_that_started_again(
    runs: list[Path], summary: dict[str, Any], submission: dict[str, Any] | None, state: RunState
) -> None:
    """Its measurements may be the same; its state is that of its files."""
    paths = RunPaths(runs[0])
    if submission is not None:
        history.add_submission(paths, dataclasses.replace(Submission.now(), **submission))
        write_json(paths.newest_incarnation, {"incarnation": "0.0" if state is RunState.failed else "1.0"})
    write_json(paths.summary, summary)
    assert report(runs) == ["run0", "run3"]
    assert ReportedRuns().statuses([paths])[0].state is state
    leave_entry(paths)
    assert report(runs) == ["run3"]
    assert ReportedRuns().statuses([paths])[0].state is state
