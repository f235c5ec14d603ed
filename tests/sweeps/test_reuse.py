"""Settings that make two cells the same, and cells that need not start."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from launcher.cli.names import resolve, resolve_any
from launcher.errors import UserError
from launcher.plan.run_plan import RunPlan
from launcher.rundir import code_snapshot, history
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths, SweepPaths
from launcher.runs.status import RunState, statuses_of
from launcher.sweeps import manifest
from launcher.sweeps.manifest import Cell, Sweep, content_of
from launcher.sweeps.reuse import look_at_sweeps, recognise, run_name
from tests.helpers import make_plan


def cell(*overrides: str, content: str | None = "c0ffee00c0ffee00", run: str | None = None) -> Cell:
    return Cell(overrides=overrides, content=content, run=run, problem=None)


def keep(root: Path, *cells: Cell) -> SweepPaths:
    paths = SweepPaths(root)
    root.mkdir(parents=True, exist_ok=True)
    Sweep(format=1, fixed=(), at_once=None, cells=cells).save(paths)
    return paths


def make_run(place: Path, verdict: str | None) -> None:
    paths = RunPaths(place)
    paths.logs.mkdir(parents=True)
    plan = make_plan(run_dir=str(place))
    dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=place.name)).save()
    history.add_submission(paths, Submission.now())  # of no process that is alive
    write_json(paths.newest_incarnation, {"incarnation": "0.0"})
    if verdict is not None:
        write_json(paths.summary, {"verdict": verdict, "failure": {"rank": 1, "error": "no luck"}})


@pytest.mark.parametrize(
    "overrides",
    [["train.steps=5"], ["batch.accumulation=4"], ["cluster.workers_per_node=4"], ["optimizer.lr=0.5"],
     ["precision=fp32"], ["strategy=fsdp"], ["train.seed=3"], ["run.calibrate_s=0"], ["checkpoint.every=7"]],
)  # fmt: skip
def test_what_changes_what_is_computed_or_measured_changes_the_content(overrides: list[str]) -> None:
    assert content_of(make_plan(*overrides), "") != content_of(make_plan(), "")


@pytest.mark.parametrize(
    "overrides",
    [["wandb.mode=disabled"], ["wandb.tags=[a]"], ["run.dir=elsewhere"], ["sweep.name=x"],
     ["cluster.max_restarts=3"], ["cluster.grace_s=5"]],
)  # fmt: skip
def test_what_is_only_shown_or_kept_does_not(overrides: list[str]) -> None:
    assert content_of(make_plan(*overrides), "") == content_of(make_plan(), "")


def test_the_queue_does_not_change_the_content_but_the_nodes_do() -> None:
    def of(*overrides: str) -> str:
        plan: RunPlan = make_plan("cluster=slurm", *overrides)
        return content_of(plan, "")

    assert of("cluster.time=01:00:00", "cluster.account=a") == of("cluster.time=02:00:00", "cluster.qos=b")
    assert of("cluster.partition=a") != of("cluster.partition=b")
    assert of("cluster.constraint=h100") != of()


def test_an_edit_of_any_module_changes_the_code(tmp_path: Path) -> None:
    project, runs = tmp_path / "project", tmp_path / "project" / "runs"
    (project / "deep").mkdir(parents=True)
    (project / "task.py").write_text("a = 1\n")
    (project / "deep" / "more.py").write_text("b = 1\n")

    def code() -> str:
        return code_snapshot.digests([project], runs, runs / "s")[1]

    first = code()
    (runs / "s" / "code").mkdir(parents=True)
    (runs / "s" / "code" / "task.py").write_text("a = 3\n")  # a copy that a sweep has made
    elsewhere = keep(project / "study")
    (elsewhere.root / "task.py").write_text("a = 4\n")  # of a sweep in another directory
    (project / "sweep.log").write_text("what a command has said")
    assert code() == first
    (project / "sizes.json").write_text("[1]")  # a task may read it
    assert code() != first
    (project / "sizes.json").unlink()
    (project / "deep" / "more.py").write_text("b = 2\n")
    second = code()
    assert second != first
    (project / "deep" / "more.py").rename(project / "deep" / "other.py")
    assert code() not in (first, second)


@pytest.mark.parametrize("verdict", ["done", "failed", "stopped", None])
def test_a_finished_run_is_known_by_its_content_in_any_sweep(tmp_path: Path, verdict: str | None) -> None:
    make_run(tmp_path / "first" / "lr=1-c0ffee00", verdict)
    keep(tmp_path / "first", cell("optimizer.lr=1", run="lr=1-c0ffee00"))
    there = recognise([cell("optimizer.lr=1.0")], SweepPaths(tmp_path / "second"))
    assert not there.resumable  # another sweep's is not this one's to go on with
    assert set(there.reusable) == ({"c0ffee00c0ffee00"} if verdict == "done" else set())
    another = recognise([cell("optimizer.lr=1.0", content="another000000000")], SweepPaths(tmp_path / "second"))
    assert not another.reusable


def test_of_a_sweep_cut_off_before_its_book_was_written_the_runs_are_known(tmp_path: Path) -> None:
    wanted = cell("optimizer.lr=1")
    make_run(tmp_path / "s" / run_name(wanted), "failed")
    make_run(tmp_path / "s" / f"{run_name(wanted)}.retry1", "done")
    found = recognise([wanted], SweepPaths(tmp_path / "s"))
    assert found.reusable[str(wanted.content)].root.name.endswith(".retry1")


@pytest.mark.parametrize("saved", [True, False])
def test_a_cell_that_was_stopped_goes_on_if_it_has_saved(tmp_path: Path, saved: bool) -> None:
    wanted = cell("optimizer.lr=1")
    place = tmp_path / "s" / run_name(wanted)
    make_run(place, "stopped")
    if saved:
        (RunPaths(place).checkpoints / "step_000007").mkdir(parents=True)
    found = recognise([wanted], SweepPaths(tmp_path / "s"))
    assert found.resumable == ({"c0ffee00c0ffee00": RunPaths(place)} if saved else {})
    assert not found.reusable


def test_names_are_short_plain_and_never_shared() -> None:
    long = [cell(f"task.text={'x' * 300}{number}", content=f"{number:016d}"[::-1]) for number in range(2)]
    assert len({run_name(each) for each in long}) == 2
    assert all(len(run_name(each)) < 100 for each in long)
    odd = run_name(cell("task.path=/a b/../c,[x]'\"", "batch.accumulation=4"))
    assert odd == "path=_a+b_.._c_x_+accumulation=4-c0ffee00"


def test_cells_that_cannot_run_or_have_not_begun_are_shown_as_that(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "a", "done")
    impossible = Cell(overrides=("batch.accumulation=3",), content=None, run=None, problem="64 samples ...\n  Use 4.")
    paths = keep(
        tmp_path / "s", cell("x=1", run="a"), impossible, cell("x=2", content="other"), cell("x=3", run="gone")
    )
    runs = look_at_sweeps([paths])[str(paths.root)]
    assert [run.state for run in runs] == [RunState.done, RunState.impossible, RunState.pending, RunState.pending]
    assert [run.cell for run in runs] == ["x=1", "accumulation=3", "x=2", "x=3"]
    assert runs[1].detail == "64 samples ... Use 4."


def test_a_sweep_that_cannot_be_read_stands_beside_the_others(tmp_path: Path) -> None:
    broken, whole = keep(tmp_path / "broken"), keep(tmp_path / "whole", cell("x=1"))
    broken.manifest.write_text("{")
    found = look_at_sweeps([broken, whole])
    (line,) = found[str(broken.root)]
    assert line.state is RunState.unreadable
    assert "cannot be read" in line.detail
    assert [run.state for run in found[str(whole.root)]] == [RunState.pending]


def test_a_run_is_over_when_its_launch_says_so_though_the_process_runs_others(tmp_path: Path) -> None:
    make_run(tmp_path / "s" / "a", "done")
    paths = RunPaths(tmp_path / "s" / "a")
    history.amend_submission(paths, pid=os.getpid(), born=history.process_start_id(os.getpid()))
    assert statuses_of([paths])[0].state is RunState.running
    history.amend_submission(paths, ended=True)
    assert statuses_of([paths])[0].state is RunState.done


def test_words_for_sweeps_and_their_cells(tmp_path: Path) -> None:
    study = tmp_path / "study"
    for name in ("lr=1+seed=1-c0ff", "lr=1+seed=1-c0ff.retry1", "lr=2+seed=1-c0fe", "path=_a_b-c0fa"):
        make_run(study / name, "done")
    make_run(tmp_path / "single", "done")
    keep(
        study, cell("optimizer.lr=1", "train.seed=1", run="lr=1+seed=1-c0ff.retry1"),
        cell("optimizer.lr=2", "train.seed=1", run="lr=2+seed=1-c0fe"), cell("task.path=/a/b", run="path=_a_b-c0fa"),
        cell("optimizer.lr=3", "train.seed=1"),
    )  # fmt: skip
    keep(tmp_path / "stall")
    assert resolve_any("study", tmp_path) == SweepPaths(study)
    assert resolve_any("stu", tmp_path) == SweepPaths(study)
    assert resolve_any(str(study), Path("nowhere")) == SweepPaths(study)
    meant = {
        "lr=1+seed=1-c0ff.retry1": ("lr=1 seed=1", "lr=1", "lr=1+seed=1", "lr=1+seed=1-c"),  # the cell's run now
        "lr=1+seed=1-c0ff": ("lr=1+seed=1-c0ff",),
        "lr=2+seed=1-c0fe": ("lr=2", "lr=2 seed=1", "lr=2+seed=1-c0fe"),
        "path=_a_b-c0fa": ("path=/a/b", "path=/a", "path"),
    }
    for run, words in meant.items():
        for word in words:
            for before in ("study", "stu", str(study)):
                assert resolve(f"{before}/{word}", tmp_path) == RunPaths(study / run), (before, word)
    assert resolve("si", tmp_path) == RunPaths(tmp_path / "single")
    wrong = {
        "study": "is a sweep", "st": "2 runs match", "st/lr=1": "2 runs match", "study/lr": "2 runs match",
        "study/x": "no such run", "other/lr": "no such run", "study/lr=3": "no such run", "": "RUN is empty",
    }  # fmt: skip
    for word, says in wrong.items():
        with pytest.raises(UserError, match=says):
            resolve(word, tmp_path)


def test_two_commands_do_not_begin_the_same_cells(tmp_path: Path) -> None:
    paths = SweepPaths(tmp_path / "s")
    refused = pytest.raises(UserError, match=r"another `launch` is starting this sweep's cells: process \d+ on")
    with manifest.alone(paths), refused, manifest.alone(paths):
        pass
    with manifest.alone(paths):  # it was let go
        pass


def test_a_book_of_another_version_is_said(tmp_path: Path) -> None:
    write_json((tmp_path / "sweep.json"), {"format": 99})
    with pytest.raises(UserError, match="another version"):
        manifest.load_sweep(SweepPaths(tmp_path))
