"""A report from the cache is the report of the files as they are now."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.forecast_cache import user_cache
from launcher.record.measurements import RunData
from launcher.record.report_entry import leave_entry
from launcher.report import measurement_cache
from launcher.report.measurement_cache import MeasurementCache, read_all
from launcher.rundir import history
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths
from launcher.runs.status import Run, RunState, statuses_of
from tests.infra.made_runs import make_run, read_records, write_records


class Reader:
    """Reads runs, and keeps the names of those that it has read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, runs: Sequence[Path]) -> dict[Path, RunData]:
        self.read += [run.name for run in runs]
        return read_all(runs)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Runs that were written long ago; one of them recorded nothing, and one has no plan."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measurement_cache, "_SETTLED_S", 0)
    directories = [make_run(tmp_path / "runs", f"run{n}", f"train.seed={n}", loss=2.0 + n).root for n in range(4)]
    (directories[2] / "metrics.jsonl").unlink()
    (directories[3] / "plan.json").unlink()
    return directories


def report(runs: Sequence[Path]) -> list[str]:
    """Return which of the runs were read, after checking that the data are those of the files."""
    reader = Reader()
    cache = MeasurementCache(reader, fewest=1)
    paths = [RunPaths(run) for run in runs]
    assert shown(cache.statuses(paths)) == shown(statuses_of(paths))
    assert cache.measurements(runs) == read_all(runs)
    return reader.read


def shown(statuses: Sequence[Run]) -> list[tuple[str, ...]]:
    return [(run.name, run.dir, run.state, run.detail) for run in statuses]


def test_what_was_read_once_is_not_read_again(runs: list[Path]) -> None:
    assert report(runs) == ["run0", "run1", "run2", "run3"]
    assert report(runs) == []
    assert report(runs[1:2]) == []


def test_a_run_whose_files_changed_is_read_again(runs: list[Path], tmp_path: Path) -> None:
    report(runs)
    paths = make_run(tmp_path / "other", "run0", "train.seed=0", loss=9.0)
    lines = read_records(paths)
    os.replace(paths.metrics, runs[0] / "metrics.jsonl")  # noqa: PTH105
    assert report(runs) == ["run0"]
    write_records(paths, lines[:-1])
    os.replace(paths.metrics, runs[2] / "metrics.jsonl")  # noqa: PTH105
    (runs[1] / "config.yaml").unlink()
    assert report(runs) == ["run1", "run2"]
    make_run(tmp_path / "runs", "run4")
    assert report([*runs, tmp_path / "runs/run4"]) == ["run4"]


