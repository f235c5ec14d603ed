"""task=hf_causal_lm: what is learned, compared with transformers' own loss of each document alone."""

from __future__ import annotations

import json
import shutil
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import TaskError
from tests.extensions.hf.hf_files import TEXTS, save_lines, save_model
from tests.infra.pretended_gpu import PretendedGpu

pytestmark = pytest.mark.usefixtures("datasets_cache")


def task(model: Path | str, data: Path, **settings: Any) -> Any:
    from launcher.extensions.hf.hf_causal_lm import HfCausalLM

    return HfCausalLM(str(model), str(data), **({"held_out": 0.0, "seq_len": 64} | settings))


def own_loss(model: Any, tokens: list[int], learned_from: int = 1) -> float:
    """Return the summed loss of a document alone, by transformers' own formula."""
    ids = torch.tensor([tokens])
    labels = ids.clone()
    labels[:, :learned_from] = -100
    mean = model(input_ids=ids, labels=labels).loss.detach()
    return float(mean) * (len(tokens) - max(1, learned_from))


@pytest.mark.parametrize("kind", ["llama", "qwen", "gpt2", "moe"])
@pytest.mark.parametrize("pack", [True, False])
def test_each_document_has_its_own_loss(kind: str, pack: bool, tmp_path: Path) -> None:
    directory = save_model(tmp_path / kind, kind)
    job = task(directory, save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS]), pack=pack)
    model, data = job.model().eval(), job.train_data()
    batch = job.collate([data[index] for index in range(len(data))])
    gpu = PretendedGpu()
    with nullcontext() if kind == "moe" else gpu:  # torch has other operators for a mixture of experts on a GPU
        result = job.loss(model, batch)
        result.total.backward()
    assert not gpu.reads.places, "the host would wait for a GPU in each micro-batch"
    documents = [[*job.tokenizer(text).input_ids, job.tokenizer.eos_token_id] for text in TEXTS]
    expected = sum(own_loss(model, document) for document in documents)
    assert result.items == sum(len(document) - 1 for document in documents)
    torch.testing.assert_close(float(result.total.detach()), expected, rtol=1e-5, atol=0)


def test_a_long_text_is_cut_without_losing_a_target(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(TEXTS) * 3)
    job = task(llama, tmp_path / "long.txt", seq_len=16)
    tokens = [*job.tokenizer("".join(TEXTS) * 3).input_ids, job.tokenizer.eos_token_id]
    pieces = [row["input_ids"] for row in job.train_data()]
    assert max(map(len, pieces)) == 16
    assert [token for piece in pieces for token in piece[1:]] == tokens[1:]
    assert [piece[0] for piece in pieces[1:]] == [piece[-1] for piece in pieces[:-1]]


def test_the_loss_of_a_completion_is_on_the_completion(llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "area(2, 3) = ", "completion": "6"}, {"prompt": "", "completion": "all of it"}]
    job = task(llama, save_lines(tmp_path / "pairs.jsonl", rows))
    first, second = job.train_data()
    assert job.tokenizer.decode([label for label in first["labels"] if label != -100]) == "6<|end|>"
    assert job.tokenizer.decode(first["input_ids"]) == "area(2, 3) = 6<|end|>"
    assert second["labels"] == second["input_ids"]


