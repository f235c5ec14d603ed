"""Models whose parts are not called as usual: as in plain torch under every strategy, or refused with one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import series, torchrun

SCRIPTED, SPARSE = "model(): blocks.0 has TorchScript's", "model(): table has sparse gradients"
AGAIN = "blocks.0.linear.weight"
SHARDED = {"sparse": SPARSE, "scripted": SCRIPTED, "weight": "The shard unit blocks.0 returns its parameter weight",
           "again": AGAIN}  # fmt: skip
TWICE = "The gradient of blocks.1.linear.bias has several parts, and DDP would reduce the first one"
REFUSED: dict[str, dict[str, str]] = {
    "ddp": {"sparse": SPARSE, "again": AGAIN, "reentrant twice": TWICE, "reentrant": TWICE},
    "every": SHARDED,
    "boundary": SHARDED,
    "gather_once": SHARDED,
}


@pytest.mark.slow
@series(16, 32)
def test_parameters_are_those_of_plain_torch(part: str, cases: int, tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "odd_models_worker.py", [part], 2, tmp_path).splitlines()
    seen: dict[str, dict[str, Any]] = json.loads(lines[-1])
    assert sum(map(len, seen.values())) == cases
    assert seen.keys() == REFUSED.keys()
    for strategy, outcomes in seen.items():
        for name, outcome in outcomes.items():
            expected = REFUSED[strategy].get(name)
            if expected is None:
                assert outcome == pytest.approx(0, abs=1e-5), (strategy, name)
            else:
                assert f"TaskError: {expected}" in outcome, (strategy, name, outcome)
