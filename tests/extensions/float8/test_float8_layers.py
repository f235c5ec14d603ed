"""Layers in float8: which ones, that they stay the same objects, and that each token is rounded on its own."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from launcher.errors import ConfigError
from launcher.extensions.float8.float8_format import float8_layers
from launcher.extensions.float8.float8_keys import Float8Recipe
from launcher.plan.run_plan import RunPlan
from launcher.process import quiet_torchao
from launcher.train.parallel.mixed_precision import matmul_parameters, set_format
from tests.helpers import make_plan

PLAIN = make_plan("precision=bf16")


def emulated(*overrides: str) -> RunPlan:
    return make_plan("precision=float8", "float8.emulate=true", *overrides)


def in_bf16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Projection(nn.Linear):
    """Subclass that computes what nn.Linear does, with attributes whose names torchao uses as well."""

    plain = True

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.config = self.linear_mm_config = "of the user's"


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(48, 32)
        self.one, self.two = nn.Linear(32, 64), Projection(64, 32)
        self.uneven, self.doubled = nn.Linear(32, 24), Doubled(32, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.normed = parametrizations.weight_norm(nn.Linear(32, 32))
        self.lora_A, self.tied, self.head = nn.Linear(32, 16), nn.Linear(32, 48), nn.Linear(32, 64)
        self.again = self.one
        self.tied.weight = self.words.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_which_layers() -> None:
    model = Parts()
    assert list(float8_layers(model, [])) == ["one", "two", "lora_A"]
    assert list(float8_layers(model, ["lora_"])) == ["one", "two"]
    assert list(float8_layers(model, ["again"])) == ["two", "lora_A"], "by any of its names"
    assert list(float8_layers(nn.ModuleDict({"inner": model}), ["lora_"])) == ["inner.one", "inner.two"]
    model.one.forward = lambda x: x  # a function of the user's
    assert list(float8_layers(model, ["lora_"])) == ["two"]


def test_a_layer_stays_the_object_that_others_refer_to() -> None:
    model, seen = Parts(), list[Any]()
    one, two, weight, names = model.one, model.two, model.one.weight, list(model.state_dict())
    one.register_forward_hook(lambda module, *_: seen.append(module))
    multiplied = set(matmul_parameters(model))
    set_format(model, emulated())
    assert model.one is one is model.again
    assert isinstance(two, Projection)
    assert type(two).__name__ == "Float8Projection"
    assert one.weight is weight
    assert list(model.state_dict()) == names
    assert set(matmul_parameters(model)) == multiplied, "which FSDP gathers in bf16"
    x = torch.randn(3, 32)
    with in_bf16():
        assert model.one(x).dtype == torch.bfloat16
    assert seen == [one]
    wide = nn.functional.linear(x, one.weight, one.bias)
    assert torch.equal(one(x), wide), "outside of autocast, as before"
    with in_bf16():
        assert one(torch.ones(0, 32)).shape == (0, 64)
        assert one(torch.ones(32)).shape == (64,)
    set_format(model, PLAIN)
    assert type(one) is nn.Linear
    assert type(two) is Projection
    set_format(model, emulated())
    set_format(model, emulated())
    assert type(two).__mro__.count(Projection) == 1, "changed once, however often"


def test_copies_compute_in_float8_and_what_is_pickled_is_plain() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), Projection(64, 32))
    x, plain = torch.randn(5, 32), copy.deepcopy(model)
    set_format(model, emulated())
    twin = copy.deepcopy(model)
    with in_bf16():
        assert torch.equal(twin(x), model(x))
        assert not torch.equal(plain(x), model(x)), "or nothing was rounded"
    with torch.no_grad():
        twin[0].weight.zero_()
    assert model[0].weight.abs().sum() > 0
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"torchao" not in buffer.getvalue()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert [type(module) for module in loaded] == [nn.Linear, nn.GELU, Projection]
    assert torch.equal(loaded[0].weight, model[0].weight)


@pytest.mark.parametrize("recipe", list(Float8Recipe))
def test_it_computes_what_torchao_does(recipe: Float8Recipe) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe.value), emulate=True)
    reference = convert_to_float8_training(copy.deepcopy(model).to(torch.bfloat16), config=config)
    set_format(model, emulated(f"float8.recipe={recipe.value}"))
    x = torch.randn(2, 16, 32)
    with in_bf16():
        outputs = model(x)
    outputs.float().square().sum().backward()
    wanted = reference(x.bfloat16())
    wanted.float().square().sum().backward()
    assert torch.equal(outputs, wanted)
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert own.grad is not None
        assert own.grad.dtype == torch.float32
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad.float())


def outputs_and_gradients(recipe: Float8Recipe, size: int) -> tuple[Tensor, Tensor]:
    """Outputs of 8 samples of different magnitude, and the gradient of each input, in micro-batches of ``size``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    x = (torch.randn(8, 16, 32) * torch.logspace(-3, 1, 8)[:, None, None]).requires_grad_()
    set_format(model, emulated(f"float8.recipe={recipe.value}"))
    outputs = list[Tensor]()
    for part in x.split(size):
        with in_bf16():
            outputs.append(model(part))
        (outputs[-1].float() * torch.logspace(0, 3, 32)).sum().backward()
    assert x.grad is not None
    return torch.cat(outputs).detach(), x.grad