def test_examples_that_cannot_be_used(llama: Path, tmp_path: Path) -> None:
    pairs = [("p", "c"), ("p", ""), ("p" * 200, "c")]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    file = save_lines(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(TaskError, match=r"example 1 \(counted from 0\) has no token to predict"):
        task(llama, file).train_data()
    assert list(task(llama, file, unusable="skip").train_data()["example"]) == [0]
    with pytest.raises(TaskError, match="none of its 1 examples can be used"):
        task(llama, save_lines(tmp_path / "none.jsonl", rows[1:2]), unusable="skip").train_data()


def test_tokens_are_read_from_the_cache(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    first = task(llama, file).train_data()[:]
    from launcher.extensions.hf.hf_causal_lm import HfCausalLM

    monkeypatch.setattr(HfCausalLM, "_sample", None)
    assert task(llama, file).train_data()[:] == first
    with pytest.raises(TypeError):  # another setting, so another cache
        task(llama, file, seq_len=32).train_data()


def test_the_held_out_part_is_the_same_in_every_run(llama: Path, tmp_path: Path) -> None:
    file = save_lines(tmp_path / "texts.jsonl", [{"text": f"{text} {n}"} for n in range(5) for text in TEXTS])
    parts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        job = task(llama, file, held_out=0.1)
        parts.append((job.train_data()[:], job.eval_data()[:]))
    assert parts[0] == parts[1]
    train, held_out = ({tuple(ids) for ids in part["input_ids"]} for part in parts[0])
    assert len(held_out) == 4
    assert not train & held_out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"text": "txet"}, "task.text=txet: .* has no such column.\n.*text"),
        ({"seq_len": 4096}, "task.seq_len=4096: must be at least 2 and at most 128"),
        ({"held_out": 1.5}, "task.held_out=1.5"),
        ({"lora": {"rank": 4}}, "task.lora.rank: no such argument"),
        ({"lora": {"targets": 5}}, "task.lora.targets=5: must be a list of names"),
        ({"lora": {"r": "many"}}, "task.lora.r=many: must be a number"),
        ({"lora": {"r": 4, "targets": ["q_porj"]}}, "task.lora.targets=q_porj.*\n.*q_proj"),
        ({"tokenizer": "nowhere/at/all"}, "task.tokenizer=nowhere/at/all: no tokenizer: no such directory"),
        ({"tokenizer": "../nowhere"}, "task.tokenizer=../nowhere: no tokenizer: no such directory"),
        ({"tokenizer": "tests/nowhere"}, "no tokenizer: tests has no directory nowhere"),
    ],
)
def test_wrong_settings_are_named(llama: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])

    def build() -> None:
        job = task(llama, file, **settings)
        job.train_data()
        job.model()

    with pytest.raises(TaskError, match=message):
        build()


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", "llama", weights=False)
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(TaskError, match=r"no weights .*\n  task.model=.*config.json trains from random values"):
        task(directory, file)
    made = task(directory / "config.json", file, tokenizer=str(directory)).model()
    assert next(made.parameters()).dtype == torch.float32


def test_another_architecture_is_refused(llama: Path, tmp_path: Path) -> None:
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(TaskError, match="bert is a masked language model"):
        task(save_model(tmp_path / "bert", "bert"), file).model()
    other = save_model(tmp_path / "other", "gpt2")
    (other / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(TaskError, match="weights are not those of a LlamaForCausalLM: missing:"):
        task(other, file).model()
    config = (llama / "config.json").read_text().replace('"llama"', '"no_such_model"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(TaskError, match="no_such_model"):
        task(tmp_path / "config.json", file, tokenizer=str(llama))


def test_lora_trains_adapters_only(llama: Path, tmp_path: Path) -> None:
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    model = task(llama, file, lora={"r": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}).model()
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    assert sum(trained.values()) == 2 * (2 * (32 + 32) + 2 * (32 + 16))  # 2 layers; r (inputs + outputs) for q and v


def test_a_column_that_is_named_wins_over_chats(llama: Path, tmp_path: Path) -> None:
    file = save_lines(tmp_path / "both.jsonl", [{"messages": [{"role": "user", "content": "no"}], "body": "the text"}])
    job = task(llama, file, text="body")
    assert job.tokenizer.decode(job.train_data()[0]["input_ids"]) == "the text<|end|>"


def with_start_and_end(job: Any) -> Any:
    """Return the task, with a tokenizer that adds both tokens to each text."""
    from tokenizers.processors import TemplateProcessing

    special = [("<|start|>", 1), ("<|end|>", 0)]
    job.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=special
    )
    return job


def test_tokens_that_a_tokenizer_adds_surround_an_example(llama: Path, tmp_path: Path) -> None:
    """The prompt does not end with the end token, and an empty one has the start token."""
    rows = [{"prompt": prompt, "completion": "4"} for prompt in ("", "2", "2+2=")]
    job = with_start_and_end(task(llama, save_lines(tmp_path / "pairs.jsonl", rows)))
    texts = ["<|start|>4<|end|>", "<|start|>24<|end|>", "<|start|>2+2=4<|end|>"]
    assert [job.tokenizer.decode(row["input_ids"]) for row in job.train_data()] == texts
    learned = [label for label in job.train_data()[2]["labels"] if label != -100]
    assert job.tokenizer.decode(learned) == "4<|end|>"


def test_an_empty_text_is_refused_if_the_tokenizer_adds_tokens(llama: Path, tmp_path: Path) -> None:
    job = with_start_and_end(task(llama, save_lines(tmp_path / "texts.jsonl", [{"text": "a"}, {"text": ""}])))
    with pytest.raises(TaskError, match=r"example 1 \(counted from 0\) has no token to predict"):
        job.train_data()


def altered(model: Path, to: Path, **values: Any) -> Path:
    """Return a configuration of ``model`` with other values."""
    to.mkdir()
    (to / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | values))
    return to / "config.json"


