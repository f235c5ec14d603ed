"""`train.on_nonfinite=skip`: a window that is not finite leaves no trace but its place in the data. The learning rates
that are applied are the schedule's, the plan's or the user's own, and are the ones reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from launcher import Engine
from launcher.errors import ConfigError, TaskError
from launcher.train.engine.optimizer_step import _require_own_state
from launcher.train.optimizers import CombinedOptimizer
from tests.conftest import Launch
from tests.helpers import make_plan, printed_by
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.runs import OWN, records, summary

WORKER = Path(__file__).parent / "nonfinite_worker.py"
LINES = (
    "loss one strategy=ddp precision=fp32",
    "input one strategy=ddp",
    "gradient several strategy=ddp precision=bf16 strategy.sync=every",
    "input several strategy=fsdp precision=bf16",
    "gradient one strategy=fsdp precision=fp32 strategy.sync=gather_once batch.norm=sync",
    "loss one strategy=ddp precision=fp16 precision.init_scale=64",
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    answers = printed_by(WORKER, [*LINES, "end"], 2, tmp_path_factory.mktemp("nonfinite"))
    return dict(zip([*LINES, "end"], answers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_as_if_the_data_lacked_the_window(seen: dict[str, dict[str, Any]], line: str) -> None:
    found = seen[line]
    assert found["equal"], "parameters, buffers and optimizer state, bit by bit"
    assert found["random"], "dropout continues as if the window had not been run"
    assert found["results"], "loss, norm and rate of each step"
    assert found["finite"]
    assert (found["skipped"], found["steps"], found["window"], found["samples"]) == (3, 6, 9, 9 * 16)
    assert found["counters"] == [0, 0]
    for reason, step in zip(found["reasons"], (3, 4, 4), strict=True):
        what = f"The gradient of step {step} has norm" if "gradient" in line else f"The loss of step {step} is not"
        assert reason.startswith(what)
        assert "rank 1, micro-batch 3" in reason or "gradient" in line


@pytest.mark.slow
def test_too_many_in_a_row(seen: dict[str, dict[str, Any]]) -> None:
    error = seen["end"]["error"]
    assert "The loss of step 2 is not finite" in error
    assert "The 20 windows before it were not finite either" in error


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_job_continues_and_resumes_bit_by_bit(launch: Launch, project: Path) -> None:
    job = [word for word in OWN if not word.startswith(("task.", "run.name", "precision"))]
    job += ["task._target_=speech.hooked.Poisoned", "train.epochs=2", "checkpoint.every=2"]
    stopped = launch("train", *job, "run.name=stop")
    assert stopped.returncode == 1
    assert "The loss of step" in stopped.stderr
    through = launch("train", *job, "run.name=through", "train.on_nonfinite=skip")
    assert through.returncode == 0, through.stderr
    assert through.stdout.count("The window is skipped (train.on_nonfinite=skip).") == 2, "one in each epoch"
    assert "2 windows skipped: loss or gradient was inf or nan" in through.stdout
    of_through = project / "runs" / "through"
    assert summary(of_through)["batch/nonfinite_windows"] == 2
    assert summary(of_through)["steps"] == 8
    lines = records(of_through)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["batch/nonfinite_windows"] == 2
    resumed = launch("resume", "stop", "train.on_nonfinite=skip")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_tensors(*(project / "runs" / name / "checkpoints" / "step_000008" for name in ("through", "stop")))
    assert [line["train/loss"] for line in records(project / "runs" / "stop")] == [line["train/loss"] for line in lines]


def test_powersgd_cannot_skip() -> None:
    with pytest.raises(ConfigError, match=r"train.on_nonfinite=skip: does not work with strategy.compress=powersgd"):
        make_plan("train.on_nonfinite=skip", "strategy.compress=powersgd")


STEPS, LR = 6, 0.5
WARM = ["schedule.warmup_steps=2"]
FLAT = ["schedule=constant", "schedule.warmup_steps=0"]


class NoSchedule:
    def step(self) -> None: ...


class Halved:
    """The rate set by hand, as ReduceLROnPlateau does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 3:
            self.optimizer.param_groups[0]["lr"] /= 2


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda _: NoSchedule(),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda done: 1 / (1 + done)),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5),
    "by hand": Halved,
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("own", "options", "wanted"),
    [
        ("none", ["schedule=linear", "schedule.min_ratio=0", *WARM], [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]),
        ("none", FLAT, [LR] * STEPS),
        ("lambda", FLAT, [LR / (1 + step) for step in range(STEPS)]),
        ("lambda", ["schedule=cosine", *WARM], [LR / (1 + step) for step in range(STEPS)]),
        ("exponential", FLAT, [LR * 0.5**step for step in range(STEPS)]),
        ("by hand", FLAT, [0.5, 0.5, 0.5, 0.25, 0.25, 0.25]),
        ("by hand", ["schedule=linear", *WARM], [0.25, 0.5, 0.5, 0.1875, 0.1875, 0.1875]),
    ],
)
def test_the_rate_reported_is_the_rate_applied(
    own: str, options: list[str], wanted: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(
        "cluster.workers_per_node=1", "batch.global_size=4", "batch.micro_size=2", f"train.steps={STEPS}",
        "train.loader_workers=0", "precision=fp32", *options, samples=16,
    )  # fmt: skip
    optimizer = torch.optim.SGD((model := nn.Linear(3, 1)).parameters(), lr=LR)
    engine, schedule, applied, reported = Engine(model, optimizer, plan), SCHEDULES[own](optimizer), list[float](), []
    optimizer.register_step_pre_hook(lambda *_: applied.append(optimizer.param_groups[0]["lr"]))
    for window in engine.windows([torch.full((3,), float(index)) for index in range(16)]):
        for batch in window:
            engine.backward(1e-6 * engine.model(batch).square().sum(), len(batch))
        reported.append(engine.step().lr)
        schedule.step()
    assert applied == pytest.approx(wanted)
    assert reported == applied
    assert capsys.readouterr().out.count("outside of the engine") == (own != "none"), "once a run"


def test_a_kept_gradient_is_found_in_each_optimizer_beside_state_of_other_forms() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    gradients = [torch.ones(2) for _ in weights]
    members = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    combined = CombinedOptimizer(members)
    members[0].state["steps"] = 3  # pyright: ignore[reportArgumentType]
    members[1].state[weights[1]] = {"before": gradients[1].clone(), "order": [0]}
    _require_own_state(combined, gradients)
    members[1].state[weights[1]]["before"] = gradients[1][:1]
    with pytest.raises(TaskError, match=r"state\['before'\] is the gradient itself"):
        _require_own_state(combined, gradients)
