"""Sweeps as real jobs: on Slurm as arrays, each cell in its true state, whatever happens to some of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.rundir import history
from launcher.rundir.paths import RunPaths, SweepPaths
from launcher.runs.status import Run, RunState
from launcher.sweeps import manifest
from launcher.sweeps.reuse import look_at_sweeps
from tests.helpers import ROOT, launch, launch_command, patience
from tests.infra import warm
from tests.infra.runs import MY_SETUP, OWN, export_canary, files_with_canary, records, wait_for
from tests.infra.slurm import Cluster, cluster, needs_slurm

CELL = (*(word for word in OWN if not word.startswith(("run.name", "batch.micro"))), "train.steps=6")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def there() -> Iterator[Cluster]:
    with cluster(2, proctrack="cgroup", accounting="shim") as made:
        yield made


class Typed:
    """Runner of commands that a user types on the login host."""

    def __init__(self, there: Cluster, place: Path) -> None:
        self.there, self.place = there, place

    def __call__(self, *arguments: str, status: int = 0) -> str:
        done = self.there.login(*launch_command(*arguments), cwd=self.place, check=False, timeout=patience(240))
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def cells(self, sweep: str) -> dict[str, dict[str, Any]]:
        return {cell["cell"]: cell for cell in json.loads(self("runs", sweep, "--json"))}

    def states(self, sweep: str) -> dict[str, str]:
        return {name: cell["state"] for name, cell in self.cells(sweep).items()}


@pytest.fixture
def typed(there: Cluster, project: Path) -> Typed:
    return Typed(there, project)


@pytest.mark.root
@needs_slurm
def test_cells_are_arrays_by_shape_and_each_one_stands_for_itself(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell fails, one shape is impossible; the same command then begins nothing, and retry the failed one alone."""
    sweep = (
        "train", "-m", "cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1,2", "batch.accumulation=2,5",
        "task.trouble=null,raise", *CELL, "sweep.name=study", MY_SETUP,
    )  # fmt: skip
    export_canary(typed.place, monkeypatch)
    # 24 samples cannot be shared in fives; "raise" is raised in the eleventh micro-batch
    said = typed(*sweep, "--wait", status=2)
    cells = typed.cells("study")
    states = typed.states("study")
    for name, state in states.items():
        expected = "impossible" if "accumulation=5" in name else "failed" if "raise" in name else "done"
        assert state == expected, (name, states)
    assert "4 impossible" in said
    arrays = {cell["job"].partition("_")[0] for cell in cells.values() if cell["job"]}
    assert len(arrays) == 2  # one worker a node, and two
    for name, cell in cells.items():
        if cell["state"] == "done":
            workers, accumulation = (int(name.partition(f"{key}=")[2].split()[0]) for key in ("node", "accumulation"))
            its = records(Path(cell["dir"]))
            assert {line["batch/world_size"] for line in its} == {2 * workers}
            assert max(line["batch/accumulation"] for line in its) == accumulation  # the short window takes fewer
            assert [line["step"] for line in its] == [1, 2, 3, 4, 5, 6]
    plans = [json.loads((Path(cell["dir"]) / "plan.json").read_text()) for cell in cells.values() if cell["dir"]]
    assert {plan["wandb"]["group"] for plan in plans} == {"study"}
    assert sorted(plan["run"]["name"] for plan in plans) == sorted(Path(plan["run"]["dir"]).name for plan in plans)

    logs = [log for cell in cells.values() if cell["dir"] for log in Path(cell["dir"]).glob("logs/rank*.log")]
    assert len(logs) == 12
    assert all("canary\n" in log.read_text() for log in logs)
    assert files_with_canary(typed.place) == []

    first = {name: cell["job"] for name, cell in cells.items()}
    typed("retry", "study", "--wait", status=1)
    after = typed.cells("study")
    for name, cell in after.items():
        again = cell["state"] == "failed"
        assert (cell["job"] != first[name]) is again
        assert cell["name"].endswith(".retry1") is again
    # the same content, in another sweep
    said = typed(*sweep, "task.trouble=null", "wandb.tags=[again]", "sweep.name=other", "--wait", status=2)
    assert "2 cells not started: the same content is done" in said
    others = typed.cells("other")
    assert {cell["dir"] for cell in others.values() if cell["state"] == "done"} == {
        cell["dir"] for cell in after.values() if cell["state"] == "done"
    }


