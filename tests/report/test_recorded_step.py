"""Measured steps of finished runs: shown for the same job on the same hardware, and for nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launcher.config.schema import Device
from launcher.plan.host import device_model
from launcher.plan.run_plan import RunPlan
from launcher.report.recorded_step import RecordedSteps
from launcher.rundir.files import write_json, write_text
from tests.helpers import make_plan

JOB = ("cluster.device=cpu", "cluster.workers_per_node=2", "batch.accumulation=4", "precision=fp32")


def finished(folder: Path, *overrides: str, step_s: float = 2.0, **summary: object) -> RunPlan:
    plan = make_plan(*JOB, *overrides, run_dir=str(folder))
    folder.mkdir(parents=True)
    write_text(plan.paths.plan, plan.to_json())
    device = device_model(Device.cpu)
    write_json(plan.paths.summary, {"verdict": "done", "device": device, "time/step_s": step_s, **summary})
    return plan


def test_the_step_of_a_finished_run_gives_the_duration_of_the_planned_one(tmp_path: Path) -> None:
    finished(tmp_path / "one")
    step = RecordedSteps(tmp_path).step_of(make_plan(*JOB, "train.steps=600", "train.seed=7"))
    assert step is not None
    assert (step.step_s, step.total_s, step.gpu_hours) == (2.0, 1200.0, None)
    assert step.text == "2 s a step, measured in run; the whole run 20 min 0 s"


@pytest.mark.parametrize(
    "other",
    [
        "batch.accumulation=2", "strategy.sync=every", "precision=bf16", "cluster.workers_per_node=4", "optimizer=sgd",
        "strategy=fsdp", "train.compile=true",
    ],
)  # fmt: skip
def test_another_job_has_no_measured_step(tmp_path: Path, other: str) -> None:
    finished(tmp_path / "one")
    assert RecordedSteps(tmp_path).step_of(make_plan(*JOB, other)) is None


def test_unfinished_damaged_and_foreign_runs_are_left_out(tmp_path: Path) -> None:
    finished(tmp_path / "stopped", verdict="stopped")
    finished(tmp_path / "elsewhere", device="another processor")
    finished(tmp_path / "damaged")
    (tmp_path / "damaged" / "plan.json").write_text("{")
    (tmp_path / "empty").mkdir()
    plan = make_plan(*JOB)
    assert RecordedSteps(tmp_path).step_of(plan) is None
    assert RecordedSteps(tmp_path / "nowhere").step_of(plan) is None
    finished(tmp_path / "fine", step_s=1.0)
    steps = RecordedSteps(tmp_path)
    assert steps.step_of(plan) is not None
    gpu = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, gpu="h100"))
    assert steps.step_of(gpu) is None
