"""Quantised gathers and gradients of real ranks against numpy, run by test_block_codec.py.

argv: number of ranks; or also "nonfinite" or "collectives". Prints one JSON object from rank 0: by case, how far the
gradient that the engine applies is from one that is quantised by hand, and from the exact one.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.config.schema import StrategyKind
from launcher.plan.sync_policy import Layout
from launcher.train.measure.comm_meter import Meter
from launcher.train.measure.noise_scale import LocalGradNorm
from launcher.train.parallel.block_codec import RowCodec, part_of
from launcher.train.parallel.collectives import Gather, Scatter, UnitCollective
from launcher.train.world import World, device_of, join
from tests.infra.workers import leave_group, print_on_rank_0

Array = NDArray[np.float32]

RANKS = int(sys.argv[1])
WIDTH, SAMPLES, MICRO, STEPS = 30, 32, 2, 2
BOTH = ("strategy.compress=int8", "strategy.compress_parameters=int8")
CASES: dict[int, list[tuple[str, ...]]] = {
    2: [
        *(("fsdp", sync, *BOTH) for sync in ("every", "boundary", "gather_once")),
        ("fsdp", "boundary", "strategy.compress=int8"),
        ("fsdp", "boundary", "strategy.compress_parameters=int8"),
        ("fsdp", "gather_once", "strategy.compress=int8", "strategy.compress_parameters=float8"),
        ("fsdp", "boundary", *BOTH, "frozen"),
        ("fsdp", "every", *BOTH, "precision=bf16"),
        ("fsdp", "boundary", *BOTH, "strategy.recompute=blocks"),
    ],
    4: [
        ("fsdp", "boundary", *BOTH),
        *(("hsdp", sync, *BOTH) for sync in ("every", "boundary", "gather_once", "replicas_at_boundary")),
        ("hsdp", "boundary", "strategy.compress_parameters=float8", "precision=bf16"),
    ],
}
OPTIONS = (
    "train.loader_workers=0", f"train.steps={STEPS}", f"batch.global_size={SAMPLES}", f"batch.micro_size={MICRO}",
    "cluster.device=cpu", f"cluster.workers_per_node={RANKS}", "run.calibrate_s=0.01", "schedule=constant",
    "schedule.warmup_steps=0", "train.clip_norm=0.05",
)  # fmt: skip
SEEN: list[dict[str, Tensor]] = []  # parameters of each forward pass, while it is a list of the current case
WATCHES = [False]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.register_buffer("offset", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        if WATCHES[0]:
            SEEN.append({name: p.detach().clone() for name, p in self.named_parameters()})
        return x + self.down(functional.softplus(self.up(self.norm(x + self.offset))))


class Model(nn.Module):
    """Shapes that neither ranks nor blocks divide; a tensor of three dimensions; weights of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, WIDTH)
        self.place = nn.Parameter(torch.randn(1, 7, WIDTH) * 1e-3)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, 53)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


