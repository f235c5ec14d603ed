"""State of a run according to its directory and Slurm; and the run that a name stands for."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from launcher import cli
from launcher.cli import names
from launcher.errors import SiteError, UserError
from launcher.launch.slurm import client
from launcher.launch.slurm.client import Listed, SlurmSilent
from launcher.report.run_list import failure_of, status_table
from launcher.rundir import history, paths
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths
from launcher.runs import control, status
from launcher.runs.status import RunState
from tests.helpers import make_plan


def make_run(root: Path, name: str, *overrides: str, job: str | None = "7", submissions: int = 1) -> RunPaths:
    paths = RunPaths(root / name)
    paths.logs.mkdir(parents=True)
    plan = make_plan(*overrides, run_dir=str(paths.root))
    dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=name)).save()
    for _ in range(submissions):
        history.add_submission(paths, dataclasses.replace(Submission.now(), job=job))
    return paths


def begin(paths: RunPaths, attempt: str = "0.0") -> None:
    write_json(paths.newest_incarnation, {"incarnation": attempt, "job": "7", "nodes": ["node1"]})


def slurm_says(monkeypatch: pytest.MonkeyPatch, state: str | None, name: str = "a", reason: str = "None") -> None:
    monkeypatch.setattr(client, "available", lambda: True)
    listed = {} if state is None else {"7": Listed(state, name, reason, "node1")}
    monkeypatch.setattr(client, "jobs", lambda _: listed)


@pytest.mark.parametrize(
    ("slurm", "begun", "verdict", "state"),
    [
        ("PENDING", False, None, RunState.pending),
        ("PENDING", True, None, RunState.requeued),
        ("PENDING", True, "stopped", RunState.requeued),
        ("PENDING", True, "failed", RunState.requeued),  # a node that was lost said so before Slurm began it again
        ("RUNNING", True, None, RunState.running),
        ("RUNNING", True, "failed", RunState.running),
        ("RUNNING", True, "done", RunState.done),
        ("COMPLETED", True, "done", RunState.done),
        ("COMPLETED", True, None, RunState.failed),
        ("FAILED", True, "failed", RunState.failed),
        ("FAILED", False, None, RunState.failed),
        ("TIMEOUT", True, None, RunState.failed),
        ("NODE_FAIL", True, None, RunState.failed),
        ("CANCELLED", True, "stopped", RunState.cancelled),
        ("PREEMPTED", True, None, RunState.stopped),
        ("FAILED", True, "stopped", RunState.stopped),
        (None, True, "failed", RunState.failed),
        (None, True, "stopped", RunState.stopped),
        (None, True, None, RunState.lost),
        (None, False, None, RunState.lost),
    ],
)
def test_states_of_a_slurm_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slurm: str | None,
    begun: bool,
    verdict: str | None,
    state: RunState,
) -> None:
    paths = make_run(tmp_path, "a", "cluster=slurm")
    if begun:
        begin(paths)
    if verdict is not None:
        write_json(paths.summary, {"verdict": verdict})
    slurm_says(monkeypatch, slurm)
    assert status.statuses_of([paths])[0].state is state


def test_what_an_earlier_submission_said_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_run(tmp_path, "a", "cluster=slurm", submissions=2)
    begin(paths, "0.3")
    write_json(paths.summary, {"verdict": "failed"})
    slurm_says(monkeypatch, "PENDING")
    assert status.statuses_of([paths])[0].state is RunState.pending
    begin(paths, "1.0")
    slurm_says(monkeypatch, "FAILED")
    assert status.statuses_of([paths])[0].state is RunState.failed


def test_a_job_that_never_started_shows_what_its_tasks_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make_run(tmp_path, "a", "cluster=slurm")
    slurm_says(monkeypatch, "FAILED")
    before = "Slurm reports FAILED before its first line:"
    assert status.statuses_of([paths])[0].detail == f"{before} does the node see the run's directory?"
    paths.slurm.mkdir()
    (paths.slurm / "6_0_log.out").write_text("of an earlier job\n")
    (paths.slurm / "7_0_log.out").write_text(
        "FATAL: no such image\nsrun: error: node1: exit code 255\nslurmstepd-node1: x\n"
    )
    assert status.statuses_of([paths])[0].detail == f"{before} FATAL: no such image"
    no_pyxis = "srun: unrecognized option '--container-image=a.sqsh'"
    (paths.slurm / "7_0_log.out").write_text(f'{no_pyxis}\nTry "srun --help" for more information\n')
    assert status.statuses_of([paths])[0].detail == f"{before} {no_pyxis}"
    no_python = "slurmstepd-node1: error: execve(): /opt/python: No such file or directory"
    ended = "srun: error: node1: task 0: Exited with exit code 2"
    (paths.slurm / "7_0_log.out").write_text(f"{no_python}\n{ended}\n")
    assert status.statuses_of([paths])[0].detail == f"{before} {no_python}"
    setup = "cluster.setup: `module load x` ended the job with status 1"
    (paths.slurm / "7_0_log.out").write_text(f"Lmod: no such module\n{setup}\n")
    assert status.statuses_of([paths])[0].detail == f"Slurm reports FAILED: {setup}"


def test_a_killed_srun_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no line of its own; the shell that runs the batch script does."""
    paths = make_run(tmp_path, "a", "cluster=slurm")
    begin(paths)
    paths.slurm.mkdir()
    shell = "/var/spool/job00007/slurm_script: line 15:    28 Killed                  srun --unbuffered --output x\n"
    (paths.slurm / "7_0_log.out").write_text(shell)
    slurm_says(monkeypatch, "FAILED")
    wanted = "Slurm reports FAILED: srun, which ran the tasks from the job's first node, was killed: SIGKILL"
    assert status.statuses_of([paths])[0].detail == wanted


