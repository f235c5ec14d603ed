"""Losses of a whole window against plain PyTorch on one big batch; run by torchrun in test_window_outputs.py.

argv: names of the functions below that return something. Prints one JSON object from rank 0 for each.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from launcher import Engine, Loss, make_plan
from launcher.extensions.window_loss.rows import gathered
from launcher.train.evaluation import Evaluation
from launcher.train.world import World
from tests.infra.workers import Calls, leave_group, message_of, print_on_rank_0

COMMON = (
    "run.calibrate_s=0", "train.loader_workers=0", "batch.global_size=12", "train.clip_norm=null", "optimizer=sgd",
    "schedule=constant", "schedule.warmup_steps=0", "train.steps=4",
)  # fmt: skip
SAMPLES, LEARNING_RATE = 31, 0.5  # three windows an epoch, the last one of 7 samples
EXACT = "precision=fp32"
WORLD = World.here()
CALLS = Calls()


def data(count: int = SAMPLES, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return list(
        zip(
            torch.randn(count, 8, generator=generator).to(dtype),
            torch.randn(count, 5, generator=generator).to(dtype),
            strict=True,
        )
    )


class Towers(nn.Module):
    """Two encoders with dropout, a temperature, and a buffer that each forward pass changes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 6))
        self.text = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 6))
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))
        self.to(dtype)


class Pairs:
    """Symmetric contrastive loss of pairs, with the temperature as a row of its own, and an accuracy."""

    def outputs(self, model: Any, batch: Sequence[Tensor]) -> Any:
        image, text = (functional.normalize(each, dim=1) for each in (model.image(batch[0]), model.text(batch[1])))
        return {"image": image, "text": text, "scale": model.temperature.exp().expand(len(image))}

    def window_loss(self, outputs: Any) -> Any:
        logits = outputs["scale"][:, None] * outputs["image"] @ outputs["text"].T
        own = torch.arange(len(logits))
        both = [functional.cross_entropy(each, own, reduction="sum") for each in (logits, logits.T)]
        return Loss((both[0] + both[1]) / 2, len(logits), {"accuracy": ((logits.argmax(1) == own).sum(), len(logits))})


class Clip(Pairs):
    """Pairs with a buffer and an attribute that each forward pass changes, and rows of whole numbers."""

    calls = 0

    def outputs(self, model: Any, batch: Sequence[Tensor]) -> Any:
        self.calls += 1
        model.calls += 1
        rows = super().outputs(model, batch)
        number = torch.full((len(batch[0]),), self.calls)
        return {**rows, "image": rows["image"] * (1 + model.calls / 8), "number": number}

    def window_loss(self, outputs: Any) -> Any:
        return super().window_loss({**outputs, "image": outputs["image"] * (1 + outputs["number"] / 8)[:, None]})


class Mixed(Pairs):
    """Pairs with rows of several widths, the narrow ones first."""

    def outputs(self, model: Any, batch: Sequence[Tensor]) -> Any:
        count = len(batch[0])
        narrow = {"used": torch.ones(count, 3, dtype=torch.bool), "weight": torch.ones(count, 1, dtype=torch.float16)}
        return {**narrow, "single": torch.ones(count, 3), **super().outputs(model, batch)}

    def window_loss(self, outputs: Any) -> Any:
        factor = outputs["used"][:, 2] * outputs["weight"][:, 0] * outputs["single"][:, 1]
        return super().window_loss({**outputs, "scale": outputs["scale"] * factor})


class Correlation(Pairs):
    """Correlation of two numbers over the window, as a bare scalar."""

    def outputs(self, model: Any, batch: Sequence[Tensor]) -> Any:
        return torch.stack([model.image(batch[0]).sum(1), model.text(batch[1]).sum(1) * model.temperature], 1)

    def window_loss(self, outputs: Tensor) -> Any:
        one, other = (outputs - outputs.mean(0)).unbind(1)
        return -(one * other).mean() / (one.std() * other.std() + 0.1)


class EachAlone:
    """Mistake: the loss of each micro-batch by itself."""

    def loss(self, model: Any, batch: Sequence[Tensor]) -> Loss:
        return Pairs().window_loss(Pairs().outputs(model, batch))


