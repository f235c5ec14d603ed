"""A model's own train() and eval() are called as a plain loop calls them, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
def test_train_and_eval_of_the_model_are_called_as_in_plain_torch(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "modes_worker.py", [], 4, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert len(seen) == 24
    for name, found in seen.items():
        assert found["error"] < 1e-5, (name, found)
        assert found["held out"] < 1e-5, (name, found)
        assert found["modes"][0] == found["modes"][1], name
