"""BatchNorm under accumulation: each ``batch.norm`` normalises by just the samples that it says, to fp64's rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.config.schema import Norm
from launcher.errors import ConfigError, TaskError
from launcher.loss import Loss
from launcher.plan.run_plan import RunPlan
from launcher.train.inspection.task_probe import probe
from launcher.train.parallel.base import Parallel
from launcher.train.parallel.batchnorm import batch_norms, norms_of, refusal_of_one_value
from launcher.train.precision import Precision
from tests.helpers import inspection_of, make_plan, torchrun

WORKER = Path(__file__).parent / "norm_worker.py"
CALLS = 4  # of BatchNorm in one forward pass
SAMPLES = 25  # windows of 12, 12 and 1: one rank of two has no sample in the last one


CPU = torch.device("cpu")


def run_all(ranks: int, tmp_path: Path, runs: list[str]) -> dict[str, dict[str, Any]]:
    words = [word for overrides in runs for word in (*overrides.split(), "/")]
    lines = torchrun(WORKER, [str(SAMPLES), *words], ranks, tmp_path).splitlines()
    return dict(zip(runs, [json.loads(line) for line in lines if line.startswith("{")], strict=True))


def require_one_batch(seen: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert seen["gradient"] < tolerance
    assert seen["from_one_batch"] < tolerance
    assert seen["statistics"] < tolerance
    assert seen["counted"] == [6, 12, 6], "once a window for each call: a calibration and passes ahead leave no trace"


@pytest.mark.slow
def test_on_one_rank(tmp_path: Path) -> None:
    one = "strategy=single cluster.workers_per_node=1"
    runs = {
        norm: f"{one} batch.micro_size={micro} batch.norm={norm.split()[0]}"
        for norm, micro in (("window", 3), ("window whole", 12), ("freeze", 4), ("leave", 4), ("leave whole", 12))
    }
    found = run_all(1, tmp_path, [*runs.values(), "no forward"])
    assert "engine.windows(..., forward=" in found["no forward"]["error"]
    seen = {norm: found[overrides] for norm, overrides in runs.items()}
    for norm in ("window", "window whole"):
        require_one_batch(seen[norm])
        assert seen[norm]["losses"] == pytest.approx(seen["leave whole"]["losses"], rel=1e-9)
    assert seen["freeze"]["gradient"] < 1e-9
    assert seen["freeze"]["counted"] == [0, 0, 0]
    assert seen["leave"]["gradient"] < 1e-9
    assert seen["leave"]["from_one_batch"] > 0.05, "or else there is nothing to mend"


@pytest.mark.slow
def test_on_two_ranks(tmp_path: Path) -> None:
    window, sync = "batch.norm=window batch.micro_size=2", "batch.norm=sync batch.micro_size=2"
    whole, frozen = "batch.norm=sync batch.micro_size=6", "batch.norm=freeze batch.micro_size=3"
    alone, again = "batch.norm=leave batch.micro_size=6", f"{sync} strategy.recompute=blocks"
    runs = [window, f"{window} strategy=fsdp", sync, whole, f"{sync} strategy=fsdp", frozen, alone, again]
    seen = run_all(2, tmp_path, [*runs, "dropout"])
    require_one_batch(seen[window])
    require_one_batch(seen[f"{window} strategy=fsdp"], tolerance=1e-6)  # it adds gradients up in fp32
    assert seen[window]["collectives"] == [2 * CALLS] * 6, "however many micro-batches"

    require_one_batch(seen[whole])
    assert seen[sync]["gradient"] < 1e-9
    assert seen[sync]["statistics"] < 1e-9
    assert seen[sync]["from_one_batch"] > 0.05
    assert seen[sync]["collectives"] == [2 * CALLS * n for n in (3, 3, 1)] * 2
    assert seen[f"{sync} strategy=fsdp"]["gradient"] < 1e-6

    assert seen[again]["gradient"] < 1e-9
    assert seen[again]["statistics"] < 1e-9
    assert seen[again]["counted"] == seen[sync]["counted"], "what is computed again does not count again"

    assert seen[frozen]["gradient"] < 1e-9
    assert seen[frozen]["counted"] == [0, 0, 0]
    assert seen[alone]["gradient"] < 1e-9
    assert seen[alone]["from_one_batch"] > 0.05, "or else there is nothing to mend"
    assert seen[alone]["collectives"] == [0] * 6

    assert seen["dropout"]["mean"] < 1e-9, "the passes ahead drew the very dropout of the pass that counts"
    assert seen["dropout"]["square"] == pytest.approx([1.0] * 4, rel=1e-3)


@pytest.mark.slow
def test_on_four_ranks(tmp_path: Path) -> None:
    window, sync = "batch.norm=window batch.micro_size=1", "batch.norm=sync batch.micro_size=3"
    hsdp = f"{window} strategy=hsdp strategy.shard_size=2 strategy.sync=replicas_at_boundary"
    seen = run_all(4, tmp_path, [window, hsdp, sync])
    require_one_batch(seen[window])
    require_one_batch(seen[hsdp], tolerance=1e-6)
    require_one_batch(seen[sync])


def plan_on_one_rank(norm: str, *overrides: str) -> RunPlan:
    return make_plan(
        "strategy=single", "cluster.workers_per_node=1", "batch.global_size=12", "batch.micro_size=4",
        f"batch.norm={norm}", *overrides,
    )  # fmt: skip


class Special(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) + 1


@pytest.mark.parametrize(
    ("model", "norm", "message"),
    [
        (Special(3), "sync", "Special, whose forward pass is not BatchNorm's own"),
        (nn.BatchNorm1d(3, track_running_stats=False), "freeze", "0 has no running statistics"),
        (nn.ReLU(), "window", "batch.norm=window: has no effect: the model has no BatchNorm"),
    ],
)
def test_what_cannot_be_had_is_refused(model: nn.Module, norm: str, message: str) -> None:
    plan, whole = plan_on_one_rank(norm), nn.Sequential(model, nn.Linear(3, 3))
    with pytest.raises((TaskError, ConfigError), match=message):
        norms_of(plan, Parallel(whole, plan, CPU), Precision(plan.precision, CPU), CPU)


def test_an_evaluation_is_torchs_own() -> None:
    for norm in Norm:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        plan, x = plan_on_one_rank(norm), torch.randn(5, 3)
        nn.init.normal_(batch_norms(model)["1"].running_mean)  # pyright: ignore[reportArgumentType]
        wanted = model.eval()(x)
        norms_of(plan, Parallel(model, plan, CPU), Precision(plan.precision, CPU), CPU)
        assert torch.equal(model.eval()(x), wanted)


class Ending(nn.Module):
    """Model that has one value per channel and sample in what ``kind`` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6))
        if kind == "spatial":
            self.head = nn.Sequential(nn.Conv1d(1, 6, 3), nn.BatchNorm1d(6))
        elif kind == "pooled":
            self.head = nn.Sequential(nn.Unflatten(1, (1, 2, 4)), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(1))
        elif kind == "group":
            self.head[1] = nn.GroupNorm(6, 6)
        elif kind == "eval":
            self.head.eval()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "values" and float(x.sum()) > 1e9:
            return x
        if self.kind == "functional":
            return functional.batch_norm(x, None, None, training=True)
        return self.head[0](x) if self.kind == "unused" else self.head(x[:, None] if self.kind == "spatial" else x)


