"""What becomes of a job when its workers end: by what they say, what the other nodes say, and what Slurm says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import process
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, SiteError, Superseded, UserError
from launcher.launch.slurm import client, node, outcome
from launcher.launch.slurm.client import SlurmJob, SlurmSilent, SlurmTask
from launcher.launch.slurm.outcome import Reports
from launcher.plan.run_plan import RunPlan
from launcher.rundir import history
from launcher.rundir.fencing import Fence, Incarnation
from launcher.rundir.files import read_json, write_json
from launcher.rundir.history import Submission
from launcher.rundir.job_end import Failure, Summary, failed_summary, failure_record
from launcher.rundir.paths import RunPaths
from tests.helpers import make_plan

PEER_GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711."
STOPPED = {"stopped_by": "SIGUSR2"}


def slurms_job(state: str = "RUNNING", restarts: int = 0, left_s: float = 9999, preempted: bool = False) -> SlurmJob:
    end = datetime.now() + timedelta(seconds=left_s)
    return SlurmJob(state=state, reason="None", nodes="node[1-2]", restarts=restarts, end=end, preempted=preempted)


class Situation:
    """One node of two, in a job that Slurm answers for as ``job`` says; what is requeued is counted."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.paths = RunPaths(root)
        self.paths.logs.mkdir(parents=True)
        self.paths.checkpoints.mkdir()
        self.plan: RunPlan = make_plan("cluster=slurm", "cluster.nodes=2", *overrides, run_dir=str(root))
        history.add_submission(self.paths, Submission.now())
        self.job: SlurmJob | None = slurms_job()
        self.requeued: list[str] = []
        monkeypatch.setattr(client, "job", lambda _: self.answer())
        monkeypatch.setattr(client, "requeue", self.requeued.append)
        monkeypatch.setattr(client, "settings", lambda: {"SlurmdTimeout": "0 sec", "KillWait": "0 sec"})
        monkeypatch.setattr(client, "host_names", lambda _: ["node1", "node2"])
        for name in ("_REQUEUE_WITHIN_S", "_SLURM_ACTS_WITHIN_S"):
            monkeypatch.setattr(outcome, name, 0)
        monkeypatch.setattr(outcome, "_LOOK_EVERY_S", 0.01)

    def answer(self) -> SlurmJob | None:
        if self.job is None:
            raise SlurmSilent("no answer")
        return self.job

    def begin(self, submission: int = 0, restart: int = 0, step: int | None = None) -> None:
        if step is not None:
            self.paths.checkpoint(step).mkdir(exist_ok=True)
        self.fence = Fence(self.paths, Incarnation(submission, restart))
        node._open_attempt(self.plan, self.task(0, restart), self.fence)

    def task(self, number: int = 0, restart: int = 0) -> SlurmTask:
        return SlurmTask(job="7", node=number, nodes=2, node_list="node[1-2]", restart=restart)

    def conclude(self, ended: Summary, number: int = 0) -> int:
        return outcome.conclude(self.plan, self.task(number), self.fence, ended)

    def told(self) -> list[str]:
        return [event["event"] for event in history.read_events(self.paths)]


def broken(error: str, **known: Any) -> Summary:
    return failed_summary(failure_record(error, None, rank=1, **known))


@pytest.fixture
def now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Situation:
    situation = Situation(tmp_path / "run", monkeypatch)
    situation.begin()
    return situation


@pytest.mark.parametrize(
    ("job", "signal", "why"),
    [
        (slurms_job(), "SIGUSR2", "SIGUSR2"),
        (slurms_job(preempted=True), "SIGTERM", "preempted"),
        (slurms_job(left_s=60), "SIGUSR2", "time limit"),
        (slurms_job(), "SIGTERM", ""),
        (slurms_job("CANCELLED"), "SIGTERM", ""),
        (slurms_job("PENDING", restarts=1), "SIGTERM", ""),
        (slurms_job(preempted=True), "", "preempted"),  # before there was a handler
        (slurms_job(left_s=60), "", ""),
    ],
)
def test_why_a_job_is_to_go_on_later(now: Situation, job: SlurmJob, signal: str, why: str) -> None:
    now.job = job
    assert outcome.reason_to_requeue(now.plan, now.task(), signal) == why


