"""task=llama: what its facts say is what it makes, rows of files of tokens, and mistakes that end in one message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from launcher.errors import TaskError
from launcher.plan import task_inspection
from launcher.plan.task_inspection import describe_task
from launcher.tasks.llama import Llama
from launcher.tasks.llama_shape import SIZES, LlamaShape
from launcher.train.inspection.task_probe import build_inspected
from launcher.train.measure.flops import flops_per_sample
from tests.helpers import inspection_of
from tests.infra.warm import ROOT
from tests.tasks.hf_files import TEXTS, save_lines, save_model, save_tokenizer
from tests.tasks.test_tasks import require_true_products
from tests.train.data.test_token_file import write

SMALL = {"width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 300, "seq_len": 16}


@pytest.mark.parametrize("size", SIZES)
def test_facts_are_true(size: str) -> None:
    task = Llama(size=size)
    facts, model = task.facts(), build_inspected(task, "Llama", 0)
    assert facts is not None
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["vector_parameters"] == sum(p.numel() for p in model.parameters() if p.ndim < 2)
    require_true_products(facts, model)
    units = {p for unit in task.shard_units(model) for p in unit.parameters()}
    assert facts["unit_parameters"] == sum(p.numel() for p in units)
    number, unit = float(size[:-1]), {"m": 1e6, "b": 1e9}[size[-1]]
    assert facts["parameters"] == pytest.approx(number * unit, rel=0.25 if size == "1b" else 0.08)


def test_the_inspection_agrees_with_facts(tmp_path: Path) -> None:
    data = write(tmp_path / "tokens.npy", numpy.arange(1000) % 300)
    job = {**SMALL, "data": str(data), "eos": 7}
    quick = describe_task(inspection_of("launcher.tasks.llama.Llama", **job))
    slow = describe_task(
        inspection_of("launcher.tasks.llama.Llama", "optimizer.groups=[{match: norm, lr: 0.1}]", **job)
    )
    same = ("samples", "parameters", "gradient_bytes", "unit_parameters", "matmul_parameters", "eval_sets", "lengths")
    assert [getattr(quick, name) for name in same] == [getattr(slow, name) for name in same]
    assert quick.samples == 62 - 3


def test_flops_are_those_that_are_counted() -> None:
    """Twice each multiply-add, of the forward pass and of both products of the backward pass."""
    task = Llama(**SMALL)
    counted = flops_per_sample(task, task.model(), task.train_data())
    assert counted == task.flops_per_sample()


def test_a_shape_survives_its_configuration(tmp_path: Path) -> None:
    for size in ("400m", "8b"):
        shape = LlamaShape.resolve(size, None, {})
        (tmp_path / "config.json").write_text(json.dumps(shape.config("float32")))
        again = LlamaShape.resolve(None, str(tmp_path), {})
        assert again.config("float32") == shape.config("float32")
        assert again.scaling == shape.scaling


def test_the_end_of_a_file_is_held_out(tmp_path: Path) -> None:
    numbers = numpy.arange(1000) % 300
    task = Llama(**SMALL, data=str(write(tmp_path / "tokens.npy", numbers)), eos=7, eval_samples=2)
    train, held_out = task.train_data(), task.eval_data()
    assert (len(train), len(held_out)) == (59, 2)
    assert train[58].tolist() == numbers[16 * 58 : 16 * 58 + 17].tolist()
    assert held_out[1].tolist() == numbers[16 * 60 : 16 * 60 + 17].tolist()


def test_an_end_that_does_not_occur_is_a_note_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_inspection, "run_probe", None)  # without another process
    data = str(write(tmp_path / "tokens.npy", numpy.arange(1000) % 299))
    target = "launcher.tasks.llama.Llama"
    (note,) = describe_task(inspection_of(target, **SMALL, data=data, eos=299)).data_notes
    assert note.startswith(f"task.eos=299 does not occur in the 1,000 tokens of {data}")
    assert not describe_task(inspection_of(target, **SMALL, data=data, eos=298)).data_notes


def exported_config(task: Llama, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The configuration and the settings of generation that transformers reads from an export."""
    from transformers import AutoConfig

    directory.mkdir()
    task.export_config(build_inspected(task, "Llama", 0), directory, dtype)
    return AutoConfig.from_pretrained(directory)


