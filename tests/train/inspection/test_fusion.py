"""The rule of fusion: bytes of small graphs by hand, and what holds for any graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.plan.replay import Mark
from launcher.plan.roofline import Operator, OperatorKind
from launcher.train.inspection.allocation_log import AllocationLog
from launcher.train.inspection.timeline import TimelineRecorder, operator_numbers

N = 64
SIZE = 4 * N * N  # bytes of a matrix
Graph = Callable[[Tensor, Tensor], Any]


class Compiled(nn.Module):
    """Module whose forward pass is a function of two matrices."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.graph(a, b)


def operators(run: Callable[..., Any], *graphs: Graph, compiled: bool = True, trained: bool = False) -> list[Operator]:
    """Return the operators of ``run``, which is called with the modules of ``graphs`` and two matrices."""
    recorder, modules = TimelineRecorder(), [Compiled(graph) for graph in graphs]
    if compiled:
        recorder.fusion.compile(modules)
    a, b = (torch.zeros(N, N, requires_grad=trained) for _ in range(2))
    with AllocationLog(torch.device("cpu"), ran=recorder.ran), recorder.recording():
        kept = run(*modules, a, b)
        recorder.mark(Mark.end)
    del kept
    return [*operator_numbers(recorder.stretches).elements()]


def call(module: nn.Module, a: Tensor, b: Tensor) -> Any:
    return module(a, b)


def traffic(found: Sequence[Operator], kind: OperatorKind = OperatorKind.memory) -> list[tuple[int, int]]:
    """Return the matrices that each operator reads and writes, without those that move less than one."""
    moved = [(each.read_bytes // SIZE, each.written_bytes // SIZE) for each in found if each.kind is kind]
    return sorted(each for each in moved if any(each))


def sums(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp() + b).sin()


def apart(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.exp().sin(), b.exp().sin()


def normed(a: Tensor, b: Tensor) -> Tensor:
    return a * torch.rsqrt((a * a).mean(-1, keepdim=True)) * b


def around_a_product(a: Tensor, b: Tensor) -> Tensor:
    return ((a.exp() + 1) @ b).relu().sin()


def with_a_view(a: Tensor, b: Tensor) -> Tensor:
    return (a.exp().t().reshape(-1) + b.flatten()).view(N, N)


def unused(a: Tensor, b: Tensor) -> Tensor:
    b.exp()
    return a.sin()


def used_before_and_after(a: Tensor, b: Tensor) -> Tensor:
    wide = a.exp()
    return (wide.sin() @ b) + wide


def in_place(a: Tensor, b: Tensor) -> Tensor:
    return a.add_(1).mul_(b)


def scattered(a: Tensor, b: Tensor) -> Tensor:
    return a.exp().index_put_((torch.tensor([1]),), b[:1]).sin()


@pytest.mark.parametrize(
    ("graph", "fused", "eager"),
    [
        (sums, [(2, 1)], [(1, 1), (1, 1), (2, 1)]),
        (apart, [(1, 1)] * 2, [(1, 1)] * 4),  # they share no tensor
        (normed, [(2, 1)], [(1, 0), (1, 1), (2, 1), (2, 1)]),
        (around_a_product, [(1, 1)] * 2, [(1, 1)] * 4),
        (with_a_view, [(2, 1)], [(1, 1), (1, 1), (2, 1)]),
        (unused, [(1, 1)], [(1, 1), (1, 1)]),
        (used_before_and_after, [(1, 2), (2, 1)], [(1, 1), (1, 1), (2, 1)]),
        (in_place, [(2, 1)], [(1, 1), (2, 1)]),
        (scattered, [(1, 1), (1, 1)], [(1, 1), (1, 1)]),
    ],
)
def test_by_hand(graph: Graph, fused: list[tuple[int, int]], eager: list[tuple[int, int]]) -> None:
    found, apart_ = operators(call, graph), operators(call, graph, compiled=False)
    assert traffic(found) == fused
    assert traffic(apart_) == eager
    assert traffic(found, OperatorKind.product) == traffic(apart_, OperatorKind.product)


def test_modules_are_compiled_apart_from_each_other_and_from_what_surrounds_them() -> None:
    def both(first: nn.Module, second: nn.Module, a: Tensor, b: Tensor) -> Tensor:
        return second(first(a, b), b).exp().sin()

    assert traffic(operators(both, sums, sums)) == [(1, 1), (1, 1), (2, 1), (2, 1)]

    def outer(a: Tensor, b: Tensor) -> Tensor:
        return inner(inner(a, b), b)

    inner = Compiled(sums)
    assert traffic(operators(call, outer)) == [(2, 1)], "modules inside of a compiled one are part of it"


def test_what_the_forward_pass_saves_is_written_and_the_backward_pass_reads_it() -> None:
    """Forward: a and b are read; exp(a) and exp(a) + b are saved for the products of the backward pass and its cosine,
    and the result is an output. Backward: its gradient and both saved results are read, two gradients are written."""

    def trained(module: nn.Module, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.autograd.grad(module(a, b), (a, b), torch.ones(N, N))  # pyright: ignore[reportReturnType]

    found = operators(trained, sums, trained=True)
    ones = (0, 1)
    assert traffic(found) == [ones, (2, 2), (3, 2)], "the output itself is read by nothing"


def test_a_recomputed_module_is_fused_in_both_passes() -> None:
    def trained(module: nn.Module, a: Tensor, b: Tensor) -> Any:
        out = checkpoint(module, a, b, use_reentrant=False)
        return torch.autograd.grad(out, (a, b), torch.ones(N, N))

    found = traffic(operators(trained, around_a_product, trained=True))
    forward, again, backward = [(1, 1)], [(1, 2), (1, 1)], [(2, 1), (2, 1)]
    assert found == sorted([(0, 1), *forward, *again, *backward]), "the second run also saves"


UNARY = [torch.exp, torch.sin, torch.relu, torch.neg, lambda x: x.sum(-1, keepdim=True), lambda x: x.t()]
BINARY = [torch.add, torch.mul, torch.matmul]
STEPS = st.lists(
    st.tuples(st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(), st.integers()), min_size=1, max_size=12
)


@settings(max_examples=30)
@given(STEPS)
def test_what_holds_for_any_graph(steps: list[tuple[int, int, int]]) -> None:
    """Fusion changes no product, adds no operator and no traffic, and reads no less than the inputs that are used."""

    def graph(a: Tensor, b: Tensor) -> Tensor:
        made = [a, b]
        for choice, left, right in steps:
            one, other = (made[place % len(made)] for place in (left, right))
            if choice < len(UNARY):
                made.append(UNARY[choice](one).expand(N, N))
            else:
                made.append(BINARY[choice - len(UNARY)](one, other))
        return made[-1]

    fused, eager = operators(call, graph), operators(call, graph, compiled=False)
    by_kind = [[each for each in found if each.kind is OperatorKind.product] for found in (fused, eager)]
    assert sorted(by_kind[0], key=str) == sorted(by_kind[1], key=str)
    assert len(fused) <= len(eager)
    moved = [sum(each.read_bytes + each.written_bytes for each in found) for found in (fused, eager)]
    assert moved[0] <= moved[1]
