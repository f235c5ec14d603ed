"""`launch drill` with real processes: a job that survives, and one with state that no checkpoint holds."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launcher.cli import run
from launcher.config.hydra import compose_with_yaml
from launcher.errors import RunError
from launcher.extensions.drill.backends import LocalBackend
from launcher.extensions.drill.runner import Drill, Length, shortened
from launcher.extensions.drill.verdict import DrillOutcome, Interruption
from launcher.launch.planner import plan_job
from launcher.rundir.files import write_json
from tests.conftest import Launch
from tests.infra import warm
from tests.infra.runs import OWN, processes_of

pytestmark = pytest.mark.slow


# a learning rate that falls from the first step on, so that a wrong one after a resume is noticed
FALLING = (*(word for word in OWN if not word.startswith("schedule")), "schedule=cosine", "schedule.warmup_steps=0")


class OnlyTheTree(LocalBackend):
    kinds = (Interruption.tree,)
    least_remaining_s = 0.1  # if that is too little, the drill repeats itself with more windows


class Failing(LocalBackend):
    """Backend that leaves the files of a failed job, without running one."""

    def resume(self) -> None:
        write_json(self.plan.paths.summary, {"failure": {"error": "ValueError: the eleventh utterance is cursed"}})
        self._launch = subprocess.Popen(["false"])


def test_a_job_that_survives(launch: Launch, project: Path) -> None:
    done = launch("drill", *FALLING, "train.steps=300", "task.trouble=slow", "--windows", "12", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    place = project / "runs" / "own"
    assert json.loads((place / "drill.json").read_text()) == found
    assert (found["outcome"], found["windows"]) == ("survives", 12)
    assert found["job"]["schedule"] == "that of the whole job: cosine over 300 steps"
    assert found["job"]["batch"] == "24 samples = 3 micro-batch × 4 accumulation × 2 ranks"
    assert [one["kind"] for one in found["interrupted"]] == ["preempt", "kill a worker", "kill the tree"]
    for one in found["interrupted"]:
        assert one["difference"]["tensors"] > 10
        assert one["difference"]["differing"] == 0
        assert one["at_step"] >= 7, "it died after the intended step"
        assert one["recovery_s"] > 0
        assert (one["from_step"] == one["at_step"]) if one["kind"] == "preempt" else (one["from_step"] % 3 == 0)
    assert processes_of(place) == []
    assert launch("drill", *OWN).returncode == 2, "a drill never writes into another one's directory"


def drilled(project: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, backend: LocalBackend) -> Drill:
    monkeypatch.chdir(project)
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    config, yaml = compose_with_yaml([*OWN, f"task.trouble={trouble}"])
    plan, changed = shortened(plan_job(config))
    Path(plan.run.dir).mkdir(parents=True)
    return Drill(plan, changed, yaml, backend, lambda _: None)


def test_a_job_that_remembers_what_no_checkpoint_holds_does_not_survive(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drill = drilled(project, monkeypatch, "remembers", OnlyTheTree())
    found = drill.run(Length(4))
    assert found.outcome is DrillOutcome.damaged
    (one,) = found.interrupted
    assert one.difference is not None
    assert one.difference.figure.startswith("train/")
    assert one.difference.differing > 1
    assert found.rerun_difference is not None
    assert found.rerun_difference.identical, "left alone it is the same each time"


def test_a_job_that_fails_by_itself_is_not_drilled(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drill = drilled(project, monkeypatch, "raise", Failing())
    with pytest.raises(RunError, match=r"was not interrupted(.|\n)*the eleventh utterance is cursed"):
        drill.run(Length(4))
    assert processes_of(project / "runs") == []


def test_the_name_of_another_run_is_refused_before_the_inspection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    assert run(["drill", "run.name=taken", "task._target_=no.such.Task"]) == 2
    message = capsys.readouterr().err
    assert ("run.name=taken: " in message, "no.such" in message) == (True, False)
