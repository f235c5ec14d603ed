"""The engine's gradient is that of one big batch: real ranks, uneven items, compiled and frozen models, bad input."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.config.schema import PrecisionKind, SumFormat
from launcher.errors import ConfigError
from launcher.plan.run_plan import PrecisionPlan
from launcher.train import precision
from launcher.train.engine.build import compile_forward
from tests.helpers import printed_by, series, torchrun

WORKER = Path(__file__).parent / "engine_worker.py"
COMMON = ["precision=fp32", "train.epochs=2", "schedule.warmup_steps=4", "train.loader_workers=0", "run.calibrate_s=0"]


def run_all(ranks: int, samples: int, tmp_path: Path, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Several runs, one after the other, on the same ranks."""
    words = [word for overrides in runs for word in (*COMMON, *overrides, "/")]
    return printed_by(WORKER, [str(samples), *words], ranks, tmp_path)


def run(ranks: int, samples: int, tmp_path: Path, *overrides: str) -> dict[str, Any]:
    return run_all(ranks, samples, tmp_path, [list(overrides)])[0]


@pytest.mark.slow
def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    """A short window of 2 samples on 4 ranks: two ranks run with weight zero."""
    seen = run(4, 50, tmp_path, "batch.global_size=48", "batch.micro_size=4", "train.clip_norm=null")
    assert seen["samples"] == [48, 2] * 2
    assert seen["gradient"] < 1e-6


@pytest.mark.slow
def test_drop_leaves_the_short_window_out(tmp_path: Path) -> None:
    seen = run(2, 203, tmp_path, "batch.global_size=48", "batch.micro_size=8", "batch.short_window=drop")
    assert seen["samples"] == [48] * 8


SHARDED = [("fsdp", sync) for sync in ("every", "boundary", "gather_once")] + [
    ("hsdp", sync) for sync in ("every", "boundary", "gather_once", "replicas_at_boundary")
]


def collectives(kind: str, sync: str, micro_batches: int) -> dict[str, int]:
    """Return the collectives of two shard units and the root, which stays gathered until the backward pass."""
    gathers = 3 if sync == "gather_once" else 5 * micro_batches
    scatters = 3 * micro_batches if sync in ("every", "replicas_at_boundary") else 3
    reduces = 3 * micro_batches if sync == "every" else 3
    wanted = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": reduces}
    return wanted if kind == "hsdp" else {name: wanted[name] for name in ("all_gather", "reduce_scatter")}


@pytest.mark.slow
def test_every_policy_of_every_sharding_is_one_big_batch(tmp_path: Path) -> None:
    """Gradients, parameters, one loss curve, and just the collectives of the policy table."""
    ranks = 4
    # 48 samples a window; 107 = 2 full windows and a short one of 11. Several epochs, and all shapes: tests/equivalence
    base = ["batch.global_size=48", "batch.micro_size=4", "train.epochs=1"]
    runs = [
        [*base, f"strategy={kind}", f"strategy.sync={sync}", *(["strategy.shard_size=2"] if kind == "hsdp" else [])]
        for kind, sync in SHARDED
    ]
    clipped = [*base, "strategy=fsdp", "train.clip_norm=0.05"]
    *seen, with_clip = run_all(
        ranks, 107, tmp_path, [[*overrides, "train.clip_norm=null"] for overrides in runs] + [clipped]
    )
    for (kind, sync), result in zip(SHARDED, seen, strict=True):
        assert result["gradient"] < 1e-6, (kind, sync)
        assert result["norm"] < 1e-6, (kind, sync)
        assert result["parameters"] < 1e-5, (kind, sync)
        assert result["samples"] == [48, 48, 11]
        assert result["clipped"] == 0, (kind, sync)
        assert result["losses"] == pytest.approx(seen[0]["losses"], rel=1e-5), (kind, sync)
        assert result["kinds"] == collectives(kind, sync, 12 // ranks), (kind, sync)
    assert with_clip["gradient"] < 1e-6
    assert with_clip["clipped"] == 3


@pytest.mark.slow
def test_compressed_gradients_keep_to_their_bound(tmp_path: Path) -> None:
    """bf16 rounds each number once when it is sent and once in the sum of two; PowerSGD loses nothing for good:
    the sum of what was applied, with the residue still kept back, is the sum of the gradients."""
    base = ["batch.global_size=48", "batch.micro_size=4", "train.clip_norm=null"]
    runs = [
        [*base, "strategy.compress=bf16"],
        [*base, "strategy.compress=powersgd", "powersgd.start=2", "strategy.bucket_mb=0.005"],
        [*base, "strategy.compress=bf16", "strategy.sync=every"],
    ]
    bf16, powersgd, every = run_all(2, 203, tmp_path, runs)
    assert 1e-4 < bf16["gradient"] < 2**-7
    assert every["gradient"] < 2**-7
    assert powersgd["gradient"] > 0.1, "rank 1 leaves much out of a single step"
    assert powersgd["owed"] < 1e-6


AGREEMENT = Path(__file__).parent / "agreement_worker.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "selection", "count"),
    [pytest.param(1, "all", 9, marks=pytest.mark.nightly), (4, "few", 10),
     pytest.param(4, "all", 30, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_all_strategies_compute_one_function(ranks: int, selection: str, count: int, tmp_path: Path) -> None:
    seen = json.loads(torchrun(AGREEMENT, ["cpu", str(ranks), selection], ranks, tmp_path).splitlines()[-1])
    cases = {name: result for name, result in seen.items() if isinstance(result, dict)}
    assert len(cases) == count
    for name, result in cases.items():
        at_once = seen[f"{name.split()[0]} at once"]
        assert result["dtypes"] == ["torch.float32"]
        assert result["error"] < 2 * at_once, (name, result, at_once)
        assert result["outputs"] == 0, (name, result)
    if ranks == 4:
        size, lost = seen["small"]
        assert size < 1e-9
        assert lost < 2**-6, "what is sent as bf16 keeps small gradients"
        assert seen["narrow sums"] < 3 * seen["bf16 at once"]


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
    "KeepsGradient": "TaskError: KeepsGradient cannot be used with strategy=ddp: its state['before'] is the gradient",
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


@pytest.mark.slow
def test_freezing_between_steps_is_that_of_plain_torch(tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "freeze_worker.py", [str(tmp_path)], 4, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    unknown, everything = seen.pop("refused")
    assert "engine.freeze('fisrt'): matches no parameter that is trained" in unknown
    assert "first.weight" in unknown
    assert "would leave nothing to train" in everything
    assert len(seen) == 6
    for name, found in seen.items():
        assert found["error"] < 2 * found["at once"] + 1e-6, (name, found)
        assert found["resumed alike"], name
