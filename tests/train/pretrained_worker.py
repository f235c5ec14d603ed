"""bf16 parameters that become fp32, or stay, run by torchrun in test_precision.py: prints one JSON object.

The model is bf16 throughout, as ``from_pretrained(torch_dtype=torch.bfloat16)`` returns it, with a frozen part, a tied
weight and a BatchNorm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.train.data.randomness import Permutation
from tests.infra.workers import flat, leave_group, print_on_rank_0

SAMPLES, WIDTH = 256, 12
OPTIONS = ["run.calibrate_s=0", "train.loader_workers=0", "train.clip_norm=null", "train.steps=1", "cluster.device=cpu"]
SIZES = [f"batch.global_size={SAMPLES}", "batch.micro_size=1"]  # accumulation 128


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(20, WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.ids.weight
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.base(self.ids(ids))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.norm(x))


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Pretrained()


def loss_sum(model: Any, ids: Tensor) -> tuple[Tensor, int]:
    total = functional.cross_entropy(model(ids[:, 0]).float(), ids[:, 1], reduction="sum")
    return total, len(ids)


def texts(indices: Iterable[int]) -> Tensor:
    numbers = torch.tensor(list(indices))
    return torch.stack([numbers * 7 % 20, numbers * 3 % 19], 1)


def by_hand() -> Tensor:
    """The window's gradient in fp64, at the parameters that bf16 holds."""
    model = seeded().double().eval()
    total, items = loss_sum(model, texts(Permutation(SAMPLES, 0, 0).take(0, SAMPLES)))
    (total / items).backward()
    return flat(p.grad for p in model.parameters() if p.requires_grad)


def run(make: Callable[[], Any], given: bool, *overrides: str) -> dict[str, Any]:
    """One window: error of the gradient against fp64, and all formats after the step."""
    plan = make_plan([*OPTIONS, *SIZES, "batch.norm=freeze", *overrides], samples=SAMPLES)
    if given:
        model = make()
        optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        engine = Engine(model, optimizer, plan)
    else:
        engine = Engine(make, lambda p: torch.optim.AdamW(p, 1e-3), plan)
    module, found = engine.parallel.module, list[Tensor]()
    trained = [p for p in module.parameters() if p.requires_grad]
    engine.optimizer.register_step_pre_hook(lambda *_: found.append(flat(p.grad for p in trained)))
    for batches in engine.windows(range(SAMPLES), texts):
        for batch in batches:
            engine.backward(*loss_sum(engine.model, batch))
        engine.step()
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    wanted = by_hand()
    return {
        "error": ((found[0] - wanted).norm() / wanted.norm()).item(),
        "trained": sorted({str(p.dtype) for p in trained}),
        "frozen": sorted({str(p.dtype) for p in module.parameters() if not p.requires_grad}),
        "buffers": sorted({str(b.dtype) for b in module.buffers() if b.is_floating_point()}),
        "state": sorted({str(value.dtype) for value in states if isinstance(value, Tensor) and value.ndim}),
        "tied": module.ids.weight is module.head.weight,
    }


def main() -> None:
    results: dict[str, Any] = {}
    cases: list[tuple[str, Callable[[], Any], bool, list[str]]] = [
        ("bf16", seeded, False, ["precision=bf16"]),
        ("bf16 given", seeded, True, ["precision=bf16"]),
        ("bf16 unseeded build", Pretrained, False, ["precision=bf16"]),
        ("fp32", seeded, False, ["precision=fp32"]),
        ("keep", seeded, False, ["precision=bf16", "precision.parameters=keep"]),
    ]
    for first, strategy in enumerate(("ddp", "fsdp")):
        for number, (name, make, given, overrides) in enumerate(cases):
            if sys.argv[1] == "all" or name == "keep" or number % 2 == first:
                results[f"{strategy} {name}"] = run(make, given, f"strategy={strategy}", *overrides)
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
