"""Every strategy, precision and sync policy computes the function that the plain model computes under autocast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "agreement_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "selection", "count"),
    [pytest.param(1, "all", 9, marks=pytest.mark.nightly), (4, "few", 10),
     pytest.param(4, "all", 30, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_all_strategies_compute_one_function(ranks: int, selection: str, count: int, tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, ["cpu", str(ranks), selection], ranks, tmp_path).splitlines()[-1])
    cases = {name: result for name, result in seen.items() if isinstance(result, dict)}
    assert len(cases) == count
    for name, result in cases.items():
        at_once = seen[f"{name.split()[0]} at once"]
        assert result["dtypes"] == ["torch.float32"]
        assert result["error"] < 2 * at_once, (name, result, at_once)
        assert result["outputs"] == 0, (name, result)
    if ranks == 4:
        size, lost = seen["small"]
        assert size < 1e-9
        assert lost < 2**-6, "what is sent as bf16 keeps small gradients"
        assert seen["narrow sums"] < 3 * seen["bf16 at once"]