def test_another_clusters_job_of_the_same_number_is_not_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_run(tmp_path, "a", "cluster=slurm")
    slurm_says(monkeypatch, "RUNNING", name="somebody's")
    assert status.statuses_of([paths])[0].state is RunState.lost


def test_an_unrecorded_job_is_the_one_that_was_submitted_from_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`launch` was killed before it recorded the job's id."""
    paths = make_run(tmp_path, "a", "cluster=slurm", job="6")
    slurm_says(monkeypatch, "COMPLETED")
    history.add_submission(paths, dataclasses.replace(Submission.now(), name="a"))
    queue = {
        "6": Listed("COMPLETED", "a", "", "", str(paths.slurm)),  # that of the first submission
        "7": Listed("PENDING", "a", "", "", str(tmp_path / "other/a/slurm")),
        "8_0": Listed("PENDING", "a", "", "", str(paths.slurm)),
    }
    monkeypatch.setattr(client, "named", lambda names: queue if names == ["a"] else {})
    assert (control.status_of(paths).state, control.status_of(paths).job) == (RunState.lost, None)
    queue["9"] = Listed("PENDING", "a", "Resources", "", str(paths.slurm))
    found = control.status_of(paths)
    assert (found.state, found.job, found.detail) == (RunState.pending, "9", "Resources")

    def silent(_: object) -> dict[str, Listed]:
        raise SlurmSilent("no answer")

    monkeypatch.setattr(client, "named", silent)
    assert control.status_of(paths).state is RunState.unknown


def test_a_slurm_that_does_not_answer_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over, open_ = make_run(tmp_path, "over", "cluster=slurm"), make_run(tmp_path, "open", "cluster=slurm")
    begin(over)
    write_json(over.summary, {"verdict": "done"})
    monkeypatch.setattr(client, "available", lambda: True)

    def silent(_: object) -> None:
        raise SlurmSilent("no answer")

    monkeypatch.setattr(client, "jobs", silent)
    assert [run.state for run in status.statuses_of([over, open_])] == [RunState.done, RunState.unknown]


def test_the_newest_runs_are_those_created_last(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name, job=None, submissions=0) for name in "abcd"]
    for run, day in zip(runs, (3, 1, 4, 2), strict=True):
        plan = json.loads(run.plan.read_text())
        plan["run"]["created"] = f"2026-01-0{day}T00:00:00+00:00"
        run.plan.write_text(json.dumps(plan))
    assert [paths.root.name for paths in status.newest(runs, 2)] == ["a", "c"]
    assert status.newest(runs, 4) == runs
    runs[0].plan.write_text("{")
    assert [paths.root.name for paths in status.newest(runs, 3)] == ["b", "d", "c"], "it has no time"


def test_a_brief_status_has_the_same_state(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "a", job=None)
    paths.metrics.write_text('{"step": 3, "train/loss": 2.5}\n')
    write_json(paths.summary, {"verdict": "done"})
    begin(paths)
    (whole,), (brief,) = status.statuses_of([paths]), status.statuses_of([paths], brief=True)
    assert (whole.step, whole.loss, brief.step, brief.loss) == (3, 2.5, None, None)
    assert dataclasses.replace(whole, step=None, loss=None, precision=None) == brief


