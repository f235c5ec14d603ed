"""Three classic examples of gradient accumulation on the engine, one rank each.

docs/explanations/classics.md shows the output.

launch run cluster.workers_per_node=1 -- jobs/classics.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher import Engine, make_plan

EXACT = ["precision=fp32", "schedule=constant", "train.clip_norm=null", "train.loader_workers=0", "run.calibrate_s=0"]


def engine_of(model: nn.Module, lr: float, samples: int, *options: str) -> Engine:
    return Engine(model, torch.optim.SGD(model.parameters(), lr=lr), make_plan([*EXACT, *options], samples=samples))


def one_big_batch() -> None:
    print("A linear classifier: a batch of 64, and 4 x 16")
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (2048,), generator=generator)
    inputs = torch.randn(10, 20, generator=generator)[labels] + torch.randn(2048, 20, generator=generator)
    data = list(zip(inputs, labels, strict=True))
    curves: list[list[float]] = []
    weights: list[Tensor] = []
    for micro_size in (64, 16):
        torch.manual_seed(0)
        model, losses = nn.Linear(20, 10), []
        engine = engine_of(model, 0.5, 2048, "batch.global_size=64", f"batch.micro_size={micro_size}", "train.steps=60")
        for window in engine.windows(data):
            for x, y in window:
                engine.backward(functional.cross_entropy(engine.model(x), y, reduction="sum"), items=len(y))
            losses.append(engine.step().loss)
        curves.append(losses)
        weights.append(model.weight.detach())
    print("  step   loss of 64  loss of 4 x 16  difference")
    for step in (1, *range(10, 61, 10)):
        one, four = (losses[step - 1] for losses in curves)
        print(f"  {step:4}  {one:11.7f}  {four:14.7f}  {abs(one - four):10.1e}")
    apart = (weights[0] - weights[1]).abs().max()
    print(f"  weights: at most {apart:.1e} apart after 60 steps; the largest is {weights[0].abs().max():.2f}\n")


def gradients(model: nn.Module, data: list[Tensor], *options: str) -> list[tuple[Tensor, list[Tensor]]]:
    """Return each window's gradient and micro-batches; SGD with rate 1 decreases the weights by the gradient.

    The loss of a sample is its dot product with the weights, so that the sample itself is its gradient.
    """
    engine, seen = engine_of(model, 1.0, len(data), *options), []
    (weights,) = model.parameters()
    for window in engine.windows(data):
        before, batches = weights.detach().clone(), []
        for x in window:
            engine.backward(engine.model(x).sum(), items=len(x))
            batches.append(x)
        engine.step()
        seen.append(((before - weights.detach())[0], batches))
    return seen


def dot_product() -> None:
    print("A dot product with three weights: 6 samples in 3 batches of 2")
    data = torch.arange(1.0, 19.0).reshape(6, 3)
    model = nn.Linear(3, 1, bias=False)

    def gradient() -> list[float]:
        assert model.weight.grad is not None
        return model.weight.grad[0].tolist()

    model(data).mean().backward()
    print("  one batch of 6:          ", gradient())
    model.zero_grad()
    for batch in data.split(2):
        model(batch).mean().backward()
    print("  3 of 2, not normalised:  ", gradient(), " three times too large")
    model.zero_grad()
    for batch in data.split(2):
        (model(batch).mean() / 3).backward()
    print("  3 of 2, normalised by 3: ", gradient())
    ((applied, _),) = gradients(model, list(data), "batch.micro_size=2", "batch.accumulation=3", "train.epochs=1")
    print("  3 of 2, the engine:      ", applied.tolist(), end="\n\n")


def short_window() -> None:
    print("20 samples in micro-batches of 2, accumulation 4: the last window has 2 micro-batches, not 4")
    data = list(torch.arange(1.0, 21.0).reshape(20, 1))
    options = ("batch.micro_size=2", "batch.accumulation=4", "train.epochs=1")
    print("  window  samples  their mean  the engine  each micro-batch's mean divided by 4")
    for number, (gradient, batches) in enumerate(gradients(nn.Linear(1, 1, bias=False), data, *options)):
        samples, divided = torch.cat(batches), sum(batch.mean() / 4 for batch in batches)
        print(f"  {number:6}  {len(samples):7}  {samples.mean():10.4f}  {gradient.item():10.4f}  {divided:10.4f}")


if __name__ == "__main__":
    one_big_batch()
    dot_product()
    short_window()