@pytest.mark.parametrize(
    ("kind", "values", "why"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("xlnet", {"attn_type": "bi"}, "attn_type=bi"),
        ("bert-generation", {"is_decoder": False}, "is_decoder=false"),
        ("cpmant", {}, "cpmant is not causal"),
        ("bert", {}, "bert is a masked language model"),
    ],
)
def test_models_whose_tokens_see_later_ones_are_refused(
    kind: str, values: dict[str, Any], why: str, llama: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": kind, "vocab_size": 352} | values))
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(TaskError, match=f"{why}.*: its tokens see those that they would predict"):
        task(config, file, tokenizer=str(llama)).model()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_longest_text_have_a_limit(kind: str, llama: Path, tmp_path: Path) -> None:
    from launcher.extensions.hf.hf_model import _longest

    rotary = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rotary |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    config = altered(llama, tmp_path / kind, rope_parameters=rotary)
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    with pytest.raises(TaskError, match=f"at most 32, because with rope_type={kind} a longer text changes"):
        task(config, file, tokenizer=str(llama))
    assert task(config, file, tokenizer=str(llama), seq_len=None)._seq_len == 32
    per_layer = types.SimpleNamespace(max_position_embeddings=128, rope_parameters={"full_attention": rotary})
    assert _longest(per_layer)[0] == 32
    assert (
        _longest(types.SimpleNamespace(max_position_embeddings=128, rope_parameters={"rope_type": "default"}))[0] == 128
    )


def test_an_example_has_the_number_of_its_line(llama: Path, tmp_path: Path) -> None:
    rows = [{"text": f"line {n}" if n != 13 else ""} for n in range(20)]
    file = save_lines(tmp_path / "texts.jsonl", rows)
    job = task(llama, file, held_out=0.9)
    with pytest.raises(TaskError, match=r"example 13 \(counted from 0\)"):
        job.eval_data()


def test_other_settings_of_a_tokenizer_have_another_cache(llama: Path) -> None:
    from transformers import AutoTokenizer

    from launcher.extensions.hf.hf_data import _identity

    tokenizer = AutoTokenizer.from_pretrained(llama)
    before = _identity(tokenizer)
    tokenizer("a text", truncation=True, max_length=2)
    assert _identity(tokenizer) == before  # no setting of its own
    tokenizer.truncation_side = "left"
    assert _identity(tokenizer) != before


def on_the_hub(cache: Path, name: str, commit: str, model: Path) -> None:
    """Put a commit of a repository into a local cache of the hub, as the newest of main."""
    place = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, place / "snapshots" / commit)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs/main").write_text(commit)


def test_a_name_on_the_hub_is_the_commit_that_was_planned(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that start later must not read a newer commit."""
    from huggingface_hub import constants
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = save_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    first, second = "1" * 40, "2" * 40
    on_the_hub(tmp_path, "us/llama", first, llama)
    planned = task("us/llama", file).fixed_arguments()
    assert planned == {"revision": first}
    other = save_model(tmp_path / "other", "llama")
    weights = {name: each + 1 for name, each in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    on_the_hub(tmp_path, "us/llama", second, other)
    assert task("us/llama", file).fixed_arguments() == {"revision": second}
    later = task("us/llama", file, **planned)
    assert later.fixed_arguments() == planned
    parameters = dict(later.model().named_parameters())
    assert all(torch.equal(parameters[name], each) for name, each in task(llama, file).model().named_parameters())
    assert task(llama, file).fixed_arguments() == {}
    with pytest.raises(TaskError, match=r"task.revision=.*: task.model=.* is not on the hub"):
        task(llama, file, revision="main")
    with pytest.raises(TaskError, match=r"(?s)task.model=us/nothing: .* as a name on the hub: .*\n  Name a directory"):
        task("us/nothing", file)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.parquet", "empty.csv", "empty.txt"])
def test_an_empty_file_is_named(llama: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(TaskError, match=rf"{name} is empty \(0 bytes\)"):
        task(llama, tmp_path / name).train_data()
    if name != "empty.txt":
        save_lines(tmp_path / f"full{Path(name).suffix}", [{"text": text} for text in TEXTS])
        with pytest.raises(TaskError, match=rf"task.data=.*: .*{name} is empty"):
            task(llama, tmp_path).train_data()
