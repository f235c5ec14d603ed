"""Figures of one run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from launcher.record.measurements import POINTS, Point, read_run, thinned
from tests.infra.made_runs import make_run, read_records, write_records

SOLVED = {
    "cluster.workers_per_node", "cluster.device", "cluster.nodes", "optimizer.lr", "precision.kind", "model.parameters",
    "data.samples",
}  # fmt: skip


def test_the_median_leaves_the_first_two_windows_out(tmp_path: Path) -> None:
    """The summary does the same; a short run had two medians."""
    paths = make_run(tmp_path, "one", "cluster.workers_per_node=2", steps=4, step_s=0.2)
    lines = read_records(paths)
    for line, step_s in zip(lines, (9.0, 8.0, 0.3, 0.3), strict=True):
        line["time/step_s"] = step_s
    write_records(paths, lines)
    assert read_run(paths.root).figures["time/step_s"] == 0.3
    write_records(paths, lines[:1])
    assert read_run(paths.root).figures["time/step_s"] == 9.0


PREDICTED = {"predicted/wire_bytes": 250}


def test_a_prediction_is_of_the_last_stage_of_a_ramp(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "one", "cluster.workers_per_node=2", steps=20, step_s=0.2)
    lines = read_records(paths)
    lines[0] |= PREDICTED
    for line in lines:
        line |= {"batch/global_size": 16, "batch/samples": 16}
    write_records(paths, lines)
    assert read_run(paths.root).figures["predicted/wire_bytes"] is None
    for line in lines[10:]:
        line |= {"batch/global_size": 64, "batch/samples": 64}
    write_records(paths, lines)
    assert read_run(paths.root).figures["predicted/wire_bytes"] == 250


@pytest.mark.parametrize("name", ["batch/global_size", "batch/samples"])
@pytest.mark.parametrize("value", [None, "?"])
def test_a_damaged_line_changes_nothing(name: str, value: str | None, tmp_path: Path) -> None:
    paths = make_run(tmp_path, "one", "cluster.workers_per_node=2", steps=40, step_s=0.2)
    lines = read_records(paths)
    without = read_run(paths.root)
    damaged = {**lines[-1], "progress/measured_since": 30, "batch/global_size": 10**6, name: value}
    write_records(paths, [*lines, damaged])
    data = read_run(paths.root)
    assert dataclasses.replace(data, damaged_lines=0) == without
    assert data.damaged_lines == 1


CONFIG = """\
task:
  _target_: a.Task
  layers: [1, 2]
trackers:
- wandb
- mlflow
callbacks:
- _target_: a.Callback
  steps:
  - 1
# a comment
optimizer: {lr: 0.1}
train:
  steps: 7
  note: "several

    lines"
"""


@pytest.mark.parametrize("text", [CONFIG, json.dumps(yaml.safe_load(CONFIG), indent=2), "", "{}"])
def test_settings_are_those_of_the_whole_file(text: str, tmp_path: Path) -> None:
    """Sections are parsed one by one, because most are the same in many runs."""
    paths = make_run(tmp_path, "one", steps=4)
    solved = read_run(paths.root).settings.keys() & SOLVED
    paths.config.write_text(text)
    content = yaml.safe_load(text) or {}
    expected = {
        "task._target_": "a.Task", "task.layers": "[1, 2]", "callbacks": '[{"_target_": "a.Callback", "steps": [1]}]',
        "train.steps": "7", "train.note": "several\nlines",
    } if content else {}  # fmt: skip
    settings = read_run(paths.root).settings
    assert {key: value for key, value in settings.items() if key not in solved} == expected


def test_a_thinned_curve_keeps_its_spikes() -> None:
    points = [Point(step, step, step, 1.0) for step in range(10_000)]
    for step, loss in ((5000, 99.0), (7003, -5.0), (8000, None)):
        points[step] = Point(step, step, step, loss)
    steps = [point.step for point in thinned(points)]
    assert len(steps) <= POINTS + 2
    assert {5000, 7003, 8000, 0, 9999} <= set(steps)
    assert steps == sorted(steps)