def build(*, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    model.embed.requires_grad_(not frozen)
    return model


def batch_of(indices: list[int]) -> Tensor:
    return torch.stack([torch.arange(7) * (index + 3) % 53 for index in indices])


def loss_of(model: Any, batch: Tensor) -> tuple[Tensor, int]:
    logits = model(batch)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum"), len(batch)


def e4m3_values() -> Array:
    """Return every finite number of float8 e4m3 that is not negative, from the definition of the format."""
    values = [m / 8 * 2.0**-6 for m in range(8)]
    values += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return np.array(values, np.float32)


def rounded(numbers: Array, codes: str) -> Array:
    """Return the numbers after blockwise quantisation, of one vector."""
    out = np.empty_like(numbers)
    for start in range(0, len(numbers), 256):
        block = numbers[start : start + 256]
        scale = np.abs(block).max() / np.float32(127 if codes == "int8" else 448)
        if scale == 0:
            out[start : start + 256] = 0
        elif codes == "int8":
            out[start : start + 256] = np.clip(np.rint(block / scale), -127, 127) * scale
        else:
            table = e4m3_values()
            size = np.abs(block / scale)[:, None]
            gap = np.abs(size - table)
            nearest = gap.argmin(1)
            upper = np.minimum(nearest + 1, len(table) - 1)  # of two as near, the even one
            tie = (gap[np.arange(len(block)), upper] == gap.min(1)) & (upper != nearest)
            nearest = np.where(tie & (nearest % 2 == 1), upper, nearest)
            out[start : start + 256] = np.sign(block) * table[nearest] * scale
    return out


def shards(tensor: Tensor, ranks: int) -> list[Array]:
    """Return the shards of a parameter or gradient, padded, as vectors."""
    rows = -(-tensor.shape[0] // ranks)
    whole = torch.zeros(rows * ranks, *tensor.shape[1:])
    whole[: tensor.shape[0]] = tensor
    return [part.flatten().numpy() for part in whole.chunk(ranks)]


def gathered(tensor: Tensor, ranks: int, codes: str | None) -> Tensor:
    """Return a parameter as all ranks of a shard group gather it."""
    if codes is None or tensor.ndim < 2:
        return tensor
    whole = np.concatenate([rounded(part, codes) for part in shards(tensor, ranks)])
    return torch.from_numpy(whole)[: tensor.numel()].view_as(tensor)


def reduced(of_ranks: list[Tensor], codes: str | None) -> Tensor:
    """Return the sum over a shard group's gradients: each rank's own shard is exact, what it receives is not."""
    if codes is None or of_ranks[0].ndim < 2:
        return torch.stack([each.double() for each in of_ranks]).sum(0)
    parts = [shards(each, len(of_ranks)) for each in of_ranks]
    sums = [
        sum(
            (part[shard] if rank == shard else rounded(part[shard], codes)).astype(np.float64)
            for rank, part in enumerate(parts)
        )
        for shard in range(len(of_ranks))
    ]
    return torch.from_numpy(np.concatenate(sums))[: of_ranks[0].numel()].view_as(of_ranks[0])


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, value)
    return found


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def norm_of(gradient: dict[str, Tensor]) -> float:
    return float(torch.stack([part.double().square().sum() for part in gradient.values()]).sum().sqrt())


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return norm_of({name: found[name].double() - wanted[name].double() for name in wanted}) / norm_of(wanted)


def sent_bytes(model: nn.Module, ranks: int, codes: str | None, width: dict[str, int], *, trained: bool) -> int:
    """Return the payload of sending each parameter once within a shard group."""
    total = 0
    for name, parameter in model.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        numel = -(-parameter.shape[0] // ranks) * parameter.shape[1:].numel()
        quantised = codes is not None and parameter.ndim > 1
        total += ranks * (numel + 4 * -(-numel // 256) if quantised else numel * width.get(name, 4))
    return total


def compare(kind: str, sync: str, *options: str) -> dict[str, Any]:
    frozen, options = "frozen" in options, tuple(option for option in options if option != "frozen")
    ranks = RANKS if kind == "fsdp" else 2
    sharding = (f"strategy={kind}", f"strategy.sync={sync}", *(("strategy.shard_size=2",) if kind == "hsdp" else ()))
    precision = () if "precision=bf16" in options else ("precision=fp32",)
    plan = make_plan([*OPTIONS, *sharding, *precision, *options], samples=SAMPLES)
    parameters_as = {"none": None}.get(plan.strategy.compress_parameters.value, plan.strategy.compress_parameters.value)
    gradients_as = "int8" if "strategy.compress=int8" in options else None
    engine = Engine(lambda: build(frozen=frozen), lambda p: torch.optim.SGD(p, 0.5), plan)
    module, reference, exact = engine.parallel.module, build(frozen=frozen), build(frozen=frozen)
    named = dict(module.named_parameters())
    applied: list[dict[str, Tensor]] = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: applied.append({name: full(p.grad) for name, p in named.items() if p.grad is not None})
    )
    narrow = {name for name in named if not precision and ("up" in name or "down" in name or "head" in name)}
    errors: dict[str, list[float]] = {"by hand": [], "exact": [], "norm": []}
    same, payload = True, {}
    for batches in engine.windows(range(SAMPLES), batch_of):
        before = {name: full(p) for name, p in named.items()}
        for name, p in reference.named_parameters():
            value = before[name].bfloat16().float() if name in narrow else before[name]
            value = gathered(value, ranks, parameters_as)
            p.data = value.bfloat16().float() if name in narrow else value
        exact.load_state_dict(before, strict=False)
        SEEN.clear()
        WATCHES[0] = bool(precision)
        local: list[dict[str, Tensor]] = []
        whole: list[dict[str, Tensor]] = []
        for batch in batches:
            total, items = loss_of(engine.model, batch)
            WATCHES[0] = False
            engine.backward(total, items)
            for model, kept in ((reference, local), (exact, whole)):
                model.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=not precision):
                    loss_of(model, batch)[0].backward()
                kept.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        result = engine.step()
        for number, seen in enumerate(SEEN):
            wanted = dict(reference.blocks[number].named_parameters())
            same &= all(torch.equal(value, wanted[name]) for name, value in seen.items())
            same &= len({tuple(p.sum().item() for p in each.values()) for each in of_all_ranks(seen)}) == 1
        if sync not in ("every", "replicas_at_boundary"):
            local = [{name: sum(each[name] for each in local) for name in local[0]}]  # pyright: ignore
        expected = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in reference.named_parameters()}
        expected = {name: expected[name] for name in local[0]}
        for number, name in itertools.product(range(len(local)), expected):
            of_ranks = of_all_ranks(local[number][name])
            for first in range(0, RANKS, ranks):
                expected[name] += reduced(of_ranks[first : first + ranks], gradients_as) / SAMPLES
        true = {name: sum(of_all_ranks(sum(each[name] for each in whole))) / SAMPLES for name in expected}
        norm = norm_of(expected)
        clip = min(1.0, 0.05 / (norm + 1e-6))
        mine = applied.pop()
        errors["by hand"].append(distance(mine, {name: part * clip for name, part in expected.items()}))
        errors["exact"].append(distance(mine, {name: part * clip for name, part in true.items()}))
        errors["norm"].append(abs(result.grad_norm / norm - 1))
        payload = {each.value: traffic.payload_bytes for each, traffic in result.comm.kinds.items()}
    with torch.no_grad():
        exact.load_state_dict({name: full(p) for name, p in named.items()}, strict=False)
        inputs, outputs = batch_of([0, 1]), list[Tensor]()
        for option in (True, False):
            with engine.parallel.evaluation(exact=option):
                outputs.append(module(inputs))
        evaluated = [(output - exact(inputs)).abs().max().item() for output in outputs]
    scatters = len(local)
    wanted_payload = {
        "reduce_scatter": scatters * sent_bytes(reference, ranks, gradients_as, {}, trained=True),
        "gathered_once": sent_bytes(reference, ranks, parameters_as, dict.fromkeys(narrow, 2), trained=False),
    }
    found = {name: max(values) for name, values in errors.items()}
    return {
        **found,
        "same": same,
        "payload": payload,
        "wanted": wanted_payload,
        "seen": len(SEEN),
        "evaluated": evaluated,
    }


def nonfinite() -> dict[str, Any]:
    """Return what the run ends with if one number of one rank's gradient, or of its shard, is inf or nan."""
    results: dict[str, Any] = {}
    for where, value in itertools.product(("gradient", "parameter"), (float("inf"), float("nan"))):
        plan = make_plan(
            [*OPTIONS, "strategy=fsdp", "strategy.sync=boundary", "precision=fp32", *BOTH], samples=SAMPLES
        )
        engine = Engine(lambda: build(frozen=False), lambda p: torch.optim.SGD(p, 0.5), plan)
        weight: Any = dict(engine.parallel.module.named_parameters())["blocks.0.up.weight"]
        if where == "parameter" and dist.get_rank() == 1:
            weight.to_local().data[3, 4] = value
        try:
            for batches in engine.windows(range(SAMPLES), batch_of):
                for batch in batches:
                    total, items = loss_of(engine.model, batch)
                    if where == "gradient" and dist.get_rank() == 1:
                        gathered = dict(engine.parallel.module.named_parameters())["head.weight"]
                        spoilt = gathered[0, 0] * 0
                        spoilt.register_hook(lambda _, value=value: torch.tensor(value))
                        total = total + spoilt
                    engine.backward(total, items)
                engine.step()
        except Exception as error:
            results[f"{where} {value}"] = str(error)
    return results


def overflow() -> dict[str, Any]:
    """Return how many windows overflow, and what is left, with a loss scale that is too large for fp16."""
    fp16 = ("precision=fp16", "precision.init_scale=1e7", "strategy.compress=int8")
    plan = make_plan([*OPTIONS, "strategy=fsdp", "strategy.sync=every", *fp16], samples=SAMPLES)
    engine = Engine(lambda: build(frozen=False), lambda p: torch.optim.SGD(p, 0.5), plan)
    skipped, norms = 0, list[float]()
    for batches in engine.windows(range(SAMPLES), batch_of):
        for batch in batches:
            engine.backward(*loss_of(engine.model, batch))
        result = engine.step()
        skipped += result.skipped
        norms += [] if result.skipped else [result.grad_norm]
    finite = all(full(p).isfinite().all().item() for p in engine.parallel.module.parameters())
    return {"skipped": skipped, "norms": norms, "finite": finite}


def collectives() -> dict[str, list[float]]:
    """Return sums of what this rank receives through sends and receives, and through the collectives of GPUs."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    row = RowCodec([part_of(700, torch.float32, 2, torch.int8), part_of(9, torch.float32, 1, torch.int8)])
    generator = torch.Generator().manual_seed(rank)
    own, gradients = torch.randn(709, generator=generator), torch.randn(2 * 709, generator=generator)
    found: dict[str, list[float]] = {}
    for exchanges, async_op in ((True, True), (False, True), (False, False)):
        layout = Layout(shard_size=2, replicas=1, unit_bytes=0, root_bytes=0, gradient_bytes=0)
        meter = Meter(StrategyKind.fsdp, layout, torch.device("cpu"))
        gather, scatter = Gather(meter, exchanges=exchanges), Scatter(meter, LocalGradNorm(), exchanges=exchanges)
        whole, part = torch.zeros(2 * 709), torch.zeros(709)
        work = UnitCollective(gather, lambda: row)(whole, own, group, async_op=async_op)
        assert (work is None) == (not exchanges and not async_op)
        if work is not None:
            work.wait()
        UnitCollective(scatter, lambda: row)(part, gradients, group, dist.ReduceOp.SUM)
        scatter.finish()
        numbers = [whole.double().sum().item(), part.double().sum().item(), *map(float, meter.payload.values())]
        found[f"exchanges={exchanges} async={async_op}"] = numbers
    return found


def main() -> None:
    plan = make_plan([*OPTIONS, "strategy=ddp"], samples=SAMPLES)
    join(World.here(), device_of(World.here(), plan.cluster.device), None)
    if "nonfinite" in sys.argv:
        print_on_rank_0(nonfinite() | {"fp16": overflow()})
    elif "collectives" in sys.argv:
        print_on_rank_0(collectives())
    else:
        print_on_rank_0({" ".join(case): compare(*case) for case in CASES[RANKS]})
    leave_group()


if __name__ == "__main__":
    main()