def test_an_exported_configuration_has_the_dtype_of_its_files(tmp_path: Path) -> None:
    start = config(tmp_path / "start", dtype="float32")
    exported = exported_config(Llama(model=start), tmp_path / "out", torch.bfloat16)
    assert exported.dtype is torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text()).keys().isdisjoint({"dtype", "rope_parameters"})


def test_an_export_names_special_tokens_that_are_known(tmp_path: Path) -> None:
    def found(task: Llama, name: str) -> list[Any]:
        exported = exported_config(task, tmp_path / name)
        return [getattr(exported, f"{each}_token_id") for each in ("bos", "eos", "pad")]

    data = str(write(tmp_path / "tokens.npy", numpy.arange(1000) % 300))
    assert found(Llama(**SMALL), "bytes") == [None, None, None]
    assert found(Llama(**SMALL, data=data, eos=7), "tokens") == [None, 7, None]
    save_tokenizer(tmp_path / "tokenizer")
    texts = Llama(**SMALL | {"vocab": 400}, data="texts.jsonl", tokenizer=str(tmp_path / "tokenizer"))
    assert found(texts, "texts") == [None, 0, 2]
    start = config(tmp_path / "start", bos_token_id=290, eos_token_id=[5, 299, 310], pad_token_id=350)
    (tmp_path / "start" / "generation_config.json").write_text('{"max_new_tokens": 9}')
    assert found(Llama(model=start, data=data, eos=7), "model") == [290, [5, 299, 310], 350]
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["max_new_tokens"] == 9
    assert found(Llama(model=start, data=data, eos=7, vocab=300), "smaller") == [290, [5, 299], None]
    assert not (tmp_path / "smaller" / "generation_config.json").exists()


@pytest.mark.parametrize("top", [True, False])
def test_the_original_length_of_scaled_positions(top: bool, tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    place = {"original_max_position_embeddings": 16} if top else {}
    shape = LlamaShape.resolve(None, config(tmp_path, rope_scaling=scaling, max_position_embeddings=64, **place), {})
    assert shape.scaling is not None
    assert shape.scaling["original_max_position_embeddings"] == (16 if top else 64)


def test_the_end_of_a_document_predicts_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "tokens.bin", [1, 2, 3, 9] * 100, "uint32")
    task = Llama(**SMALL, data=str(data), eos=9, token_type="uint32")
    model = task.model()
    loss = task.loss(model, task.collate([task.train_data()[0]]))
    assert loss.items == 12
    document = task.loss(model, torch.tensor([[1, 2, 3, 9]])).total
    assert loss.total.item() == pytest.approx(4 * document.item(), rel=1e-5)
    assert task.loss(model, torch.tensor([[9, 9, 1]])).items == 0


def test_without_documents_a_row_is_one_text(tmp_path: Path) -> None:
    data = write(tmp_path / "tokens.bin", [1, 2, 3, 9] * 100)
    task = Llama(**SMALL, data=str(data), eos="none", held_out=0)
    assert task.eval_data() is None
    assert task.facts() is None, "the plan asks the task"
    assert task.loss(task.model(), task.collate([task.train_data()[0]])).items == 16


