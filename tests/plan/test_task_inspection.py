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
from launcher.plan.run_plan import RunPlan
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
