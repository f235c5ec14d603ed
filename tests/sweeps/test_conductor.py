"""Cells of a sweep on this machine: started once, continued, refused before any starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from itertools import product
from pathlib import Path

import pytest

from launcher.config.hydra import compose_with_yaml
from launcher.config.multirun import RequestedCell, Result
from launcher.errors import EXIT_DONE, EXIT_RESUMABLE, ConfigError, RunError, UserError
from launcher.launch import planner
from launcher.plan import clusters
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.rundir import history
from launcher.rundir.files import write_json
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths
from launcher.sweeps.conductor import Conductor
from launcher.sweeps.manifest import load_sweep

TASK = ("task._target_=made.Task", "batch.global_size=8", "batch.micro_size=2", "train.steps=4")


class Machine:
    """Runs what it is given, as ``verdict`` and ``numbers`` say."""

    def __init__(self) -> None:
        self.verdict, self.numbers, self.confirmed = "done", dict[str, object](), True
        self.ran: list[str] = []
        self.said: list[str] = []

    def __call__(self, plan: RunPlan) -> int:
        self.ran.append(plan.paths.root.name)
        if not history.submissions(plan.paths):
            history.add_submission(plan.paths, Submission.now())
        write_json(plan.paths.newest_incarnation, {"incarnation": "0.0"})
        write_json(plan.paths.summary, {"verdict": self.verdict, **self.numbers})
        history.amend_submission(plan.paths, ended=True)
        return EXIT_RESUMABLE if self.verdict == "stopped" else EXIT_DONE


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "made.py").write_text("class Task: ...")
    monkeypatch.chdir(tmp_path)
    seen = TaskPlan(target="made.Task", params={}, samples=64, parameters=2, gradient_bytes=8, unit_parameters=2)
    monkeypatch.setattr(planner, "describe_task", lambda *_, **__: seen)  # a process of its own looks at a real one
    return Machine()


def conduct(
    machine: Machine, arguments: Sequence[str], cells: Sequence[RequestedCell], results: bool = False
) -> tuple[list[Result], list[str]]:
    """Return the results of one command's sweep, and the labels of all cells of the sweep."""
    words = ["-m", *arguments]
    conductor = Conductor(words, machine, lambda _: None, machine.said.append, wait=False, confirmed=machine.confirmed)
    found = conductor.begin(cells, results)
    assert conductor.paths is not None
    return found, [cell.label for cell in load_sweep(conductor.paths).cells]


def begin(
    machine: Machine, *fixed: str, seeds: Sequence[int], results: bool = False, key: str = "train.seed"
) -> list[Result]:
    """A sweep over seeds, as one command does it."""
    words = [(f"{key}={seed}",) for seed in seeds]
    cells = [RequestedCell(each, *compose_with_yaml([*TASK, *fixed, *each])) for each in words]
    return conduct(machine, [*TASK, *fixed, f"{key}={','.join(map(str, seeds))}"], cells, results)[0]


def test_a_sweep_that_was_stopped_goes_on_where_it_was(machine: Machine) -> None:
    machine.verdict = "stopped"
    with pytest.raises(KeyboardInterrupt):
        begin(machine, "sweep.name=s", seeds=(1, 2))
    (stopped,) = machine.ran
    (RunPaths(Path("runs/s") / stopped).checkpoints / "step_000002").mkdir(parents=True)
    machine.verdict = "done"
    begin(machine, "sweep.name=s", seeds=(1, 2))
    assert machine.ran[1] == stopped
    assert len(machine.ran) == 3
    begin(machine, "sweep.name=s", seeds=(1, 2))
    assert len(machine.ran) == 3, "both are done"


def test_cells_of_an_added_kind_of_cluster_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("own", "launcher.plan.clusters:Cluster", clusters.GROUP)
    monkeypatch.setattr(clusters, "_added", lambda: {"own": point})
    begin(machine, "sweep.name=s", "cluster.kind=own", seeds=(1, 2))
    assert len(machine.ran) == 2


def test_a_name_belongs_to_one_sweep(machine: Machine) -> None:
    begin(machine, "sweep.name=s", "optimizer.lr=0.1", seeds=(1,))
    with pytest.raises(ConfigError, match=r"sweep.name.* started with optimizer.lr=0.1, not with optimizer.lr=0.2"):
        begin(machine, "sweep.name=s", "optimizer.lr=0.2", seeds=(1,))
    assert len(machine.ran) == 1
    with pytest.raises(ConfigError, match=r"started with no train.clip_norm, not with train.clip_norm=1"):
        begin(machine, "sweep.name=s", "optimizer.lr=0.1", "train.clip_norm=1", seeds=(1,))
    with pytest.raises(ConfigError, match=r"started with train.seed=..., not with no train.seed"):
        begin(machine, "sweep.name=s", "optimizer.lr=0.1", seeds=(1,), key="optimizer.lr")
    assert len(machine.ran) == 1
    begin(machine, "sweep.name=s", "optimizer.lr=0.7", "optimizer.lr=0.1", "wandb.tags=[x]", seeds=(1, 2))
    assert len(machine.ran) == 2, "the last of a key holds"


def test_an_edit_of_the_code_begins_anew_and_says_so_and_a_log_does_not(machine: Machine) -> None:
    begin(machine, "sweep.name=s", seeds=(1, 2))
    Path("sweep.log").write_text("what it said")
    Path("a.csv").write_text("1,2")
    begin(machine, "sweep.name=s", seeds=(1, 2))
    assert len(machine.ran) == 2
    assert not machine.said
    Path("made.py").write_text("class Task: edited = True")
    begin(machine, "sweep.name=s", seeds=(1, 2, 3))
    assert len(machine.ran) == 5
    assert "differs from that of 2 runs" in machine.said[0]


