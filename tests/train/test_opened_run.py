"""A run opened in a process alone has the samples, weights and figures of its training."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, chdir, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, random_split

import launcher
from launcher import Loss, open_run
from launcher.config.hydra import compose_with_yaml
from launcher.errors import SiteError, UserError, WrongCheckpoint
from launcher.plan.run_plan import TaskPlan
from launcher.train.precision import kept_tf32, set_tf32
from launcher.train.trainer import train
from tests.helpers import make_plan
from tests.infra.runs import records

TARGET = f"{__name__}.Split"
SEEN: dict[int, Tensor] = {}  # samples that were evaluated, by number
IN_TRAINING: dict[int, list[float]] = {}  # those of the training
SOURCE = {"seed": 3}


class Rows:
    """Rows that an augmentation changes."""

    def __init__(self, shift: float) -> None:
        generator = torch.Generator().manual_seed(SOURCE["seed"])
        self.x = torch.randn(60, 5, generator=generator) + shift

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index), "x": self.x[index] + 0.1 * torch.randn(5)}


class Streamed(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"number": torch.tensor(1000 + n), "x": torch.full((5,), n / 10)} for n in range(7)])


class Net(nn.Module):
    """Weights and a mask without a seed of their own; the mask is in no checkpoint."""

    mask: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))
        self.register_buffer("mask", torch.rand(5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.mask).squeeze(-1)


class Writes:
    """Callback that an evaluation does not call; its constructor starts a file in the run's working directory."""

    def __init__(self) -> None:
        Path("norms.csv").write_text("step,norm\n")

    def on_step(self, _engine: Any, result: Any) -> None:
        with Path("norms.csv").open("a") as file:
            file.write(f"{result.step},{result.grad_norm}\n")


class Around:
    """Callback that notes the evaluations that it is called for."""

    evaluations = 0

    def around_evaluation(self, _engine: Any) -> AbstractContextManager[None]:
        Around.evaluations += 1
        return nullcontext()


