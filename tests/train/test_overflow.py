"""fp16: where one rank's part of a gradient overflows, every rank skips, and every rank's loss scale falls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["every", "gather_once"])
def test_ranks_agree_to_skip(sync: str, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "overflow_worker.py"
    assert "agreed" in torchrun(worker, ["strategy=fsdp", f"strategy.sync={sync}"], 2, tmp_path)
