"""batch.norm=window in one process: what looks ahead, the order of its layers, and its statistics in the window."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.errors import TaskError
from launcher.extensions.window_norm.window_norms import WindowNorms
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.preserved_state import ChangingParameters, PreservedState
from launcher.train.parallel.base import Parallel
from launcher.train.parallel.batchnorm import norms_of
from launcher.train.precision import Precision
from tests.train.parallel.test_batchnorm import CPU, plan_on_one_rank


def look_ahead(model: nn.Module, inputs: list[Tensor], norm: str = "window") -> WindowNorms:
    plan = plan_on_one_rank(norm, "precision=fp32")
    norms = norms_of(plan, Parallel(model, plan, CPU), Precision(plan.precision, CPU), CPU)
    assert isinstance(norms, WindowNorms)
    kept = PreservedState(model, CPU, [], ChangingParameters(ranks=1))
    norms.look_ahead([MicroBatch(x, len(x)) for x in inputs], lambda micro: model(micro.data).square().sum(), kept)
    return norms


def test_a_look_ahead_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    inputs = [torch.randn(4, 3) for _ in range(3)]
    before, drawn = [b.clone() for b in model.buffers()], torch.random.get_rng_state()
    look_ahead(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_a_large_mean_does_not_swallow_the_variance() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.BatchNorm1d(2)), 1e4 + torch.randn(12, 2, dtype=torch.float64)
    norms = look_ahead(model, list(x.float().split(4)))
    norms.track()
    wanted = x.float().double().var(0)
    assert model[0].running_var.double() == pytest.approx((0.9 + 0.1 * wanted).numpy(), rel=1e-4)  # pyright: ignore


def test_one_number_a_channel_is_normalised_to_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    norms = look_ahead(model, [torch.randn(1, 2)])
    norms.micro_batch(counts=True)
    assert model(torch.randn(1, 2)).isfinite().all()
    norms.track()
    assert all(value.isfinite().all() for value in model.buffers())


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])

    def forward(self, x: Tensor) -> Tensor:
        order = self.layers if x[0, 0] > 0 else list(reversed(self.layers))
        return order[1](order[0](x)) if x[0, 1] > 0 else order[0](x)


@pytest.mark.parametrize("second", [[-1.0, 1.0], [1.0, -1.0]])
def test_micro_batches_with_layers_of_their_own_are_refused(second: list[float]) -> None:
    with pytest.raises(TaskError, match="same BatchNorm layers in the same order"):
        look_ahead(Choosy(), [torch.ones(4, 2), torch.tensor([second] * 4)])


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool | None, twice: bool = False) -> None:
        super().__init__()
        self.reentrant, self.twice = reentrant, twice
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for unit in (self.first, self.last, *([self.last] if self.twice else [])):
            again = self.reentrant is not None
            x = cast("Tensor", checkpoint(unit, x, use_reentrant=self.reentrant)) if again else unit(x)
        return x


def test_layers_computed_again_use_the_statistics_of_the_window() -> None:
    torch.manual_seed(0)
    plain, model = Checkpointed(reentrant=None).double(), Checkpointed(reentrant=False).double()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(12, 3, dtype=torch.float64)
    plain(x).square().sum().backward()
    norms = look_ahead(model, list(x.split(4)))
    for part in x.split(4):
        norms.micro_batch(counts=True)
        model(part).square().sum().backward()
    norms.track()
    wanted = [each.grad for each in plain.parameters()] + list(plain.buffers())
    for mine, other in zip([each.grad for each in model.parameters()] + list(model.buffers()), wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the passes without gradient
@pytest.mark.parametrize(
    ("reentrant", "twice", "message"), [(False, True, "uses 2 times"), (True, False, "use_reentrant=False, or batch")]
)
def test_checkpoints_that_hide_the_order_of_calls_are_refused(reentrant: bool, twice: bool, message: str) -> None:
    model, x = Checkpointed(reentrant=reentrant, twice=twice), torch.randn(4, 3, requires_grad=True)

    def window() -> None:
        norms = look_ahead(model, [x, x + 1])
        norms.micro_batch(counts=True)
        model(x).square().sum().backward()

    with pytest.raises(TaskError, match=message):
        window()