class Split:
    """Its held-out data is the rest of the random split that ``train_data`` draws; its batches are a loader's."""

    def __init__(self, shift: float = 0.0, width: int = 8) -> None:
        self.rows, self.width, self.target, self.calls = Rows(shift), width, torch.rand(()), 0

    def model(self) -> nn.Module:
        return Net(self.width)

    def train_data(self) -> Any:
        trained, self.held_out = random_split(self.rows, [0.7, 0.3])
        return DataLoader(trained, batch_size=3, shuffle=True, collate_fn=lambda rows: default_collate([*rows]))

    def eval_data(self) -> Any:
        return {"held": self.held_out, "stream": Streamed(), "head": Subset(self.held_out, range(9))}

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Loss:
        if launcher.current().evaluating:
            SEEN.update(zip(batch["number"].tolist(), batch["x"], strict=True))
        self.calls += not launcher.current().evaluating
        errors = (model(batch["x"]) - self.target).square()
        return Loss(errors.sum(), len(errors), metrics={"calls": (self.calls, 1), "error": (errors.sqrt().sum(), 3)})

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank, trained in this process."""
    place = tmp_path_factory.mktemp("runs") / "split"
    callbacks = f"callbacks=[{{_target_: {__name__}.Writes}},{{_target_: {__name__}.Around}}]"
    words = ("cluster.workers_per_node=1", "batch.global_size=6", "batch.micro_size=3", "train.steps=4",
             "train.eval_every=2", "checkpoint.every=2", "run.calibrate_s=0", "train.loader_workers=0",
             callbacks)  # fmt: skip
    task = TaskPlan(
        target=TARGET, params={}, samples=42, parameters=1, gradient_bytes=4, unit_parameters=0,
        eval_sets=("held", "stream", "head"),
    )  # fmt: skip
    place.mkdir()
    plan = make_plan(*words, "precision=fp32", run_dir=str(place), task=task)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, cwd=str(place)))
    plan.save()
    plan.paths.config.write_text(compose_with_yaml([*words, "precision=fp32", f"task._target_={TARGET}"])[1])
    SEEN.clear()
    with chdir(place):
        train(plan, bool)
    dist.destroy_process_group()
    IN_TRAINING.update({number: x.tolist() for number, x in SEEN.items()})
    return place


def recorded(run: Path, step: int) -> dict[str, float]:
    (record,) = [each for each in records(run) if each["step"] == step]
    return {name: value for name, value in record.items() if name.startswith("eval/")}


def process_state() -> list[Any]:
    kind, words, *rest = np.random.get_state()
    waiting = dict(vars(torch.cuda._lazy_seed_tracker))
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    tf32 = [products.fp32_precision, convolutions.fp32_precision, products.allow_tf32, torch.backends.cudnn.allow_tf32]
    return [torch.get_rng_state().tolist(), random.getstate(), kind, list(words), rest, waiting, tf32, dict(os.environ)]


def test_samples_and_figures_are_those_of_the_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SEEN.clear()
    evaluations, written = Around.evaluations, (run / "norms.csv").read_text()
    with kept_tf32():
        set_tf32(True)
        before = process_state()
        opened = open_run(run)
        assert opened.evaluate() == recorded(run, 4) == opened.evaluate()
        assert process_state() == before
    assert not dist.is_initialized()
    assert {number: x.tolist() for number, x in SEEN.items()} == IN_TRAINING
    assert Around.evaluations == evaluations + 2
    assert (run / "norms.csv").read_text() == written
    assert written.count("\n") == 5
    assert "may not be held out" not in capsys.readouterr().out
    held_out = opened.eval_data["held"].indices
    assert {n for n in SEEN if n < 1000} == {*held_out} == {*range(60)} - {*opened.train_data.dataset.indices}
    assert (opened.step, opened.directory, opened.model.training) == (4, run, False)
    assert opened.config.task == {"_target_": TARGET}


def test_an_earlier_checkpoint_and_other_data(run: Path) -> None:
    assert open_run(run, step=2).evaluate() == recorded(run, 2) != recorded(run, 4)
    other = open_run(run, ["++task.shift=2.0", "train.eval_samples=5"])
    values = other.evaluate()
    assert values["eval/held/loss"] != recorded(run, 4)["eval/held/loss"]
    assert (other.config.train.eval_samples, other.plan.task.params) == (5, {"shift": 2.0})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task._target_=other.Task"], f"task._target_: an evaluation has the task that was trained, {TARGET}"),
        (["optimizer.lr=1", "batch.global_size=12"], "batch.global_size, optimizer.lr: cannot change in an evaluation"),
        (["train.loss=1"], "train.loss=1: there is no such key"),
        (["task.shift=far"], "task.shift=far"),
        (["train.eval_micro_size=0"], "train.eval_micro_size=0: must be at least 1"),
        (["train.loader_workers=-1"], "train.loader_workers=-1: must be at least 0"),
        (["task.width=9"], "saved from another model, whose parameters and buffers differ"),
    ],
)
def test_what_it_cannot_do_is_refused(run: Path, overrides: list[str], message: str) -> None:
    with pytest.raises((UserError, WrongCheckpoint)) as error:
        open_run(run, overrides)
    assert message in str(error.value)


def test_data_that_has_changed_since_is_noticed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCE, "seed", 4)
    other = r"eval_data\(\)\['{}'\] is not that of the run: sample \d+ is another"
    with pytest.warns(match=other.format("held")), pytest.warns(match=other.format("head")):
        open_run(run)


def changed_copy(run: Path, place: Path, **groups: dict[str, Any]) -> Path:
    """A copy of the run in another place, with other values in its plan."""
    shutil.copytree(run, place)
    values = json.loads((place / "plan.json").read_text())
    for name, group in groups.items():
        values[name] |= group
    (place / "plan.json").write_text(json.dumps(values))
    return place


def test_a_run_that_was_moved_keeps_its_decision_on_the_precision(run: Path, tmp_path: Path) -> None:
    copy = changed_copy(run, tmp_path / "moved", precision={"kind": "auto"})
    (copy / "precision.json").write_text(json.dumps({"kind": "fp32", "reason": "of the cluster"}))
    assert open_run(copy).plan.precision.reason == "of the cluster"


def test_a_callback_whose_package_is_missing_is_left_out(run: Path, tmp_path: Path) -> None:
    copy = changed_copy(run, tmp_path / "copy")
    values = json.loads((copy / "plan.json").read_text())
    values["callbacks"].append({"_target_": "nowhere.Logger"})
    (copy / "plan.json").write_text(json.dumps(values))
    with pytest.warns(UserWarning, match=r"leaves a callback of the run out: callbacks\[2\]._target_=nowhere.Logger"):
        assert open_run(copy).evaluate() == recorded(run, 4)


def test_only_a_process_alone_opens_a_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="is not the directory of a run"):
        open_run(tmp_path)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SiteError, match="torchrun has started 2"):
        open_run(run)
