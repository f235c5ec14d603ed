"""Attention within documents by the kernel that takes their bounds: gradients of each document alone, and no mask."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.extensions.hf import document_attention
from launcher.extensions.hf.llama import Llama
from launcher.train.data import packing
from launcher.train.engine.build import compile_forward, recompute

LENGTH, END, DOCUMENTS = 128, 3, [[40, 1, 60, 27], [128]]


def weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the softmax of the causal scores of one document [heads, tokens, tokens]."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1)


def each_alone(bounds: Tensor, longest: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    for start, stop in itertools.pairwise(bounds.tolist()):
        assert start < stop <= start + longest, "the kernel leaves out what is beyond the longest document"
        yield [each[start:stop] for each in tensors]


def forward(query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: Any, **_: Any) -> tuple[Tensor, ...]:
    bounds, of_keys, longest, _, _, causal, _ = others
    assert causal
    assert torch.equal(bounds, of_keys)
    assert bounds.dtype is torch.int32
    assert len(query) == bounds[-1]
    groups, parts = query.shape[1] // key.shape[1], list[Tensor]()
    for own, keys, values in each_alone(bounds, longest, query, key, value):
        shared = weights(own, keys.repeat_interleave(groups, 1), scale or query.shape[-1] ** -0.5)
        parts.append(torch.einsum("hqk,khd->qhd", shared, values.repeat_interleave(groups, 1)))
    lse = query.new_zeros(query.shape[1], len(query), dtype=torch.float32)
    return torch.cat(parts), lse, torch.zeros(2, dtype=torch.uint64), query.new_empty(0), query.new_empty(0)


def backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, scale: Any, **_: Any
) -> tuple[Tensor, ...]:
    bounds, longest = others[2], others[4]
    found = list[tuple[Tensor, ...]]()
    groups, scale = query.shape[1] // key.shape[1], scale or query.shape[-1] ** -0.5
    for each, own, keys, values in each_alone(bounds, longest, gradient, query, key, value):
        keys, values = (narrow.repeat_interleave(groups, 1) for narrow in (keys, values))
        shared = weights(own, keys, scale)
        change = torch.einsum("qhd,khd->hqk", each, values)
        change = shared * (change - (shared * change).sum(-1, keepdim=True)) * scale
        wide = torch.einsum("hqk,qhd->khd", change, own), torch.einsum("hqk,qhd->khd", shared, each)
        found.append((torch.einsum("hqk,khd->qhd", change, keys), *(w.unflatten(1, (-1, groups)).sum(2) for w in wide)))
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the CPU the operators of torch's flash attention, for sequences of unequal lengths."""
    monkeypatch.setattr(packing, "has_document_kernel", lambda _: True)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


