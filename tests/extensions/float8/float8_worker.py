"""precision=float8 under every strategy and sync policy, run by torchrun in test_float8.py.

The reference is one process, one big batch, and torchao's own conversion of a model whose linear layers are in bf16.
Prints one JSON object from rank 0: by case, the distance of the gradient of one window from the reference, and whether
the outputs of an evaluation are those of the reference.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.train.data.randomness import Permutation
from launcher.train.world import World, device_of, join
from tests.infra.workers import OF_FOUR_RANKS, distance, flat, leave_group, print_on_rank_0

DEVICE, RANKS = torch.device("cpu"), 4
VOCABULARY, WIDTH, LENGTH, SAMPLES = 48, 32, 8, 32
OPTIONS = ["run.calibrate_s=0", "train.loader_workers=0", "train.clip_norm=null", "cluster.device=cpu"]
SIZES = [f"batch.global_size={SAMPLES}", "train.steps=1", f"cluster.workers_per_node={RANKS}"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch_of(indices: list[int]) -> Tensor:
    number = torch.tensor(indices)[:, None]
    return (number * 7 + torch.arange(LENGTH + 1) * (5 + number)) % VOCABULARY


def loss_sum(model: Any, words: Tensor) -> tuple[Tensor, int]:
    targets = words[:, 1:].flatten()
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), targets, reduction="sum"), targets.numel()


def by_hand(recipe: str | None, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the window as one batch, and the outputs of an evaluation; without a recipe in bf16 only."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model: Any = build()
    if recipe is not None:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        for block in model.blocks:
            for name in ("up", "down"):
                getattr(block, name).to(torch.bfloat16).register_forward_pre_hook(lambda _, x: (x[0].bfloat16(),))
        hooks = [dict(layer._forward_pre_hooks) for block in model.blocks for layer in (block.up, block.down)]
        convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "head", config=config)
        for layer, of_layer in zip((each for b in model.blocks for each in (b.up, b.down)), hooks, strict=True):
            layer._forward_pre_hooks.update(of_layer)  # the conversion makes new layers
    with torch.autocast("cpu", torch.bfloat16):
        total, items = loss_sum(model, whole)
    (total / items).backward()
    gradient = flat([p.grad for p in model.parameters()])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return gradient, model.eval()(batch_of([0, 1, 2, 3])[:, :-1])


def window(policy: tuple[str, ...], micro: int, *options: str) -> tuple[Tensor, Tensor, list[str]]:
    """One window of the engine: gradient that is applied, outputs of an evaluation before it, and dtypes kept."""
    strategy, sync, *more = policy
    kind = [f"strategy={strategy}", f"strategy.sync={sync}", *more, "precision=float8", f"batch.micro_size={micro}"]
    hsdp = ["strategy.shard_size=2"] if strategy == "hsdp" else []
    emulated = ["float8.emulate=true", *options]
    plan = make_plan([*OPTIONS, *SIZES, *kind, *hsdp, *emulated], samples=SAMPLES)
    engine = Engine(build, lambda p: torch.optim.AdamW(p, 1e-3), plan)
    parameters, found = list(engine.parallel.module.parameters()), list[Tensor]()
    engine.optimizer.register_step_pre_hook(lambda *_: found.append(flat([p.grad for p in parameters])))
    with engine.parallel.evaluation(), torch.no_grad(), engine.precision.autocast():
        outputs = engine.parallel.module.eval()(batch_of([0, 1, 2, 3])[:, :-1])
    engine.parallel.module.train()
    for batches in engine.windows(range(SAMPLES), batch_of):
        for batch in batches:
            engine.backward(*loss_sum(engine.model, batch))
        engine.step()
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    dtypes = {str(t.dtype) for t in (*parameters, *states) if isinstance(t, Tensor)}
    return found[0], outputs, sorted(dtypes)


def main() -> None:
    plan = make_plan([*OPTIONS, *SIZES, "batch.micro_size=1"], samples=SAMPLES)
    join(World.here(), device_of(World.here(), plan.cluster.device), None)
    whole = batch_of(list(Permutation(SAMPLES, plan.train.seed, 0).take(0, SAMPLES)))
    recipe = "rowwise_with_gw_hp"
    wanted, wanted_outputs = by_hand(recipe, whole)
    results: dict[str, Any] = {"bf16": distance(by_hand(None, whole)[0], wanted)}
    for policy in OF_FOUR_RANKS if sys.argv[1] == "all" else OF_FOUR_RANKS[1::2]:
        gradient, outputs, dtypes = window(policy, 2)
        results[" ".join(policy)] = {
            "error": distance(gradient, wanted), "outputs": torch.equal(outputs, wanted_outputs), "dtypes": dtypes
        }  # fmt: skip
    for micro in (1, 4, 8):
        results[f"micro {micro}"] = distance(window(("fsdp", "boundary"), micro)[0], wanted)
    excluded = window(("ddp", "boundary"), 2, "float8.exclude=[up]")[0]
    results["excluded"] = distance(excluded, wanted)
    print_on_rank_0(results)
    leave_group()


if __name__ == "__main__":
    main()
