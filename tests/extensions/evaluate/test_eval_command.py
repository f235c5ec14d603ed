"""`launch eval` of a sharded run with averages: the figures that it recorded, to rounding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers import launch
from tests.infra.runs import OWN, PROJECT, records

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def test_a_sharded_run_with_averages(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    job = (*OWN, "train.steps=2", "strategy=fsdp", "cluster.workers_per_node=2", "callbacks=[{_target_: Ema}]")
    done = launch("train", *job, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    last = {name: value for name, value in records(tmp_path / "runs" / "own")[-1].items() if name.startswith("eval/")}
    done = launch("eval", "own", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert (answer["run"], answer["step"], answer["recorded"]) == ("own", 2, last)
    assert answer["metrics"] == pytest.approx(last, rel=1e-5)

    done = launch("eval", "own", "train.eval_samples=1", "--step", "2", cwd=tmp_path)
    assert "Evaluation of own, step 2 (runs/own/checkpoints/step_000002)\n" in done.stdout, done.stdout + done.stderr
    assert "eval/loss" in done.stdout
    assert "recorded" not in done.stdout
    done = launch("eval", "own", "train.seed=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "launch: error: train.seed: cannot change in an evaluation of what was trained.\n" in done.stderr
