"""task=llama: shapes by name, rows of files of tokens, and mistakes that end in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from launcher.errors import ConfigError, TaskError
from launcher.extensions.hf import hf_model
from launcher.extensions.hf.llama import SIZES, Llama
from launcher.targets import find_target
from launcher.train.inspection.built_task import build_inspected
from launcher.train.measure.flops import flops_per_sample
from tests.extensions.hf.hf_files import TEXTS, save_lines, save_model, save_tokenizer
from tests.extensions.hf.test_token_file import write

SMALL: dict[str, Any] = {"width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 300, "seq_len": 16}


@pytest.mark.parametrize("size", SIZES)
def test_sizes_have_the_parameters_that_they_name(size: str) -> None:
    count = sum(p.numel() for p in build_inspected(Llama(size=size), "Llama", 0).parameters())
    exact = {"1b": 1_235_814_400, "8b": 8_030_261_248, "70b": 70_553_706_496}
    assert count == exact.get(size, count)
    assert count == pytest.approx(float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]], rel=0.25 if size == "1b" else 0.08)


@pytest.mark.parametrize("module", ["llama", "hf_causal_lm", "hf_classifier", "chunked_loss"])
def test_a_module_that_has_moved_is_named(module: str) -> None:
    with pytest.raises(ConfigError, match=f"no module .*\n  did you mean 'launcher.extensions.hf.{module}'"):
        find_target("task._target_", f"launcher.tasks.{module}.Name")


def test_flops_are_those_that_are_counted() -> None:
    """6 for each parameter in a matrix of a layer or of the head, and 12 L d T for attention."""
    task = Llama(**SMALL)
    layer = 32 * 8 * (2 * 4 + 2 * 2) + 3 * 32 * 48
    per_token = 6 * (2 * layer + 300 * 32) + 12 * 2 * 32 * 16
    assert flops_per_sample(task, task.model(), task.train_data()) == 16 * per_token


def test_the_end_of_a_file_is_held_out(tmp_path: Path) -> None:
    numbers = numpy.arange(1000) % 300
    task = Llama(**SMALL, data=str(write(tmp_path / "tokens.npy", numbers)), eos=7, eval_samples=2)
    train, held_out = task.train_data(), task.eval_data()
    assert (len(train), len(held_out)) == (59, 2)
    assert train[58].tolist() == numbers[16 * 58 : 16 * 58 + 17].tolist()
    assert held_out[1].tolist() == numbers[16 * 60 : 16 * 60 + 17].tolist()


def test_an_end_that_does_not_occur_is_a_note_of_the_plan(tmp_path: Path) -> None:
    data = str(write(tmp_path / "tokens.npy", numpy.arange(1000) % 299))
    for eos, notes in ((299, 1), (298, 0)):
        task = Llama(**SMALL, data=data, eos=eos)
        task.train_data()
        assert len(task.notes) == notes
        assert all(f"task.eos=299 does not occur in the 1,000 tokens of {data}" in note for note in task.notes)


def test_a_configuration_has_the_special_tokens_that_are_known(tmp_path: Path) -> None:
    def found(**settings: Any) -> list[Any]:
        config: Any = Llama(**settings).model().config
        return [getattr(config, f"{each}_token_id") for each in ("bos", "eos", "pad")]

    data = str(write(tmp_path / "tokens.npy", numpy.arange(1000) % 300))
    assert found(**SMALL) == [None, None, None]
    assert found(**SMALL, data=data, eos=7) == [None, 7, None]
    save_tokenizer(tmp_path / "tokenizer")
    texts = {"data": "texts.jsonl", "tokenizer": str(tmp_path / "tokenizer")}
    assert found(**SMALL | {"vocab": 400}, **texts) == [None, 0, None]
    start = str(save_model(tmp_path / "start", "llama", weights=False) / "config.json")
    settings = json.loads(Path(start).read_text()) | {"pad_token_id": 340, "eos_token_id": [5, 299]}
    Path(start).write_text(json.dumps(settings))
    assert found(model=start, data=data, eos=7) == [None, [5, 299], 340]
    assert found(model=start, data=data, eos=7, vocab=300) == [None, [5, 299], None]


def test_the_end_of_a_document_predicts_nothing(tmp_path: Path) -> None:
    data = write(tmp_path / "tokens.bin", [1, 2, 3, 9] * 100, "uint32")
    task = Llama(**SMALL, data=str(data), eos=9, token_type="uint32")
    model = task.model()
    loss = task.loss(model, task.collate([task.train_data()[0]]))
    assert loss.items == 12
    document = task.loss(model, task.collate([torch.tensor([1, 2, 3, 9])])).total
    assert loss.total.item() == pytest.approx(4 * document.item(), rel=1e-5)
    assert task.loss(model, task.collate([torch.tensor([9, 9, 1])])).items == 0


def test_without_documents_a_row_is_one_text(tmp_path: Path) -> None:
    data = write(tmp_path / "tokens.bin", [1, 2, 3, 9] * 100)
    task = Llama(**SMALL, data=str(data), eos="none", held_out=0)
    assert task.eval_data() is None
    assert task.loss(task.model(), task.collate([task.train_data()[0]])).items == 16


def test_texts_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows, and so the same loss, as task=hf_causal_lm with the same weights."""
    from launcher.extensions.hf.hf_causal_lm import HfCausalLM

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    start = str(save_model(tmp_path / "llama", "llama"))
    data = str(save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]))
    own, other = Llama(model=start, data=data, tokenizer=start, seq_len=64), HfCausalLM(start, data, seq_len=64)
    model, theirs = own.model(), other.model()
    model.load_state_dict(theirs.state_dict())
    rows = [own.train_data()[index] for index in range(4)]
    loss, expected = own.loss(model, own.collate(rows)), other.loss(theirs, other.collate(rows))
    assert loss.items == expected.items
    assert loss.total.item() == pytest.approx(expected.total.item(), rel=1e-5)
    assert own.tokenizer.eos_token == "<|end|>"
    assert "checkpoint.init_from=" in own.notes[0]


def test_parameters_in_bf16() -> None:
    model = Llama(**SMALL, dtype="bf16").model()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"size": "9b"}, r"task.size=9b: no such size.\n  Sizes: 15m, 60m"),
        ({"size": "8b", "model": "x"}, "both name a shape"),
        ({"model": "missing"}, "task.model=missing: no such file or directory"),
        ({"seq_len": 5000}, "task.seq_len=5000: must be at least 2 and at most 4096, the length of the model's"),
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
        ({"held_out": 1.0}, "task.held_out=1.0: must be at least 0 and below 1"),
    ],
)
def test_wrong_values(params: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Llama(**params)


def test_one_row_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"the 1 rows of .* cannot be divided"):
        Llama(**SMALL, data=str(write(tmp_path / "row.bin", range(20))), eos=3).train_data()


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    data = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(TaskError, match=r"the tokenizer has \d+ tokens, and the model only 256"):
        Llama(vocab=256, data=str(data), tokenizer=str(tmp_path)).model()


@pytest.mark.parametrize("keys", [{}, {"tokenizer": "x", "data": "x"}])
def test_it_needs_transformers(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_model, "find_spec", lambda _: None)
    missing = "transformers, datasets" if keys else "transformers"
    with pytest.raises(TaskError, match=rf"task=llama: {missing} must be installed.\n  pip install samebatch\[hf\]"):
        Llama(**keys)
