"""Models of transformers: what an export writes is what `from_pretrained` reads, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from launcher.errors import UserError
from launcher.extensions.export.exporter import export
from launcher.extensions.export.request import ExportRequest
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


ADAPTERS: dict[str, dict[str, Any]] = {
    "linear": {"r": 3, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 7},
    "saved": {"r": 2, "target_modules": ["query", "word_embeddings"], "modules_to_save": ["classifier"]},
    "conv1d": {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True, "use_rslora": True},
    "dora": {"r": 2, "target_modules": ["q_proj"], "use_dora": True},
    "tied": {"r": 2, "target_modules": ["lm_head"]},
}


class Pretrained:
    """Task with one of the models."""

    def __init__(self, name: str, adapter: str | None = None) -> None:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        self.name, self.adapter = name, adapter
        words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")

    def model(self) -> nn.Module:
        import transformers

        cls, config, settings = MODELS[self.name]
        model = getattr(transformers, cls)(getattr(transformers, config)(**settings))
        if self.adapter is None:
            return model
        import peft

        return peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **ADAPTERS[self.adapter]))

    def train_data(self) -> Any: ...
    def loss(self, model: Any, batch: Any) -> Any: ...


def exported(tmp_path: Path, name: str, model: nn.Module, **more: Any) -> Path:
    """The directory of an export of ``model``."""
    checkpoint = tmp_path / "step_000001"
    if not checkpoint.exists():
        make_checkpoint(checkpoint, dict(model.state_dict()))
        (tmp_path / "out").mkdir()
    request = {
        "checkpoint": str(checkpoint), "directory": str(tmp_path / "out"), "params": {"name": name}, "seed": 0,
        "target": "tests.extensions.export.test_model_files.Pretrained", "import_from": (str(ROOT),), "averages": None,
        "merge_lora": False, "dtype": None, "shard_bytes": 20_000,
    }  # fmt: skip
    export(ExportRequest(**(request | more)))
    return tmp_path / "out"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    import transformers

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

    assert transformers.AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(["b", "c"]) == [1, 2]
    loaded, info = getattr(transformers, MODELS[name][0]).from_pretrained(directory, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert loaded.eval()(ids).logits.equal(model(ids).logits)


class Own(nn.Linear):
    """Model with a method that is none of the launcher's."""

    def save_config(self) -> None:
        raise AssertionError


class Configured:
    """Task whose model is not of transformers, and has a configuration."""

    def model(self) -> nn.Module:
        return Own(2, 3)

    def train_data(self) -> Any: ...
    def loss(self, model: Any, batch: Any) -> Any: ...

    def export_config(self, model: Any, directory: Path, dtype: torch.dtype) -> None:
        (directory / "own.json").write_text(json.dumps([model.out_features, str(dtype)]))


def test_a_task_writes_the_configuration_of_its_own_model(tmp_path: Path) -> None:
    target = "tests.extensions.export.test_model_files.Configured"
    directory = exported(tmp_path, "", Own(2, 3), target=target, params={}, dtype="bf16")
    assert json.loads((directory / "own.json").read_text()) == [3, "torch.bfloat16"]
    assert not (directory / "config.json").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "adapter"), [("llama", "linear"), ("classifier", "saved"), ("gpt2", "conv1d")])
