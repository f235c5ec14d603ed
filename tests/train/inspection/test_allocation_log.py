"""The log of allocations: events, and the streams that torch's FSDP2 allocates on."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from unittest.mock import patch

import pytest
import torch

from launcher.config.schema import Sync
from launcher.train.inspection import memory_forecast
from launcher.train.inspection.allocation_log import STREAMS, AllocationLog, event_of, sizes_and_streams
from tests.train.inspection.test_repeated_blocks import plan_of


def test_events_keep_size_and_stream() -> None:
    pairs = [(512, 0), (-512, 0), (1024, 3), (-1024, 3), (1, STREAMS - 1)]
    assert [*sizes_and_streams(event_of(size, stream) for size, stream in pairs)] == pairs


def test_a_free_is_of_the_stream_of_its_allocation() -> None:
    side = torch.cpu.Stream()
    with AllocationLog(torch.device("cpu"), streams=True) as log:
        with torch.cpu.stream(side):
            a = torch.zeros(100)
        b = torch.zeros(50)
        del a
        with torch.cpu.stream(side):
            del b
    assert [*sizes_and_streams(log.events)] == [(400, 1), (200, 0), (-400, 1), (-200, 0)]


def allocated(sync: Sync, *overrides: str) -> dict[int, int]:
    """Return the bytes that a trace allocates on each stream, in two windows of one micro-batch."""
    seen: Counter[int] = Counter()

    def read(_: object, events: Iterable[tuple[int, int]]) -> int:
        seen.update(dict.fromkeys(range(4), 0))
        for size, stream in events:
            seen[stream] += max(0, size)
        return 0

    plan = plan_of(2, "cluster.gpu=h100", "batch.accumulation=1", *overrides, model="mlp")
    with warnings.catch_warnings(), patch.object(memory_forecast, "reserved_by", read):
        warnings.simplefilter("ignore")
        with memory_forecast.tracing(plan, shorten=False) as tracer:
            tracer.forecast(sync)
    return dict(seen)


HSDP = ("strategy=hsdp", "strategy.shard_size=2", "cluster.workers_per_node=4")
NARROW = ("precision=bf16", "precision.reduce_dtype=bf16")


@pytest.mark.parametrize(("overrides", "casts"), [(("strategy=fsdp",), False), (HSDP, False), ((*HSDP, *NARROW), True)])
def test_streams_of_fsdp2(overrides: tuple[str, ...], casts: bool) -> None:
    """torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py: foreach_all_gather allocates its output on the copy-in
    stream, foreach_reduce its output on the reduce-scatter stream, and what it converts that to on the stream of the
    all-reduce. Everything else is on the stream of computation, the input of the reduce-scatter included."""
    found = allocated(Sync.every, *overrides)
    gathered, reduced, converted = found[1], found[2], found[3]
    # forward and backward passes gather whole units, a reduction has half of one as its result
    assert found[0] > gathered > 2 * reduced > 0
    assert (converted > 0) is casts
    if casts:
        assert converted >= reduced, "fp32 from bf16"


def test_parameters_that_stay_gathered_are_gathered_on_the_stream_of_computation() -> None:
    """Fsdp gathers them before the forward pass, which torch does on the current stream (get_all_gather_streams)."""
    assert 0 < allocated(Sync.gather_once, "strategy=fsdp")[1] < allocated(Sync.every, "strategy=fsdp")[1]


def test_ddp_has_one_stream() -> None:
    assert {stream for stream, size in allocated(Sync.every, "strategy=ddp").items() if size} == {0}
