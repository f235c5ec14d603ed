"""Sums of many micro-batches: they run in fp32, whatever format gradients are computed, reduced or stored in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "long_sums_worker.py"
BF16 = "precision=fp32 strategy=ddp strategy.compress=bf16"
KEPT = "bfloat16 precision=bf16 precision.parameters=keep"
SHARDED = "precision=bf16 precision.reduce_dtype=bf16"
CASES = {
    1: [f"{KEPT} strategy=single"],
    2: [
        f"float32 {BF16} strategy.sync=every",
        f"float32 {BF16} strategy.sync=boundary",
        f"{KEPT} strategy=ddp strategy.sync=boundary",
        f"{KEPT} strategy=ddp strategy.sync=every",
        f"{KEPT} strategy=fsdp strategy.sync=every",
        f"{KEPT} strategy=fsdp strategy.sync=boundary",
        f"float32 {SHARDED} strategy=fsdp strategy.sync=every",
    ],
    4: [
        f"float32 {SHARDED} strategy=hsdp strategy.shard_size=2 strategy.sync={sync}"
        for sync in ("replicas_at_boundary", "every", "boundary")
    ],
}


@pytest.mark.parametrize(
    ("ranks", "lengths", "every"),
    [
        (1, (3, 2048), 1),
        (2, (3, 512), 2),
        (4, (3, 512), 3),
        *(
            pytest.param(ranks, (1, 2, 3, long), 1, marks=pytest.mark.nightly)
            for ranks, long in ((1, 8192), (2, 1024), (4, 512))
        ),
    ],
)
def test_a_window_of_any_length_has_its_exact_gradient(
    ranks: int, lengths: tuple[int, ...], every: int, tmp_path: Path
) -> None:
    """``every``: 3 takes each third case."""
    lines = [f"{accumulation} {case}" for case in CASES[ranks][::every] for accumulation in lengths]
    errors = json.loads(torchrun(WORKER, lines, ranks, tmp_path).splitlines()[-1])
    assert errors.keys() == set(lines)
    # a few roundings to bf16, of half a unit in the last place; a sum in bf16 would be half of it or less
    assert max(errors.values()) < 4 * 2**-8, errors
