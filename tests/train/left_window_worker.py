"""Windows that a user's own loop leaves by an exception that it catches, run by torchrun in test_left_window.py.

The reference is plain torch in one process: the same windows, each as one big batch under the same autocast, without
those that were left out.

Prints one JSON object from rank 0: by case, how far the parameters are from the reference, and what was raised.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher import Engine, make_plan
from launcher.errors import EngineMisuse
from launcher.train import under_way
from launcher.train.sampling import Permutation

SAMPLES, GLOBAL, STEPS, LEFT = 64, 16, 4, 1
OPTIONS = (
    "run.calibrate_s=0", "train.loader_workers=0", f"batch.global_size={GLOBAL}", "batch.micro_size=2",
    f"train.steps={STEPS}", "train.clip_norm=null", "schedule=constant", "schedule.warmup_steps=0",
)  # fmt: skip
STRATEGIES = {
    "ddp boundary": ("strategy=ddp", "strategy.sync=boundary"),
    "ddp every": ("strategy=ddp", "strategy.sync=every"),
    "fsdp boundary": ("strategy=fsdp", "strategy.sync=boundary"),
    "fsdp every": ("strategy=fsdp", "strategy.sync=every"),
    "fsdp gather_once": ("strategy=fsdp", "strategy.sync=gather_once"),
}


class BadBatch(Exception):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise BadBatch
        with torch.no_grad():
            self.norm(x + torch.rand(()))  # statistics that depend on the random state, and of which nothing depends
        return torch.tanh(self.linear(x)) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def data() -> list[Tensor]:
    return list(torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1)))


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().square().sum()


def flat(module: nn.Module) -> Tensor:
    state = module.state_dict()
    whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in state.items() if "norm" not in name]
    return torch.cat([value.detach().double().flatten() for value in whole])


def reference(windows: list[int], precision: str) -> Tensor:
    model, samples = build(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for window in windows:
        epoch, place = divmod(window, SAMPLES // GLOBAL)
        indices = Permutation(SAMPLES, 0, epoch).take(place * GLOBAL, GLOBAL)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(model(torch.stack([samples[index] for index in indices])))
        optimizer.zero_grad()
        (loss / GLOBAL).backward()
        optimizer.step()
    return flat(model)


def train(options: tuple[str, ...], where: str, number: int, *, again: bool) -> tuple[Engine, Model, list[str]]:
    """Train, with an exception in micro-batch ``number`` of one window.

    Args:
        where: "block", in the forward pass of a shard unit; "loss", after the forward pass; "never".
        again: the loop around the windows is started again after the exception, in place of the next window.
    """
    plan = make_plan([*OPTIONS, *options], samples=SAMPLES)
    model = build()
    block: Any = model.blocks[1]
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), plan)
    failed, states = False, list[str]()

    def window_of(batches: Any) -> None:
        nonlocal failed
        for nth, batch in enumerate(batches):
            due = not failed and engine.window_index == LEFT and nth == number and where != "never"
            failed |= due
            block.fails = due and where == "block"
            try:
                outputs = engine.model(batch)
            finally:
                block.fails = False
            if due and where == "loss":
                raise BadBatch
            engine.backward(loss_of(outputs), len(batch))
        engine.step()

    while not engine.over:
        try:
            for batches in engine.windows(data()):
                try:
                    window_of(batches)
                except BadBatch:
                    if again:
                        raise
        except BadBatch:
            states.append(str(torch.is_autocast_enabled("cpu")))
    return engine, model, states


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def cases() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for precision in ("bf16", "fp32"):  # bf16 is the default
        skipped, whole = reference([0, 2, 3, 4], precision), reference([0, 1, 2, 3], precision)
        for name, options in STRATEGIES.items():
            if precision == "bf16" and "boundary" not in name:
                continue
            own = (*options, f"precision={precision}")
            _, untouched, _ = train(own, "never", 0, again=False)
            at_best = distance(flat(untouched), whole)
            last = GLOBAL // 2 // dist.get_world_size() - 1
            for where, number, again in (("block", last, False), ("loss", 1, False), ("block", 1, True)):
                engine, model, states = train(own, where, number, again=again)
                error = distance(flat(model), whole if again else skipped)
                found: dict[str, Any] = {"error": error, "at best": at_best}
                if again:
                    exact = model.state_dict(), untouched.state_dict()
                    found["same"] = all(torch.equal(local(exact[0][n]), local(exact[1][n])) for n in exact[0])
                    found["autocast"] = states
                found["windows"], found["autocast after"] = engine.window_index, torch.is_autocast_enabled("cpu")
                results[f"{precision} {name} {where} {number} {'again' if again else 'left out'}"] = found
    return results


def local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def message(run: Callable[[], object]) -> str:
    try:
        run()
    except EngineMisuse as error:
        return str(error)
    except RuntimeError:  # the other rank has ended
        assert dist.get_rank() != 1
    return ""


def on_one_rank() -> None:
    """Rank 1 alone leaves a window out, and the others wait for it in a collective."""
    under_way.LEAVE_S = 2.0
    plan = make_plan([*OPTIONS, "strategy=ddp"], samples=SAMPLES)
    model = build()
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.05), plan)
    for batches in engine.windows(data()):
        try:
            for batch in batches:
                if dist.get_rank() == 1 and engine.window_index == LEFT:
                    raise BadBatch
                engine.backward(loss_of(engine.model(batch)), len(batch))
        except BadBatch:
            continue
        engine.step()


def without_step() -> None:
    plan = make_plan([*OPTIONS, "strategy=ddp"], samples=SAMPLES)
    model = build()
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.05), plan)
    for batches in engine.windows(data()):
        for batch in batches:
            engine.backward(loss_of(engine.model(batch)), len(batch))


def main() -> None:
    seen = cases()
    seen["without step"] = message(without_step)
    if dist.get_rank() == 0:
        print(json.dumps(seen), flush=True)
    alone = message(on_one_rank)  # the other ranks wait in a collective that never ends
    if dist.get_rank() == 1:
        print(json.dumps({"one rank": alone}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
