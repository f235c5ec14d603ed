"""One model under every strategy, precision and sync policy, run by torchrun in test_engine.py.

The model is one that FSDP's own mixed precision would compute differently: fp32 time steps up to 993, an fp32 residual
stream, integer inputs, keyword arguments and nested inputs, tied and raw parameters, norms, a convolution, a layer
outside of autocast, and a linear layer's weight used in elementwise arithmetic.

Prints one JSON object from rank 0: by case, how far the gradient of one window is from that of fp64, and how far the
outputs of an evaluation are from those of the plain model under autocast.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.train.data.randomness import Permutation
from launcher.train.world import World, device_of, join
from tests.infra.workers import OF_FOUR_RANKS, distance, flat, leave_group, print_on_rank_0

DEVICE, RANKS = torch.device(sys.argv[1]), int(sys.argv[2])
VOCABULARY, WIDTH, LENGTH, SAMPLES = 32, 16, 6, 48
POLICIES: dict[int, list[tuple[str, ...]]] = {
    1: [("single",), ("fsdp", "boundary"), ("fsdp", "gather_once", "strategy.recompute=blocks")],
    4: OF_FOUR_RANKS,
}
OPTIONS = ["run.calibrate_s=0", "train.loader_workers=0", "train.clip_norm=null", f"cluster.device={sys.argv[1]}"]
SIZES = [f"batch.global_size={SAMPLES}", "batch.micro_size=4", "train.steps=1", f"cluster.workers_per_node={RANKS}"]


@dataclass
class Condition:
    time: Tensor  # fp32: in bf16, 993 is 992
    scales: list[Tensor]


class Block(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.time = nn.Linear(2, 24)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.gate = nn.Parameter(torch.full((WIDTH,), 1.01))  # 1.0078 in bf16
        if last:
            self.router, self.mixes = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = last

    def forward(self, x: Tensor, condition: Condition, *, shift: dict[str, Tensor]) -> Tensor:
        angle = condition.time[:, None] / 10
        wave = self.time(torch.cat([angle.sin(), angle.cos()], 1))  # the waves of a rounded time are others
        x = x + self.down(functional.gelu(self.up(self.norm(x)) + wave[:, None])) * self.gate
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2) + 0.1 * shift["by"] * condition.scales[0][:, None]
        if not self.last:
            return x
        with torch.autocast(x.device.type, enabled=False):
            weights = (3 * self.router(x)).softmax(-1)
        normed = functional.normalize(self.mixes.weight.square() + 0.1, dim=1)
        return x + functional.linear(x, normed) * weights.amax(-1, keepdim=True)


class Model(nn.Module):
    """Takes (ids, condition, shift=dict) and returns {"logits": ..., "size": [...]}."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(last=number == 1) for number in range(2)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.ids.weight
        self.offset = nn.Parameter(torch.linspace(100, 101, WIDTH))  # an fp32 residual stream keeps its steps

    def forward(self, ids: Tensor, condition: Condition, *, shift: dict[str, Tensor]) -> dict[str, Any]:
        x = self.ids(ids) + self.offset
        for block in self.blocks:
            x = block(x - self.offset, condition, shift=shift) + self.offset
        x = x - self.offset
        return {"logits": self.head(self.norm(x)), "size": [x.square().mean((1, 2))]}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch_of(indices: list[int]) -> dict[str, Tensor]:
    number = torch.tensor(indices)
    ids = (number[:, None] * 7 + torch.arange(LENGTH + 1) * 5) % VOCABULARY
    return {"ids": ids, "time": (number * 331 % 994).float(), "shift": (number[:, None, None] % 5 - 2.0)}


