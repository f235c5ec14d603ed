"""`launch eval` of a sharded run with averages: the figures that it recorded, to rounding; and what it prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.extensions.evaluate import eval_command
from tests.helpers import launch, shown
from tests.infra.runs import OWN, PROJECT, records


def test_recorded_values_stand_beside_the_new_ones() -> None:
    answer = {"metrics": {"eval/loss": 0.123456789123, "eval/f1": None}, "recorded": {"eval/loss": 0.125}}
    assert shown(eval_command._table(answer)).split() == (
        ["metric", "value", "recorded", "eval/loss", "0.123456789", "0.125", "eval/f1", "-", "-"]
    )
    with_other_data = shown(eval_command._table(answer | {"recorded": {}}))
    assert with_other_data.split() == ["metric", "value", "eval/loss", "0.123456789", "eval/f1", "-"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_run_with_averages(tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    job = (*OWN, "train.steps=2", "strategy=fsdp", "cluster.workers_per_node=2", "callbacks=[{_target_: Ema}]")
    launch("train", *job, cwd=tmp_path, status=0)
    last = {name: value for name, value in records(tmp_path / "runs" / "own")[-1].items() if name.startswith("eval/")}
    done = launch("eval", "own", "--json", cwd=tmp_path, status=0)
    answer = json.loads(done.stdout)
    assert (answer["run"], answer["step"], answer["recorded"]) == ("own", 2, last)
    assert answer["metrics"] == pytest.approx(last, rel=1e-5)

    done = launch("eval", "own", "train.seed=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "launch: error: train.seed: cannot change in an evaluation of what was trained.\n" in done.stderr
