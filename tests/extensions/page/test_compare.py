"""`launch report`: its figures against the raw records, and what it says of runs that are not what one hopes for."""

from __future__ import annotations

import csv
import io
import json
import os
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.cli import run as launch
from launcher.errors import UserError
from launcher.extensions.page.report_command import launch_report
from launcher.rundir.paths import RunPaths
from tests.infra.made_runs import cell, make_run, make_sweep, read_records, write_records

# 40 names, each after the one before: lists that contain the one before twice have 2**40 entries
NESTED = [*pairwise("a" * length for length in range(1, 41))]
GRID = [(accumulation, workers) for accumulation in (1, 2, 4) for workers in (1, 2)]


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    """A sweep over accumulation and workers, with a cell that failed, an impossible one, and one that is repeated."""
    root = tmp_path / "runs" / "grid"
    cells = []
    for accumulation, workers in GRID:
        overrides = (f"batch.accumulation={accumulation}", f"cluster.workers_per_node={workers}")
        make_run(
            root, f"a{accumulation}w{workers}", *overrides, step_s=(0.2 + 0.01 * accumulation) / workers**0.8,
            loss=3 + 0.01 * accumulation,
        )  # fmt: skip
        cells.append(cell(f"a{accumulation}w{workers}", *overrides))
    make_run(root, "bad", "batch.accumulation=8", "cluster.workers_per_node=2", verdict="failed", steps=9)
    cells.append(cell("bad", "batch.accumulation=8", "cluster.workers_per_node=2"))
    cells.append(cell(None, "batch.accumulation=7", problem="7 does not divide 64.\n  Choose another."))
    cells.append(cell("a4w2", "batch.accumulation=4", "cluster.workers_per_node=2", "train.steps=30"))
    make_sweep(root, *cells)
    return root


