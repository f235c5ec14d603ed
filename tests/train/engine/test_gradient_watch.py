"""Losses that run backward themselves, optimizers that step within the backward pass, and gradients that depend on a
micro-batch's other samples are refused; gradients of inputs are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun

CHANGES = "TaskError: The loss changes the gradients of the model's parameters: it calls backward() or zero_grad()"
REFUSED = {
    "own backward": CHANGES,
    "zeroed": CHANGES,
    "steps in backward": "TaskError: head.bias: written within the backward pass",
    "by frequency": "TaskError: model(): table.weight has gradients that are divided by the frequencies within a micro",
}


# gradients that were reduced are in the shards, which zero_grad() of gathered parameters leaves alone
RIGHT = {"fsdp every: zeroed"}


@pytest.mark.slow
def test_changed_gradients_are_refused_by_name(tmp_path: Path) -> None:
    seen = json.loads(torchrun(Path(__file__).parent / "gradient_watch_worker.py", [], 2, tmp_path).splitlines()[-1])
    assert len(seen) == 56
    for case, said in seen.items():
        expected = None if case in RIGHT else REFUSED.get(case.partition(": ")[2])
        assert said.startswith(expected) if expected else not said, (case, said)