def full(model: nn.Module) -> dict[str, Tensor]:
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for name, p in model.named_parameters()}


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Sequence[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def compare(
    task: Any, *options: str, samples: Any = None, dtype: torch.dtype = torch.float64, reference: Any = None
) -> dict[str, Any]:
    """Return the largest differences of loss, accuracy and parameters between the engine and one big batch.

    The reference runs the micro-batches of all ranks in one graph, each with its rank's random numbers.
    """
    samples = data(dtype=dtype) if samples is None else samples
    count = len(samples) if hasattr(samples, "__len__") else None
    plan = make_plan([*COMMON, *options], samples=count)
    model = lambda: Towers(dtype)  # noqa: E731
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE), plan, owner=task)
    plain, reference = Towers(dtype), reference or copy.deepcopy(task)
    found = {"loss": 0.0, "accuracy": 0.0, "parameters": 0.0, "items": [], "skipped": 0}
    torch.manual_seed(100 + WORLD.rank)
    loss = engine.outputs.loss if engine.outputs is not None else lambda model, batch, _: task.loss(model, batch)
    for window in engine.windows(samples):
        state, calls, seen = torch.get_rng_state(), plain.calls.clone(), []  # pyright: ignore[reportCallIssue]
        for batch in window:
            seen.append((copy.deepcopy(batch), engine.samples_in_batch))
            engine.backward(loss(engine.model, batch, engine.samples_in_batch))
        result = engine.step()
        after = torch.get_rng_state()
        before, rows = getattr(task, "calls", 0), []
        for state_of_rank, micro_batches in WORLD.of_all((state, seen)):
            torch.set_rng_state(state_of_rank)
            plain.calls.copy_(calls)  # pyright: ignore[reportCallIssue]
            reference.calls = before - len(micro_batches)
            for batch, number in micro_batches:
                with engine.precision.autocast():
                    outputs = reference.outputs(plain, batch)
                if number:
                    rows.append(outputs)
        torch.set_rng_state(after)
        with engine.precision.autocast():
            whole = reference.window_loss(
                {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
                if isinstance(rows[0], dict)
                else torch.cat(rows)
            )
        if result.skipped:  # fp16 has overflowed
            found["skipped"] += 1
            continue
        mean = whole.total / whole.items if isinstance(whole, Loss) else whole
        for parameter, gradient in zip(
            plain.parameters(), torch.autograd.grad(mean, [*plain.parameters()]), strict=True
        ):
            parameter.data -= LEARNING_RATE * gradient
        found["loss"] = max(found["loss"], abs(result.loss - mean.item()))
        if isinstance(whole, Loss):
            right, of = whole.metrics["accuracy"]
            found["accuracy"] = max(found["accuracy"], abs(result.metrics["accuracy"] - float(right) / of))
        found["items"].append(result.items)
        for name, value in full(engine.model).items():
            apart = (value - plain.get_parameter(name)).abs().max().item()
            found["parameters"] = max(found["parameters"], apart)
    found["noise"] = engine.noise is not None
    return found


def exact() -> Any:
    """By case, the differences. Micro-batches so that a window has 1, 2 and 3 of them; the last window is uneven."""
    ranks = WORLD.size
    whole = 12 // ranks
    sizes = {1: whole, 2: -(-whole // 2), 3: -(-whole // 3)}
    found: dict[str, Any] = {}
    for accumulation, size in sizes.items():
        micro = f"batch.micro_size={size}"
        uneven = ["batch.uneven=true"] * (ranks * size * accumulation != 12)
        found[f"ddp {accumulation}"] = compare(Clip(), EXACT, micro, *uneven)
    third = f"batch.micro_size={sizes[3]}"
    found["correlation"] = compare(Correlation(), EXACT, third)
    found["stream"] = compare(Clip(), EXACT, third, samples=Stream(data()))
    if ranks > 1:
        found["every"] = compare(Clip(), EXACT, third, "strategy=ddp", "strategy.sync=every")
        found["fsdp"] = compare(Clip(), EXACT, third, "strategy=fsdp", "strategy.sync=boundary")
        found["fsdp once"] = compare(Clip(), EXACT, third, "strategy=fsdp", "strategy.sync=gather_once")
    if ranks == 4:
        for sync in ("boundary", "replicas_at_boundary"):
            options = ("strategy=hsdp", "strategy.shard_size=2", f"strategy.sync={sync}")
            found[f"hsdp {sync}"] = compare(Clip(), EXACT, third, *options)
    return found


def few_rows() -> Any:
    """Differences of a run whose last window has one sample; and, for numbers of rows by rank, the tensors that did
    not arrive as they were sent."""
    found: dict[str, Any] = {"run": compare(Mixed(), EXACT, "batch.micro_size=6", samples=data(25)), "wrong": []}
    for numbers in ((1, 1), (1, 0), (0, 1), (2, 1), (3, 3)):
        sent = [
            [
                torch.full((number, 5), rank == 1),
                torch.arange(number * 3).reshape(3, number).T.half() + rank,
                torch.empty(number, 0, dtype=torch.int64),
                torch.full((number, 3), rank + 0.5),
                (torch.arange(number * 3) + rank)[::3],
                torch.full((number, 2, 3), rank - 0.25, dtype=torch.bfloat16),
                (torch.arange(number * 4.0).reshape(number, 4).double() - rank)[:, 1:2],
            ]
            for rank, number in enumerate(numbers)
        ]
        received = gathered(sent[WORLD.rank], WORLD, torch.device("cpu"))
        for rank, (one, other) in enumerate(zip(sent, received, strict=True)):
            same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)]
            found["wrong"] += [[numbers, rank, index] for index, right in enumerate(same) if not right]
    return {**found, "wrong": [each for wrong in WORLD.of_all(found["wrong"]) for each in wrong]}


def narrow() -> Any:
    """In bf16, the default where it is native, and in fp16."""
    single = torch.float32
    return {
        "bf16": compare(Clip(), "precision=bf16", "batch.micro_size=2", dtype=single),
        "fp16": compare(Clip(), "precision=fp16", "batch.micro_size=2", dtype=single),
        "each alone": compare(EachAlone(), "precision=bf16", "batch.micro_size=2", dtype=single, reference=Pairs()),
    }


def evaluation() -> Any:
    """eval/loss and eval/accuracy of a data set and of a stream, and what they should be: of groups of 12 samples."""
    model, total, right = Towers().eval(), 0.0, 0.0
    for start in range(0, SAMPLES, 12):
        batch = [torch.stack(each) for each in zip(*data()[start : start + 12], strict=True)]
        loss = Pairs().window_loss(Pairs().outputs(model, batch))
        total, right = total + loss.total.item(), right + float(loss.metrics["accuracy"][0])
    expected = {"eval/loss": total / SAMPLES, "eval/accuracy": right / SAMPLES}
    found = {}
    for name, samples in (("mapped", data()), ("stream", Stream(data()))):
        for micro in (1, 3):
            plan = make_plan([*COMMON, EXACT, f"batch.micro_size={micro}", "batch.uneven=true"], samples=SAMPLES)
            task = Pairs()
            engine = Engine(Towers, lambda parameters: torch.optim.SGD(parameters, 0.1), plan, owner=task)
            values = Evaluation(engine, task, {"": samples}).run()  # pyright: ignore[reportArgumentType]
            found[f"{name} {micro}"] = [values, expected]
    return found


class Wrong(Clip):
    """Mistakes, by name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.scale: Any = None

    def outputs(self, model: Any, batch: Sequence[Tensor]) -> Any:
        rows = super().outputs(model, batch)
        match self.kind:
            case "noise":
                return {**rows, "image": rows["image"] + CALLS.count()}
            case "a scalar":
                return {**rows, "scale": model.temperature.sum()}
            case "a number":
                return {**rows, "scale": 1.0}
            case "fewer rows":
                return {**rows, "text": rows["text"][1:]}
            case "another dtype":
                return {**rows, "text": rows["text"].float() if WORLD.rank else rows["text"]}
            case "another shape":
                return {**rows, "text": rows["text"][:, : self.calls]}
            case "complex":
                return {**rows, "text": rows["text"].to(torch.complex128)}
            case _:
                return rows

    def window_loss(self, outputs: Any) -> Any:
        loss = super().window_loss(outputs)
        match self.kind:
            case "a list":
                return [loss]
            case "detached":
                return Loss(loss.total.detach(), loss.items)
            case "a parameter":
                return Loss(loss.total * self.scale.sum(), loss.items)
            case "a vector":
                return Loss(loss.total.repeat(2), loss.items)
            case _:
                return loss


def messages() -> Any:
    """By mistake, the message on every rank; nothing was applied."""
    kinds = (
        "noise", "a scalar", "a number", "fewer rows", "another dtype", "another shape", "complex", "a list",
        "detached", "a parameter", "a vector",
    )  # fmt: skip
    found = {}
    for kind in kinds:
        plan = make_plan([*COMMON, EXACT, "batch.micro_size=2"], samples=SAMPLES)
        task = Wrong(kind)
        engine = Engine(Towers, lambda parameters: torch.optim.SGD(parameters, 0.1), plan, owner=task)
        task.scale = engine.model.temperature
        before = full(engine.model)

        def train(engine: Any = engine) -> None:
            for window in engine.windows(data()):
                for batch in window:
                    engine.backward(engine.outputs.loss(engine.model, batch, engine.samples_in_batch))
                engine.step()

        message = message_of(train)
        assert all(torch.equal(value, before[name]) for name, value in full(engine.model).items()), kind
        found[kind] = WORLD.of_all(message)
    return found


CASES: dict[str, Callable[[], Any]] = {case.__name__: case for case in (exact, few_rows, narrow, evaluation, messages)}


def main() -> None:
    for name in sys.argv[1:]:
        print_on_rank_0({name: CASES[name]()})
    leave_group()


if __name__ == "__main__":
    main()
