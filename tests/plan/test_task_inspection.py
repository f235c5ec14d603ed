"""Inspection of tasks: each is built once, in a process that answers all questions about it."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from launcher import targets
from launcher.config.hydra import compose
from launcher.config.schema import Config, Device
from launcher.errors import ConfigError, TaskError
from launcher.launch.planner import CallCache, plan_job, plan_jobs
from launcher.plan import task_inspection
from launcher.plan.run_plan import RunPlan
from launcher.plan.task_inspection import InspectionRequest
from launcher.train.inspection import task_probe
from launcher.train.inspection.built_task import BuiltTask
from tests.helpers import inspection_of, make_plan
from tests.infra.installed_package import install

COUNTING = """
import os, random, time
import torch
from launcher import Loss


def count(what):
    with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as file:
        print(what, file=file)


class Task:
    def __init__(self, width=8, draws="", fails="", waits=0.0):
        count("init")
        self.width, self.fails = width, fails
        if draws == "python": random.random()
        if draws == "seed": torch.initial_seed()
        self.samples = 64 + (int(torch.randint(100, ())) if draws == "torch" else 0)
        time.sleep(waits)
        self.seen = torch.zeros(())

    def model(self):
        count("model")
        blocks = torch.nn.ModuleList(torch.nn.Linear(self.width, self.width) for _ in range(8))
        return Model(blocks, self.fails)

    def train_data(self):
        count("train_data")
        return [torch.ones(self.width)] * self.samples

    def eval_data(self):
        count("eval_data")
        return [torch.ones(self.width)] * 4

    def loss(self, model, batch):
        self.seen = 0.9 * self.seen + batch.mean()
        return Loss(model(batch).sum() + 0 * self.seen, len(batch))


class Model(torch.nn.Module):
    def __init__(self, blocks, fails):
        super().__init__()
        self.blocks = blocks
        if fails == "values": blocks[0].weight.sum().item()
        if fails == "copies": self.lock = (each for each in [])
        if fails == "closure": blocks[3].register_forward_hook(lambda module, given, made: self.keep(made))
        self.kept = None

    def keep(self, made):
        self.kept = made

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.kept if self.kept is not None else x
"""
ONCE = {"init": 1, "model": 1, "train_data": 1, "eval_data": 1}
SHARDED = (
    "cluster=elsewhere", "cluster.gpu=h100", "cluster.nodes=2", "cluster.workers_per_node=2", "batch.micro_size=2",
)  # fmt: skip


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Counter[str]]:
    """A module with a task that counts the calls of its methods; returns the calls since the last look."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "calls"

    def look() -> Counter[str]:
        found = Counter(file.read_text().split()) if file.exists() else Counter[str]()
        file.write_text("")
        return found

    return look


def counting(*words: str) -> Config:
    return compose(["task._target_=counting.Task", "batch.global_size=16", *words])


@pytest.mark.parametrize("strategy", ["hsdp", "auto"])
def test_a_task_is_built_once_for_all_questions(strategy: str, calls: Callable[[], Counter[str]]) -> None:
    plan = plan_job(counting(f"strategy={strategy}", *SHARDED), starts=False)
    assert all(each.peak_bytes for each in plan.strategy.forecasts)
    assert calls() == ONCE


@pytest.mark.parametrize("fails", ["values", "copies", "closure"])
def test_a_model_without_a_good_copy_is_predicted_as_others_are(fails: str, calls: Callable[[], Counter[str]]) -> None:
    """It is built again where a trace needs that."""
    plan = plan_job(counting("strategy=fsdp", f"task.fails={fails}", *SHARDED), starts=False)
    assert all(each.peak_bytes for each in plan.strategy.forecasts)
    assert {**calls(), "model": 1} == ONCE


def test_the_cells_of_a_sweep_share_the_task_that_they_build(calls: Callable[[], Counter[str]]) -> None:
    cells = (("strategy=fsdp",), ("strategy=ddp",), ("strategy=fsdp", "batch.micro_size=3"))
    configs = [counting(*SHARDED, *cell, f"task.width={width}") for width in (8, 16) for cell in cells]
    numbers: list[int] = []
    plans = plan_jobs(configs, CallCache(), starts=False, weighs=True, planned=lambda number, _: numbers.append(number))
    assert calls() == dict.fromkeys(ONCE, 2)
    assert sorted(numbers) == [*range(6)]
    assert [isinstance(plan, ConfigError) for plan in plans] == [False, False, True] * 2
    alone = plan_job(configs[0], starts=False, weighs=True)
    assert isinstance(plans[0], RunPlan)
    assert (plans[0].strategy, plans[0].task) == (alone.strategy, alone.task)