def test_texts_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows, and so the same loss, as task=hf_causal_lm with the same weights."""
    from launcher.tasks.hf_causal_lm import HfCausalLM

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    start = str(save_model(tmp_path / "llama", "llama"))
    data = str(save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]))
    own, other = Llama(model=start, data=data, tokenizer=start, seq_len=64), HfCausalLM(start, data, seq_len=64)
    theirs: Any = other.model()
    model = own.model()
    model.load_state_dict(theirs.state_dict())
    rows = [own.train_data()[index] for index in range(4)]
    loss, expected = own.loss(model, own.collate(rows)), other.loss(theirs, other.collate(rows))
    assert loss.items == expected.items
    assert loss.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    assert own.tokenizer.eos_token == "<|end|>"
    assert own.facts() is None
    assert "checkpoint.init_from=" in own.notes[0]


def test_parameters_in_bf16() -> None:
    model = Llama(**SMALL, dtype="bf16").model()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert torch.get_default_dtype() is torch.float32


def config(directory: Path, **changes: Any) -> str:
    directory.mkdir(exist_ok=True)
    settings = {**LlamaShape.resolve("15m", None, {}).config("float32"), **changes}
    (directory / "config.json").write_text(json.dumps(settings))
    return str(directory)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"size": "9b"}, r"task.size=9b: no such size.\n  Sizes: 15m, 60m"),
        ({"size": "8b", "model": "x"}, "both name a shape"),
        ({"model": "missing"}, "task.model=missing: no such file or directory"),
        ({"model": {"model_type": "qwen2"}}, "model_type is qwen2.*\n  Use task=hf_causal_lm"),
        ({"model": {"attention_bias": True}}, "attention_bias=True, and task=llama has False only"),
        ({"model": {"rope_scaling": {"rope_type": "yarn"}}}, "of the type yarn, and task=llama has default and llama3"),
        ({"seq_len": 5000}, "task.seq_len=5000: must be at least 2 and at most 4096, the length of the model's"),
        (
            {"model": {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_theta": 1.0}}},
            "its rope_scaling and rope_parameters differ",
        ),
        (
            {"data": "texts.json"},
            r"task.data=texts.json: not a file of tokens.*\n.* name a tokenizer: task.tokenizer=DIR",
        ),
        (
            {"data": "tokens.npy", "eval_data": "texts.json", "eos": 3},
            "task.eval_data=texts.json: not a file of tokens",
        ),
        ({"data": "tokens.npy", "eos": 3, "token_type": "uint16"}, "task.token_type=uint16: only a .bin file needs it"),
        ({"text": "body"}, "task.text=body: only examples for a tokenizer have columns"),
        ({"data": "tokens.npy"}, r"task.eos is not set.\n  Name the token that ends each document"),
        ({"data": "tokens.npy", "eos": 32000}, "task.eos=32000: must be none, or a token from 0 to 31999"),
        ({"eos": 3}, "task.eos=3: only a file of tokens needs it"),
        ({"heads": 5}, "task.width=288: must be a multiple of the number of heads, 5"),
        ({"kv_heads": 4}, "task.kv_heads=4: must divide the number of heads, 6"),
        ({"depth": 0}, "task.depth=0: must be at least 1"),
        ({"vocab": 100}, "task.vocab=100: must be at least 256"),
        ({"tokenizer": "x"}, "task.tokenizer needs examples in task.data"),
        ({"dtype": "fp8"}, "task.dtype=fp8: must be fp32 or bf16"),
        ({"token_type": "int8"}, "task.token_type=int8: must be uint16 or uint32"),
        ({"held_out": 1.0}, "task.held_out=1.0: must be at least 0 and below 1"),
    ],
)
def test_wrong_values(params: dict[str, Any], message: str, tmp_path: Path) -> None:
    if isinstance(params.get("model"), dict):
        params = {"model": config(tmp_path, **params["model"])}
    with pytest.raises(TaskError, match=message):
        Llama(**params)


def test_one_row_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the 1 rows of .* cannot be divided"):
        Llama(**SMALL, data=str(write(tmp_path / "row.bin", range(20))), eos=3).train_data()


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    data = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(
        TaskError, match=r"it has \d+ tokens, more than the model's vocabulary of 256.\n  Use task.vocab="
    ):
        Llama(vocab=256, data=str(data), tokenizer=str(tmp_path)).train_data()


def test_the_largest_is_described_without_torch() -> None:
    code = (
        "import sys; from launcher.tasks.llama import Llama; "
        "assert Llama(size='70b').facts()['parameters'] == 70_553_706_496; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
