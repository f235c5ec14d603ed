"""DDP's gradients: in its buckets alone, and exact, whether or not the window's first backward pass is reduced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["boundary", "every"])
def test_windows_of_one_and_of_two_micro_batches_in_turn(sync: str, tmp_path: Path) -> None:
    seen = json.loads(torchrun(Path(__file__).parent / "ddp_worker.py", [sync], 2, tmp_path).splitlines()[-1])
    assert [count for count, _, _ in seen] == [2, 1] * 3
    assert all(off < 1e-6 for _, off, _ in seen)
    # once the buckets have their final layout, no gradient is outside of them: there would be a second copy
    assert [storages for _, _, storages in seen[2:]] == [1] * 4