def test_the_default_recipe_rounds_each_token_on_its_own() -> None:
    whole = outputs_and_gradients(Float8Recipe.rowwise_with_gw_hp, 8)
    for size in (1, 2, 4):
        for part, all_at_once in zip(outputs_and_gradients(Float8Recipe.rowwise_with_gw_hp, size), whole, strict=True):
            torch.testing.assert_close(part, all_at_once, rtol=2**-7, atol=0.0)
    outputs, _ = outputs_and_gradients(Float8Recipe.tensorwise, 1)
    at_once, _ = outputs_and_gradients(Float8Recipe.tensorwise, 8)
    assert ((outputs - at_once).norm(dim=(1, 2)) / at_once.norm(dim=(1, 2)))[0] > 0.01, "tensorwise does not"


def test_a_compiled_block_is_one_graph_with_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))
    set_format(model, emulated())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, gradients = torch.randn(2, 16, 32), list[list[Tensor]]()
    for each in (model, compiled):
        with in_bf16():
            total = each(x).float().square().sum()
        gradients.append(list(torch.autograd.grad(total, list(model.parameters()))))
    for own, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(own, wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max().item())


@pytest.mark.filterwarnings("ignore")  # of transformers and peft
def test_frozen_layers_under_adapters_of_peft() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    base: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape))
    model: Any = get_peft_model(base, LoraConfig(r=16, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    names = list(float8_layers(model, ["lora_"]))
    assert len(names) == 7, names
    assert any(name.endswith("q_proj.base_layer") for name in names)
    assert not any("lora_" in name or "lm_head" in name for name in names)
    set_format(model, emulated())
    with in_bf16():
        loss = model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss
    loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2
    assert all(gradient is not None for gradient in trained.values())
    assert trained[next(name for name in trained if "lora_B" in name)].abs().sum() > 0
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_no_layer_and_no_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no layer of the model can be computed in float8"):
        set_format(nn.Sequential(nn.Linear(30, 64)), emulated())
    monkeypatch.delitem(sys.modules, "launcher.extensions.float8.float8_linear", raising=False)
    monkeypatch.setitem(sys.modules, "torchao.float8.config", None)
    with pytest.raises(ConfigError, match=r"torchao cannot be imported: .*\n  Install it: pip install"):
        set_format(nn.Linear(32, 32), emulated())


def test_only_the_known_messages_of_the_import_are_hidden(caplog: pytest.LogCaptureFixture) -> None:
    quiet_torchao()
    filters = [*logging.getLogger("torchao").filters]
    quiet_torchao()
    assert logging.getLogger("torchao").filters == filters, "each is added once"
    for message in ("Failed to load /x/torchao/_C_mxfp8.abi3.so: no such symbol", "another warning"):
        logging.getLogger("torchao").warning(message)
    assert [record.getMessage() for record in caplog.records] == ["another warning"]
