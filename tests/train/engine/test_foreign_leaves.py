"""Trainable tensors outside of the model are refused; inputs that require a gradient, and other engines' models, are
not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import series, torchrun

WORKER = Path(__file__).parent / "foreign_leaves_worker.py"
REFUSED = {
    "weighted": "Weighted.log_var, of shape [1],",
    "criterion": "Criterion.criterion.weight, of shape [6, 6],",
    "no parameter": "NoParameter.scales['one'], of shape [6],",
    "of the model": "model.plain[0], of shape [6],",
    "global": "GLOBAL_SCALE, of shape [1],",
}


@pytest.mark.slow
@series(11, 29)
def test_what_is_trainable_and_not_in_the_model_is_named(part: str, cases: int, tmp_path: Path) -> None:
    lines = torchrun(WORKER, [part], 2, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert len(seen) == cases
    own_loop = seen.pop("own loop")
    for case, said in seen.items():
        expected = REFUSED.get(case.partition(" ")[2])
        if expected is None:
            assert said == "", case
        else:
            assert said.startswith(f"TaskError: The loss depends on {expected} that requires a gradient"), (case, said)
    assert own_loop == "", "its loop may train it"
    assert sum("does not\n  share its gradient" in line for line in "\n".join(lines).split("The loss depends")) == 1
