"""precision=float8 in the plan: who may use it, what has no effect, and what the plan says."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest

from launcher.config.schema import Device, PrecisionKind
from launcher.errors import ConfigError
from launcher.extensions.float8.float8_format import FLOAT8
from launcher.extensions.float8.float8_keys import Float8Config, Float8Recipe
from launcher.plan import host
from launcher.plan.gpus import GPUS, find_gpu
from launcher.plan.run_plan import RunPlan
from launcher.train import opened_run
from tests.helpers import make_plan

EMULATED = ("precision=float8", "float8.emulate=true")


def test_it_sends_what_bf16_sends() -> None:
    float8, bf16 = make_plan(*EMULATED, "strategy=fsdp"), make_plan("precision=bf16", "strategy=fsdp")
    assert float8.strategy.forecasts == bf16.strategy.forecasts
    assert float8.extension(Float8Config).recipe is Float8Recipe.rowwise_with_gw_hp
    assert RunPlan.from_json(float8.to_json()) == float8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("precision=float8",), "precision=float8: a CPU has no float8 units"),
        (("precision=float8", "cluster.device=cuda", "cluster.gpu=a100"), "A100 has no float8 units"),
        (("precision=bf16", "float8.emulate=true"), "float8.emulate=true: has no effect with precision=bf16"),
        (("precision=fp32", "float8.recipe=rowwise"), "float8.recipe=rowwise: has no effect with"),
        (
            ("precision=bf16", "float8.exclude=[out]"),
            "has no effect with precision=bf16.\n  It belongs to precision=float8",
        ),
        ((*EMULATED, "float8.exclude=['(']"), "is not a regular expression"),
        (
            (*EMULATED, "precision.reduce_dtype=float8", "strategy=fsdp"),
            "must be one of fp32, bf16, fp16, not 'float8'",
        ),
        ((*EMULATED, "precision.init_scale=8"), "has no effect with precision=float8"),
    ],
)
def test_what_it_refuses(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=r"precision|float8\.exclude") as refused:
        make_plan(*overrides, gpus=2 if "cluster.device=cuda" in overrides else 0)
    assert message in str(refused.value)


def test_an_evaluation_without_units_is_in_bf16() -> None:
    plan = make_plan("precision=float8", "cluster.device=cuda", "cluster.gpu=h100", gpus=2)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=Device.cpu))
    with pytest.warns(UserWarning, match=r"precision=float8: this device \(cpu\) cannot compute in it"):
        alone, _ = opened_run._for_one_process(plan)
    assert alone.precision.kind is PrecisionKind.bf16


def test_a_gpu_with_units_may() -> None:
    plan = make_plan("precision=float8", "cluster.device=cuda", "cluster.gpu=h100", gpus=2)
    assert plan.precision.kind is PrecisionKind("float8")
    assert any("without train.compile=true is slower than bf16" in note for note in plan.notes)
    compiled = make_plan("precision=float8", "cluster.device=cuda", "cluster.gpu=h100", "train.compile=true", gpus=2)
    assert not any("slower" in note for note in compiled.notes)


def test_notes_on_layers_recipe_and_emulation() -> None:
    task = dataclasses.replace(make_plan().task, format_layers=(14, 15))
    notes = make_plan(*EMULATED, "float8.recipe=tensorwise", task=task).notes
    assert "14 of 15 linear layers compute in float8, all else in bf16." in notes
    assert any("the gradient depends on how samples are divided into micro-batches" in note for note in notes)
    assert any("slow, for tests" in note for note in notes)
    with pytest.raises(ConfigError, match="no layer of the model can be computed in float8"):
        make_plan(*EMULATED, task=dataclasses.replace(task, format_layers=(0, 3)))


@pytest.mark.parametrize(("capability", "may"), [("8.0", False), ("8.9", True), ("9.0", True)])
def test_this_machines_gpus_are_asked(capability: str, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Any = type("Done", (), {"stdout": f"{capability}\n"})
    monkeypatch.setattr(host.subprocess, "run", lambda *_, **__: done)
    host.gpus_have.cache_clear()
    try:
        plan = make_plan("precision=float8", gpus=2)
        if may:
            FLOAT8(plan).check_machine(plan.cluster)
        else:
            with pytest.raises(ConfigError, match="has no float8 units"):
                FLOAT8(plan).check_machine(plan.cluster)
    finally:
        host.gpus_have.cache_clear()


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    plan = make_plan(*EMULATED)
    with pytest.raises(ConfigError, match=r"torchao is not installed.\n +Install it: pip install 'samebatch\[float8"):
        FLOAT8(plan).check_machine(plan.cluster)


def test_peaks_are_twice_those_of_bf16_on_gpus_since_ada() -> None:
    for gpu in GPUS:
        if gpu.fp8 is not None:
            assert gpu.bf16 is not None
            assert gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02), gpu
    flops = {name: find_gpu(name).flops(PrecisionKind("float8"), tf32=False) for name in ("h200", "a100", "v100")}
    assert flops == {"h200": 1979e12, "a100": None, "v100": None}
