"""Replicas that have become different are found before anything of them is saved, and others are not refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launcher.train.engine.replica_check import checksum
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


def test_a_checksum_depends_on_each_bit_and_its_position() -> None:
    torch.manual_seed(0)
    for dtype, size in ((torch.float32, 5000), (torch.bfloat16, 4099), (torch.float64, 1), (torch.uint8, 7)):
        tensor = (torch.randn(size) * 50).to(dtype)
        changed = [tensor.clone() for _ in range(4)]
        bits = [each.view(torch.uint8) for each in changed]
        bits[1][-1] ^= 1
        bits[2][0] ^= 128
        changed[3] = tensor.flip(0) if size > 1 else tensor + 1
        sums = [_sum(each) for each in changed]
        assert sums[0] == _sum(tensor)
        assert len({*sums}) == 4, dtype
    table = torch.arange(4096.0).reshape(4, 1024)
    exchanged = [table[[1, 0, 2, 3]], table.roll(1, 1), table.roll(1, 0), table.flip(0, 1)]
    assert len({_sum(table), *map(_sum, exchanged)}) == 5
    whole = torch.randn(101)
    assert _sum(whole[1:]) == _sum(whole[1:].clone()), "wherever the tensor begins in memory"
    assert _sum(torch.zeros(3, 0)) == 0


def _sum(tensor: Tensor) -> int:
    return int(checksum(tensor).item())
