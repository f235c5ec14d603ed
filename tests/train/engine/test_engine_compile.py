"""train.compile with accumulation: a compiled model takes the same steps, under no_sync, FSDP2 and recompute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
def test_a_compiled_model_takes_the_same_steps(tmp_path: Path) -> None:
    worker = Path(__file__).parent / "compile_worker.py"
    seen = json.loads(torchrun(worker, [], 2, tmp_path, timeout=900).splitlines()[-1])
    assert len(seen) == 5
    for case, result in seen.items():
        assert result["calls"] >= 6, (case, result, "the layers of the blocks are captured")
        assert result["distance"] < (1e-3 if "bf16" in case else 1e-6), (case, result)
