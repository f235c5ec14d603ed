"""precision=float8: every strategy and sync policy has the gradient of one big batch with torchao's own layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import series, torchrun

WORKER = Path(__file__).parent / "float8_worker.py"


@pytest.mark.slow
@series(5, 10)
def test_all_strategies_and_micro_batches_have_one_gradient(part: str, cases: int, tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, [part], 4, tmp_path).splitlines()[-1])
    policies = {name: result for name, result in seen.items() if isinstance(result, dict)}
    assert len(policies) == cases
    assert seen["bf16"] > 0.02, "or float8 would not show"
    for name, result in policies.items():
        assert result["error"] < 2**-8, (name, result)
        assert result["outputs"], (name, "an evaluation computes in float8, too")
        assert result["dtypes"] == ["torch.float32"], name
    for micro in (1, 4, 8):
        assert seen[f"micro {micro}"] < 2**-8
    assert seen["excluded"] > 0.01, "layers that are left out are in bf16"
