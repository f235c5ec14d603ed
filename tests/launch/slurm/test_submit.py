"""Arrays: of one shape, no larger than Slurm takes, and none left in the queue without a run that knows of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import SiteError, UserError
from launcher.launch.slurm import client, submit
from launcher.launch.slurm.client import Listed, SlurmSilent
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.rundir import history
from launcher.rundir.paths import SweepPaths
from launcher.runs.status import Run, RunState
from launcher.sweeps import manifest, reuse
from launcher.sweeps.reuse import look_at_sweeps
from tests.helpers import make_plan
from tests.infra.made_runs import make_sweep
from tests.sweeps.test_reuse import cell


def plans(root: Path, number: int) -> list[RunPlan]:
    made: list[RunPlan] = []
    for name in (f"r{n}" for n in range(number)):
        plan = make_plan("cluster=slurm", run_dir=str(root / name))
        plan.paths.logs.mkdir(parents=True)
        made.append(dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=name)))
        made[-1].save()
    return made


def test_an_array_is_no_larger_than_slurm_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[list[str], str]] = []

    def send_array(plans: Sequence[LaunchPlan], name: str, *_: Any) -> list[str]:
        sent.append(([plan.run.name for plan in plans], name))
        return [f"{len(sent)}_{number}" for number in range(len(plans))]

    monkeypatch.setattr(submit, "submit_array", send_array)
    answers = submit.submit_in_arrays(plans(tmp_path, 5), "s", tmp_path, 2, None)
    assert answers == ["1_0", "1_1", "2_0", "2_1", "3_0"]
    assert [names for names, _ in sent] == [["r0", "r1"], ["r2", "r3"], ["r4"]]
    assert len({name for _, name in sent}) == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interruption_leaves_no_job_that_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C while the runs' files are written, or while sbatch has the array already."""
    cancelled: list[str] = []
    add, mine = history.add_submission, plans(tmp_path, 3)

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if when == "before" and len(history.submissions(mine[0].paths)) == 0:
            return add(*arguments, **named)
        raise KeyboardInterrupt

    module, name = (history, "add_submission") if when == "before" else (submit, "_submit_function")
    monkeypatch.setattr(module, name, interrupted)
    # other jobs of the same name: one was submitted elsewhere, and one has ended
    queue = {
        "3": Listed("PENDING", "s.1", "", "", "/elsewhere"),
        "7": Listed("CANCELLED", "s.1", "", "", str(tmp_path)),
        "8": Listed("PENDING", "s.1", "", "", str(tmp_path)),
    }
    monkeypatch.setattr(client, "named", lambda names: queue if names == ["s.1"] else {})
    monkeypatch.setattr(client, "cancel", lambda *jobs: cancelled.extend(jobs))
    with pytest.raises(KeyboardInterrupt):
        submit.submit_array(mine, "s.1", tmp_path)
    assert cancelled == ["8"]
    recorded = 1 if when == "before" else 3
    assert [len(history.submissions(plan.paths)) for plan in mine] == [1] * recorded + [0] * (3 - recorded)
    assert all(history.submissions(plan.paths)[0].refused for plan in mine[:recorded])


def test_jobs_are_found_by_a_name_with_a_comma(monkeypatch: pytest.MonkeyPatch) -> None:
    def squeue(*command: str) -> str:
        rows = {
            name: f"{job}|PENDING|None||{name}|/runs/{name}/slurm/x.sh\n" for job, name in enumerate(("a", "a,b", "c"))
        }
        wanted = next((word.removeprefix("--name=").split(",") for word in command if word.startswith("--name=")), rows)
        return "".join(rows.get(name, "") for name in wanted)

    monkeypatch.setattr(client, "ask", squeue)
    assert client.named(["a,b"]) == {"1": Listed("PENDING", "a,b", "None", "", "/runs/a,b/slurm")}
    assert client.named(["a", "c"]).keys() == {"0", "2"}


def test_a_cell_that_is_refused_again_leaves_the_book_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = plans(tmp_path / "s", 2)
    for plan in old:
        history.add_submission(plan.paths, history.Submission.now())
        history.amend_submission(plan.paths, job="7_0")
    make_sweep(tmp_path / "s", cell("x=0", run="r0"), cell("x=1", run="r1"))
    paths = SweepPaths(tmp_path / "s")
    runs = [
        dataclasses.replace(run, job="7_0", state=RunState.failed) for run in look_at_sweeps([paths])[str(paths.root)]
    ]  # no Slurm has them here

    def retry(run: Run) -> RunPlan:
        plan = make_plan("cluster=slurm", run_dir=f"{run.dir}.retry1")
        plan.paths.logs.mkdir(parents=True)
        return dataclasses.replace(plan, run=dataclasses.replace(plan.run, name=plan.paths.root.name))

    def send_all(*_: Any) -> list[str | UserError]:
        return ["8_0", SiteError("no such reservation")]

    def run_here(_: object) -> int:
        raise AssertionError("a Slurm run started on this host")

    def silent() -> dict[str, str]:
        raise SlurmSilent("Slurm does not answer")

    monkeypatch.setattr(client, "settings", silent)
    never_submitted = [dataclasses.replace(run, job=None) for run in runs]
    with pytest.raises(SlurmSilent):
        reuse.restart_runs(paths, lambda: never_submitted, retry, run_here, print, print)
    assert not (tmp_path / "s" / "r0.retry1").exists()
    monkeypatch.setattr(client, "settings", dict)
    monkeypatch.setattr(submit, "submit_in_arrays", send_all)
    begun = reuse.restart_runs(paths, lambda: runs, retry, lambda _: 0, print, print)
    assert begun.jobs == ["8_0"]
    assert begun.statuses == [2]
    assert begun.refused == ["r1: no such reservation"]
    assert [each.run for each in manifest.load_sweep(paths).cells] == ["r0.retry1", "r1"]
    assert not (tmp_path / "s" / "r1.retry1").exists()
