"""Replicas that have become different are found before anything of them is saved, and others are not refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun

# by case: what all ranks are told, and the checkpoints that are saved before
DIFFERENT = {
    "noise": (
        "ReplicasDiffer: After step 3 the ranks have different models: 5 of 5 parameters on ranks 1, 2, 3 differ from "
        "those of rank 0: 0.weight, 0.bias, 1.weight, 3.weight and 1 more.\n"
        "  Callbacks that have changed parameters, learning rates or what is frozen: Noise (on_step).",
        0,
    ),
    "late noise": ("After step 4 the ranks have different models: 5 of 5 parameters on ranks 1, 2, 3", 0),
    "noise hsdp": ("5 of 5 parameters on ranks 2, 3 differ from those of the first replica: 0.weight", 0),
    "freeze": ("After step 6 the ranks have different models: what is frozen differs: nothing on rank 0, 0.weight on "
               "rank 3.\n  Callbacks that have changed parameters, learning rates or what is frozen: "
               "OnLastRank (on_step on rank 3).", 1),
    "freeze fsdp": ("what is frozen differs: nothing on rank 0, 0.weight on rank 3.", 1),
    "rate": ("lr of the optimizer's group 1 differs: ", 1),
    "rate fsdp": ("lr of the optimizer's group 1 differs: ", 1),
    "data": ("1 of 5 parameters on rank 3 differ from those of rank 0: 0.weight.\n  The optimizer does not do that: "
             "look for code in the callbacks (OnLastRank, Watching), the loss or your loop that changes them.", 0),
    "swap": ("parameters on rank 3 differ from those of rank 0: ", 1),
    "state": ("CallbackFailed: The state of callback OwnState differs between ranks 0 and 1: inner/rank.\n", 0),
    "state of tensors": ("The state of callback OwnState differs between ranks 0 and 1: inner/sum.\n", 0),
    "not resumed": ("After step 6 the ranks have different models: 1 of 5 parameters on rank 3 differ", 0),
}  # fmt: skip


@pytest.mark.slow
def test_replicas_that_differ_are_refused_and_no_others(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "replica_check_worker.py", [str(tmp_path)], 4, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert len(seen) == len(DIFFERENT) + 8
    for case, (told, saved) in seen.items():
        message, before = DIFFERENT.get(case, ("", 2))
        assert all(message in text and bool(message) == bool(text) for text in told), (case, told)
        assert len(saved) == before, (case, saved)
