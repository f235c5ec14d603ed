"""Llama in plain PyTorch: equal to transformers' LlamaForCausalLM, with documents that do not see each other and a loss
without whole logits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from launcher.tasks import llama_model
from launcher.tasks.llama import document_places
from launcher.tasks.llama_model import LlamaModel, linear_cross_entropy
from launcher.tasks.llama_shape import LlamaShape
from launcher.train.data.packing import document_mask_mod
from launcher.train.engine.build import compile_forward, recompute
from launcher.train.inspection.allocation_log import AllocationLog

SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
PLAIN = LlamaShape(
    width=32, depth=2, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=96, positions=128, theta=10_000.0, eps=1e-5
)
TIED = dataclasses.replace(PLAIN, tied=True, kv_heads=1, scaling=SCALING, theta=500_000.0)
WIDE_HEADS = dataclasses.replace(PLAIN, head_dim=16)


def made(shape: LlamaShape, dtype: torch.dtype = torch.float32) -> LlamaModel:
    torch.manual_seed(1)
    model = LlamaModel(shape)
    for parameter in model.parameters():  # norms too
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.to(dtype)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(PLAIN.vocab, (rows, length), generator=torch.Generator().manual_seed(2))


def distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("shape", [PLAIN, TIED, WIDE_HEADS], ids=["plain", "tied", "wide_heads"])
def test_it_is_the_llama_of_transformers(shape: LlamaShape, dtype: torch.dtype, within: float) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs: Any = LlamaForCausalLM(LlamaConfig(**shape.config("float32")))
    own = made(shape, dtype)
    theirs.to(dtype).load_state_dict(own.state_dict())
    assert own.state_dict().keys() == theirs.state_dict().keys()
    batch = tokens(3, 65)
    inputs, targets = batch[:, :-1], batch[:, 1:]
    expected = theirs(inputs).logits
    assert distance(own(inputs), expected) <= within
    total = functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    loss = own(inputs, targets)
    assert loss.item() == pytest.approx(total.item(), rel=within)
    total.backward()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None
        assert distance(parameter.grad, gradients[name]) <= 10 * within, name


def test_initial_values_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    for name, parameter in LlamaModel(dataclasses.replace(PLAIN, width=128, head_dim=32)).named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(parameter.mean().item()) < 1e-3, name
        else:
            assert (parameter == 1).all(), name


def test_documents_in_a_row_are_computed_as_if_alone() -> None:
    model, eos = made(TIED, torch.float64), 7
    batch = tokens(1, 41).where(tokens(1, 41) != eos, 8)
    ends = [10, 11, 30]  # documents of 11, 1, 19 and 9 tokens
    batch[0, ends] = eos
    positions, document_ids = document_places(batch == eos)
    assert positions[0, [0, 10, 11, 12, 30, 31]].tolist() == [0, 10, 0, 0, 18, 0]
    assert document_ids[0, [0, 10, 11, 12, 30, 31]].tolist() == [0, 0, 1, 2, 2, 3]
    together = model(batch, None, positions, document_ids)
    for start, stop in [(0, 11), (11, 12), (12, 31), (31, 41)]:
        assert distance(together[:, start:stop], model(batch[:, start:stop])) <= 1e-13


def test_flex_attention_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has the forward pass only. One compilation serves all layers and masks."""
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import create_block_mask

    def block_mask(document_ids: Tensor) -> Any:
        rows, length = document_ids.shape
        return create_block_mask(document_mask_mod(document_ids), rows, None, length, length, device="cpu")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = made(WIDE_HEADS), made(WIDE_HEADS)
    compiled.load_state_dict(plain.state_dict())
    compile_forward(list(compiled.model.layers))
    for shift in (0, 1):
        batch = tokens(2, 140).roll(shift, 1)
        places = document_places(batch < 4)
        with torch.no_grad():
            expected = plain(batch, None, *places)
            with monkeypatch.context() as as_on_a_gpu:
                as_on_a_gpu.setattr(llama_model, "attention_mask", block_mask)
                assert distance(compiled(batch, None, *places), expected) <= 1e-6
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
@pytest.mark.parametrize("documents", [False, True])
def test_recompute_and_compile_leave_the_gradient_unchanged(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    shape = dataclasses.replace(PLAIN, depth=4)
    plain, compiled = made(shape), made(shape)
    compile_forward([*compiled.model.layers, compiled.chunk_loss])
    recompute(list(compiled.model.layers))
    for rows in (2, 2):
        batch = tokens(rows, 33)
        places = document_places(batch[:, :-1] < 9) if documents else ()
        for model in (plain, compiled):
            model(batch[:, :-1], batch[:, 1:], *places).backward()
    for (name, parameter), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert distance(other.grad, parameter.grad) <= 1e-6, name
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2, "one compilation serves all layers, and one the loss"


def reference(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, weight).float(), targets, reduction="sum")


def operands(dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter, Tensor]:
    torch.manual_seed(3)
    targets = torch.randint(50, (37,))
    targets[[0, 5, 36]] = -100
    return nn.Parameter(torch.randn(37, 16).to(dtype)), nn.Parameter(torch.randn(50, 16).to(dtype)), targets