class EndingTask:
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def model(self) -> nn.Module:
        return Ending(self.kind)

    def train_data(self) -> list[Tensor]:
        return list(torch.ones(33, 8))

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        return Loss(model(batch).sum(), len(batch))


ENDINGS = {
    "plain": "head.1", "pooled": "head.2", "spatial": "", "eval": "", "unused": "", "values": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", ENDINGS)
def test_a_layer_that_fails_on_one_sample_is_found_without_a_step(kind: str) -> None:
    fields = probe(inspection_of(f"{__name__}.EndingTask", kind=kind))
    assert (fields["batch_norms"], fields["one_value_norm"]) == (1, ENDINGS[kind])


def test_what_the_plan_cannot_know_names_the_layer_in_the_window_in_which_it_shows() -> None:
    plan = make_plan("batch.global_size=16", "train.epochs=1", samples=33)

    def refused(kind: str, index: int = 2) -> str | None:
        model = Ending(kind)
        with pytest.raises(ValueError, match="more than 1 value") as raised:
            model(torch.ones(1, 8))
        refusal = refusal_of_one_value(raised.value, model, plan, index, "step 3 on rank 0")
        return None if refusal is None else str(refusal)

    said = refused("values") or ""
    assert "The BatchNorm head.1 has 1 value per channel in step 3 on rank 0" in said
    assert "An epoch of 33 samples ends with a window of 1.\n  Use batch.short_window=drop, " in said
    said = refused("values", 1) or ""
    assert ".\n  Use a larger batch.micro_size or batch.global_size, batch.norm=window, or a model()" in said
    assert "An epoch" not in said, "this window is full, the epoch's last one did not fail"
    assert "The BatchNorm of the model" in (refused("functional") or "")
    assert refused("group") is None, "its own message"