@pytest.mark.root
@needs_slurm
def test_a_cell_that_is_requeued_takes_no_other_one_with_it(typed: Typed) -> None:
    """The last task of an array has the array's own number: what is meant for it must not reach the others."""
    typed(
        # so many steps that both still run when a busy machine has seen the first ten
        "train", "-m", "cluster=slurm", "train.seed=1,2", *CELL, "train.steps=150", "checkpoint.every=10",
        "task.trouble=slow", "cluster.workers_per_node=1", "sweep.name=pair", "--quiet",
    )  # fmt: skip
    wait_for(
        lambda: all((cell["step"] or 0) >= 10 for cell in typed.cells("pair").values()),
        "both to be under way",
        every_s=1,
    )
    jobs = {cell["cell"]: cell["job"] for cell in typed.cells("pair").values()}
    runs = {cell["cell"]: Path(cell["dir"]) for cell in typed.cells("pair").values()}
    typed.there.login("scancel", "--signal=USR2", jobs["seed=2"], cwd=typed.place)
    # saved, and queued again by the agent itself
    wait_for(lambda: "requeued" in events(runs["seed=2"]), "it to be queued again")
    assert "requeued" not in events(runs["seed=1"])
    typed("cancel", "pair")
    assert set(typed.states("pair").values()) == {"cancelled"}
    typed("resume", "pair", "--wait")
    assert set(typed.states("pair").values()) == {"done"}
    for cell in typed.cells("pair").values():
        assert [line["step"] for line in records(Path(cell["dir"]))] == list(range(1, 151))


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.root
@needs_slurm
def test_a_shape_that_slurm_refuses_leaves_the_rest_in_the_queue(typed: Typed) -> None:
    said = typed(
        "train", "-m", "cluster=slurm", "cluster.sbatch.reservation=null,nowhere", *CELL, "sweep.name=half", status=2
    )
    assert "nowhere" in said
    states = typed.states("half")
    assert sorted(states.values())[0] == "impossible"
    assert len([place for place in (typed.place / "runs" / "half").iterdir() if (place / "plan.json").exists()]) == 1
    wait_for(lambda: "done" in typed.states("half").values(), "the other one", every_s=1)


@pytest.mark.root
@needs_slurm
def test_a_sweeper_that_learns_from_results_must_be_waited_for(typed: Typed) -> None:
    optuna = (
        "train", "-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.sampler.seed=0", "hydra.sweeper.direction=minimize", "cluster=slurm",
        "cluster.workers_per_node=1", "optimizer.lr=tag(log,interval(1e-4,1e-1))", *CELL, "sweep.name=search",
    )  # fmt: skip
    assert "--wait" in typed(*optuna, status=2)
    typed(*optuna, "--wait", "--quiet")
    cells = typed.cells("search")
    assert len(cells) == 4
    losses = {
        cell["cell"]: json.loads((Path(cell["dir"]) / "summary.json").read_text())["eval/loss"]
        for cell in cells.values()
    }
    best = (typed.place / "runs" / "search" / "optimization_results.yaml").read_text()
    assert f"{min(losses, key=losses.__getitem__).partition('=')[2]}" in best
    assert str(min(losses.values())) in best


def test_on_one_machine_cells_run_one_after_the_other_on_frozen_code(project: Path) -> None:
    """The second command finds what is done; an edit of the code is another content."""
    sweep = ("train", "-m", "train.seed=1,2", *CELL, "train.steps=3", "sweep.name=here", "--quiet")
    assert launch(*sweep, cwd=project).returncode == 0
    runs = project / "runs" / "here"
    first = {path.parent.name: path.stat().st_mtime_ns for path in runs.glob("*/summary.json")}
    assert len(first) == 2
    assert launch(*sweep, cwd=project).returncode == 0
    assert {path.parent.name: path.stat().st_mtime_ns for path in runs.glob("*/summary.json")} == first
    with (project / "speech" / "tasks.py").open("a") as code:
        code.write("\n# another remark\n")
    assert launch(*sweep[:2], "train.seed=1,1", *sweep[3:], "--yes", cwd=project).returncode == 0
    assert len([*runs.glob("*/summary.json")]) == 3
    assert len([*(runs / "code").iterdir()]) == 2
    sweep_now = manifest.load_sweep(SweepPaths(runs))
    assert len(sweep_now.cells) == 2
    begun = {cell.overrides: cell.run for cell in sweep_now.cells}
    assert begun[("train.seed=1",)] not in first
    assert begun[("train.seed=2",)] in first
    for run in runs.glob("*/plan.json"):
        (copy,) = (Path(place) for place in json.loads(run.read_text())["cluster"]["import_from"])
        assert copy.is_relative_to(runs / "code")
        remarked = "# another remark" in (copy / "speech" / "tasks.py").read_text()
        assert remarked is (run.parent.name not in first)


