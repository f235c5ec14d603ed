"""The user's own model in a loss: attributes, methods, parameters, several passes, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import series, torchrun


def run(ranks: int, part: str, where: Path) -> dict[str, Any]:
    worker = Path(__file__).parent / "user_model_worker.py"
    return json.loads(torchrun(worker, [str(ranks), part], ranks, where).splitlines()[-1])


@pytest.mark.slow
@series(24, 56)
def test_the_gradient_is_that_of_plain_torch_however_the_model_is_used(part: str, cases: int, tmp_path: Path) -> None:
    seen = run(4, part, tmp_path)
    assert len(seen) == cases
    for name, found in seen.items():
        assert found["error"] < 2 * found["at once"], (name, found)


def test_a_parameter_of_a_shard_unit_in_the_loss_is_refused(tmp_path: Path) -> None:
    seen = run(2, "refusals", tmp_path)
    assert "The loss uses blocks.0.up.weight of a shard unit outside of the unit's forward" in seen["weight_of_a_unit"]
    assert "The loss uses a parameter of a shard unit" in seen["decay_of_all"]
    assert "use the optimizer's" in seen["decay_of_all"]
    assert seen["part_of_a_unit"] == "torch: mixed tensors"


def test_contrast_with_the_samples_of_all_ranks_is_exact_with_one_micro_batch(tmp_path: Path) -> None:
    seen = run(2, "contrasts", tmp_path)
    assert len(seen) == 4
    for name, found in seen.items():
        assert found["error"] < 3 * found["at once"], (name, found)