def test_what_was_saved_is_queued_again(now: Situation) -> None:
    write_json(now.paths.summary, {"verdict": "stopped", "steps": 5})
    assert now.conclude(STOPPED) == EXIT_RESUMABLE
    assert now.requeued == ["7"]
    assert now.told() == ["started", "stopped", "requeued"]
    assert now.conclude(STOPPED, number=1) == EXIT_DONE
    assert now.requeued == ["7"], "node 0 alone does it"


def test_a_message_follows_the_requeue(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, list[str]]] = []

    def send(plan: object, summary: dict[str, Any], within_s: float) -> None:
        assert plan is now.plan
        assert within_s < 10, "Slurm ends the process after KillWait"
        sent.append((summary["verdict"], [*now.requeued]))

    monkeypatch.setattr(outcome, "report_outcome", send)
    write_json(now.paths.summary, {"verdict": "stopped", "steps": 5})
    now.conclude(STOPPED)
    assert sent == [("requeued", ["7"])]


class Failing:
    """`scontrol requeue` that fails ``times`` times with ``error``, and counts."""

    def __init__(self, now: Situation, monkeypatch: pytest.MonkeyPatch, error: SiteError, times: int = 10**9) -> None:
        self.calls, self.error, self.times, self.now = 0, error, times, now
        self.sent: list[str] = []
        monkeypatch.setattr(client, "requeue", self.requeue)
        monkeypatch.setattr(outcome, "_RETRY_EVERY_S", 0.001)
        monkeypatch.setattr(outcome, "report_outcome", lambda _, summary, __: self.sent.append(summary["verdict"]))
        write_json(now.paths.summary, {"verdict": "stopped", "steps": 5})

    def requeue(self, job: str) -> None:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        self.now.requeued.append(job)


