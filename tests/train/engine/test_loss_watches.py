"""Losses that change gradients, depend on trainable tensors outside of the model, or contain samples of other ranks are
refused; gradients of inputs, other engines' models, and collectives for logs are not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher import Engine
from launcher.errors import TaskError
from tests.helpers import make_plan, torchrun

CHANGES = "TaskError: The loss changes the gradients of the model's parameters: it calls backward() or zero_grad()"
CHANGED = {
    "own backward": CHANGES,
    "zeroed": CHANGES,
    "steps in backward": "TaskError: head.bias: written within the backward pass",
    "by frequency": "TaskError: model: table.weight has gradients that are divided by the frequencies within a micro",
}
# gradients that were reduced are in the shards, which zero_grad() of gathered parameters leaves alone
RIGHT = {"fsdp every: zeroed"}
FOREIGN = {
    "weighted": "Weighted.log_var, of shape [1],",
    "criterion": "Criterion.criterion.weight, of shape [6, 6],",
    "no parameter": "NoParameter.scales['one'], of shape [6],",
    "of the model": "model.plain[0], of shape [6],",
    "global": "GLOBAL_SCALE, of shape [1],",
}
PLACE = "in loss_watches_worker.py, line"
# by case: the collectives that the message names
COLLECTIVES = {
    "torch.distributed.nn": f"(allgather {PLACE}",
    "functional": "(all_gather",
    "a Function of one's own": f"(allgather {PLACE}",
    "in the model": f"(allgather {PLACE}",
    "without gradient": f"(allgather {PLACE}",
    "a mean with gradient": f"(allreduce {PLACE}",
    "fsdp": f"(allgather {PLACE}",
}
ALLOWED = ("one micro-batch", "a count", "objects", "no collective", "batch.norm=sync", "another BatchNorm")


Output = tuple[str, list[dict[str, Any]]]


@pytest.fixture(
    scope="module", params=[("some", 19, 11), pytest.param(("all", 56, 29), marks=pytest.mark.nightly)], ids=str
)
def output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Output:
    """What two ranks print, and in it the messages of all cases of gradients, of leaves, and of collectives."""
    part, *numbers = request.param
    text = torchrun(Path(__file__).parent / "loss_watches_worker.py", [part], 2, tmp_path_factory.mktemp("watches"))
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [len(cases) for cases in found[:2]] == numbers
    return text, found


@pytest.mark.slow
def test_changed_gradients_are_refused_by_name(output: Output) -> None:
    text, (seen, _, _) = output
    assert "written by the first" not in text
    for case, said in seen.items():
        expected = None if case in RIGHT else CHANGED.get(case.partition(": ")[2])
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


MANY = ("batch.micro_size=2", "batch.global_size=8")


def with_hook(register: str, hook: Callable[[Any], Any], *options: str) -> tuple[Engine, nn.Linear]:
    """Train a linear layer whose weight has a gradient hook, and one with plain torch, two windows each."""
    torch.manual_seed(0)
    model, data = nn.Linear(4, 1), torch.sin(torch.arange(64.0)).view(16, 4)
    whole = copy.deepcopy(model)
    for each in (model, whole):
        getattr(each.weight, register)(hook)
    plan = make_plan(
        *options, "train.steps=2", "train.shuffle=false", "precision=fp32", "run.calibrate_s=0", "strategy=single",
        "train.loader_workers=0", "cluster.device=cpu", "schedule=constant", "schedule.warmup_steps=0",
        "train.clip_norm=null", samples=16,
    )  # fmt: skip
    engine = Engine(model, lambda parameters: torch.optim.SGD(parameters, 0.01), plan)
    for window in engine.windows(list(data)):
        for batch in window:
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
    optimizer = torch.optim.SGD(whole.parameters(), 0.01)
    for batch in data.split(8):
        whole(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine, whole


def halve(gradient: Any) -> None:
    gradient.mul_(0.5)


def clamp(gradient: Any) -> None:
    gradient.clamp_(-1, 1)


def halve_sum(parameter: Any) -> None:
    parameter.grad.data.mul_(0.5)


@pytest.mark.parametrize(
    ("register", "hook", "words"),
    [
        ("register_hook", lambda gradient: gradient.clamp(-1, 1), "clamps the gradient"),
        ("register_hook", lambda gradient: gradient / gradient.norm(), "clamps the gradient"),
        ("register_hook", clamp, "clamps the gradient"),
        ("register_post_accumulate_grad_hook", halve_sum, "changes the sum of the window so far"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_hook_whose_result_depends_on_the_division_is_refused(
    register: str, hook: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(TaskError, match=rf"^weight: a gradient hook .*{words}.*\n.*register_step_pre_hook"):
        with_hook(register, hook, *MANY)


@pytest.mark.parametrize(
    ("register", "hook", "options"),
    [
        ("register_hook", lambda gradient: gradient * torch.tensor([0.0, 1, 0.3, 1]), MANY),
        ("register_hook", lambda _: None, MANY),
        ("register_hook", halve, MANY),
        ("register_hook", lambda gradient: gradient.mul_(0.5), MANY),
        ("register_post_accumulate_grad_hook", lambda _: None, MANY),
        ("register_post_accumulate_grad_hook", halve_sum, ("batch.micro_size=8", "batch.global_size=8")),
    ],
)
@pytest.mark.usefixtures("alone")
def test_a_hook_that_multiplies_or_only_looks_is_right(
    register: str, hook: Callable[[Any], Any], options: tuple[str, ...]
) -> None:
    engine, whole = with_hook(register, hook, *options)
    for found, wanted in zip(engine.model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(found, wanted, atol=1e-7)
    assert len(whole.weight._backward_hooks or whole.weight._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize("micro_size", [2, 8])
@pytest.mark.parametrize("after", ["backward", "zero_grad"])
@pytest.mark.usefixtures("alone")
def test_a_loop_that_changes_gradients_after_the_backward_pass_is_refused(micro_size: int, after: str) -> None:
    plan = make_plan(
        f"batch.micro_size={micro_size}", "batch.global_size=8", "train.steps=2", "run.calibrate_s=0",
        "train.loader_workers=0", "cluster.device=cpu", "strategy=single", samples=16,
    )  # fmt: skip
    engine = Engine(nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, 0.01), plan)

    def train() -> None:
        for window in engine.windows(list(torch.sin(torch.arange(64.0)).view(16, 4))):
            for batch in window:
                engine.backward(engine.model(batch).square().sum(), len(batch))
                if after == "backward":
                    engine.model(batch).abs().sum().backward()
                else:
                    engine.optimizer.zero_grad()
            engine.step()

    with pytest.raises(TaskError, match=r"^The loop changes the gradients .* after engine\.backward\(\)"):
        train()


@pytest.mark.slow
def test_what_is_trainable_and_not_in_the_model_is_named(output: Output) -> None:
    text, (_, leaves, _) = output
    seen = leaves.copy()
    own_loop = seen.pop("own loop")
    for case, said in seen.items():
        expected = FOREIGN.get(case.partition(" ")[2])
        if expected is None:
            assert said == "", case
        else:
            assert said.startswith(f"TaskError: The loss depends on {expected} that requires a gradient"), (case, said)
    assert own_loop == "", "its loop may train it"
    assert sum("does not\n  share its gradient" in line for line in text.split("The loss depends")) == 1


@pytest.mark.slow
def test_samples_of_other_ranks_are_refused_on_all_ranks(output: Output) -> None:
    seen = output[1][2]
    assert set(seen) == {*COLLECTIVES, *ALLOWED}
    for case, text in COLLECTIVES.items():
        first, second = seen[case]
        assert first == second
        assert first.startswith("CollectiveInLoss: The loss of a micro-batch depends on what other ranks have")
        # torch 2.11 names some operations in other letters, AllGatherIntoTensor
        assert text.replace("_", "").lower() in first.replace("_", "").lower(), (case, first)
        assert "a window has 2 micro-batches" in first


@pytest.mark.slow
def test_whatever_is_exact_or_only_logged_is_allowed(output: Output) -> None:
    seen = output[1][2]
    assert {case: seen[case] for case in ALLOWED} == {case: ["", ""] for case in ALLOWED}