def forward(model: Any, batch: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    time, shift = batch["time"].to(dtype), batch["shift"].to(dtype)
    condition = Condition(time=time, scales=[(time / 1000)[:, None]])
    return model(batch["ids"][:, :-1], condition, shift={"by": shift})


def loss_sum(model: Any, batch: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, int]:
    outputs, targets = forward(model, batch, dtype), batch["ids"][:, 1:].flatten()
    total = functional.cross_entropy(outputs["logits"].flatten(0, 1), targets, reduction="sum")
    return total + outputs["size"][0].sum() * 0.1, targets.numel()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def by_hand(precision: str, whole: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The gradient of the window as one batch, and the outputs of an evaluation: plain torch."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = build().to(DEVICE, dtype)
    narrow = DTYPES.get(precision)
    with torch.autocast(DEVICE.type, narrow, enabled=narrow is not None):
        total, items = loss_sum(model, whole, dtype)
    (total * (1024 / items)).backward()  # small enough, and large enough, for fp16
    gradient = flat([p.grad for p in model.parameters()]) / 1024
    with torch.no_grad(), torch.autocast(DEVICE.type, narrow, enabled=narrow is not None):
        return gradient, forward(model.eval(), to_device(batch_of(list(range(4)))), dtype)["logits"]


def to_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def window(policy: tuple[str, ...], precision: str, *options: str, scale: float = 1.0) -> dict[str, Any]:
    """One window of the engine: the gradient that is applied, and before it an evaluation's outputs."""
    strategy, sync, *more = (*policy, "every") if len(policy) == 1 else policy
    kind = [f"strategy={strategy}", f"strategy.sync={sync}", *more, f"precision={precision}"]
    fp16 = ["precision.init_scale=1024"] if precision == "fp16" else []
    hsdp = ["strategy.shard_size=2"] if strategy == "hsdp" else []
    plan = make_plan([*OPTIONS, *SIZES, *kind, *fp16, *hsdp, *options], samples=SAMPLES)
    engine = Engine(build, lambda p: torch.optim.AdamW(p, 1e-3), plan)
    with engine.parallel.evaluation(), torch.no_grad(), engine.precision.autocast():
        outputs = forward(engine.parallel.module.eval(), to_device(batch_of(list(range(4)))))["logits"]
    engine.parallel.module.train()
    parameters, found = list(engine.parallel.module.parameters()), list[Tensor]()
    engine.optimizer.register_step_pre_hook(lambda *_: found.append(flat([p.grad for p in parameters])))
    for batches in engine.windows(range(SAMPLES), batch_of):
        for batch in batches:
            total, items = loss_sum(engine.model, batch)
            engine.backward(total * scale, items)
        assert not engine.step().skipped
    return {"gradient": found[0], "outputs": outputs, "dtypes": sorted({str(p.dtype) for p in parameters})}


def main() -> None:
    plan = make_plan([*OPTIONS, *SIZES, "strategy=ddp" if RANKS > 1 else "strategy=single"], samples=SAMPLES)
    join(World.here(), device_of(World.here(), plan.cluster.device), None)
    whole = to_device(batch_of(list(Permutation(SAMPLES, plan.train.seed, 0).take(0, SAMPLES))))
    exact, _ = by_hand("fp64", whole)
    results: dict[str, Any] = {}
    for place, precision in enumerate(("bf16", "fp16", "fp32")):
        at_once, outputs = by_hand(precision, whole)
        results[f"{precision} at once"] = distance(at_once, exact)
        for number, policy in enumerate(POLICIES[RANKS]):
            if sys.argv[3] != "all" and number % 3 != place:  # each policy in one precision
                continue
            seen = window(policy, precision)
            results[f"{precision} {' '.join(policy)}"] = {
                "error": distance(seen["gradient"], exact),
                "outputs": distance(seen["outputs"].double(), outputs.double()),
                "dtypes": seen["dtypes"],
            }
    if RANKS > 1:
        sent_whole = window(("ddp", "boundary"), "fp32", scale=1e-9)["gradient"]
        sent_narrow = window(("ddp", "boundary"), "fp32", "strategy.compress=bf16", scale=1e-9)["gradient"]
        results["small"] = [sent_whole.abs().mean().item(), distance(sent_narrow, sent_whole)]
        narrow_sums = window(("fsdp", "boundary"), "bf16", "precision.reduce_dtype=bf16")["gradient"]
        results["narrow sums"] = distance(narrow_sums, exact)
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
