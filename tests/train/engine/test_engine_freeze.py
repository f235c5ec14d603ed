"""engine.freeze and engine.unfreeze are exact, under every strategy, and survive a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
def test_freezing_between_steps_is_that_of_plain_torch(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "freeze_worker.py", [str(tmp_path)], 4, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    unknown, everything = seen.pop("refused")
    assert "engine.freeze('fisrt'): matches no parameter that is trained" in unknown
    assert "first.weight" in unknown
    assert "would leave nothing to train" in everything
    assert len(seen) == 6
    for name, found in seen.items():
        assert found["error"] < 2 * found["at once"] + 1e-6, (name, found)
        assert found["resumed alike"], name
