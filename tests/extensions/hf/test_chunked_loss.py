"""Cross-entropy of a large vocabulary: equal to torch's, without whole logits, with the heads of transformers too."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from launcher.extensions.forecast.fake_model import AllocationLog
from launcher.extensions.hf.chunked_loss import ChunkedHead, linear_cross_entropy
from launcher.extensions.hf.llama import Llama
from launcher.train.engine.build import compile_forward, recompute
from tests.extensions.hf.hf_files import configuration
from tests.helpers import torchrun


def distance(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


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


@pytest.mark.parametrize(
    ("kind", "changes", "replaced"),
    [
        ("llama", {}, True),
        ("qwen", {}, True),
        ("gpt2", {}, True),
        ("moe", {}, True),
        ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8}, False),  # caps its logits
        ("granite", {"logits_scaling": 3.0}, False),
        ("cohere", {}, False),
    ],
)
def test_heads_of_transformers(kind: str, changes: dict[str, Any], replaced: bool) -> None:
    """A head whose result the model changes stays as it is."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind in ("llama", "qwen", "gpt2", "moe"):
        config = configuration(kind)
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, vocab_size=352, pad_token_id=0, **changes)
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    names = [name for name, _ in model.named_parameters()]
    ChunkedHead.replace_head_of(model)
    head = model.get_output_embeddings()
    assert isinstance(head, ChunkedHead) == replaced
    assert [name for name, _ in model.named_parameters()] == names
    if replaced:
        tokens = torch.randint(352, (2, 20))
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[0, :4] = -100
        expected = functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = head.loss_of(model, targets, input_ids=inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        pairs = [torch.autograd.grad(each, list(model.parameters())) for each in (loss, expected)]
        for name, actual, wanted in zip(names, *pairs, strict=True):
            assert distance(actual, wanted) <= 1e-5, name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler
@pytest.mark.parametrize("documents", [False, True])
def test_recompute_and_compile_leave_the_gradient_unchanged(documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    task = Llama(width=32, depth=4, heads=4, kv_heads=2, ffn=48, vocab=300, seq_len=32)
    task.eos, task._pack = (9, True) if documents else (None, False)
    plain, compiled = task.model(), task.model()
    compiled.load_state_dict(plain.state_dict())
    compile_forward(task.compile_units(compiled))
    recompute(task.shard_units(compiled))
    for _ in range(2):
        batch = task.collate([*torch.randint(20, (2, 33))])
        for model in (plain, compiled):
            task.loss(model, batch).total.backward()
    for (name, parameter), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert distance(other.grad, parameter.grad) <= 1e-6, name
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2, "one compilation serves all layers, and one the loss"


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(1, 4), (4, 14)])
def test_a_head_that_is_the_embedding_under_every_strategy(ranks: int, cases: int, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "chunked_loss_worker.py"
    seen = json.loads(torchrun(worker, [str(ranks)], ranks, tmp_path).splitlines()[-1])
    assert len(seen) == cases
    for name, found in seen.items():
        assert found["error"] < 2 * found["at once"], (name, found)
        if "fsdp" in name and ranks > 1:  # of two units and the root, in two micro-batches: each once
            assert found["collectives"]["reduce_scatter"] == (6 if "sync=every" in name else 3), (name, found)
