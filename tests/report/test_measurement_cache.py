"""A report from the cache is the report of the files as they are now."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.plan.forecast_cache import user_cache
from launcher.report import measurement_cache
from launcher.report.measurement_cache import MeasurementCache
from launcher.report.measurements import RunData, read_all
from launcher.rundir.paths import RunPaths
from launcher.runs.status import Run, statuses_of
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
    file.write_text(damage)
    assert report(runs) == ["run0", "run1", "run2", "run3"]
    assert report(runs) == []
    content = file.read_text()
    file.write_text(content.replace('"settings":[[', '"settings":[[1],[', 1))
    report(runs)


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
