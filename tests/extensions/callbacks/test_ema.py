"""Moving averages of the parameters: against one in fp64, under several strategies and across resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.errors import ConfigError
from launcher.extensions.callbacks import Ema
from launcher.train.checkpoint import load
from tests.conftest import Launch
from tests.infra.checkpoints import assert_same_tensors, tensors
from tests.infra.runs import OWN, records
from tests.train.checkpoint.test_load_changed import engine_of, run
from tests.train.test_callback_set import engine_with

DECAY = 0.7
JOB = [
    *(word for word in OWN if not word.startswith("run.name")), "train.steps=6", "train.eval_every=3",
    "checkpoint.every=2", "cluster.workers_per_node=2", "callbacks=[{_target_: Ema, decay: 0.7},"
    "{_target_: speech.hooked.Recorder}]",
]  # fmt: skip


def averages(directory: Path) -> dict[str, Tensor]:
    prefix = "callbacks.Ema/averages/"
    return {name.removeprefix(prefix): v for name, v in tensors(directory).items() if name.startswith(prefix)}


def events(project: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (project / "events-0.jsonl").read_text().splitlines()]


def reference(seen: list[dict[str, Any]], every: int = 1) -> list[dict[str, Tensor]]:
    """The average after each step, in fp64, of the parameters that another callback has recorded."""
    start = next(each for each in seen if each["event"] == "start")["parameters"]
    average = {name: torch.tensor(value, dtype=torch.float64) for name, value in start.items()}
    results: list[dict[str, Tensor]] = []
    for each in seen:
        if each["event"] == "step":
            if each["of"] % every == 0:
                for name, value in each["parameters"].items():
                    new = torch.tensor(value, dtype=torch.float64)
                    average[name] = DECAY * average[name] + (1 - DECAY) * new
            results.append({name: value.clone() for name, value in average.items()})
    return results


def held_out_loss(parameters: dict[str, Tensor]) -> float:
    from tests.user_project.speech.tasks import Utterances

    model = nn.Sequential(nn.Embedding(30, 16), nn.GELU(), nn.Linear(16, 30)).double()
    model.load_state_dict({name: parameters[name].view_as(value) for name, value in model.state_dict().items()})
    total, items = 0.0, 0
    for sample in Utterances(20).data:
        total += functional.cross_entropy(model(sample[:-1]), sample[1:], reduction="sum").item()
        items += len(sample) - 1
    return total / items


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_as_computed_by_hand_in_every_world(launch: Launch, project: Path) -> None:
    assert (done := launch("train", *JOB, "run.name=whole")).returncode == 0, done.stderr
    assert "Ema, Recorder" in done.stdout, "in the plan"
    seen = events(project)
    by_hand = reference(seen)
    whole = averages(project / "runs" / "whole" / "checkpoints" / "step_000006")
    for name, value in by_hand[-1].items():
        torch.testing.assert_close(whole[name].flatten().double(), value, rtol=1e-5, atol=1e-6)
    for number, record in enumerate(records(project / "runs" / "whole"), 1):
        assert ("eval/loss" in record) == (number in (3, 6))
        if number in (3, 6):
            assert record["eval/loss"] == pytest.approx(held_out_loss(by_hand[number - 1]), rel=1e-5)
    # the other callbacks see the averages in an evaluation, and the parameters are back after it
    for evaluation, average in zip((e for e in seen if e["event"] == "evaluation"), by_hand[2::3], strict=True):
        for name, value in average.items():
            torch.testing.assert_close(
                torch.tensor(evaluation["parameters"][name]), value.float(), rtol=1e-5, atol=1e-6
            )
    after = next(e for e in seen if e["event"] == "window" and e["step"] == 4)["parameters"]
    assert after == next(e for e in seen if e["event"] == "step" and e["of"] == 3)["parameters"]

    assert launch("train", *JOB, "run.name=part", "train.steps=4").returncode == 0
    shutil.copytree(project / "runs" / "part", project / "runs" / "copy")
    assert launch("resume", "part", "train.steps=6").returncode == 0
    end = project / "runs" / "part" / "checkpoints" / "step_000006"
    assert all(value.equal(whole[name]) for name, value in averages(end).items()), "bit by bit"
    assert_same_tensors(end, project / "runs" / "whole" / "checkpoints" / "step_000006")

    plan = project / "runs" / "copy" / "plan.json"
    plan.write_text(plan.read_text().replace("runs/part", "runs/copy"))
    words = ["strategy=fsdp", "cluster.workers_per_node=2", "train.steps=6"]
    assert (done := launch("resume", str(project / "runs" / "copy"), *words)).returncode == 0, done.stderr
    for name, value in averages(project / "runs" / "copy" / "checkpoints" / "step_000006").items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("arguments", "words"), [({"decay": 1.0}, "decay=1.0"), ({"every": 0}, "every=0")])
def test_values_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Ema(**arguments)


@pytest.mark.usefixtures("alone")
def test_an_evaluation_by_hand_is_that_of_the_averages() -> None:
    engine = engine_with(Ema(0.5), words=("precision=fp32",))
    before = engine.evaluate(list(torch.ones(4, 3)), squares)["eval/loss"]
    average = engine.callbacks.find(Ema).averages["weight"]
    average.add_(1)
    after = engine.evaluate(list(torch.ones(4, 3)), squares)["eval/loss"]
    bias = engine.model.get_parameter("bias")
    assert after == pytest.approx((average.sum() + bias).square().item())
    assert after != pytest.approx(before)
    assert not engine.model.get_parameter("weight").equal(average)


def squares(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return model(batch).float().square().sum(), len(batch)


@pytest.mark.usefixtures("alone")
def test_averages_of_parameters_that_were_frozen_start_with_their_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    place = run(engine_of(tmp_path, model, Ema()), 3)
    thawed, averages = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), Ema()
    engine = engine_of(tmp_path, thawed, averages)
    load.load(engine, place)
    engine.callbacks.start(engine)
    assert averages.averages["0.weight"].equal(model.state_dict()["0.weight"])
    assert not averages.averages["1.weight"].equal(model.state_dict()["1.weight"])
