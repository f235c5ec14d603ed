"""Losses that are no sums, counts that are none, windows without items, formats that a device lacks: a message each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.config.schema import PrecisionKind, SumFormat
from launcher.errors import ConfigError
from launcher.plan.run_plan import PrecisionPlan
from launcher.train import precision
from tests.helpers import torchrun

# by case: what it says, on every rank
SAID = {
    "one loss a sample": "TaskError: The loss of a micro-batch is of shape [2], and must be a scalar tensor",
    "a number": "TaskError: The loss of a micro-batch is a float, and must be a scalar tensor",
    "a mask": "TaskError: The items of a micro-batch are a tensor of shape [2]",
    "items of the model": "TaskError: The number of items of a micro-batch requires a gradient",
    "negative": "TaskError: The items of a micro-batch must be a finite number, 0 or more: this one has -3.",
    "nan": "0 or more: this one has nan.",
    "a list": "0 or more: this one has [3].",
    "negative on one rank": "0 or more: rank 1, micro-batch 1 has -3; rank 1, micro-batch 2 has -3.",
    "nan items on one rank": "rank 1, micro-batch 1 has nan; rank 1, micro-batch 2 has nan.",
    "inf items on one rank": "rank 1, micro-batch 1 has inf; rank 1, micro-batch 2 has inf.",
    "a sum in fp16": "it is summed in float16, which ends at 65504: call .float() before the sum",
    "no item anywhere": "DataError: No window of epoch 1 holds an item",
    "Adafactor": "TaskError: Adafactor cannot be used with strategy=fsdp: its step fails on sharded parameters",
    "ReadsNumbers": "TaskError: ReadsNumbers cannot be used with strategy=fsdp: its step reads numbers of sharded",
    "powersgd": "DataError: The window of step 1 holds no item. With strategy.compress=powersgd",
}


@pytest.mark.slow
def test_one_message_each_and_empty_windows_are_left_out(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "bad_input_worker.py", [], 2, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert set(seen) == set(SAID)
    for case, words in SAID.items():
        assert all(words in said for said in seen[case]), (case, seen[case])


def test_a_format_that_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> None:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    plan = PrecisionPlan(kind=PrecisionKind.fp16, reduce_dtype=SumFormat.fp32, init_scale=1.0, growth_interval=1)
    precision.Precision(plan, torch.device("cpu"))
    monkeypatch.setattr(precision.functional, "linear", lacking)
    with pytest.raises(ConfigError, match=r"precision=fp16: this device \(cpu\) cannot .*'Half'\n  Use precision=bf16"):
        precision.Precision(plan, torch.device("cpu"))
