"""Model FLOPs, counted without memory, against arithmetic; and the peaks of devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher import Loss
from launcher.config.schema import PrecisionKind
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.tasks.digits import Digits
from launcher.train import metrics, training_loop
from launcher.train.inspection.task_probe import probe
from launcher.train.measure.flops import flops_per_sample, peak_flops
from launcher.train.world import World
from tests.helpers import inspection_of, make_plan

WIDTH, HEADS, DEPTH, LENGTH, TOKENS = 32, 4, 3, 24, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    """``how``: recompute, in the older or the newer form of torch's checkpoint."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.places = how, torch.arange(LENGTH)  # no buffer
        self.embed, self.position = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(self.places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.how == "older") if self.how in ("older", "newer") else block(x)
        return self.head(x)


class Text:
    """``how``: "masked" picks the valid targets by a mask, as the task in the README does."""

    def __init__(self, how: str = "") -> None:
        self.how = how

    def model(self) -> nn.Module:
        return GPT(self.how)

    def train_data(self) -> list[Tensor]:
        return list(torch.randint(0, TOKENS, (9, LENGTH + 1)))

    def loss(self, model: Any, batch: Tensor) -> Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        if self.how == "masked":
            valid = targets != 0
            logits, targets = logits[valid], targets[valid]
            return Loss(functional.cross_entropy(logits, targets, reduction="sum"), valid.sum())
        return Loss(functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())


def counted(task: Any, model: nn.Module | None = None) -> float | None:
    return flops_per_sample(task, model or task.model(), task.train_data())


@pytest.mark.parametrize("how", ["", "older", "newer", "masked"])
def test_a_transformer_is_6_n_t_and_12_l_d_t_squared(how: str) -> None:
    """Attention in one kernel among it; and not what a backward pass computes again."""
    matrices = sum(p.numel() for name, p in GPT("").named_parameters() if p.ndim == 2 and "emb" not in name)
    matrices -= LENGTH * WIDTH  # of position.weight
    assert counted(Text(how)) == 6 * matrices * LENGTH + 12 * DEPTH * WIDTH * LENGTH**2


class Pictures:
    """A convolution with BatchNorm, whose first input needs no gradient; a stream; a collate of its own."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))

    def train_data(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            yield torch.randn(3, 8, 8), 1

    def collate(self, samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])


def test_a_convolution() -> None:
    convolution, linear = 2 * 36 * 8 * 3 * 9, 2 * 8 * 36 * 5
    assert counted(Pictures()) == 2 * convolution + 3 * linear, "no gradient of the pictures"


class Meta(Text):
    """Model on the meta device, as the inspection of a task has it, with a method that keeps its input."""

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return GPT("")

    def loss(self, model: Any, batch: Tensor) -> Loss:
        self.seen = batch
        return super().loss(model, batch)


class Blind(Text):
    """Its loss asks a tensor for its value."""

    def loss(self, model: Any, batch: Tensor) -> Loss:
        return Loss(model(batch[:, :-1]).sum() * batch.float().mean().item(), 1)


class Unreadable(list[Tensor]):
    def __getitem__(self, index: Any) -> Any:
        raise OSError(f"{index} is not here")


class Elsewhere(Text):
    """Its samples can be read where the job runs only."""

    def train_data(self) -> list[Tensor]:
        return Unreadable(super().train_data())


def test_the_model_stays_as_it_is_and_what_cannot_be_counted_is_left_out() -> None:
    task, model = Text(), GPT("")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    known = counted(task, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert counted(Meta()) == known
    assert counted(Blind()) is None
    assert counted(Elsewhere()) is None


def test_a_look_at_a_task_counts_them_unless_the_task_says_so() -> None:
    assert probe(inspection_of(f"{__name__}.Text"))["flops_per_sample"] == counted(Text())
    assert probe(inspection_of(f"{__name__}.Says"))["flops_per_sample"] is None


class Says(Text):
    def flops_per_sample(self) -> float:
        return 1e12


@pytest.mark.parametrize("task", [Text(), Says()])
def test_what_is_recorded(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 samples/s of 1e12 FLOPs, on two GPUs of 70 TFLOP/s in bf16."""
    plan = make_plan("precision=bf16", "checkpoint.enabled=false")
    plan = dataclasses.replace(plan, task=dataclasses.replace(plan.task, flops_per_sample=1e12))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A10G")
    monkeypatch.setattr(metrics, "step_metrics", lambda *_: {"throughput/samples_per_s": 10.0})

    def recorded(device: str) -> dict[str, float]:
        parts: Any = SimpleNamespace(
            device=torch.device(device), world=World(rank=0, size=2, local_rank=0), plan=plan, samples=0,
            items=0, empty_windows=0, nonfinite_windows=0,
            precision=SimpleNamespace(scales=False), total_s=1.0, calibration_due=False, last=False, since=0,
            best=SimpleNamespace(metrics=dict), cadence=None, fence=None, failed=None, parts={}, commit=None,
            metrics=dict,
        )  # fmt: skip
        for part in ("RunTotals", "Saver", "ReplicaCheck"):
            monkeypatch.setattr(training_loop, part, lambda *_: parts)
        loop = training_loop.TrainingLoop(plan, task, parts, parts, parts, None)
        result: Any = SimpleNamespace(metrics={}, last=False)
        return loop.step_metrics(result)

    assert recorded("cuda")["throughput/mfu"] == pytest.approx(10e12 / 140e12)
    on_cpu = recorded("cpu")
    assert on_cpu["throughput/flops_per_s"] == 10e12
    assert "throughput/mfu" not in on_cpu