def test_a_requeue_that_fails_is_repeated(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Failing(now, monkeypatch, SlurmSilent("Slurm does not answer"), times=3)
    assert now.conclude(STOPPED) == EXIT_RESUMABLE
    assert (slurm.calls, now.requeued, slurm.sent) == (4, ["7"], ["requeued"])
    assert now.told() == ["started", "stopped", "requeued"]


def test_a_requeue_whose_answer_is_lost_is_not_repeated(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Failing(now, monkeypatch, SlurmSilent("timed out"))
    answers = [slurms_job(), slurms_job("COMPLETING", restarts=1)]
    monkeypatch.setattr(client, "job", lambda _: answers.pop(0))
    now.conclude(STOPPED)
    assert (slurm.calls, slurm.sent) == (1, ["requeued"])
    assert now.told() == ["started", "stopped", "requeued"]


@pytest.mark.parametrize(
    ("error", "once"),
    [
        (SlurmSilent("Slurm does not answer: Unable to contact slurm controller"), False),
        (SiteError("`scontrol requeue 7`: Unexpected message received"), False),
        (SiteError("`scontrol requeue 7`: Requested operation is presently disabled for job 7"), True),
        (SiteError("scontrol is not on this machine's PATH."), True),
    ],
)
def test_what_was_not_requeued_is_not_called_so(
    now: Situation, monkeypatch: pytest.MonkeyPatch, error: SiteError, once: bool
) -> None:
    monkeypatch.setattr(outcome, "_grace_s", lambda _: 0.2)
    slurm = Failing(now, monkeypatch, error)
    assert now.conclude(STOPPED) == EXIT_RESUMABLE
    assert (slurm.calls == 1) is once
    assert slurm.sent == []
    assert now.told() == ["started", "stopped", "not requeued"]
    assert history.read_events(now.paths)[-1]["why"] == str(error)


def test_a_sigterm_whose_cause_slurm_does_not_tell_at_first(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[SlurmJob | None] = [None, None, slurms_job(preempted=True)]

    def answer(_: str) -> SlurmJob:
        now.job = answers.pop(0)
        return now.answer() or slurms_job()

    monkeypatch.setattr(client, "job", answer)
    monkeypatch.setattr(outcome, "_RETRY_EVERY_S", 0.001)
    assert outcome.reason_to_requeue(now.plan, now.task(), "SIGTERM") == "preempted"


TERMINATED = {"stopped_by": "SIGTERM"}


def test_a_killed_slurmstepd_is_named_and_the_job_requeued(now: Situation) -> None:
    write_json(now.paths.summary, {"verdict": "stopped", "steps": 5})
    orphan = dataclasses.replace(now.task(1), parent=1)
    assert outcome.conclude(now.plan, orphan, now.fence, TERMINATED) == EXIT_DONE
    assert now.conclude({}) == EXIT_RESUMABLE, "node 0 has no signal of its own"
    assert now.requeued == ["7"]
    stopped, requeued = history.read_events(now.paths)[1:]
    assert "slurmstepd" in requeued["why"]
    assert "task 1, was killed" in requeued["why"]
    assert (stopped["event"], stopped["by"]) == ("stopped", requeued["why"])
    assert (read_json(now.paths.summary) or {})["verdict"] == "stopped"


SRUN = """\
srun: error: node2: task 1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=7.0
srun: error: node1: task 0: Exited with exit code 1
"""


def say(now: Situation, text: str) -> None:
    now.paths.slurm.mkdir(exist_ok=True)
    with (now.paths.slurm / "7_0_log.out").open("a") as file:
        file.write(text)


@pytest.mark.parametrize("ended", [broken(PEER_GONE), TERMINATED])
def test_a_killed_task_is_the_failure(now: Situation, ended: Summary) -> None:
    """The others have lost their peer, or were told to stop before they noticed."""
    say(now, SRUN)
    assert now.conclude(ended) == EXIT_FAILED
    failure = (read_json(now.paths.summary) or {})["failure"]
    assert failure["error"] == "Slurm's task 1 on node2, which ran the launcher's agent, was killed: SIGKILL"
    assert (failure["node"], failure["host"], failure["traceback"]) == (1, "node2", None)
    assert now.told()[-1] == "failed"
    assert now.requeued == []


def test_a_task_that_was_killed_in_an_earlier_start_is_not_the_failure(now: Situation) -> None:
    say(now, SRUN)
    now.begin(restart=1)
    say(now, "srun: error: Cannot communicate with node 1.  Aborting job.\n")
    ended = outcome.conclude(now.plan, now.task(0, 1), now.fence, broken(PEER_GONE))
    assert (ended, now.requeued) == (EXIT_RESUMABLE, ["7"]), "srun has given up a node: the job is requeued"


def test_what_could_not_be_saved_is_not_called_stopped(now: Situation) -> None:
    now.conclude(STOPPED)
    assert (read_json(now.paths.summary) or {})["verdict"] == "killed"
    assert now.requeued == ["7"]


def test_a_run_that_is_done_is_not_queued_again(now: Situation) -> None:
    write_json(now.paths.summary, {"verdict": "done", "steps": 300})
    assert now.conclude({}) == EXIT_DONE
    assert now.requeued == []
    assert now.told() == ["started", "done"]


def test_a_cancelled_run_is_not_queued_again(now: Situation) -> None:
    write_json(now.paths.summary, {"verdict": "stopped", "steps": 5})
    history.amend_submission(now.paths, cancelled=True)
    now.conclude(STOPPED)
    assert now.requeued == []


def test_without_checkpoints_nothing_is_queued_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Situation(tmp_path / "run", monkeypatch, "checkpoint.enabled=false")
    now.begin()
    assert now.conclude(STOPPED) == EXIT_RESUMABLE
    assert now.requeued == []


def test_starts_without_a_step_end_and_a_person_begins_to_count_anew(now: Situation) -> None:
    write_json(now.paths.summary, {"verdict": "stopped"})
    for restart in (1, 2):
        now.begin(restart=restart)
        assert now.conclude(STOPPED) == EXIT_RESUMABLE
    now.begin(restart=3)
    assert now.conclude(STOPPED) == EXIT_FAILED
    assert "started 4 times without getting one step further" in str(read_json(now.paths.summary))
    assert len(now.requeued) == 2
    now.begin(submission=1)
    assert now.conclude(STOPPED) == EXIT_RESUMABLE
    for restart in (1, 2, 3, 4):  # a step each time
        now.begin(submission=1, restart=restart, step=restart)
        assert now.conclude(STOPPED) == EXIT_RESUMABLE


def test_an_error_of_the_runs_own_ends_the_job(now: Situation) -> None:
    assert now.conclude(broken("ValueError: cursed"), number=1) == EXIT_FAILED
    assert now.conclude(STOPPED) == EXIT_FAILED, "node 0 was told to stop because the other one has failed"
    assert now.requeued == []
    summary = read_json(now.paths.summary) or {}
    assert (summary["verdict"], summary["failure"]["error"], summary["failure"]["node"]) == (
        "failed", "ValueError: cursed", 1
    )  # fmt: skip


def test_a_node_that_another_one_left_waiting_hears_why_and_has_no_status_above_that_of_the_cause(
    now: Situation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun returns the highest status of all: 130 would hide that the input is wrong."""

    def reported(condition: Callable[[], object], within_s: float) -> bool:  # noqa: ARG001
        Reports(now.fence, 1, 2).add(failure_record("there is no such file", None, rank=1, kind="TaskError"))
        return bool(condition())

    monkeypatch.setattr(outcome, "wait_until", reported)
    assert now.conclude({"verdict": "killed"}) == EXIT_FAILED
    assert (read_json(now.paths.summary) or {})["failure"]["kind"] == "TaskError"


def test_nodes_that_lost_each_other_begin_again(now: Situation) -> None:
    Reports(now.fence, 1, 2).add(failure_record(PEER_GONE, None, rank=1))
    assert now.conclude(broken(PEER_GONE)) == EXIT_RESUMABLE
    assert now.requeued == ["7"]
    assert "disconnected" in now.told()


def test_a_node_that_says_nothing_is_slurms_to_find(now: Situation) -> None:
    now.job = slurms_job("COMPLETING")
    assert now.conclude(broken(PEER_GONE)) == EXIT_FAILED
    assert now.requeued == []


@pytest.mark.parametrize("clock_s", [1, -1])
def test_the_earliest_failure_is_the_runs(now: Situation, clock_s: int) -> None:
    """The clock of a node that lost a peer may be behind."""
    at = datetime.now()
    later: Failure = failure_record(PEER_GONE, None, rank=0, at=at + timedelta(seconds=clock_s))
    Reports(now.fence, 0, 2).add(later)
    Reports(now.fence, 1, 2).add(failure_record("ValueError: first", None, rank=1, at=at))
    Reports(now.fence, 0, 2).add(later)
    assert (read_json(now.paths.summary) or {})["failure"]["error"] == "ValueError: first"


def test_the_reports_of_many_nodes_are_opened_once_each(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    """All nodes of a job look for them: with one file to open for each node, it would be their number squared."""
    for number in (3, 500):
        Reports(now.fence, number, 512).add(failure_record(f"error of {number}", None))
    opened: list[Path] = []
    monkeypatch.setattr(outcome, "read_json", lambda path: opened.append(path) or read_json(path))
    reports = Reports(now.fence, 0, 512)
    for _ in range(3):
        assert {number: failure["error"] for number, failure in reports.all().items()} == {
            3: "error of 3", 500: "error of 500"
        }  # fmt: skip
    assert opened == [now.paths.failure_of(3), now.paths.failure_of(500)]


def test_what_an_older_start_says_changes_nothing(now: Situation) -> None:
    old = Reports(now.fence, 0, 2)
    now.begin(restart=1)
    with pytest.raises(Superseded):
        old.add(failure_record("ValueError: stale", None))
    assert not now.paths.summary.exists()


def test_a_node_without_a_way_says_so_in_the_runs_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Situation(tmp_path / "run", monkeypatch)
    now.plan.save()

    def no_way(*_: object) -> None:
        raise SiteError("no interface leads there")

    now.fence = Fence(now.paths, Incarnation())
    monkeypatch.setattr(client, "node_address", no_way)
    monkeypatch.setattr(client, "controller_address", no_way)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    with pytest.raises(SiteError):
        node._join_nodes(now.plan, now.task(), now.fence)
    outcome.conclude_failure(now.plan, now.task(), now.fence, failure_record("no interface leads there", None))
    assert now.fence.newest()["incarnation"] == "0.0", "the verdict is of a start that has begun"
    assert (read_json(now.paths.summary) or {})["verdict"] == "failed"


def test_a_start_takes_the_plan_for_as_many_nodes_as_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = Situation(tmp_path / "run", monkeypatch, "cluster.nodes=1:2", "cluster.workers_per_node=3")
    now.plan.save()
    served: list[tuple[RunPlan, Path]] = []

    def serve(plan: RunPlan, plan_file: Path, *_: object) -> Summary:
        served.append((plan, plan_file))
        return {}

    monkeypatch.setattr(node, "serve", serve)
    now.fence = Fence(now.paths, Incarnation())
    alone = dataclasses.replace(now.task(), nodes=1)
    assert node._run(alone, now.fence, SimpleNamespace(received=None)) == EXIT_DONE  # pyright: ignore
    ((plan, plan_file),) = served
    assert (plan.batch.world_size, plan_file.name) == (3, "plan.nodes1.json")
    assert RunPlan.load(plan_file) == plan
    assert now.fence.newest()["ranks"] == history.read_events(now.paths)[0]["ranks"] == 3
    with pytest.raises(UserError, match="has 3 hosts, but was planned for 1 to 2"):
        node._run(dataclasses.replace(alone, nodes=3), now.fence, SimpleNamespace(received=None))  # pyright: ignore


def test_a_replaced_start_does_not_return(now: Situation, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[SlurmJob | None] = [None, slurms_job(restarts=1), slurms_job("CANCELLED", restarts=1)]

    def next_answer(_: float) -> None:
        now.job = answers.pop(0)

    monkeypatch.setattr(process.time, "sleep", next_answer)
    now.job = None  # cut off from Slurm
    node._stay_if_replaced(now.task(), EXIT_FAILED)
    assert answers == [], "it stayed while Slurm was silent, and while the job ran elsewhere"
    node._stay_if_replaced(now.task(restart=1), EXIT_FAILED)


def test_a_start_that_is_replaced_while_it_reports_an_error_does_not_return(
    now: Situation, monkeypatch: pytest.MonkeyPatch
) -> None:
    now.plan.save()
    stayed: list[int] = []

    def replaced(*_: object) -> int:
        now.begin(restart=1)
        raise SiteError("the connection to the other nodes is lost")

    for name, does in (("die_with_parent", lambda *_: None), ("_write_to", lambda *_: None), ("_run", replaced)):
        monkeypatch.setattr(node, name, does)
    monkeypatch.setattr(SlurmTask, "here", now.task)
    monkeypatch.setattr(node, "_stay_if_replaced", lambda _, status: stayed.append(status))
    with pytest.raises(SystemExit) as ended:
        node.run_node(str(now.paths.root), 0)
    assert (stayed, ended.value.code) == ([EXIT_FAILED], EXIT_FAILED)
    assert not now.paths.summary.exists()


def test_slurms_settings_are_read_with_their_unit_and_a_job_that_it_does_not_know_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "settings", lambda: {"SlurmdTimeout": "45 sec"})
    assert outcome._slurmd_timeout_s() == 45
    monkeypatch.setattr(client, "settings", dict)
    assert outcome._slurmd_timeout_s() == 300
    asked: list[str] = []
    monkeypatch.setattr(client, "job", asked.append)
    assert outcome._job("7", within_s=600) is None
    assert asked == ["7"]
