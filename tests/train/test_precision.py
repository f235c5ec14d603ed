"""bf16 and fp16 with accumulation: what is lost is the rounding of the arithmetic, however large the window; what is
kept is fp32; and where one rank overflows, all skip."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from launcher.train.precision import Precision, parameters_to_fp32
from tests.helpers import make_plan, series, torchrun

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


FORMATS = ("trained", "frozen", "buffers", "state")


@pytest.mark.slow
@series(6, 10)
def test_bf16_parameters_are_trained_in_fp32_unless_they_are_to_stay(part: str, cases: int, tmp_path: Path) -> None:
    worker = Path(__file__).parent / "pretrained_worker.py"
    seen = json.loads(torchrun(worker, [part], 2, tmp_path).splitlines()[-1])
    assert len(seen) == cases
    wide, narrow = ["torch.float32"], ["torch.bfloat16"]
    for name, result in seen.items():
        assert result["tied"], name
        formats = tuple(result[each] for each in FORMATS)
        if name.endswith("keep"):
            assert formats == (narrow, narrow, narrow, narrow), name
            # 128 micro-batches are added up in fp32
            assert result["error"] < 2 * ROUNDING["bf16"] or "unseeded" in name, (name, result)
            continue
        assert formats == (wide, wide if name.endswith("fp32") else narrow, wide, wide), name
        if name.endswith("fp32"):
            assert result["error"] < 1e-5, (name, result)
        elif "unseeded" not in name:
            assert result["error"] < ROUNDING["bf16"], (name, result)


def test_tf32_is_decided_for_products_and_convolutions_alike() -> None:
    """The flags can be set and read without a GPU, through both of torch's interfaces, in any order."""

    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    def newer() -> list[str]:
        return [cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]

    plan, cpu = make_plan("precision=fp32").precision, torch.device("cpu")
    assert not plan.tf32
    try:
        for allowed in (False, True, False, True):
            Precision(dataclasses.replace(plan, tf32=allowed), cpu)
            assert newer() == ["tf32" if allowed else "ieee"] * 3
            older = [cuda.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()]
            assert older == ([True, True, "high"] if allowed else [False, False, "highest"])
        torch.backends.fp32_precision = "tf32"  # a task's own setting does not reach convolutions behind its back
        Precision(plan, cpu)
        assert newer() == ["ieee"] * 3
    finally:
        torch.backends.fp32_precision = "none"
        Precision(plan, cpu)


def test_an_optimizer_with_state_follows_its_parameters() -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for inputs in (torch.ones(1, 3, dtype=torch.bfloat16), torch.ones(1, 3)):
        model(inputs).sum().backward()
        optimizer.step()
        model.zero_grad()
        parameters_to_fp32(model, frozen=False, optimizer=optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