def test_a_run_that_changed_a_moment_ago_is_not_cached(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next record may not change the times that the file system shows."""
    monkeypatch.setattr(measurement_cache, "_SETTLED_S", 3600)
    old = time.time() - 2 * 3600
    for name in ("plan.json", "config.yaml", "metrics.jsonl"):
        os.utime(runs[0] / name, (old, old))
    for _ in range(2):
        assert "run0" in report(runs), "its inode has changed just now"
    monkeypatch.setattr(measurement_cache, "_SETTLED_S", 0)
    report(runs)
    assert report(runs) == []


@pytest.mark.parametrize("damage", ["", "{", '{"versions": null}', '{"versions": 1, "settings": [], "runs": 3}'])
def test_a_damaged_cache_is_as_good_as_none(runs: list[Path], damage: str) -> None:
    report(runs)
    (file,) = (user_cache() / "reports").glob("*.json")
    content = file.read_text()
    file.write_text(damage)
    assert report(runs) == ["run0", "run1", "run2", "run3"]
    assert report(runs) == []
    assert file.read_text() == content
    # as valid as before, with other figures
    for old, new in (('"settings":[[', '"settings":[[1],['), ("2.0,", "1.0,"), (',"done":["', ',"done":["x')):
        assert old in content
        file.write_text(content.replace(old, new, 1))
        assert report(runs) == ["run0", "run1", "run2", "run3"]


def test_the_files_of_a_finished_run_are_not_read_again(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    report(runs)
    opened: list[Path] = []
    read_bytes, read_text = Path.read_bytes, Path.read_text
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path) or read_bytes(path))
    monkeypatch.setattr(Path, "read_text", lambda path, **how: opened.append(path) or read_text(path, **how))
    cache, paths = MeasurementCache(fewest=1), [*map(RunPaths, runs)]
    assert {run.state for run in cache.statuses(paths)} == {RunState.done}
    cache.measurements(runs)
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
    report(runs)
    paths = RunPaths(runs[0])
    if submission is not None:
        history.add_submission(paths, dataclasses.replace(Submission.now(), **submission))
        write_json(paths.newest_attempt, {"incarnation": "0.0" if state is RunState.failed else "1.0"})
    write_json(paths.summary, summary)
    assert report(runs) == ["run0"]
    assert report(runs) == []
    assert MeasurementCache(fewest=1).statuses([paths])[0].state is state


def test_a_state_that_may_change_without_a_file_is_not_cached(runs: list[Path]) -> None:
    """The process of a `launch` ends, and leaves the files as they are."""
    paths = RunPaths(runs[0])
    history.add_submission(paths, Submission.now().by_this_process())
    write_json(paths.newest_attempt, {"incarnation": "0.0"})
    assert report(runs)
    assert MeasurementCache(fewest=1).statuses([paths])[0].state is RunState.running
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "process_start_id", lambda _: None)
        assert report(runs) == []
        assert MeasurementCache(fewest=1).statuses([paths])[0].state is RunState.done


def test_a_rewrite_of_equal_size_and_time_is_seen(runs: list[Path]) -> None:
    report(runs)
    metrics = runs[0] / "metrics.jsonl"
    before, content = metrics.stat(), metrics.read_text()
    with metrics.open("r+") as file:  # the same file, not a new one in its place
        file.write(content.replace('"train/loss": 2', '"train/loss": 1'))
    os.utime(metrics, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (metrics.stat().st_size, metrics.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert report(runs) == ["run0"]


def test_a_renamed_and_a_deleted_run(runs: list[Path]) -> None:
    report(runs)
    shutil.rmtree(runs[1])
    runs[0].rename(runs[1])
    assert report(runs[1:]) == ["run1"], "another run has this name now"


def test_times_after_the_clock_was_set_back(runs: list[Path]) -> None:
    """A file of the future may change again and have the same time."""
    report(runs)
    later = time.time() + 3600
    os.utime(runs[0] / "metrics.jsonl", (later, later))
    for _ in range(2):
        assert report(runs) == ["run0"]


def test_a_run_that_changes_while_it_is_read(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(places: Sequence[Path]) -> dict[Path, RunData]:
        data = read_all(places)
        with (runs[0] / "metrics.jsonl").open("a") as file:
            file.write("damaged\n")
        return data

    MeasurementCache(read, fewest=1).measurements(runs)
    assert report(runs) == ["run0"]

    def read_slowly(places: Sequence[Path]) -> dict[Path, RunData]:
        clock = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: clock() + 2 * 3600 * 10**9)
        return read_all(places)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement_cache, "_SETTLED_S", 3600)
        (user_cache() / "reports").rename(tmp_path / "aside")
        MeasurementCache(read_slowly, fewest=1).measurements(runs)
    assert not (user_cache() / "reports").exists(), "two hours later the files are old, but they were new when read"


def test_reports_at_the_same_time(runs: list[Path]) -> None:
    """Reports of all runs and of some at once: whichever is written last, the cache is right."""
    parts = [runs, runs[:2], runs[2:], runs] * 4
    with ThreadPoolExecutor(8) as pool:
        for part, data in zip(
            parts, pool.map(lambda part: MeasurementCache(fewest=1).measurements(part), parts), strict=True
        ):
            assert data == read_all(part)
    (file,) = (user_cache() / "reports").glob("*")
    report(runs)
    assert report(runs) == []
    assert [*(user_cache() / "reports").glob("*")] == [file], "no partial file is left"


def test_entries_that_runs_have_left_are_taken_and_not_cached(runs: list[Path]) -> None:
    leave_entry(RunPaths(runs[0]))
    leave_entry(RunPaths(runs[1]))
    assert report(runs) == ["run2", "run3"]
    (file,) = (user_cache() / "reports").glob("*.json")
    assert '"run2"' in file.read_text()
    assert '"run0"' not in file.read_text()
    assert report(runs) == []
    make_run(runs[0].parent.parent / "other", "run0", loss=9.0).metrics.replace(runs[0] / "metrics.jsonl")
    assert report(runs) == ["run0"]
    assert report(runs) == []


def test_nothing_is_written_beside_the_runs(runs: list[Path]) -> None:
    """The directory of the runs may be read-only."""
    before = {path: path.stat().st_mtime_ns for path in [runs[0].parent, *runs[0].parent.rglob("*")]}
    report(runs)
    report(runs)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_cache_that_cannot_be_written_is_no_error(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert report(runs) == ["run0", "run1", "run2", "run3"]


def test_few_runs_are_not_cached(runs: list[Path]) -> None:
    reader = Reader()
    for _ in range(2):
        cache = MeasurementCache(reader, fewest=5)
        cache.statuses(map(RunPaths, runs))
        cache.measurements(runs)
    assert len(reader.read) == 8
    assert not (user_cache() / "reports").exists()