def test_where_a_run_stands(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "a", "train.steps=60", job=None)
    begin(paths)
    history.amend_submission(paths, pid=os.getpid(), born=history.process_start_id(os.getpid()))
    rows = [{"step": step, "time/total_s": 2.0 * step, "train/loss": 1.0} for step in range(1, 41)]
    rows[29]["eval/loss"] = 0.75
    paths.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 41, "eval/lo')
    for step in (10, 30):
        paths.checkpoint(step).mkdir(parents=True)
    (run,) = status.statuses_of([paths])
    assert (run.state, run.step, run.held_out, run.resumes_from) == (RunState.running, 40, 0.75, 30)
    assert run.left_s == pytest.approx(40.0)
    out = io.StringIO()
    Console(file=out, width=120).print(status_table(run))
    assert "40/60, loss 1.0000, 40 s left" in out.getvalue()
    assert "held-out" in out.getvalue()
    assert {"held_out", "left_s", "resumes_from"} <= run.to_json().keys()
    history.amend_submission(paths, ended=True)
    write_json(paths.summary, {"verdict": "stopped"})
    (over,) = status.statuses_of([paths])
    assert (over.left_s, over.held_out, over.resumes_from) == (None, 0.75, 30)
    Console(file=out, width=120).print(status_table(over))
    assert "of step 30: `launch resume" in out.getvalue()
    shutil.rmtree(paths.checkpoints)
    Console(file=out, width=120).print(status_table(status.statuses_of([paths])[0]))
    assert "checkpoint  none" in out.getvalue()


def test_local_runs(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "a", job=None, submissions=0)
    history.add_submission(paths, Submission.now().by_this_process())
    assert status.statuses_of([paths])[0].state is RunState.running
    history.amend_submission(paths, born="another process of this number")
    assert status.statuses_of([paths])[0].state is RunState.lost
    history.amend_submission(paths, host="elsewhere")
    assert status.statuses_of([paths])[0].state is RunState.unknown
    begin(paths)
    write_json(paths.summary, {"verdict": "failed", "failure": {"rank": 1, "error": "KeyError: 3\nmore"}})
    (run,) = status.statuses_of([paths])
    assert (run.state, run.detail) == (RunState.failed, "rank 1: KeyError: 3")
    console = Console(width=100, file=io.StringIO())
    console.print(status_table(run), failure_of(run))
    text = cast("io.StringIO", console.file).getvalue()
    assert text.count("KeyError: 3") == text.count("more") == 1, "launch status shows all lines of the error, once"


def test_what_was_asked_to_end_before_an_error_stays_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [make_run(tmp_path, name, job=None, submissions=0) for name in ("own", "foreign", "later")]
    for place in places:
        history.add_submission(place, Submission.now().by_this_process())
    places.append(make_run(tmp_path, "a", "cluster=slurm"))
    slurm_says(monkeypatch, "PENDING")
    asked: list[object] = []

    def kill(*_: int) -> None:
        asked.append("process")
        if len(asked) == 3:
            raise PermissionError

    monkeypatch.setattr(client, "cancel", asked.append)
    monkeypatch.setattr(control.os, "kill", kill)
    with pytest.raises(SiteError, match=r"foreign: belongs to .* can cancel it"):
        control.cancel_runs(status.statuses_of(places), print)
    assert asked == ["7", "process", "process"]
    assert [history.submissions(place)[-1].cancelled for place in places] == [True, False, False, True]


def test_a_run_is_found_by_name_directory_or_beginning(tmp_path: Path) -> None:
    for name in ("alpha-1", "alpha-2", "beta"):
        make_run(tmp_path, name)
    (tmp_path / "not-a-run").mkdir()
    assert names.resolve("beta", tmp_path).root.name == "beta"
    assert names.resolve("be", tmp_path).root.name == "beta"
    assert names.resolve(str(tmp_path / "alpha-1"), Path("elsewhere")).root.name == "alpha-1"
    with pytest.raises(UserError, match="alpha: 2 runs match: alpha-1, alpha-2"):
        names.resolve("alpha", tmp_path)
    with pytest.raises(UserError, match="did you mean 'beta'"):
        names.resolve("betta", tmp_path)