@pytest.mark.parametrize(
    ("word", "built"), [("strategy=fsdp", 1), ("task.draws=torch", 3), ("task.draws=python", 3), ("task.draws=seed", 3)]
)
def test_a_seed_needs_a_plan_of_its_own_only_if_building_the_task_uses_it(
    word: str, built: int, calls: Callable[[], Counter[str]]
) -> None:
    plans = plan_jobs([counting(*SHARDED, word, f"train.seed={seed}") for seed in range(3)], CallCache())
    assert calls() == dict.fromkeys(ONCE, built)
    tasks = [plan.task for plan in plans if isinstance(plan, RunPlan)]
    assert len({task.samples for task in tasks}) == (3 if word == "task.draws=torch" else 1)
    assert [plan.train.seed for plan in plans if isinstance(plan, RunPlan)] == [*range(3)]


def test_the_plan_names_what_took_long_to_build(
    calls: Callable[[], Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_inspection, "SLOW_S", 0.5)
    (note,) = [note for note in plan_job(counting("task.waits=0.6")).notes if "Building" in note]
    assert re.fullmatch(r"Building the task took \d+ s \(__init__\(\) \d+ s.*\), as it will on each rank\.", note)
    monkeypatch.setattr(task_inspection, "SLOW_S", 1e6)
    assert not [note for note in plan_job(counting()).notes if "Building" in note]
    assert calls()["init"] == 2, "a job that starts is inspected again"


def test_an_inspection_that_ends_early_leaves_the_memory_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_inspection, "_PROBE", "launcher.no_such_module")
    plan = make_plan("strategy=fsdp", "cluster.workers_per_node=2")
    assert "the process that measured it ended early" in task_inspection.weigh_memory(plan, choose=True).notes[-1]


@pytest.mark.parametrize("entry_point", ["", "launcher.no_such_module:forecast"])
def test_without_a_forecast_the_choice_is_by_what_is_known(entry_point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"windows": EntryPoint("windows", entry_point, task_inspection.FORECASTS)} if entry_point else {}
    monkeypatch.setattr(task_inspection, "entry_points", lambda _: points)

    def chosen(strategy: str, width: int) -> RunPlan:
        size = (f"task.width={width}", "task.depth=32", "precision=bf16", "batch.accumulation=4")
        return plan_job(compose([f"strategy={strategy}", *SHARDED, *size]), starts=False)

    small, large, too_large = (chosen("auto", width) for width in (512, 4096, 12288))
    assert small.strategy.kind.value == "ddp"
    assert (large.strategy.kind.value, large.strategy.sync.value) == ("fsdp", "gather_once")
    assert "; ddp lacks" in large.strategy.kind_reason
    assert "no strategy is predicted to fit" in too_large.strategy.kind_reason
    medium = chosen("fsdp", 5120)
    assert (medium.strategy.sync.value, medium.strategy.rehearses) == ("boundary", False)
    for plan in (small, large, medium):
        (note,) = [note for note in plan.notes if note.startswith("The memory of each sync policy is unknown")]
        assert ("is installed" if not entry_point else "No module named 'launcher.no_such_module'") in note
        assert "A rank needs at least" in note


def test_the_memory_of_this_machines_gpu_is_known_without_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (1, 80 * 10**9))
    plan = make_plan("strategy=fsdp", "cluster.workers_per_node=2")
    cluster = dataclasses.replace(plan.cluster, device=Device.cuda)
    built = BuiltTask(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
    answer = task_probe._forecast(dataclasses.asdict(dataclasses.replace(plan, cluster=cluster)), None, built)
    assert answer["device_bytes"] == 80 * 10**9
    assert "is installed" in answer["problem"]


def test_the_forecast_of_another_package_replaces_the_launchers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "other", {task_inspection.FORECASTS: {"zebra": "launcher.no_such_module:forecast"}})
    (other,) = (each for each in metadata.distributions(path=[str(tmp_path)]))
    points = {**targets.entry_points(task_inspection.FORECASTS), **{each.name: each for each in other.entry_points}}
    monkeypatch.setattr(task_inspection, "entry_points", lambda _: points)
    plan = make_plan("strategy=fsdp", "cluster.workers_per_node=2")
    assert "launcher.no_such_module" in task_inspection.weigh_memory(plan, choose=True).notes[-1]


