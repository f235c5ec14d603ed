"""Figures of one run, and which runs belong on one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.report import report
from launcher.report.compare import efficiencies, over_accumulation
from launcher.report.figures import POINTS, facts_of, read, thinned
from launcher.rundir.paths import RunPaths
from tests.infra.made_runs import make_run, read_records, write_records


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
    measured = read(paths).measured
    assert measured is not None
    assert (measured.since, measured.windows, measured.step_s, measured.wire_bytes) == (30, 10, 0.5, 9000)
    assert (measured.speedup, measured.exposed_s) == (None, None), "calibrated for the earlier one"
    assert len(measured.curve.steps) == 40
    assert report([str(paths.root), "--json"]) == 0
    (note,) = [note for note in json.loads(capsys.readouterr().out)["notes"] if "resumed" in note]
    assert note.startswith("one was resumed after step 30 under settings that change what a step takes or sends")


@pytest.mark.parametrize("name", ["batch/global_size", "batch/samples"])
@pytest.mark.parametrize("value", [None, "?"])
def test_a_damaged_line_changes_nothing(name: str, value: str | None, tmp_path: Path) -> None:
    paths = make_run(tmp_path, "one", "cluster.workers_per_node=2", steps=40, step_s=0.2)
    lines = read_records(paths)
    without = read(paths).measured
    assert without is not None
    damaged = {**lines[-1], "progress/measured_since": 30, "batch/global_size": 10**6, name: value}
    write_records(paths, [*lines, damaged])
    measured = read(paths).measured
    assert measured is not None
    assert dataclasses.replace(measured, damaged=0) == without
    assert measured.damaged == 1


def test_lines_over_accumulation(tmp_path: Path) -> None:
    """A study of the micro-batch has its global batch follow; two global batches at one accumulation are two lines."""

    def lines(*sizes: tuple[int, int]) -> int:
        facts = []
        for number, (accumulation, total) in enumerate(sizes):
            words = (f"batch.accumulation={accumulation}", f"batch.global_size={total}")
            facts.append(read(make_run(tmp_path, f"{sizes}{number}", *words, steps=1)).facts)
        return len(set(over_accumulation([each for each in facts if each])))

    assert lines((1, 8), (2, 16), (4, 32)) == 1
    assert lines((1, 32), (2, 32), (1, 64), (2, 64)) == 2


def test_the_baseline_is_the_fastest_on_the_fewest(tmp_path: Path) -> None:
    two = facts_of(*_plan(make_run(tmp_path, "two", "cluster.workers_per_node=2")))
    eight = facts_of(*_plan(make_run(tmp_path, "eight", "cluster.workers_per_node=8")))
    found = efficiencies([(two, 90.0, True), (two, 100.0, True), (two, 300.0, False), (eight, 200.0, False)])
    assert [each.value for each in found if each] == [0.9, 1.0, 3.0, 0.5]


def _plan(paths: RunPaths) -> tuple[dict[str, Any], RunPaths]:
    return json.loads(paths.plan.read_text()), paths


def test_a_thinned_curve_keeps_its_spikes() -> None:
    losses = [1.0] * 10_000
    losses[5000], losses[7003], losses[8000] = 99.0, -5.0, float("nan")
    steps = range(10_000)
    curve = thinned(steps, steps, steps, losses)
    assert len(curve.steps) <= POINTS + 2
    assert {5000, 7003, 8000, 0, 9999} <= set(curve.steps)
    assert list(curve.steps) == sorted(curve.steps)
