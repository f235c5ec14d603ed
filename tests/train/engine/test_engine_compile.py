"""train.compile with accumulation: a compiled model takes the same steps, under no_sync, FSDP2 and recompute."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from launcher.train.engine.build import compile_forward
from tests.helpers import series, torchrun


@pytest.mark.slow
@series(4, 6)
def test_a_compiled_model_takes_the_same_steps(part: str, cases: int, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "compile_worker.py"
    seen = json.loads(torchrun(worker, [part], 2, tmp_path, timeout=900).splitlines()[-1])
    assert len(seen) == cases
    for case, result in seen.items():
        part = case.split()[-1]
        whole = part in ("whole", "own")
        assert result["functions"] == (["Module._call_impl"] if whole else ["Block.forward"] * 2), (case, result)
        assert bool(result["splits"]) == (part == "whole"), (case, result, "graphs are split by buckets")
        assert result["calls"] >= 6, (case, result, "the layers of the blocks are captured")
        assert result["distance"] < (1e-3 if "bf16" in case else 1e-6), (case, result)


def test_a_copy_of_a_compiled_module_computes_with_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    original, x = nn.Linear(2, 2), torch.ones(1, 2)
    compile_forward([original])
    twin = copy.deepcopy(original)
    nn.init.zeros_(twin.weight)
    assert twin(x).equal(twin.bias[None])
    assert original(x).allclose(nn.functional.linear(x, original.weight, original.bias))
