"""`precision=float8` as a job: one gradient under every strategy, with torchao's own layers; resume, export, verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launcher.plan.run_plan import RunPlan
from tests.helpers import launch, series, torchrun
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.runs import records

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
WORKER = Path(__file__).parent / "float8_worker.py"
SHAPE = (
    "task=llama", "task.width=64", "task.depth=2", "task.heads=4", "task.kv_heads=2", "task.ffn=96", "task.vocab=256",
    "task.seq_len=32", "task.eval_samples=4",
)  # fmt: skip
JOB = (
    *SHAPE, "wandb.mode=disabled", "run.calibrate_s=0", "batch.global_size=8", "batch.micro_size=2",
    "cluster.workers_per_node=2", "strategy=fsdp", "strategy.sync=boundary",
)  # fmt: skip
EMULATED = ("precision=float8", "float8.emulate=true")


@series(5, 10)
def test_all_strategies_and_micro_batches_have_one_gradient(part: str, cases: int, tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, [part], 4, tmp_path).splitlines()[-1])
    policies = {name: result for name, result in seen.items() if isinstance(result, dict)}
    assert len(policies) == cases
    assert seen["bf16"] > 0.02, "or float8 would not show"
    for name, result in policies.items():
        assert result["error"] < 2**-8, (name, result)
        assert result["outputs"], (name, "an evaluation computes in float8, too")
        assert result["dtypes"] == ["torch.float32"], name
    for micro in (1, 4, 8):
        assert seen[f"micro {micro}"] < 2**-8
    assert seen["excluded"] > 0.01, "layers that are left out are in bf16"


@pytest.mark.nightly
def test_it_exports_what_bf16_does_and_resumes_in_bf16(tmp_path: Path) -> None:
    whole = launch("train", *JOB, *EMULATED, "train.steps=4", "run.name=whole", cwd=tmp_path, status=0)
    assert "float8 (rowwise_with_gw_hp, emulated), else bf16" in whole.stdout
    assert "14 of 15 linear layers compute in float8, all else in bf16." in whole.stdout
    for words in ("Failed to load", "register_constant", "Warning", "deprecated"):
        assert words not in whole.stdout + whole.stderr
    launch("train", *JOB, *EMULATED, "train.steps=2", "schedule=constant", "run.name=half", cwd=tmp_path, status=0)
    resumed = launch("resume", "half", "train.steps=4", "precision=bf16", "float8.emulate=null", cwd=tmp_path, status=0)
    assert "precision=bf16 instead of float8" in resumed.stdout
    runs = tmp_path / "runs"
    names: list[dict[str, object]] = []
    for run in ("whole", "half"):
        launch("export", run, "--to", f"export-{run}", cwd=tmp_path, status=0)
        tensors = load_file(tmp_path / f"export-{run}" / "model.safetensors")
        names.append({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
        assert len(records(runs / run)) == 4
    assert names[0] == names[1]


@pytest.mark.nightly
def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path: Path) -> None:
    constant = ("schedule=constant", "schedule.warmup_steps=0", "checkpoint.every=2")
    assert launch("train", *JOB, *EMULATED, *constant, "train.steps=4", "run.name=whole", cwd=tmp_path).returncode == 0
    assert launch("train", *JOB, *EMULATED, *constant, "train.steps=2", "run.name=half", cwd=tmp_path).returncode == 0
    launch("resume", "half", "train.steps=4", cwd=tmp_path, status=0)
    runs = tmp_path / "runs"
    assert_same_tensors(*(runs / name / "checkpoints" / "step_000004" for name in ("half", "whole")))


@pytest.mark.nightly
def test_verify_finds_the_gradient_of_one_big_batch(tmp_path: Path) -> None:
    done = launch("verify", *JOB, *EMULATED, cwd=tmp_path, status=0)
    assert "in float8 " in done.stdout
    assert "Verdict: exact." in done.stdout


@pytest.mark.parametrize("width", [256, pytest.param(2048, marks=pytest.mark.nightly)])
def test_a_plan_for_a_gpu_that_is_not_at_hand(width: int, tmp_path: Path) -> None:
    gpu = ("strategy=fsdp", "cluster.workers_per_node=8", "train.compile=true", "batch.micro_size=4")
    shape = (*SHAPE, f"task.width={width}", f"task.ffn={4 * width}", "task.seq_len=512", "wandb.mode=disabled")
    memory = list[int]()
    for precision in ("bf16", "float8"):
        done = launch(
            "plan", *shape, *gpu, "cluster.gpu=h200", f"precision={precision}", "--json", cwd=tmp_path, status=0
        )
        plan = RunPlan.from_json(done.stdout)
        forecast = plan.strategy.forecast
        assert forecast is not None
        assert forecast.peak_bytes is not None
        memory.append(forecast.peak_bytes)
    assert 0.5 < memory[1] / memory[0] < 1.5, memory
