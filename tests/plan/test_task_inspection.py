"""Traces of several plans in one process: the same as one by one, and found where each plan looks for its own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launcher.config.hydra import compose
from launcher.errors import TaskError
from launcher.launch.planner import Once, plan_job, trace_jobs
from launcher.plan import task_inspection
from launcher.plan.run_plan import RunPlan, TaskPlan
from launcher.plan.task_inspection import InspectionRequest
from tests.helpers import inspection_of, make_plan

MODEL = (
    "task=bytes_gpt", "task.width=32", "task.depth=2", "task.heads=2", "task.seq_len=16", "batch.global_size=16",
    "batch.micro_size=2", "cluster=elsewhere", "cluster.gpu=h100", "precision=bf16", "cluster.nodes=2",
    "cluster.workers_per_node=2",
)  # fmt: skip
CELLS = (("strategy=ddp",), ("strategy=fsdp",), ("strategy=fsdp", "batch.micro_size=3"))  # the last one is impossible


def plans(once: Once) -> list[RunPlan]:
    return [plan_job(compose([*MODEL, *cell]), once, starts=False) for cell in CELLS[:-1]]


def test_traces_of_one_process_are_those_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one by one"))
    expected = plans(Once())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "together"))
    calls: list[tuple[int, int]] = []
    trace_jobs([compose([*MODEL, *cell]) for cell in CELLS], Once(), lambda number, of: calls.append((number, of)))
    assert calls == [(number, 2) for number in (1, 2)]

    def no_process(*_: Any) -> None:
        raise AssertionError("all traces are stored")

    monkeypatch.setattr(task_inspection, "run_probe", no_process)
    for plan, before in zip(plans(Once()), expected, strict=True):
        assert plan.strategy == before.strategy
        assert all(forecast.peak_bytes for forecast in plan.strategy.forecasts)
    trace_jobs([compose([*MODEL, *cell]) for cell in CELLS], Once(), lambda *_: pytest.fail("nothing is traced again"))


def test_a_process_that_ends_early_leaves_the_rest_to_each_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(task_inspection, "_FORECAST", "launcher.no_such_module")
    traced: list[int] = []
    task_inspection.trace_plans(
        [make_plan(f"batch.micro_size={size}") for size in (1, 2)], lambda number, _: traced.append(number)
    )
    assert traced == []


def test_a_trace_of_all_policies_serves_each_of_them() -> None:
    every, boundary = (
        make_plan("strategy=fsdp", "cluster.workers_per_node=2", "batch.accumulation=4", f"strategy.sync={sync}")
        for sync in ("every", "boundary")
    )
    assert task_inspection._traced_parts(every) == task_inspection._traced_parts(boundary)


def test_an_inspection_that_does_not_end_is_ended_at_a_limit_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import time\n\n\nclass Task:\n    def __init__(self):\n        time.sleep(1e6)\n"
    )
    request = dataclasses.replace(inspection_of("endless.Task"), import_from=str(tmp_path))
    with pytest.raises(TaskError, match=r"took more than 2 s \(train.hang_timeout\)"):
        task_inspection.describe_task(request, limit_s=2)


def test_tasks_are_inspected_in_one_process_as_they_are_one_by_one(tmp_path: Path) -> None:
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
        "    def train_data(self): return [torch.ones(4)] * 10 * len(USED)\n"
        "    def eval_data(self): return None\n"
        "    def loss(self, model, batch): return Loss(model(batch).sum(), len(batch))\n"
    )
    requests = [
        (dataclasses.replace(inspection_of("several.Task", **arguments), import_from=str(tmp_path)), limit_s)
        for arguments, limit_s in (({}, None), ({"width": 3}, None), ({"width": 5}, None), ({"width": 7}, 1.0),
                                   ({"width": 8}, None))
    ]  # fmt: skip
    first, odd, gone, endless, last = task_inspection.describe_tasks(requests)
    assert first == task_inspection.describe_task(requests[0][0])
    assert isinstance(last, TaskPlan)
    assert (last.samples, last.parameters) == (10, 40), "each in a process of its own"
    for error, text in ((odd, "ValueError: width 3 is odd"), (gone, "ended early"), (endless, "took more than 1 s")):
        assert isinstance(error, TaskError)
        assert text in str(error)
    assert task_inspection.describe_tasks(requests[:1]) == [None]


def test_jobs_with_other_learning_rates_share_an_inspection() -> None:
    def request(*overrides: str) -> InspectionRequest:
        return InspectionRequest.of(compose(["task=digits", *overrides]), "")

    assert request("optimizer.lr=1", "schedule.warmup_steps=3") == request(
        "optimizer.lr=2", "optimizer.betas=[0.8,0.9]"
    )
    assert request("optimizer=sgd") != request()
    own = "optimizer._target_=torch.optim.Adagrad"
    assert request(own, "optimizer.lr=1") != request(own, "optimizer.lr=2")
