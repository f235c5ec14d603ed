"""Tasks with Hugging Face models under `launch train`: equal to plain PyTorch with one big batch, and only what is
trained is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.task import build_model, load_task, train_data
from launcher.train.data.randomness import Permutation
from tests.extensions.hf.hf_files import TEXTS, save_lines, save_model
from tests.helpers import launch
from tests.infra.checkpoints import tensors
from tests.infra.runs import summary

STEPS, BATCH, RATE, SEED = 3, 16, 0.5, 0
LORA = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def trained_plainly(params: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the trained parameters after STEPS of gradient descent on whole global batches, in one process."""
    task: Any = load_task("launcher.extensions.hf.hf_causal_lm.HfCausalLM", params, [], SEED)
    model, data = build_model(task, SEED), train_data(task, SEED)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    order = Permutation(len(data), SEED, 0)
    for step in range(STEPS):
        loss = task.loss(model, task.collate([data[index] for index in order.take(step * BATCH, BATCH)]))
        gradients = torch.autograd.grad(loss.total / loss.items, list(trained.values()))
        with torch.no_grad():
            for parameter, gradient in zip(trained.values(), gradients, strict=True):
                parameter -= RATE * gradient
    return trained


@pytest.mark.parametrize(
    ("strategy", "pack", "lora"),
    [
        ("fsdp", True, LORA),
        pytest.param("ddp", True, LORA, marks=pytest.mark.nightly),
        pytest.param("ddp", False, None, marks=pytest.mark.nightly),
        pytest.param("fsdp", True, None, marks=pytest.mark.nightly),
    ],
)
def test_a_job_learns_what_one_big_batch_learns(
    strategy: str, pack: bool, lora: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    model = save_model(tmp_path / "llama", "llama")
    data = save_lines(tmp_path / "texts.jsonl", [{"text": f"{text} {n}"} for n in range(8) for text in TEXTS])
    params: dict[str, Any] = {"model": str(model), "data": str(data), "seq_len": 64, "pack": pack}
    if lora is not None:
        params["lora"] = lora
    launch(
        "train", "task=hf_causal_lm", *(f"+task.{key}={value}" for key, value in params.items() if key != "lora"),
        *(["+task.lora={r: 4, alpha: 8, targets: [q_proj, v_proj]}"] if lora else []),
        f"strategy={strategy}", "cluster.workers_per_node=2", f"batch.global_size={BATCH}", "batch.micro_size=4",
        "optimizer=sgd", f"optimizer.lr={RATE}", "optimizer.momentum=0", "optimizer.weight_decay=0",
        "schedule=constant", "schedule.warmup_steps=0", "train.clip_norm=null", f"train.steps={STEPS}",
        "precision=fp32", f"train.seed={SEED}", "wandb.mode=disabled", "run.dir=.", "run.name=job",
        "run.calibrate_s=0", cwd=tmp_path, status=0,
    )  # fmt: skip
    expected, found = trained_plainly(params), tensors(tmp_path / f"job/checkpoints/step_{STEPS:06}")
    start = build_model(load_task("launcher.extensions.hf.hf_causal_lm.HfCausalLM", params, [], SEED), SEED)
    before = dict(start.named_parameters())
    for name, value in expected.items():
        change, error = value - before[name], found[f"model.{name}"] - value
        assert error.norm() <= 1e-4 * change.norm() + 1e-7, name
    if strategy == "ddp":  # of a ring of two ranks, the bytes on the wire are the payload
        trained = sum(value.numel() for value in expected.values())
        assert summary(tmp_path / "job")["comm/wire_bytes"] == 4 * trained
