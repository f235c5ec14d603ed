"""Units that run more than once in a micro-batch, and gradients in the loss, under every strategy and sync policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
def test_an_evaluation_leaves_no_gathered_parameters(tmp_path: Path) -> None:
    """A unit that was gathered early, and then not used, would be that of the evaluation in the next window."""
    worker = Path(__file__).parent / "uses_worker.py"
    seen = json.loads(torchrun(worker, ["2", "evaluations"], 2, tmp_path).splitlines()[-1])
    for sync, (without, evaluated) in seen.items():
        assert evaluated == without, sync


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "part", "cases"),
    [
        (1, "half", 10),
        (4, "half", 35),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, "all", 20), (4, "all", 70))),
    ],
)
def test_the_gradient_is_that_of_plain_torch(ranks: int, part: str, cases: int, tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "uses_worker.py", [str(ranks), part], ranks, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert len(seen) == cases
    for name, found in seen.items():
        assert found["error"] < 2 * found["at once"], (name, found)
        if "fsdp" in name and ranks > 1:  # of two units and the root, in two micro-batches: each once
            assert found["collectives"]["reduce_scatter"] == (6 if "sync=every" in name else 3), (name, found)