class Shapes(TorchDispatchMode):
    """Mode that records shapes of tensors, and the calls of the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes, self.calls = set[tuple[int, ...]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += func is torch.ops.torch_attn._varlen_attn.default
        storages = [each for each in tree_leaves(result) if isinstance(each, Tensor) and 0 not in each.stride()]
        self.shapes |= {tuple(each.shape) for each in storages}
        return result

    @property
    def squares(self) -> set[tuple[int, ...]]:
        """Shapes that grow with the square of the length."""
        return {shape for shape in self.shapes if shape.count(LENGTH) + shape.count(2 * LENGTH) > 1}


def configuration(kind: str) -> Any:
    """Return the configuration of two layers of width 32 without dropout."""
    values = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    values |= {"vocab_size": 300, "max_position_embeddings": LENGTH, "pad_token_id": None, "bos_token_id": None}
    values |= {"eos_token_id": END, "num_key_value_heads": 4 if kind in ("gpt_neox", "phi") else 2}
    match kind:
        case "gpt2":
            values |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 48}
        case "gpt_neox":
            values.pop("num_key_value_heads")
        case "gemma" | "qwen3" | "qwen3_moe":
            values |= {"head_dim": 16}
    if "moe" in kind:
        values |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config: Any = transformers.AutoConfig.for_model(kind, **values)
    config.embedding_dropout = config.residual_dropout = 0.0
    return config


def packed(directory: Path, config: Any) -> tuple[Any, Any, Any]:
    """Return a task, its model, and rows of several documents."""
    config.save_pretrained(directory)
    task = Llama(model=str(directory / "config.json"), seq_len=LENGTH)
    task.eos, task._pack = END, True
    torch.manual_seed(0)
    rows = torch.randint(4, 300, (len(DOCUMENTS), LENGTH + 1))
    for row, lengths in enumerate(DOCUMENTS):
        rows[row, torch.tensor(lengths).cumsum(0) - 1] = END
    return task, task.model(), rows


def trained_alone(config: Any, model: Any, rows: Tensor) -> tuple[Any, Tensor]:
    """Return a model of transformers as it comes, with the gradients of each document in a pass of its own, and their
    summed loss."""
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    other.load_state_dict(model.state_dict())
    total = torch.zeros(())
    for row, lengths in zip(rows, DOCUMENTS, strict=True):
        for document in row[:-1].split(lengths):
            total = total + functional.cross_entropy(
                other.train()(document[None]).logits[0, :-1], document[1:], reduction="sum"
            )
    total.backward()
    return other, total


def require_equal(model: Any, other: Any) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), other.parameters(), strict=True):
        assert parameter.grad is not None, name
        assert (parameter.grad - expected.grad).norm() <= 1e-5 * expected.grad.norm(), name


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", document_attention.KINDS)
def test_gradients_are_those_of_each_document_alone_and_no_mask_is_made(kind: str, tmp_path: Path) -> None:
    config = configuration(kind)
    task, model, rows = packed(tmp_path, config)
    with Shapes() as seen:
        loss = task.loss(model, task.collate([*rows]))
        loss.total.backward()
    assert seen.calls == 2, "once in each layer"
    assert not seen.squares
    assert document_attention.NAME not in task.model().config.to_json_string(), "other programs do not know it"
    other, total = trained_alone(config, model, rows)
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-6)
    require_equal(model, other)


def test_without_the_kernel_there_is_a_mask(tmp_path: Path) -> None:
    """Also a check that the shapes of a mask are recorded."""
    task, model, rows = packed(tmp_path, configuration("llama"))
    with Shapes() as seen:
        task.loss(model, task.collate([*rows])).total.backward()
    assert (len(DOCUMENTS), 1, LENGTH, LENGTH) in seen.squares
    assert not seen.calls


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("change", [{"head_dim": 12}, {"head_dim": 264}, {"attention_dropout": 1e-12}, {}])
def test_attention_that_the_kernel_does_not_have(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not change:  # torch 2.11 has no groups of heads
        monkeypatch.setattr(document_attention, "_GROUPS_HEADS", False)
    config = configuration("llama")
    config.update(change)
    task, model, rows = packed(tmp_path, config)
    with Shapes() as seen:
        task.loss(model, task.collate([*rows])).total.backward()
    assert not seen.calls
    require_equal(model, trained_alone(config, model, rows)[0])


@pytest.mark.usefixtures("kernel")
def test_other_models_and_eager_attention_keep_the_mask(tmp_path: Path) -> None:
    for number, config in enumerate((transformers.OPTConfig(
        hidden_size=32, num_hidden_layers=1, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=LENGTH, dropout=0.0, vocab_size=300,
    ), configuration("llama"))):  # fmt: skip
        if number:
            config._attn_implementation = "eager"
        task, model, rows = packed(tmp_path / str(number), config)
        if number:
            model.set_attn_implementation("eager")
        with Shapes() as seen:
            loss = task.loss(model, task.collate([*rows]))
        assert seen.squares, config.model_type
        assert not seen.calls, config.model_type
        assert loss.total.item() == pytest.approx(trained_alone(config, model, rows)[1].item(), rel=1e-5)


@pytest.mark.usefixtures("kernel")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
def test_compilation_serves_all_layers_and_numbers_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    config = configuration("llama")
    task, model, rows = packed(tmp_path, config)
    other, _ = trained_alone(config, model, rows)
    compile_forward(task.compile_units(model))
    recompute(task.shard_units(model))
    task.loss(model, task.collate([*rows])).total.backward()
    require_equal(model, other)
    for documents in (2, 5, 9):
        row = rows[0].where(rows[0] != END, 4)
        row[torch.arange(1, documents) * 9] = END
        task.loss(model, task.collate([row, row])).total.backward()
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] <= 3, "one of the loss, one of the layers, and one for other sizes"


def test_a_gpus_job_is_forecast_without_a_mask() -> None:
    from launcher.extensions.forecast.fake_model import autocast_of_cuda

    cpu = torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert not packing.has_document_kernel(cpu)
        with autocast_of_cuda():
            assert packing.has_document_kernel(cpu)
    with autocast_of_cuda():
        assert not packing.has_document_kernel(cpu), "fp32 has no kernel"
