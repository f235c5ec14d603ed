"""Losses that run backward themselves, optimizers that step within the backward pass, and gradients that depend on a
micro-batch's other samples are refused; gradients of inputs are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from launcher import Engine
from tests.helpers import make_plan, series, torchrun

CHANGES = "TaskError: The loss changes the gradients of the model's parameters: it calls backward() or zero_grad()"
REFUSED = {
    "own backward": CHANGES,
    "zeroed": CHANGES,
    "steps in backward": "TaskError: head.bias: written within the backward pass",
    "by frequency": "TaskError: model(): table.weight has gradients that are divided by the frequencies within a micro",
}


# gradients that were reduced are in the shards, which zero_grad() of gathered parameters leaves alone
RIGHT = {"fsdp every: zeroed"}


@pytest.mark.slow
@series(19, 56)
def test_changed_gradients_are_refused_by_name(part: str, cases: int, tmp_path: Path) -> None:
    output = torchrun(Path(__file__).parent / "gradient_watch_worker.py", [part], 2, tmp_path)
    assert "written by the first" not in output
    seen = json.loads(output.splitlines()[-1])
    assert len(seen) == cases
    for case, said in seen.items():
        expected = None if case in RIGHT else REFUSED.get(case.partition(": ")[2])
        assert said.startswith(expected) if expected else not said, (case, said)


class Shifted(nn.Module):
    """Model whose shift is set from the data: in the first pass only, or in each one."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always, self.shift, self.out = always, nn.Parameter(torch.zeros(4)), nn.Linear(4, 1)
        self.words = nn.Embedding(3, 4, max_norm=0.1)
        self.ready = False

    def forward(self, rows: Tensor) -> Tensor:
        if self.always or not self.ready:
            with torch.no_grad():
                self.shift.clamp_(-1, 1).copy_(-rows.mean(0))
                self.ready = True
        return self.out(rows + self.shift + self.words((rows[:, 0] > 0).long()))


@pytest.mark.parametrize("precision", ["fp32", "auto"])
@pytest.mark.parametrize(("micro_size", "always", "named"), [(2, False, True), (2, True, False), (8, False, False)])
@pytest.mark.usefixtures("alone")
def test_a_parameter_that_the_first_micro_batch_alone_has_set_is_named(
    micro_size: int, always: bool, named: bool, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(
        f"precision={precision}", f"batch.micro_size={micro_size}", "batch.global_size=8", "train.steps=2",
        "run.calibrate_s=0", "train.loader_workers=0", "cluster.device=cpu", "strategy=single", samples=16,
    )  # fmt: skip
    engine = Engine(Shifted(always=always), lambda parameters: torch.optim.SGD(parameters, 0.01), plan)
    for window in engine.windows(list(torch.sin(torch.arange(64.0)).view(16, 4))):
        for batch in window:
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
    assert ("shift: written by the first forward pass" in capsys.readouterr().out) is named
