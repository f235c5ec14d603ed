"""A real run with a prediction: what its record, its summary and its plan keep, and what the next plan makes of it."""

from __future__ import annotations

import dataclasses
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher import api
from launcher.config.hydra import compose
from launcher.config.schema import Config
from launcher.launch import planner
from launcher.plan.forecast import StepTime
from launcher.plan.past_runs import PastRuns
from launcher.plan.run_plan import RunPlan
from launcher.report.summary_table import summary_table
from tests.helpers import CORPUS

JOB = (
    CORPUS, "task.width=32", "task.depth=1", "task.heads=2", "task.seq_len=16", "task.eval_samples=16",
    "batch.micro_size=2", "batch.accumulation=2", "cluster.workers_per_node=2", "cluster.device=cpu", "precision=fp32",
    "strategy.sync=boundary", "train.steps=12", "run.calibrate_s=0", "wandb.mode=disabled", "checkpoint.enabled=false",
    "run.name=predicted",
)  # fmt: skip
# no step of this job takes as long
STEP = StepTime(
    step_s=1000.0, low_s=900.0, high_s=1100.0, compute_s=0.8, optimizer_s=0.1, data_s=0.0, communication_s=0.2,
    exposed_s=0.1, source="measured",
)  # fmt: skip


def with_step(plan: RunPlan, config: Config, **_: Any) -> RunPlan:
    """Stands for ``with_predictions``."""
    assert config.train.log_every == 1
    known = [dataclasses.replace(each, peak_bytes=10**6, step=STEP) for each in plan.strategy.forecasts]
    forecasts = tuple(PastRuns.load().corrected(plan, known))
    return dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts))


@pytest.mark.slow
def test_a_run_keeps_its_prediction_and_corrects_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(planner, "with_predictions", with_step)
    job = api.submit(JOB)
    records = [json.loads(line) for line in (job.dir / "metrics.jsonl").read_text().splitlines()]
    predicted = {name: value for name, value in records[0].items() if name.startswith("predicted/")}
    assert predicted == {
        "predicted/step_s": 1000.0, "predicted/step_low_s": 900.0, "predicted/step_high_s": 1100.0,
        "predicted/exposed_s": 0.1,
        "predicted/peak_bytes": 10**6, "predicted/wire_bytes": records[0]["comm/wire_bytes"],
    }  # fmt: skip
    assert not any(name.startswith("predicted/") for record in records[1:] for name in record)
    summary, plan = job.summary(), RunPlan.load(job.dir / "plan.json")
    assert summary.items() >= predicted.items()
    assert plan.strategy.forecast is not None
    assert plan.strategy.forecast.step == STEP

    out = io.StringIO()
    Console(file=out, width=200).print(summary_table(plan, summary))
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("prediction")]
    assert (
        "below, outside of its interval (1,000,000.0 ms predicted, 900,000.0 to 1,100,000.0), wire bytes exact" in line
    )

    step_s = statistics.median(record["time/step_s"] for record in records[2:])
    (past,) = PastRuns.load().runs
    assert (past.predicted_s, past.measured_s) == (1000.0, pytest.approx(step_s))
    following = planner.plan_job(compose([*JOB, "train.steps=20"])).strategy.forecast
    assert following is not None
    assert following.step is not None
    assert following.step.correction == pytest.approx((step_s / 1000) ** 0.5), "one run, and one at 1"
    assert following.step.past_runs == 1
