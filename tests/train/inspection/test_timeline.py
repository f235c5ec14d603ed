"""Timelines: FLOPs and bytes of an independent count, collectives with the forecast's bytes, whole ones from short."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.config.schema import PrecisionKind, Sync
from launcher.plan.replay import Mark
from launcher.plan.roofline import OperatorKind
from launcher.plan.run_plan import Forecast, RunPlan
from launcher.plan.sync_policy import POLICIES, Collective
from launcher.train.inspection.allocation_log import AllocationLog
from launcher.train.inspection.memory_forecast import tracing
from launcher.train.inspection.timeline import Stretch, TimelineRecorder, operator_numbers
from launcher.train.measure.flops import without_memory
from launcher.train.parallel.float8 import set_float8
from tests.helpers import make_plan
from tests.train.inspection.test_repeated_blocks import GPT, plan_of


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def timelines(plan: RunPlan, *, shorten: bool) -> dict[Sync, tuple[Forecast, Sequence[Stretch]]]:
    with tracing(plan, shorten=shorten) as tracer:
        policies = POLICIES[plan.strategy.kind]
        found = {sync: tracer.forecast(sync)[0] for sync in (policies[0], policies[-1])}
        assert tracer.shortens is shorten
        return {sync: (forecast, tracer.timelines[sync]) for sync, forecast in found.items()}


def flops(timeline: Sequence[Stretch], kind: OperatorKind) -> int:
    return sum(number * each.flops for each, number in operator_numbers(timeline).items() if each.kind is kind)


def gpt_plan(*overrides: str, depth: int) -> RunPlan:
    return plan_of(2, *overrides, target=GPT, width=32, depth=depth, heads=2, seq_len=16)


def test_flops_of_a_gpt_are_those_of_its_matrices_and_its_attention() -> None:
    """Forward 2 and backward 4 FLOPs for each parameter in a matrix and each token; a causal attention has half of the
    scores, 2 products forward and 5 backward. Recomputed blocks run forward twice, but for their last product: nothing
    of it is needed."""
    depth, width, length, tokens = 2, 32, 16, 2 * 16
    blocks, head = depth * 12 * width**2, 256 * width
    for recompute, forwards in (("none", 1), ("blocks", 2)):
        plan = gpt_plan("batch.accumulation=2", f"strategy.recompute={recompute}", depth=depth)
        with tracing(plan) as tracer:
            tracer.forecast(Sync.boundary)
        timeline = tracer.timelines[Sync.boundary]
        again = (forwards - 1) * 2 * (blocks - depth * 4 * width**2)
        products = tokens * ((blocks + head) * 6 + again)
        assert flops(timeline, OperatorKind.product) == 2 * products, "of two micro-batches"
        scores = 2 * depth * 2 * length**2 * width  # of two samples
        assert flops(timeline, OperatorKind.attention) == 2 * scores * (forwards + 2.5)


CASES: list[Any] = [
    "strategy=ddp",
    "strategy=fsdp strategy.recompute=blocks precision=bf16 train.compile=true",
    *(
        pytest.param(words, marks=pytest.mark.nightly)
        for words in ("strategy=fsdp", "strategy=hsdp strategy.shard_size=2 cluster.workers_per_node=4")
    ),
]


@pytest.mark.parametrize("words", CASES)
def test_a_timeline_from_a_shortened_model_is_that_of_the_whole_one(words: str) -> None:
    plan = plan_of(2, "batch.accumulation=2", *words.split(), model="mlp")
    whole, short = (timelines(plan, shorten=shorten) for shorten in (False, True))
    for sync, (forecast, timeline) in whole.items():
        shortened = short[sync][1]
        assert [(each.event, each.payload_bytes) for each in shortened] == [
            (each.event, each.payload_bytes) for each in timeline
        ]
        sent = sum(each.payload_bytes for each in timeline if isinstance(each.event, Collective))
        assert sent == forecast.payload_bytes
        for kind in OperatorKind:
            assert flops(shortened, kind) == flops(timeline, kind)
        numbers = [operator_numbers(each) for each in (shortened, timeline)]
        moved = [sum(n * (op.read_bytes + op.written_bytes) for op, n in each.items()) for each in numbers]
        assert moved[0] == pytest.approx(moved[1], rel=0.01), "compiled code may keep another result at an end"
        assert [each.event for each in timeline].count(Mark.end) == 2
        if "ddp" not in words:
            events = [each.event for each in timeline]
            assert events.count(Mark.wait) == events.count(Collective.all_gather)


def record(function: object) -> list[Stretch]:
    """Return the timeline of a function that is called with two matrices of 64 x 64."""
    recorder = TimelineRecorder()
    a, b = torch.zeros(64, 64), torch.zeros(64, 64)
    with AllocationLog(torch.device("cpu"), ran=recorder.ran), recorder.recording():
        function(a, b)  # pyright: ignore[reportCallIssue]
        recorder.mark(Mark.end)
    return recorder.stretches


def test_bytes_of_operators() -> None:
    size = 4 * 64 * 64
    (stretch,) = record(lambda a, b: (a @ b.T).add_(1))
    assert sorted((op.kind.value, op.flops, op.read_bytes, op.written_bytes) for op in stretch.operators) == [
        ("memory", 0, size, size), ("product", 2 * 64**3, 2 * size, size),
    ]  # fmt: skip
    (stretch,) = record(lambda a, b: a.copy_(b))
    assert [(op.read_bytes, op.written_bytes) for op in stretch.operators] == [(size, size)], "a is not read"
    index = torch.zeros(5, dtype=torch.long)
    (stretch,) = record(lambda a, _: nn.functional.embedding(index, a))
    assert [(op.read_bytes, op.written_bytes) for op in stretch.operators] == [(4 * 5 * 64, 4 * 5 * 64)]


def test_a_product_of_widened_factors_runs_in_the_narrow_format() -> None:
    def widened(a: torch.Tensor, b: torch.Tensor) -> None:
        narrow = a.bfloat16(), b.bfloat16()
        torch.addmm(torch.zeros(64, 64), narrow[0].float(), narrow[1].float())
        torch.mm(a, b)

    (stretch,) = record(widened)
    formats = [op.dtype for op in stretch.operators if op.kind is OperatorKind.product]
    assert formats == [PrecisionKind.bf16, PrecisionKind.fp32]


def test_products_in_float8_are_counted_once_and_as_such() -> None:
    layer = nn.Linear(64, 64)
    set_float8(layer, dataclasses.replace(make_plan("precision=bf16").precision, kind=PrecisionKind.float8))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        twin = without_memory(layer, fake)

        def passes(a: torch.Tensor, _: torch.Tensor) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = twin(fake.from_tensor(a).requires_grad_())
            outputs.sum().backward()

        (stretch,) = record(passes)
    products = [op for op, number in stretch.operators.items() for _ in range(number) if op.kind.value == "product"]
    assert [(op.dtype.value, op.flops) for op in products] == [
        (kind, 2 * 64**3) for kind in ("float8", "float8", "bf16")
    ]
