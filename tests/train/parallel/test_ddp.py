"""DDP's gradients: in its buckets alone, and exact, whether or not the window's first backward pass is reduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import torchrun

WORKER = Path(__file__).parent / "ddp_worker.py"


def windows(tmp_path: Path, *arguments: str) -> list[Any]:
    """Run the worker on two ranks; return what it prints of each window."""
    seen = json.loads(torchrun(WORKER, list(arguments), 2, tmp_path).splitlines()[-1])
    assert all(off < 1e-6 for _, off, *_ in seen)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["boundary", "every"])
def test_windows_of_one_and_of_two_micro_batches_in_turn(sync: str, tmp_path: Path) -> None:
    """A pass without collectives, as calibration runs it, follows on the second window of one micro-batch."""
    options = ("batch.global_size=8", "train.epochs=3", f"strategy.sync={sync}")
    seen = windows(tmp_path, "12", "3", *options)
    assert [count for count, *_ in seen] == [2, 1] * 3
    # once the buckets have their final layout, no gradient is outside of them: there would be a second copy
    assert [storages for _, _, storages, *_ in seen[2:]] == [1] * 4


@pytest.mark.slow
def test_several_micro_batches_after_a_first_window_of_one(tmp_path: Path) -> None:
    """The buckets get their final layout between two windows, while the gradients are None."""
    options = ("batch.global_size=16", "batch.ramp=[[1,4]]", "train.epochs=1", "strategy.sync=boundary")
    seen = windows(tmp_path, "36", "-1", *options)
    assert [count for count, *_ in seen] == [1, 4, 4]
    assert [storages for _, _, storages, *_ in seen[1:]] == [1] * 2


@pytest.mark.slow
def test_the_all_reduce_of_what_was_used_is_counted(tmp_path: Path) -> None:
    """DDP reduces an int32 for each of two parameters, beside 72 gradients in fp32, in each of two micro-batches."""
    options = ("batch.global_size=8", "train.steps=1", "strategy.sync=every", "strategy.find_unused_parameters=true")
    (_, _, _, *sent), *_ = windows(tmp_path, "8", "-1", *options)
    assert sent == [[2 * (4 * 72 + 2 * 4)], 4, 0]
