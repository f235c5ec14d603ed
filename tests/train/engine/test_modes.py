"""A model's own train() and eval() are called as a plain loop calls them, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_train_and_eval_of_the_model_are_called_as_in_plain_torch(ranks: int, tmp_path: Path) -> None:
    """Four ranks add HSDP, which is one class with FSDP."""
    lines = torchrun(Path(__file__).parent / "modes_worker.py", [], ranks, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert len(seen) == 6 * (3 if ranks == 2 else 4)
    for name, found in seen.items():
        assert found["error"] < 1e-5, (name, found)
        assert found["held out"] < 1e-5, (name, found)
        assert found["modes"][0] == found["modes"][1], name