def test_a_broken_directory_does_not_trip_the_others(tmp_path: Path) -> None:
    make_run(tmp_path, "good", job=None, submissions=0)
    broken = make_run(tmp_path, "broken", job=None, submissions=0)
    broken.plan.write_text("{")
    broken.job.write_text("")
    broken.metrics.write_text(json.dumps({"step": 3, "train/loss": 1.0}) + '\n{"step": 4, "tr')
    runs = {run.name: run for run in status.statuses_of(paths.find(tmp_path))}
    assert set(runs) == {"good", "broken"}
    assert (runs["broken"].state, runs["broken"].detail[:18]) == (RunState.unreadable, "plan.json: is not ")


def test_lines_that_do_not_parse_are_no_events(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert history.read_events(paths) == []
    history.note_event(paths, "submitted", job="7")
    whole = paths.events.read_text()
    torn, merged = whole[:20] + "}", whole.strip() + whole.strip()
    with paths.events.open("ab") as file:
        file.write(f"{torn}\n{merged}\n{{}}\n[1]\n2\n".encode() + b"\xff}\n")
    history.note_event(paths, "started")
    with paths.events.open("a") as file:
        file.write(whole[:30])
    assert [event["event"] for event in history.read_events(paths)] == ["submitted", "started"]


def test_what_a_newer_version_wrote_is_read_as_far_as_it_is_known() -> None:
    known: dict[str, Any] = {"at": "2025-01-01T00:00:00+00:00", "host": "h", "user": "u", "job": "7"}
    assert history.parse_submissions({"submissions": [known | {"federation": "west"}]}) == [Submission(**known)]
    for malformed in (
        {},
        {"submissions": None},
        {"submissions": [3]},
        {"submissions": {"a": 1}},
        {"submissions": [{}]},
    ):
        assert history.parse_submissions(malformed) == []


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary", "[1]"), ("plan", "[1]"), ("plan", '"x"'), ("plan", '{"run": null}'), ("plan", '{"precision": []}'),
        ("newest_incarnation", '{"incarnation": 3}'), ("metrics", '{"step": "many"}'), ("plan", '{"cluster": []}'),
        ("plan", '{"run": {"created": "x"}}'), ("plan", '{"run": {"name": 3}}'), ("plan", "[" * 200_000),
        ("summary", "[" * 200_000), ("summary", '{"a":' * 200_000), ("job", "[" * 200_000), ("plan", " " * (2**26 + 1)),
        ("newest_incarnation", '{"incarnation": "0.0", "nodes": 3}'), ("newest_incarnation", '{"ranks": "x"}'),
    ],
)  # fmt: skip
def test_a_damaged_run_hides_no_other(tmp_path: Path, file: str, content: str) -> None:
    good, bad = (make_run(tmp_path, name, job=None) for name in ("good", "bad"))
    expected = status.statuses_of([good])
    getattr(bad, file).write_text(content + "\n")
    first, second = status.statuses_of([bad, good])
    assert (first.dir, first.state) == (str(bad.root), RunState.unreadable)
    assert first.detail
    assert [second] == expected
    assert status.newest([bad, good], 1)[0] in (bad, good)
    for change in (control.to_resume, control.to_retry, lambda run: control.cancel_runs([run], print)):
        with pytest.raises(UserError):
            change(first)


@pytest.mark.parametrize("file", ["summary", "metrics", "newest_incarnation", "job"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, file: str) -> None:
    good, bad = (make_run(tmp_path, name, job=None) for name in ("good", "bad"))
    expected = status.statuses_of([good])
    place = getattr(bad, file)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    first, second = status.statuses_of([bad, good])
    assert (first.state, first.detail) == (RunState.unreadable, f"{place.name}: is no regular file")
    assert [second] == expected


def test_terminal_escapes_are_shown_and_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b]0;owned\x07\x1b[31mb\x9b2J"
    paths = make_run(tmp_path, evil, job=None, submissions=0)
    history.add_submission(paths, dataclasses.replace(Submission.now(), user=evil, job="7", host=evil))
    begin(paths)
    write_json(paths.summary, {"verdict": "failed", "failure": {"rank": 1, "error": evil, "log": f"/{evil}"}})
    history.note_event(paths, "started", nodes=[evil], what=evil)
    write_json(paths.tracker_status("wandb"), {"url": evil, "problem": evil})
    for command in (["runs"], ["status", str(paths.root)], ["resume", evil], ["report", str(tmp_path)]):
        cli.run([*command, "--dir", str(tmp_path)])
        shown = "".join(capsys.readouterr())
        assert not {"\x1b", "\x07", "\x9b"} & {*shown}, command
        assert "\\x1b" in shown, command
