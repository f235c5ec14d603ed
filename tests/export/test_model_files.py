"""Models of transformers: what an export writes is what `from_pretrained` reads, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.export.exporter import export
from launcher.export.request import ExportRequest
from tests.helpers import ROOT
from tests.infra.checkpoints import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
# class, its configuration, settings
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", TINY | {"intermediate_size": 48, "num_key_value_heads": 2}),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", TINY | {"intermediate_size": 48, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60}),
    "bert": ("BertForMaskedLM", "BertConfig", TINY | {"intermediate_size": 48}),
    "classifier": ("BertForSequenceClassification", "BertConfig", TINY | {"intermediate_size": 48, "num_labels": 3}),
    "qwen": ("Qwen2ForCausalLM", "Qwen2Config", TINY | {"intermediate_size": 48, "num_key_value_heads": 2}),
    "moe": (
        "MixtralForCausalLM",
        "MixtralConfig",
        TINY | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
}


class Pretrained:
    """Task with one of the models."""

    def __init__(self, name: str) -> None:
        self.name = name

    def model(self) -> nn.Module:
        import transformers

        cls, config, settings = MODELS[self.name]
        return getattr(transformers, cls)(getattr(transformers, config)(**settings))

    def train_data(self) -> Any: ...
    def loss(self, model: Any, batch: Any) -> Any: ...


def exported(tmp_path: Path, name: str, model: nn.Module, **more: Any) -> Path:
    """The directory of an export of ``model``."""
    checkpoint = make_checkpoint(tmp_path / "step_000001", dict(model.state_dict()))
    (tmp_path / "out").mkdir()
    request = {
        "checkpoint": str(checkpoint), "directory": str(tmp_path / "out"), "params": {"name": name}, "seed": 0,
        "target": "tests.export.test_model_files.Pretrained", "import_from": (str(ROOT),), "averages": None,
        "merge_lora": False, "dtype": None, "shard_bytes": 20_000,
    }  # fmt: skip
    export(ExportRequest(**(request | more)))
    return tmp_path / "out"


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    model: Any = Pretrained(name).model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    directory = exported(tmp_path, name, model)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    theirs = json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())
    if name != "moe":  # transformers 5 saves the experts under other names, and reads both
        assert index["weight_map"].keys() == theirs["weight_map"].keys()
    config = json.loads((directory / "config.json").read_text())
    assert config == json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (directory / "generation_config.json").exists() == (tmp_path / "theirs" / "generation_config.json").exists()

    loaded, info = getattr(transformers, MODELS[name][0]).from_pretrained(directory, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert loaded.eval()(ids).logits.equal(model(ids).logits)
