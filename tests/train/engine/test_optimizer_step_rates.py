"""The learning rates that are applied are the schedule's, the plan's or the user's own, and are the ones reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun
from tests.train.engine.rates_worker import LR, STEPS

WARM = ["schedule.warmup_steps=2"]
FLAT = ["schedule=constant", "schedule.warmup_steps=0"]
EXPONENTIAL = [LR * 0.5**step for step in range(STEPS)]
# a user's schedule, the plan's options, the rates in numbers
CASES: list[tuple[str, list[str], list[float]]] = [
    ("none", ["schedule=linear", "schedule.min_ratio=0", *WARM], [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]),
    ("none", FLAT, [LR] * STEPS),
    ("lambda", FLAT, [LR / (1 + step) for step in range(STEPS)]),
    ("lambda", ["schedule=cosine", *WARM], [LR / (1 + step) for step in range(STEPS)]),
    ("exponential", FLAT, EXPONENTIAL),
    ("by hand", FLAT, [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
    ("by hand", ["schedule=linear", *WARM], [0.25, 0.5, 0.5, 0.1875, 0.1875, 0.1875]),
]


@pytest.mark.slow
def test_the_rate_reported_is_the_rate_applied(tmp_path: Path) -> None:
    lines = ["/".join([own, *options]) for own, options, _ in CASES]
    out = torchrun(Path(__file__).parent / "rates_worker.py", lines, 2, tmp_path).splitlines()
    seen = [json.loads(line) for line in out if line.startswith("{")]
    for (own, options, wanted), found in zip(CASES, seen, strict=True):
        assert found["applied"] == pytest.approx(wanted), (own, options)
        assert found["reported"] == found["applied"], (own, options)
    warned = [line for line in out if "outside of the engine" in line]
    assert len(warned) == len([own for own, *_ in CASES if own != "none"]), "once a run, by rank 0"