@pytest.mark.parametrize("chunk", [1, 10, 37, 100])
def test_the_chunked_loss_is_the_cross_entropy(chunk: int) -> None:
    x, weight, targets = operands(torch.float64)
    scale = 0.37
    expected = functional.cross_entropy(functional.linear(x, weight), targets, reduction="sum")
    gradients = torch.autograd.grad(scale * expected, [x, weight])
    loss = linear_cross_entropy(x, weight, targets, chunk)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    for actual, wanted in zip(torch.autograd.grad(scale * loss, [x, weight]), gradients, strict=True):
        assert distance(actual, wanted) <= 1e-14


def test_nothing_to_predict() -> None:
    x, weight, _ = operands(torch.float32)
    loss = linear_cross_entropy(x, weight, torch.full((37,), -100))
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["fp32", "narrow"])
def test_the_chunked_loss_in_mixed_precision(dtype: torch.dtype, parameters: str) -> None:
    """Its error against fp64 is not larger than that of torch's own, with a loss scale as for fp16."""
    x, weight, targets = operands(torch.float32 if parameters == "fp32" else dtype)
    exact = [nn.Parameter(each.detach().double()) for each in (x, weight)]
    scale = 2.0**10
    wanted = torch.autograd.grad(functional.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum"), exact)
    errors: dict[str, list[float]] = {}
    for name, function in {"chunked": lambda *given: linear_cross_entropy(*given, 10), "torch": reference}.items():
        with torch.autocast("cpu", dtype):
            loss = function(x, weight, targets)
        assert loss.dtype == torch.float32
        found = torch.autograd.grad(scale * loss, [x, weight])
        assert [each.dtype for each in found] == [x.dtype, weight.dtype]
        errors[name] = [distance(each / scale, exact) for each, exact in zip(found, wanted, strict=True)]
    for chunked, of_torch in zip(errors["chunked"], errors["torch"], strict=True):
        assert chunked <= 1.2 * of_torch + 1e-4


def test_small_probabilities_have_a_gradient_in_fp16() -> None:
    """In rows of the head that are no target: not less exact than torch's own with a loss scale."""
    torch.manual_seed(4)
    x, weight = nn.Parameter(torch.randn(8, 64)), nn.Parameter(torch.randn(500, 64))
    targets = torch.randint(50, (8,))
    exact = weight.detach().double().requires_grad_()
    loss = functional.cross_entropy(x.detach().double() @ exact.T, targets, reduction="sum")
    (wanted,) = torch.autograd.grad(loss, exact)
    errors = list[float]()
    for function in (linear_cross_entropy, reference):
        with torch.autocast("cpu", torch.float16):
            (found,) = torch.autograd.grad(512 * function(x, weight, targets), weight)
        relative = (found / 512 - wanted)[50:].norm(dim=1) / wanted[50:].norm(dim=1)
        errors.append(relative.median().item())
    assert errors[0] <= 1.2 * errors[1]


def test_a_graph_that_is_kept_gives_the_gradient_again() -> None:
    """Launch verify repeats a backward pass in fp16 with a smaller loss scale."""
    x, weight, targets = operands(torch.float32)
    loss = linear_cross_entropy(x, weight, targets)
    first = torch.autograd.grad(loss, [x, weight], retain_graph=True)
    for one, twice in zip(first, torch.autograd.grad(2 * loss, [x, weight]), strict=True):
        assert torch.equal(2 * one, twice)


def test_logits_never_exist_as_a_whole() -> None:
    items, width, vocabulary, chunk = 512, 16, 1000, 32
    x, weight = torch.randn(items, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (items,))
    peaks = list[int]()
    for function in (lambda: linear_cross_entropy(x, weight, targets, chunk), lambda: reference(x, weight, targets)):
        with AllocationLog(torch.device("cpu")) as log:
            function().backward()
        peaks.append(max(itertools.accumulate(log.events)))
        x.grad = weight.grad = None
    whole, gradients = 4 * items * vocabulary, 4 * (x.numel() + weight.numel())
    assert peaks[1] > whole
    assert peaks[0] < gradients + 4 * (4 * chunk * vocabulary) < whole


def test_evaluation_computes_no_gradient() -> None:
    x, weight, targets = operands(torch.float32)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss = linear_cross_entropy(x, weight, targets, 10)
    assert not loss.requires_grad
    assert counter.get_total_flops() == 2 * 37 * 16 * 50
    assert loss.item() == pytest.approx(reference(x, weight, targets).item(), rel=1e-6)


def test_it_runs_inside_a_checkpoint() -> None:
    x, weight, targets = operands(torch.float64)
    loss = checkpoint(linear_cross_entropy, x, weight, targets, 10, use_reentrant=False)
    assert isinstance(loss, Tensor)
    loss.backward()
    assert x.grad is not None
    expected = torch.autograd.grad(functional.cross_entropy(x @ weight.T, targets, reduction="sum"), x)[0]
    assert distance(x.grad, expected) <= 1e-13