def test_what_is_under_way_is_not_replaced(machine: Machine) -> None:
    begin(machine, "sweep.name=s", seeds=(1,))
    paths = RunPaths(Path("runs/s").resolve() / machine.ran[0])
    history.amend_submission(paths, pid=os.getpid(), born=history.process_start_id(os.getpid()), ended=False)
    Path("made.py").write_text("class Task: edited = True")
    with pytest.raises(
        UserError, match=r"1 of these cells are active with other code.*sweep.at_once.*seed=1.\n.*launch cancel"
    ):
        begin(machine, "sweep.name=s", seeds=(1, 2))
    assert len(machine.ran) == 1


def test_settings_that_cannot_be_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("own", "launcher.plan.clusters:Cluster", clusters.GROUP)
    monkeypatch.setattr(clusters, "_added", lambda: {"own": point})
    with pytest.raises(ConfigError, match=r"sweep.at_once=2: has no effect with cluster=own"):
        begin(machine, "sweep.at_once=2", "cluster.kind=own", seeds=(1,))
    for time in ("time/step_s", "comm/exposed_s_low", "comm/speedup", "added/time_s"):
        with pytest.raises(
            ConfigError, match=rf"sweep.objective={time}: is not comparable between cells that run side"
        ):
            begin(machine, "sweep.at_once=2", f"sweep.objective={time}", seeds=(1, 2), results=True)
    assert not machine.ran


def test_sweepers_learn_what_sweep_objective_names(machine: Machine) -> None:
    machine.numbers = {"train/loss": 2.0, "throughput/samples_per_s": 70}
    assert begin(machine, seeds=(1,), results=True) == [2.0]
    assert begin(machine, "sweep.objective=throughput/samples_per_s", seeds=(1,), results=True) == [70.0]
    machine.numbers |= {"eval/accuracy": 0.75, "eval/far/auroc": 0.5, "best": {"step": 3, "value": 0.875}}
    assert begin(machine, "sweep.objective=eval/accuracy", seeds=(5,), results=True) == [0.75]
    assert begin(machine, "sweep.objective=eval/far/auroc", seeds=(6,), results=True) == [0.5]
    assert begin(machine, "sweep.objective=best", seeds=(7,), results=True) == [0.875]
    machine.numbers["eval/loss"] = 4
    assert begin(machine, seeds=(3,), results=True) == [4.0]
    machine.numbers["eval/loss"] = None  # whatever the training loss is
    (result,) = begin(machine, seeds=(4,), results=True)
    assert isinstance(result, RunError)
    assert "was not finite" in str(result)
    (result,) = begin(machine, "sweep.objective=los", seeds=(1,), results=True)
    assert isinstance(result, ConfigError)
    assert "throughput/samples_per_s, train/loss" in str(result)
    machine.verdict = "failed"
    (result,) = begin(machine, seeds=(2,), results=True)
    assert isinstance(result, RunError)
    assert "train.seed=2: did not finish" in str(result)


def test_finished_cells_start_again_only_if_that_is_confirmed(machine: Machine) -> None:
    begin(machine, seeds=[1, 2])
    Path("made.py").write_text("class Task: ...  # edited")
    machine.confirmed = False
    asks = r"2 finished cells, which would start again: seed=1, seed=2.\n.*--yes.*--failed"
    with pytest.raises(UserError, match=asks):
        begin(machine, seeds=[1, 2])
    assert len(machine.ran) == 2


def test_a_cell_whose_overrides_come_in_another_order_is_the_same(machine: Machine) -> None:
    for words in (("train.seed=1", "optimizer.lr=0.5"), ("optimizer.lr=0.5", "train.seed=1")):
        cells = [RequestedCell(words, *compose_with_yaml([*TASK, *words]))]
        _, labels = conduct(machine, [*TASK, "train.seed=1", "optimizer.lr=0.5", "sweep.name=s"], cells)
        assert len(labels) == 1
    assert len(machine.ran) == 1


def test_more_values_add_cells_and_fewer_continue_a_part(machine: Machine) -> None:
    def sweep(**values: Sequence[str]) -> list[str]:
        """Begin the sweep as Hydra does: a key with one value is no override of its cells."""
        words = [[f"{key.replace('__', '.')}={each}" for each in several] for key, several in values.items()]
        cells = [
            RequestedCell(
                tuple(word for word, axis in zip(chosen, words, strict=True) if len(axis) > 1),
                *compose_with_yaml([*TASK, *chosen, "sweep.name=s"]),
            )
            for chosen in product(*words)
        ]
        typed = [f"{key.replace('__', '.')}={','.join(several)}" for key, several in values.items()]
        return conduct(machine, [*typed, "sweep.name=s"], cells)[1]

    started = ["seed=1", "seed=2"]
    assert sweep(train__seed="12", optimizer__lr="1") == started
    assert sweep(train__seed="2", optimizer__lr="1") == started, "fewer"
    assert len(machine.ran) == 2
    assert sweep(train__seed="123", optimizer__lr="1") == [*started, "seed=3"], "more"
    wider = sweep(train__seed="1", optimizer__lr="12")
    assert wider == ["seed=1 lr=1", "seed=2 lr=1", "seed=3 lr=1", "seed=1 lr=2"]
    assert sweep(train__seed="3", optimizer__lr="1") == wider
    assert len(machine.ran) == 4
    with pytest.raises(ConfigError, match=r"no train\.clip_norm"):
        sweep(train__seed="12", optimizer__lr="12", train__clip_norm="1")