def as_json(*arguments: object) -> dict[str, Any]:
    """Return the output of `launch report ... --json`."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        assert launch_report([*map(str, arguments), "--json"]) == 0
    return json.loads(out.getvalue())


def by_name(*arguments: object) -> dict[str, dict[str, Any]]:
    return {run["run"]: run for run in as_json(*arguments)["runs"]}


def test_figures_equal_what_the_records_say(grid: Path) -> None:
    """Recomputed here from the raw lines, with nothing of launcher.report."""
    runs = {Path(run["dir"]).name: run for run in as_json(grid)["runs"] if run["dir"]}
    speed: dict[tuple[int, int], float] = {}
    reached = max(min(_smooth(read_records(RunPaths(grid / f"a{a}w{w}")))) for a, w in GRID)
    for accumulation, workers in GRID:
        lines, shown = read_records(RunPaths(grid / f"a{accumulation}w{workers}")), runs[f"a{accumulation}w{workers}"]
        sent = lines[-1]["comm/wire_bytes"]
        own = [line for line in lines if line["batch/samples"] == line["batch/global_size"]]
        assert len(own) == shown["own_windows"] == 29
        step_s = statistics.median(line["time/step_s"] for line in own)
        assert shown["time/step_s"] == step_s
        assert shown["time/data_s"] == statistics.median(line["time/data_s"] for line in own)
        assert shown["throughput/samples_per_s"] == 64 / step_s
        exposed = max((line["comm/exposed_s"] for line in lines if "comm/exposed_s" in line), default=0.0)
        assert shown["comm/exposed_s"] == exposed
        assert shown["time/compute_s"] == pytest.approx(step_s - shown["time/data_s"] - exposed)
        assert shown["comm/wire_bytes"] == sent
        assert shown["comm/saved_fraction"] == (None if workers == 1 else 1 - sent / lines[-1]["comm/wire_bytes_every"])
        compared = accumulation > 1 and workers > 1
        assert shown["comm/speedup"] == (4 / 3 if compared else None)
        assert (shown["comm/speedup_low"], shown["comm/speedup_high"]) == ((1.25, 1.4) if compared else (None, None))
        assert shown["eval/loss"] == lines[-1]["eval/loss"]
        speed[accumulation, workers] = 64 / step_s
        alone = speed[accumulation, 1]
        assert shown["scaling/efficiency"] == pytest.approx(speed[accumulation, workers] / (workers * alone))
        assert shown["loss/target"] == pytest.approx(reached)
        first = next(n for n, loss in enumerate(_smooth(lines)) if loss <= shown["loss/target"])
        assert shown["loss/hours"] == pytest.approx(workers * lines[first]["time/total_s"] / 3600)
        assert shown["loss/step"] == lines[first]["step"]


def _smooth(lines: list[dict[str, Any]]) -> list[float]:
    losses = [line["train/loss"] for line in lines]
    return [statistics.fmean(losses[max(0, n - 9) : n + 1]) for n in range(len(losses))]


def test_cells_are_shown_as_what_they_are(grid: Path) -> None:
    runs = by_name(grid)
    assert runs["accumulation=7"]["state"] == "impossible"
    assert runs["accumulation=7"]["detail"] == "7 does not divide 64. Choose another."
    bad = runs["accumulation=8 workers_per_node=2"]
    assert (bad["state"], bad["detail"], bad["step"]) == ("failed", "rank 1: out of luck", 9)
    assert bad["comm/exposed_s"] is None, "not measured is not zero"
    assert bad["time/compute_s"] is None
    again = runs["accumulation=4 workers_per_node=2 steps=30"]
    assert again["same_as"] == "accumulation=4 workers_per_node=2"
    notes = " ".join(as_json(grid)["notes"])
    assert "1 failed, 1 impossible" in notes
    assert "is the same run as accumulation=4 workers_per_node=2, and is counted once" in notes
    assert "accumulation=8 workers_per_node=2: exposed communication was not measured" in notes


def test_a_cell_whose_run_lies_in_another_sweep(grid: Path) -> None:
    other = grid.parent / "other"
    other.mkdir()
    make_sweep(other, cell("../grid/a1w1", "batch.accumulation=1"), cell("gone", "batch.accumulation=2"))
    runs = by_name("oth", "--dir", grid.parent)
    assert runs["accumulation=1"]["elsewhere"].endswith("grid")
    assert runs["accumulation=2"]["state"] == "pending"


def test_csv_has_a_line_a_run_and_no_page_is_written(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_report(["grid", "--dir", str(grid.parent), "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [line["state"] for line in lines] == ["done"] * 6 + ["failed", "impossible", "done"]
    assert not (grid / "report.html").exists()


def test_a_run_under_way_with_half_a_line(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "going", "cluster.workers_per_node=2", verdict=None, steps=8)
    whole = by_name(paths.root)["going"]
    with paths.metrics.open("a") as file:
        file.write('{"step": 9, "train/lo')
    assert by_name(paths.root)["going"] == whole
    with paths.metrics.open("a") as file:
        file.write("\n[1]\nnull\nno record\n")
    given = as_json(paths.root)
    assert given["runs"][0] == whole
    assert "damaged" in " ".join(given["notes"])
    assert whole["loss/target"] is None, "no run has finished"


def test_no_own_window_yet_is_no_zero(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "new", verdict=None, steps=1, **cast("dict[str, Any]", {"batch/samples": 1}))
    given = as_json(paths.root)
    shown = given["runs"][0]
    assert (shown["time/step_s"], shown["throughput/samples_per_s"], shown["comm/wire_bytes"]) == (None, None, None)
    assert "no full window" in " ".join(given["notes"])
    paths.metrics.unlink()
    assert by_name(paths.root)["new"]["problem"] == "nothing was recorded"


def test_tasks_are_not_compared_with_each_other(tmp_path: Path) -> None:
    make_run(tmp_path, "one", "cluster.workers_per_node=1", loss=3.0)
    make_run(tmp_path, "two", "cluster.workers_per_node=2", loss=3.0)
    make_run(tmp_path, "four", "cluster.workers_per_node=4", loss=1.0, target="b.Task")
    given = as_json(tmp_path)
    runs = {run["run"]: run for run in given["runs"]}
    assert "2 tasks: losses and speeds are compared only within each." in given["notes"]
    assert runs["two"]["scaling/baseline_world_size"] == 1
    assert runs["four"]["scaling/efficiency"] is None
    assert runs["four"]["loss/target"] < runs["one"]["loss/target"]


def test_other_versions(tmp_path: Path) -> None:
    make_run(tmp_path, "new")
    make_run(tmp_path, "old", version="0.0.9")
    older = make_run(tmp_path, "older")
    plan = json.loads(older.plan.read_text())
    older.plan.write_text(json.dumps(plan | {"format": 0}))
    make_run(tmp_path, "torn").plan.write_text('{"format": 1, "batch"')
    make_run(tmp_path, "lean").plan.write_text('{"format": 1, "batch": {}}')
    given = as_json(tmp_path)
    runs = {run["run"]: run for run in given["runs"]}
    assert "The runs used different versions of launcher: 0.0.9, 0.1.0." in given["notes"]
    assert "older: its plan was written by another version of launcher." in given["notes"]
    assert runs["torn"]["problem"].startswith("unreadable: JSONDecodeError")
    assert runs["lean"]["problem"].startswith("unreadable: KeyError")
    assert runs["old"]["time/step_s"] == runs["new"]["time/step_s"]


def test_a_loss_that_is_asked_for(grid: Path) -> None:
    runs = by_name(grid, "--loss", "3.97")
    assert {run["loss/target"] for run in runs.values() if run["task"]} == {3.97}
    assert runs["accumulation=1 workers_per_node=1"]["loss/hours"] > 0
    assert by_name(grid, "--loss", "1")["accumulation=1 workers_per_node=1"]["loss/hours"] is None


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "wild", verdict="failed")
    write_records(paths, [line | {"train/loss": None} for line in read_records(paths)])
    shown = by_name(paths.root)["wild"]
    assert (shown["train/loss"], shown["train/loss_smoothed"], shown["train/loss_smoothed_min"]) == (None, None, None)
    assert launch_report([str(paths.root)]) == 0


@pytest.mark.parametrize("word", ["nothing", "empty", "empty/deeper"])
def test_nothing_to_report(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert launch(["report", str(tmp_path / word)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("launch: error: ") == 1
    assert "no run" in said.err or "no such run" in said.err


def test_words_that_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path, "a")
    for words in (
        ["a", "--csv", "--json"],
        ["a", "--loss", "low"],
        ["a", "--loss", "nan"],
        [],
        ["a", "--html", "/nowhere/x.html"],
    ):
        with pytest.raises(UserError):
            launch_report([*words, "--dir", str(tmp_path)])


def test_a_sweep_of_another_version_is_shown_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text('{"format": 9}')
    assert launch_report([str(tmp_path / "s"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["state"] == "unreadable"
    assert "another version" in row["detail"]


def test_runs_with_the_same_problem_share_a_note(tmp_path: Path) -> None:
    for name in "abc":
        make_run(tmp_path, name).metrics.unlink()
    assert "a, b, c: nothing was recorded." in as_json(tmp_path)["notes"]


def test_metrics_of_the_evaluation_are_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of other metrics, and one without any."""
    run = make_run(tmp_path, "a", **{"eval/far/auroc": 0.5, "best/step": 7, "best/value": 0.875})
    lines = [line | {"train/accuracy": number / 100} for number, line in enumerate(read_records(run))]
    lines[5]["eval/accuracy"] = 0.75  # the last one, though later records have none
    write_records(run, lines)
    make_run(tmp_path, "b", **cast("dict[str, Any]", {"eval/f1": None}))
    make_run(tmp_path, "c")
    runs = by_name(tmp_path)
    assert [runs[name]["eval/accuracy"] for name in "abc"] == [0.75, None, None]
    assert (runs["a"]["eval/far/auroc"], runs["a"]["best/value"], runs["b"]["eval/f1"]) == (0.5, 0.875, None)
    assert (runs["a"]["train/accuracy"], runs["c"]["train/accuracy"]) == ((len(lines) - 1) / 100, None)
    assert runs["c"]["eval/loss"] == 3.125
    assert launch_report([str(tmp_path), "--csv"]) == 0
    lines = [*csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert [line["eval/accuracy"] for line in lines] == ["0.75", "", ""]
    assert launch_report([str(tmp_path)]) == 0
    assert "eval/accuracy" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("eval/accuracy", "eval/far/auroc", "best/value"))