def test_eight_cells_four_at_a_time_on_one_machine(project: Path) -> None:
    """One is killed and leaves the others; Ctrl-C ends all that run; the same command then runs what is missing."""
    sweep = (
        "train", "-m", "train.seed=1,2,3,4,5,6,7,8", *CELL, "train.steps=2", "cluster.workers_per_node=1",
        "task.trouble=held at the start", "cluster.grace_s=1", "sweep.at_once=4", "sweep.name=beside",
    )  # fmt: skip
    (project / "hold").touch()
    command = launch_command(*sweep, "--quiet")
    job = warm.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    paths = SweepPaths(project / "runs" / "beside")

    def cells() -> list[Run]:
        return look_at_sweeps([paths])[str(paths.root)] if paths.manifest.exists() else []

    def running() -> set[int | None]:
        runs = [RunPaths(Path(cell.dir)) for cell in cells() if cell.state is RunState.running]
        return {history.submissions(run)[-1].pid for run in runs if (run.logs / "rank0.log").exists()}

    wait_for(lambda: len(running()) == 4, "four cells to run")
    first = running()
    assert sum(cell.state is RunState.pending for cell in cells()) == 4
    killed = min(pid for pid in first if pid is not None)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: len(running() - first) == 1, "another cell to run in its place")
    assert running() > first - {killed}
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=patience(120))
    assert job.returncode == 130, said
    states = [cell.state for cell in cells()]  # the agent of the killed one may have found the time to say so
    assert states.count(RunState.pending) == 3, said
    assert states.count(RunState.stopped) in (4, 5), said
    assert "3 cells never started: " in said
    assert said.count("launch resume") == said.count("\n5 cells unfinished: `launch resume beside` continues") == 1, (
        said
    )

    (project / "hold").unlink()
    done = launch(*sweep, "--quiet", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {cell.state for cell in cells()} == {RunState.done}
    runs = [Path(cell.dir) for cell in cells()]
    assert len({*runs}) == 8
    assert {line["sweep/at_once"] for run in runs for line in records(run)} == {4}
    assert all("beside 3 other cells" in json.loads((run / "summary.json").read_text())["device"] for run in runs)


@pytest.mark.root
@needs_slurm
@pytest.mark.parametrize("job", ["slurm", pytest.param("sweep", marks=pytest.mark.nightly)])
def test_the_jobs_run_as_they_stand_and_copied_into_a_project(job: str, typed: Typed) -> None:
    def run(script: Path, *overrides: str) -> str:
        done = typed.there.login(
            sys.executable, str(script), *overrides, cwd=typed.place, check=False, timeout=patience(240)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if job == "slurm":
        shutil.copy(ROOT / "jobs" / "slurm.py", typed.place / "mine.py")
        assert "done\nloss 3." in run(typed.place / "mine.py", *CELL, "train.steps=4")
        return
    small = ("cluster=slurm", *CELL, "train.steps=2", "run.calibrate_s=0", "sweep.name=grid")
    said = run(ROOT / "jobs" / "sweep.py", *small)
    assert "accumulation=8 workers_per_node=2: impossible" in said  # 24 samples, and 16 micro-batches
    assert "7 done, 1 impossible; the page: " in said
    page = (typed.place / "runs" / "grid" / "report.html").read_text()
    assert all(f"accumulation={number} workers_per_node=1" in page for number in (1, 2, 4, 8))
