"""`launch train` with sharded models: one curve under every strategy, and what a user can get wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import CORPUS
from tests.infra.runs import OWN, records, summary

pytestmark = pytest.mark.slow

JOB = (
    CORPUS, "task.width=32", "task.depth=2", "task.heads=2", "task.seq_len=16", "task.eval_samples=69", "train.steps=4",
    "batch.global_size=32", "batch.micro_size=4", "wandb.mode=disabled", "optimizer.lr=1e-2", "schedule.warmup_steps=2",
)  # fmt: skip
STRATEGIES = {
    "ddp": ("cluster.workers_per_node=2",),
    "fsdp": ("strategy=fsdp", "cluster.workers_per_node=2"),
    "hsdp": (
        "strategy=hsdp", "cluster.workers_per_node=4", "strategy.shard_size=2", "strategy.recompute=blocks",
        "strategy.sync=boundary",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "close", "calibrate_s"),
    [("fp32", 1e-5, 30), pytest.param("bf16", 0.02, 0, marks=pytest.mark.nightly)],
)
def test_one_curve_under_every_strategy(
    precision: str, close: float, calibrate_s: int, launch: Launch, tmp_path: Path
) -> None:
    curves: dict[str, list[float]] = {}
    for name, overrides in STRATEGIES.items():
        limit = f"run.calibrate_s={0 if name == 'ddp' else calibrate_s}"  # of DDP: test_train.py
        done = launch("train", *JOB, *overrides, limit, f"precision={precision}", f"run.name={name}")
        assert done.returncode == 0, done.stdout + done.stderr
        run = tmp_path / "runs" / name
        seen = records(run)
        curves[name] = [record["train/loss"] for record in seen] + [summary(run)["eval/loss"]]
        assert (run / "checkpoints/step_000004").is_dir()
        # the calibration has shown what is exposed, but where a policy was asked for whose memory nobody has weighed
        assert summary(run).get("comm/exposed_s") == seen[-1].get("comm/exposed_s")
        measured = "comm/not_measured" not in summary(run)
        assert ("comm/exposed_s" in seen[-1]) == (measured and calibrate_s > 0 and name == "fsdp")
        kinds = {key.split("/")[1] for key in seen[-1] if key.count("/") == 2}
        sharded = {"all_gather", "reduce_scatter"} | ({"all_reduce"} if name == "hsdp" else set())
        assert kinds == ({"all_reduce"} if name == "ddp" else sharded)
    for name, curve in curves.items():
        assert curve == pytest.approx(curves["ddp"], rel=close), name
    plan = json.loads((tmp_path / "runs/fsdp/plan.json").read_text())["strategy"]
    assert plan["sync"] == "gather_once"
    assert [forecast["sync"] for forecast in plan["forecasts"]] == ["every", "boundary", "gather_once"]
    assert all(forecast["peak_bytes"] > 0 for forecast in plan["forecasts"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.trouble=shared unit"], "2 and again are one Linear under two parents"),
        (["task.trouble=empty unit"], "1 has no parameters to shard"),
        (["task.trouble=unused"], "The loss does not depend on 1 of the model's parameters: forgotten"),
        (["strategy.sync=replicas_at_boundary"], "strategy=fsdp does not have this policy"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    overrides: list[str], message: str, launch: Launch, project: Path
) -> None:
    done = launch("train", *OWN, "strategy=fsdp", *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "runs").exists()