def test_speed_with_outer_steps_includes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """time/step_s does not; bytes and time between the sites are columns of their own."""
    make_run(tmp_path / "runs", "together", "cluster.workers_per_node=2", step_s=0.2)
    run = make_run(tmp_path / "runs", "apart", "cluster.workers_per_node=2", step_s=0.2)
    lines = read_records(run)
    for line in lines:
        line |= {"outer/sites": 2, "outer/wire_bytes": 3e6, "outer/time_s": 0.05 * lines[0]["step"]}
    write_records(run, lines)
    assert launch(["report", "together", "apart", "--json", "--dir", str(tmp_path / "runs")]) == 0
    together, apart = json.loads(capsys.readouterr().out)["runs"]
    assert together["outer/step_s"] is None
    assert apart["outer/step_bytes"] == pytest.approx(len(lines) * 3e6 / lines[-1]["step"])
    spent = sum(line["outer/time_s"] for line in lines) / lines[-1]["step"]
    assert apart["outer/step_s"] == pytest.approx(spent)
    assert together["throughput/samples_per_s"] == pytest.approx(64 / together["time/step_s"])
    assert apart["throughput/samples_per_s"] == pytest.approx(64 / (apart["time/step_s"] + spent))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("plan", {"cluster": []}), ("plan", {"batch": {"world_size": "two"}}), ("plan", {"strategy": 3}),
        ("plan", "[" * 200_000), ("summary", "[" * 200_000), ("metrics", None), ("config", None), ("loop_plan", None),
        ("report_entry", None), ("metrics", {"comm/speedup": [1], "comm/exposed_s": {}}),
        ("metrics", {"time/step_s": "x", "train/loss": [3]}), ("metrics", {"step": 10**400}),
        ("metrics", {"eval/accuracy": {"a": 1}}), ("config", "cluster: {price_per_gpu_hour: many}"),
        ("config", f"task: {{a: &a [1], {', '.join(f'{b}: &{b} [*{a}, *{a}]' for a, b in NESTED)}}}"),
        ("config", f"task: {{a: &a {{x: 1}}, {', '.join(f'{b}: &{b} {{l: *{a}, r: *{a}}}' for a, b in NESTED)}}}"),
        ("config", "[" * 100_000),
    ],
)  # fmt: skip
def test_a_run_of_any_content_hides_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: object
) -> None:
    good, bad = make_run(tmp_path, "good"), make_run(tmp_path, "bad", target="b.Task", loss=9.0)
    place: Path = getattr(bad, file)
    if content is None:
        place.unlink(missing_ok=True)
        os.mkfifo(place)
    elif isinstance(content, str):
        place.write_text(content)
    elif file == "metrics":
        write_records(bad, [each | cast("dict[str, Any]", content) for each in read_records(bad)])
    else:
        plan = json.loads(place.read_text())
        for name, value in cast("dict[str, Any]", content).items():
            plan[name] = plan[name] | value if isinstance(value, dict) else value
        place.write_text(json.dumps(plan))
    assert launch_report([str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "good" in capsys.readouterr().out
    by_label = by_name(tmp_path)
    assert by_label["good"]["step"] == 30
    problems = [by_label["bad"]["problem"], by_label["bad"]["state"], "".join(as_json(tmp_path)["notes"])]
    assert file in ("loop_plan", "report_entry") or any("unreadable" in str(p) or "damaged" in str(p) for p in problems)
    assert good.root.exists()


def test_no_secret_in_which_runs_differ_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook, page = "https://hooks.slack.com/services/T0/B0/", tmp_path / "page.html"
    for name in "ab":
        paths = make_run(tmp_path, name)
        config = json.loads(paths.config.read_text())
        config |= {
            "notify": [f"{hook}hush{name}", "bell"],
            "callbacks": [{"_target_": "x.Webhook", "url": f"{hook}hush{name}"}],
        }
        config["task"] |= {"hf_token": f"hush{name}", "store": f"s3://u:hush{name}@host/x", "pad_token": "<pad>" + name}
        config["train"] |= {"seed": "ab".index(name)}
        paths.config.write_text(json.dumps(config))
    for form in ([], ["--json"], ["--csv"]):
        assert launch_report([str(tmp_path), "--html", str(page), *form]) == 0
        shown = capsys.readouterr().out + page.read_text()
        assert "hush" not in shown
        assert form == ["--csv"] or "&lt;pad&gt;a" in shown or "<pad>a" in shown