def test_a_trace_of_all_policies_serves_each_of_them() -> None:
    every, boundary = (
        make_plan("strategy=fsdp", "cluster.workers_per_node=2", "batch.accumulation=4", f"strategy.sync={sync}")
        for sync in ("every", "boundary")
    )
    assert task_inspection._traced_parts(every) == task_inspection._traced_parts(boundary)


def test_a_later_description_of_a_task_says_and_shows_what_the_first_one_did(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluating.py").write_text(
        "import torch\nfrom launcher import Loss\n\n\n"
        "class Task:\n"
        "    def model(self): return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout()).eval()\n"
        "    def train_data(self): return [torch.ones(4)] * 64\n"
        "    def eval_data(self): return None\n"
        "    def flops_per_sample(self): return 1.0\n"
        "    def tokens_per_sample(self): return 4\n"
        "    def loss(self, model, batch):\n"
        "        print('loss')\n"
        "        return Loss(model(batch).sum(), len(batch))\n"
        "    def shard_units(self, model):\n"
        "        print('units')\n"
        "        return [model[0]]\n"
    )
    sharded = dataclasses.replace(inspection_of("evaluating.Task", "strategy=fsdp"), import_from=str(tmp_path))
    with task_inspection.new_inspection() as inspection:
        first = task_inspection.describe_task(dataclasses.replace(sharded, shards=False), inspection)
        job = make_plan("strategy=fsdp", "cluster.workers_per_node=2", task=first)
        job = dataclasses.replace(job, cluster=dataclasses.replace(job.cluster, import_from=(str(tmp_path),)))
        assert task_inspection.weigh_memory(job, inspection, choose=True).strategy.forecasts[0].peak_bytes
        second = task_inspection.describe_task(sharded, inspection)
    assert first.in_eval_mode == second.in_eval_mode == ("",)
    assert first.tokens_per_sample == 4
    assert capfd.readouterr().err.split() == ["units"], "a trace is silent, and nothing after it"


def test_tasks_of_several_jobs_are_inspected_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "several.py").write_text(
        "import os, time\nimport torch\nfrom launcher import Loss\nUSED = []\n\n\n"
        "class Task:\n"
        "    def __init__(self, width=2):\n"
        "        USED.append(width)\n"
        "        if width == 3: raise ValueError(f'width {width} is odd')\n"
        "        if width == 5: os._exit(1)\n"
        "        if width == 7: time.sleep(1e6)\n"
        "        self.width = width\n"
        "    def model(self): return torch.nn.Linear(4, self.width)\n"
        "    def train_data(self): return [torch.ones(4)] * 64 * len(USED)\n"
        "    def eval_data(self): return None\n"
        "    def loss(self, model, batch): return Loss(model(batch).sum(), len(batch))\n"
    )
    monkeypatch.chdir(tmp_path)
    endless_task = ("task.width=7", "train.hang_timeout=3", "cluster.grace_s=2")
    words = ((), ("task.width=3",), ("task.width=5",), endless_task, ("task.width=8",))
    configs = [compose(["task._target_=several.Task", *each]) for each in words]
    first, odd, gone, endless, last = plan_jobs(configs, CallCache())
    assert isinstance(first, RunPlan)
    assert first.task == plan_job(configs[0]).task
    assert isinstance(last, RunPlan)
    assert (last.task.samples, last.task.parameters) == (64, 40), "each in a process of its own"
    for error, text in (
        (odd, "ValueError: width 3 is odd"),
        (gone, "ended early"),
        (endless, "(train.hang_timeout)"),
    ):
        assert isinstance(error, TaskError)
        assert text in str(error)


def test_jobs_with_other_learning_rates_share_an_inspection() -> None:
    def request(*overrides: str) -> InspectionRequest:
        return InspectionRequest.of(compose(["task=digits", *overrides]), "")

    assert request("optimizer.lr=1", "schedule.warmup_steps=3") == request(
        "optimizer.lr=2", "optimizer.betas=[0.8,0.9]"
    )
    assert request("optimizer=sgd") != request()
    own = "optimizer._target_=torch.optim.Adagrad"
    assert request(own, "optimizer.lr=1") != request(own, "optimizer.lr=2")


def test_parts_of_a_model_that_are_compiled_without_train_compile_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert task_probe._compiled_part(model) == ""
    model.config = SimpleNamespace(_attn_implementation="flex_attention")
    assert task_probe._compiled_part(model) == "flex attention (Sequential)"
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1]._compiled_call_impl = model[1].forward  # as Module.compile() does
    assert task_probe._compiled_part(model) == "Linear.compile() of the task (1)"
