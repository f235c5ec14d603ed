"""bf16 and fp16 with accumulation: what is lost is the rounding of the arithmetic, however large the window; what is
kept is fp32; and where one rank overflows, all skip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import torchrun

ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}
# one GPU serves one rank
DEVICES = [("cpu", 2), *([("cuda", min(2, torch.cuda.device_count()))] if torch.cuda.is_available() else [])]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "ranks"), DEVICES)
def test_windows_of_32k_items_and_overflow(device: str, ranks: int, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "precision_worker.py"
    seen = json.loads(torchrun(worker, [device, str(ranks)], ranks, tmp_path).splitlines()[-1])
    windows = {name: result for name, result in seen.items() if name.endswith(("bf16", "fp16"))}
    assert len(windows) == (6 if ranks == 2 else 2)
    for name, result in windows.items():
        precision = name.split()[-1]
        assert result["items"] == 2**15
        assert result["skipped"] == 0, "the default scale needs no search"
        assert result["dtypes"] == ["torch.float32"], "parameters, gradients, optimizer state"
        assert ROUNDING[precision] / 100 < result["error"] < 2 * ROUNDING[precision], (name, result)
        assert result["error"] < 1.5 * seen[f"{precision} at once"]["error"], "accumulation costs nothing"
    assert seen["fp16 without a scale"]["error"] > 5 * seen["fp16 at once"]["error"], "or nothing could be lost here"
    assert all(agreed for name, agreed in seen.items() if name.endswith("overflow"))
