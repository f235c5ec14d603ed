"""Tasks with Hugging Face models under `launch train`: equal to plain PyTorch with one big batch, and only what is
trained is sent. A Llama from weights of transformers, in shards, and back: equal to transformers' own model, trained on
one document at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional

from launcher.task import build_model, load_task, train_data
from launcher.train.data.randomness import Permutation
from tests.extensions.hf.hf_files import TEXTS, save_lines, save_model
from tests.helpers import launch
from tests.infra.checkpoints import tensors
from tests.infra.runs import records, summary

STEPS, BATCH, RATE, SEED = 3, 16, 0.5, 0
ROWS, LENGTH, EOS = 8, 24, 5  # of files of tokens: rows of a batch, tokens of a row, the end of a document
DESCENT = (
    "optimizer=sgd", f"optimizer.lr={RATE}", "optimizer.momentum=0", "optimizer.weight_decay=0", "schedule=constant",
    "schedule.warmup_steps=0", "train.clip_norm=null", f"train.steps={STEPS}", "precision=fp32", f"train.seed={SEED}",
    "wandb.mode=disabled", "run.dir=.", "run.name=job", "run.calibrate_s=0",
)  # fmt: skip
LORA = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def require_learned(
    before: dict[str, torch.Tensor], found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Require that each parameter has changed as in ``expected``."""
    for name, value in expected.items():
        change, error = value - before[name], found[name] - value
        assert error.norm() <= 1e-4 * change.norm() + 1e-7, name


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
        *DESCENT, cwd=tmp_path, status=0,
    )  # fmt: skip
    expected, found = trained_plainly(params), tensors(tmp_path / f"job/checkpoints/step_{STEPS:06}")
    start = build_model(load_task("launcher.extensions.hf.hf_causal_lm.HfCausalLM", params, [], SEED), SEED)
    before = dict(start.named_parameters())
    require_learned(before, {name: found[f"model.{name}"] for name in expected}, expected)
    if strategy == "ddp":  # of a ring of two ranks, the bytes on the wire are the payload
        trained = sum(value.numel() for value in expected.values())
        assert summary(tmp_path / "job")["comm/wire_bytes"] == 4 * trained


def save_start(directory: Path, *, tied: bool) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, eos_token_id=EOS,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(directory)
    return directory


def save_tokens(path: Path) -> Path:
    numpy.save(path, numpy.random.default_rng(SEED).integers(0, 96, 40 * LENGTH + 7, dtype=numpy.uint16) // 2)
    return path


def trained_by_transformers(start: Path, params: dict[str, Any]) -> Any:
    """Return the model of transformers after gradient descent on whole batches, each document in a pass of its own."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(start)
    data = load_task("launcher.extensions.hf.llama.Llama", params, [], SEED).train_data()
    order = Permutation(len(data), SEED, 0)
    for step in range(STEPS):
        total, items = torch.zeros(()), 0
        for index in order.take(step * ROWS, ROWS):
            row = data[index].long()
            inputs, targets = row[:-1], row[1:]
            stops = [*(1 + place for place in (inputs == EOS).nonzero().flatten().tolist()), LENGTH]
            for start_of, stop in zip([0, *stops], stops, strict=False):
                document = slice(start_of, stop)
                ignored = torch.where(inputs[document] == EOS, -100, targets[document])
                if stop > start_of:
                    logits = model(inputs[None, document]).logits[0]
                    total = total + functional.cross_entropy(logits, ignored, reduction="sum")
                    items += int((ignored != -100).sum())
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(total / items, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= RATE * gradient
    return model


@pytest.mark.parametrize(
    ("strategy", "tied"),
    [("fsdp", False), *(pytest.param(kind, True, marks=pytest.mark.nightly) for kind in ("ddp", "hsdp"))],
)
def test_a_job_trains_the_llama_of_transformers(strategy: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    start, data = save_start(tmp_path / "start", tied=tied), save_tokens(tmp_path / "tokens.npy")
    params = {"model": str(start), "data": str(data), "seq_len": LENGTH, "eos": EOS, "eval_samples": 2}
    sharding = ["strategy.shard_size=2", "cluster.workers_per_node=4"] if strategy == "hsdp" else []
    launch(
        "train", "task=llama", *(f"task.{key}={value}" for key, value in params.items()),
        f"checkpoint.init_from={start}", f"strategy={strategy}", "cluster.workers_per_node=2", *sharding,
        f"batch.global_size={ROWS}", "batch.micro_size=2" if not sharding else "batch.micro_size=1",
        "strategy.recompute=blocks", *DESCENT, cwd=tmp_path, status=0,
    )  # fmt: skip
    launch("export", "job", "--to", "out", cwd=tmp_path, status=0)
    found, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert found.generation_config.max_new_tokens == 7
    assert found.config.eos_token_id == EOS, "keys of the configuration that are not the shape's are kept"
    expected = trained_by_transformers(start, params)
    before = dict(AutoModelForCausalLM.from_pretrained(start).named_parameters())
    require_learned(before, dict(found.named_parameters()), dict(expected.named_parameters()))
    tokens = torch.arange(20)[None]
    assert torch.allclose(found(tokens).logits, expected(tokens).logits, atol=1e-5)


def test_the_head_is_gathered_in_the_precision_of_the_products(tmp_path: Path) -> None:
    """Under FSDP the head is gathered in bf16, although the loss uses its matrix outside of its forward pass."""
    shape = ["task.width=32", "task.heads=4", "task.kv_heads=2", "task.depth=2", "task.ffn=48", "task.vocab=256"]
    done = launch(
        "train", "task=llama", *shape, "task.seq_len=32", "task.eval_samples=2", "strategy=fsdp", "precision=bf16",
        "cluster.workers_per_node=2", "batch.global_size=8", "batch.micro_size=2", "train.steps=3",
        "wandb.mode=disabled", "run.dir=.", "run.name=job", "train.log_every=1", "task.size=8b",
        "run.calibrate_s=0", cwd=tmp_path, status=0,
    )  # fmt: skip
    shown = (tmp_path / "job/logs/rank0.log").read_text() + done.stdout + done.stderr
    assert "gathered in fp32" not in shown
    losses = [record["train/loss"] for record in records(tmp_path / "job") if "train/loss" in record]
    assert 5.3 < losses[0] < 5.8
    assert losses[-1] < losses[0]