def test_adapters_alone_and_merged(name: str, adapter: str, tmp_path: Path) -> None:
    import peft
    import transformers

    torch.manual_seed(3)
    model: Any = Pretrained(name, adapter).model().eval()
    base: Any = Pretrained(name).model()
    inner = {key.replace(".base_layer", ""): value for key, value in model.get_base_model().state_dict().items()}
    base.load_state_dict({key: inner[key] for key in base.state_dict() if key in inner}, strict=False)
    params = {"name": name, "adapter": adapter}
    directory = exported(tmp_path, name, model, params=params)
    names = {path.name for path in directory.iterdir() if "token" not in path.name}
    classes = {"config.json"} if name == "classifier" else set[str]()
    assert names == {"adapter_config.json", "adapter_model.safetensors"} | classes
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert peft.PeftModel.from_pretrained(base, directory).eval()(ids).logits.equal(model(ids).logits)

    merged = tmp_path / "merged"
    merged.mkdir()
    exported(tmp_path, name, model, params=params, merge_lora=True, directory=str(merged))
    loaded, info = getattr(transformers, MODELS[name][0]).from_pretrained(merged, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = model.merge_and_unload().state_dict()
    assert [key for key, value in loaded.state_dict().items() if not value.equal(wanted[key])] == []


class Classifier(Pretrained):
    """Task with three named classes, and a model that was saved with two."""

    def __init__(self, base: str) -> None:
        super().__init__("classifier")
        self.base = base

    def model(self) -> nn.Module:
        import peft
        import transformers

        labels = {"num_labels": 3, "id2label": {0: "aa", 1: "bb", 2: "cc"}, "label2id": {"aa": 0, "bb": 1, "cc": 2}}
        config = transformers.AutoConfig.from_pretrained(self.base, **labels)
        made: Any = transformers.AutoModelForSequenceClassification
        model = made.from_pretrained(self.base, config=config, ignore_mismatched_sizes=True)
        return peft.get_peft_model(
            model, peft.LoraConfig(init_lora_weights=False, task_type="SEQ_CLS", **ADAPTERS["saved"])
        )


@pytest.mark.filterwarnings("ignore")
def test_the_adapter_of_a_classifier_has_its_classes(tmp_path: Path) -> None:
    import peft
    import transformers

    torch.manual_seed(3)
    cls, config, settings = MODELS["classifier"]
    base = getattr(transformers, cls)(getattr(transformers, config)(**settings | {"num_labels": 2}))
    base.save_pretrained(tmp_path / "base")
    model: Any = Classifier(str(tmp_path / "base")).model().eval()
    target = "tests.extensions.export.test_model_files.Classifier"
    directory = exported(tmp_path, "", model, target=target, params={"base": str(tmp_path / "base")})
    own = transformers.AutoConfig.from_pretrained(directory)
    made: Any = transformers.AutoModelForSequenceClassification
    plain = made.from_pretrained(tmp_path / "base", config=own, ignore_mismatched_sizes=True)
    loaded: Any = peft.PeftModel.from_pretrained(plain, directory).eval()
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert loaded(ids).logits.equal(model(ids).logits)
    assert loaded.config.id2label == {0: "aa", 1: "bb", 2: "cc"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "adapter", "words"),
    [
        ("llama", None, "--merge-lora: the model has no adapters of peft"),
        ("llama", "dora", "only ordinary LoRA is merged"),
        ("gpt2", "tied", "are one parameter, and an adapter changes only one of its uses"),
    ],
)
def test_what_cannot_be_merged(name: str, adapter: str | None, words: str, tmp_path: Path) -> None:
    model = Pretrained(name, adapter).model()
    with pytest.raises(UserError, match=words):
        exported(tmp_path, name, model, params={"name": name, "adapter": adapter}, merge_lora=True)


class Block(nn.Module):
    """A module with the names of one that torch.compile wraps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(width, width)


class Counts(nn.Module):
    """A module whose extra state has no entries."""

    def get_extra_state(self) -> Any:
        return {"by name": {}}

    def set_extra_state(self, state: Any) -> None: ...


class Simple:
    """Task whose model has a width."""

    def __init__(self, width: int = 2, *, renamed: bool = False) -> None:
        self.width, self.renamed = width, renamed

    def model(self) -> nn.Module:
        block = {"outer" if self.renamed else "block": Block(self.width)}
        return nn.ModuleDict({**block, "norm": nn.BatchNorm1d(1), "counts": Counts()})

    def train_data(self) -> Any: ...
    def loss(self, model: Any, batch: Any) -> Any: ...
    def export(self, model: nn.Module, directory: Path) -> None:
        torch.save(model.state_dict(), directory / "state.pt")


def test_a_model_that_is_no_longer_that_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    model: Any = Simple().model()
    target = "tests.extensions.export.test_model_files.Simple"
    with torch.no_grad():
        model["block"]._orig_mod.weight.fill_(1e5)
    for params, words in (
        ({"width": 3}, [r"block.weight has the shape \[2, 2\] there, and \[3, 3\] in the model"]),
        ({"renamed": True}, ["outer.weight is not among them; the nearest name is 'block.weight'"]),
    ):
        with pytest.raises(UserError, match=words[0]):
            exported(tmp_path, "", model, target=target, params=params)
    with pytest.raises(UserError, match=r"--dtype fp16: block.weight has values that are infinite in it"):
        exported(tmp_path, "", model, target=target, params={}, dtype="fp16")
    place = tmp_path / "whole"
    place.mkdir()
    exported(tmp_path, "", model, target=target, params={}, dtype="bf16", directory=str(place))
    found = load_file(place / "model.safetensors")
    assert found["block.weight"].equal(torch.full((2, 2), 1e5).bfloat16()), "named as without torch.compile"
    wanted, state = model.state_dict(), torch.load(place / "state.pt")
    assert state.pop("counts._extra_state") == {"by name": {}}
    assert all(value.equal(wanted[name]) for name, value in state.items())
