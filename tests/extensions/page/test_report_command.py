"""`launch report` of made runs, and which runs belong on one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from launcher.cli.runs import launch_runs
from launcher.extensions.page.compare import Entry, Row, lines_over_accumulation, set_efficiencies
from launcher.extensions.page.report_command import launch_report
from launcher.record.measurements import read_run
from launcher.report.run_list import LISTED
from launcher.rundir.paths import RunPaths
from tests.infra.made_runs import make_run, read_records, write_records

PREDICTED = {"predicted/wire_bytes": 250}


def test_a_run_resumed_with_another_strategy_has_the_figures_of_the_later_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both were mixed: one median over the step times of two strategies."""
    paths = make_run(tmp_path, "one", "cluster.workers_per_node=2", steps=40, step_s=0.2)
    lines = read_records(paths)
    half = {name: lines[0][name] // 2 for name in ("batch/global_size", "batch/samples")}
    for line in lines[30:]:
        line |= {"progress/measured_since": 30, "time/step_s": 0.5, "comm/wire_bytes": 9000, **half}
    write_records(paths, lines)
    data = read_run(paths.root)
    assert data.resumed_after == 30
    names = ("own_windows", "time/step_s", "comm/wire_bytes")
    assert [data.figures[name] for name in names] == [10, 0.5, 9000]
    assert data.figures["comm/speedup"] is data.figures["comm/exposed_s"] is None, "calibrated for the earlier one"
    assert [len(column) for column in data.curves["training loss"]] == [40] * 4
    assert launch_report([str(paths.root), "--json"]) == 0
    (note,) = [note for note in json.loads(capsys.readouterr().out)["notes"] if "resumed" in note]
    assert note.startswith(
        "one was resumed after step 30 with settings or hardware that change a step's time or traffic"
    )


def test_a_prediction_is_shown_beside_the_windows_of_its_own_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = make_run(tmp_path, "one", "cluster.workers_per_node=2", steps=40, step_s=0.2)
    lines = read_records(paths)
    lines[0] |= PREDICTED
    write_records(paths, lines)
    assert read_run(paths.root).figures["predicted/wire_bytes"] == 250
    assert launch_report([str(paths.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["predicted/wire_bytes"] == 250
    for line in lines[20:]:
        line["progress/measured_since"] = 20
    write_records(paths, lines)
    assert read_run(paths.root).figures["predicted/wire_bytes"] is None, "resumed with other settings"
    lines[20] |= PREDICTED | {"predicted/wire_bytes": 500}
    write_records(paths, lines)
    assert read_run(paths.root).figures["predicted/wire_bytes"] == 500
    for line in lines[30:]:
        line["batch/micro_size"] //= 2
    write_records(paths, lines)
    assert read_run(paths.root).figures["predicted/wire_bytes"] is None, "smaller micro-batches after an error"


@pytest.mark.parametrize(("runs", "further"), [(LISTED, 0), (LISTED + 3, 3)])
def test_tables_of_many_runs_are_limited(
    runs: int, further: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make_run(tmp_path, "r000", steps=4)
    for number in range(1, runs):
        shutil.copytree(first.root, tmp_path / f"r{number:03}")
    listed, compared = f"{further} older runs are not listed: launch runs --all", f"{further} further runs are not in"
    for command, words in ((launch_runs, listed), (launch_report, compared)):
        command([str(tmp_path), "--csv"] if command is launch_report else ["--dir", str(tmp_path), "--all"])
        assert len(re.findall(r"^r\d{3}(?:,| +)done\b", capsys.readouterr().out, re.MULTILINE)) == runs
        command([str(tmp_path)] if command is launch_report else ["--dir", str(tmp_path)])
        out = capsys.readouterr().out
        assert len(re.findall(r"^r\d{3}(?:,| +)done\b", out, re.MULTILINE)) == LISTED
        assert (words in out) == bool(further)


def row(paths: RunPaths, samples_per_s: float | None = None, state: str = "done") -> Row:
    data = read_run(paths.root)
    entry = Entry(label=paths.root.name, state=state, detail="", dir=paths.root)
    return Row(
        entry=entry, data=data, varied=data.settings, figures=data.figures | {"throughput/samples_per_s": samples_per_s}
    )


def test_lines_over_accumulation(tmp_path: Path) -> None:
    """A study of the micro-batch has its global batch follow; two global batches at one accumulation are two lines."""

    def lines(*sizes: tuple[int, int]) -> int:
        rows = []
        for number, (accumulation, total) in enumerate(sizes):
            words = (f"batch.accumulation={accumulation}", f"batch.global_size={total}")
            rows.append(row(make_run(tmp_path, f"{sizes}{number}", *words, steps=1)))
        return len(lines_over_accumulation(rows))

    assert lines((1, 8), (2, 16), (4, 32)) == 1
    assert lines((1, 32), (2, 32), (1, 64), (2, 64)) == 2


def test_the_baseline_is_the_fastest_on_the_fewest(tmp_path: Path) -> None:
    two = make_run(tmp_path, "two", "cluster.workers_per_node=2")
    eight = make_run(tmp_path, "eight", "cluster.workers_per_node=8")
    rows = [row(two, 90), row(two, 100), row(two, 300, "failed"), row(eight, 200, "failed")]
    set_efficiencies(rows)
    assert [each["scaling/efficiency"] for each in rows] == [0.9, 1.0, 3.0, 0.5]
