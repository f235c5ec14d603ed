"""GPUs of the table: their names, and the plan for one that this machine does not have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from launcher import api, cli
from launcher.config.schema import ClusterConfig, Device, Sync
from launcher.errors import ConfigError
from launcher.plan.gpus import BY_DEVICE_NAME, BY_NAME, GPUS, OVERHEAD_BYTES, find_gpu
from launcher.plan.host import Site
from launcher.plan.placement import solve_cluster
from launcher.plan.run_plan import RunPlan
from launcher.plan.task_inspection import Inspection, weigh_memory
from tests.helpers import make_plan


def test_names_are_unique_and_products_have_memory() -> None:
    assert len(BY_DEVICE_NAME) == len(GPUS)
    assert len(BY_NAME) == sum(gpu.name is not None for gpu in GPUS)
    names = "h100 h200 gh200 h800 h20 a100 a100-40gb a100-64gb a800 l40s b200 rtxpro6000"
    for name in names.split():
        gpu = find_gpu(name)
        assert gpu.usable_bytes == gpu.memory_gb * 10**9 - OVERHEAD_BYTES > 0
    assert find_gpu("H100").memory_gb == 80


def test_a_plan_for_gpus_elsewhere() -> None:
    plan = make_plan("cluster.gpu=h100", "cluster.workers_per_node=8", "strategy=fsdp", "batch.micro_size=1")
    assert (plan.cluster.device, plan.cluster.gpu, plan.batch.world_size) == (Device.cuda, "h100", 8)
    assert plan.precision.reason == "auto: H100 computes bf16 natively"
    plan = make_plan("cluster.gpu=v100", "strategy=ddp")
    assert (plan.precision.kind.value, plan.precision.reason) == ("fp32", "auto: V100 emulates bf16")
    assert plan.batch.world_size == 2, "the documented default"
    cluster = ClusterConfig(gpu="h100", workers_per_node=8)
    assert solve_cluster(cluster, Site(gpus=1, cores=2, cwd="/"), "run").workers_per_node == 8
    with pytest.raises(ConfigError, match=r"cluster.gpu=h10: is not in .*\n  Did you mean 'h100'\? Allowed: .*l40s"):
        make_plan("cluster.gpu=h10")
    with pytest.raises(ConfigError, match=r"cluster.gpu=h100: has no effect with cluster.device=cpu"):
        make_plan("cluster.gpu=h100", "cluster.device=cpu")


@pytest.mark.parametrize(
    ("peaks", "chosen", "words"),
    [
        ({"every": 10, "boundary": 20, "gather_once": 60}, Sync.gather_once, ""),
        ({"every": 10, "boundary": 66, "gather_once": 90}, Sync.boundary, ""),
        ({"every": 90, "boundary": 95, "gather_once": 99}, Sync.every, "does not fit, by 17.45 GB. Try a smaller"),
    ],
)
def test_its_memory_decides(peaks: dict[str, int], chosen: Sync, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("cluster.gpu=h100", "cluster.workers_per_node=8", "strategy=fsdp", "batch.accumulation=4")

    def ask(_: Inspection, kind: str, about: dict[str, Any], *__: object) -> dict[str, object]:
        assert kind == "forecast"
        asked = RunPlan.from_json(json.dumps(about["plan"]))
        forecasts = [
            dataclasses.replace(each, peak_bytes=peaks[each.sync.value] * 10**9) for each in asked.strategy.forecasts
        ]
        return {"forecasts": [dataclasses.asdict(each) for each in forecasts], "problem": None}

    monkeypatch.setattr(Inspection, "ask", ask)
    weighed = weigh_memory(plan, choose=True)
    assert weighed.strategy.sync is chosen
    assert weighed.strategy.memory_bytes == find_gpu("h100").usable_bytes
    new = [note for note in weighed.notes if note not in plan.notes]
    assert words in (new[0] if new else "")
    assert len(new) == bool(words)
    kept = weigh_memory(plan, choose=False).strategy
    assert kept.memory_bytes == weighed.strategy.memory_bytes, "it ranks plans whatever their strategy"


@pytest.mark.parametrize(
    "words",
    [["train"], ["train", "-m", "train.seed=1,2"], ["verify"], ["drill"], ["run", "--", __file__]],
    ids=" ".join,
)
def test_only_a_plan_is_for_gpus_that_are_elsewhere(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run([words[0], "cluster.gpu=l40s", *words[1:]]) == 2
    assert "cluster.gpu=l40s: is for `launch plan`" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"cluster.gpu=l40s: is for `launch plan`"):
        api.submit(["cluster=local", "cluster.gpu=l40s"])
    assert list(tmp_path.iterdir()) == []