def test_the_bundled_tasks_own_formulas_are_what_is_counted() -> None:
    task = BytesGPT(width=64, depth=3, heads=2, seq_len=48)
    assert task.flops_per_sample() == pytest.approx(counted(task), rel=0.02), "it counts biases and norms as matrices"
    assert Digits(width=3).flops_per_sample() == counted(Digits(width=3))


TERA = {
    ("NVIDIA A100-SXM4-80GB", "bf16"): 312, ("A100-SXM4-40GB", "fp16"): 312, ("NVIDIA A100-SXM4-80GB", "fp32"): 19.5,
    ("NVIDIA A100-SXM4-80GB", "tf32"): 156, ("NVIDIA A10", "bf16"): 125, ("NVIDIA A10G", "bf16"): 70,
    ("NVIDIA H100 80GB HBM3", "bf16"): 989.4, ("NVIDIA H100 PCIe", "bf16"): 756, ("NVIDIA H100 NVL", "bf16"): 835.5,
    ("NVIDIA H200", "fp32"): 67, ("NVIDIA H200", "tf32"): 494.5, ("NVIDIA L4", "fp16"): 121,
    ("NVIDIA L40S", "bf16"): 362.05, ("Tesla V100-SXM2-16GB", "fp16"): 125, ("Tesla V100-PCIE-16GB", "fp16"): 112,
    ("Tesla V100-SXM2-16GB", "bf16"): None, ("Tesla T4", "tf32"): 8.1, ("NVIDIA GeForce RTX 4090", "bf16"): 165.2,
    ("NVIDIA RTX A1000", "bf16"): None, ("NVIDIA RTX A1000 Laptop GPU", "fp32"): None, ("NVIDIA A2", "bf16"): None,
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"): None, ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16"): None,
    ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"): None, ("NVIDIA A10-24Q", "bf16"): None, ("", "fp32"): None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), TERA)
def test_the_peak_is_that_of_the_very_device_in_the_very_precision(name: str, precision: str) -> None:
    tf32 = precision == "tf32"
    peak = peak_flops(name, PrecisionKind("fp32" if tf32 else precision), tf32=tf32)
    tera = TERA[name, precision]
    assert peak == (None if tera is None else pytest.approx(tera * 1e12))
