"""Autocast of CUDA on tensors of the CPU, compared with that on fake tensors of a GPU; the log of allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.extensions.forecast.fake_model import AllocationLog, autocast_of_cuda, problem_text

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "softplus": F.softplus,
    "sum": lambda x: x.sum(),
    "sum of a dimension": lambda x: x.sum(0),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "exp": torch.exp,
    "gelu": F.gelu,
    "linear": lambda x: x @ x.t(),
    "a chosen format": lambda x: F.softmax(x, -1, dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: x[x > 0], "the size of a tensor in the model or its loss depends on values"),
        (lambda x: x.sum().item(), "the model or its loss asks a tensor for its value"),
    ],
)
def test_a_trace_that_needs_values_fails_with_a_sentence(function: Callable[[Tensor], Any], text: str) -> None:
    with FakeTensorMode(), pytest.raises(Exception) as caught:
        function(torch.empty(4))
    assert problem_text(caught.value).startswith(text)


@pytest.mark.filterwarnings("ignore")  # the forecast's process shows none
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_formats_under_autocast_are_those_of_cuda(dtype: torch.dtype) -> None:
    def found(device: str, start: torch.dtype) -> dict[str, torch.dtype]:
        before = torch.get_autocast_dtype(device)
        torch.set_autocast_enabled(device, True)  # torch.autocast refuses CUDA without a GPU
        torch.set_autocast_dtype(device, dtype)
        try:
            with FakeTensorMode(), torch.no_grad():
                x = torch.empty(4, 8, device=device, dtype=start)
                return {name: function(x).dtype for name, function in FUNCTIONS.items()}
        finally:
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, before)

    for start in (dtype, torch.float32):
        expected, before = found("cuda", start), found("cpu", start)
        with autocast_of_cuda():
            assert found("cpu", start) == expected
        assert found("cpu", start) == before


def test_allocations_and_frees_in_order() -> None:
    with AllocationLog(torch.device("cpu")) as log:
        a = torch.zeros(100)
        b = a.view(10, 10)
        c = torch.zeros(50)
        del a, b
        c.untyped_storage().resize_(0)
        c.untyped_storage().resize_(200)
    assert log.events == [400, 200, -400, -200, 200]


def test_sizes_are_rounded_up() -> None:
    with AllocationLog(torch.device("cpu"), 512) as log:
        torch.zeros(100)
    assert log.events == [512, -512]
