"""A resume with changes: more parameters are trained, a buffer has another shape, optimizer arguments are forced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from launcher import Engine, Loss, make_plan
from launcher.errors import WrongCheckpoint
from launcher.plan.initial_weights import InitialWeights
from launcher.plan.resumable import DATA as DATA_KEY
from launcher.rundir.fencing import Fence
from launcher.train.checkpoint import load, save
from launcher.train.checkpoint.initial import InitialValues, misfits, model_state, require_fit
from launcher.train.checkpoint.weights import open_weights
from launcher.train.engine import calibration, engine
from launcher.train.trainer import train
from launcher.train.world import World
from tests.helpers import make_plan as make_plan_for
from tests.infra.runs import records
from tests.train.checkpoint.stateful_optimizers import Remembers

DATA = list(torch.sin(torch.arange(48.0)).reshape(12, 4))
KEYS = ("batch.global_size=4", "train.loader_workers=0", "precision=fp32", "strategy=single", "cluster.device=cpu",
        "cluster.workers_per_node=1")  # fmt: skip
pytestmark = pytest.mark.usefixtures("alone")


class Grows(nn.Module):
    """With a buffer that gets a row at each call, one that is None until the first, one that is None from then on, and
    two that are registered there."""

    seen: Tensor
    late: Tensor
    first: Tensor | None
    start: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(0, 4))
        self.register_buffer("first", None)
        self.register_buffer("start", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if "late" not in self._buffers:
                self.register_buffer("late", torch.zeros(2))
                self.out.register_buffer("hidden", torch.zeros(()), persistent=False)
            self.late += 1
            self.out.get_buffer("hidden").add_(1)
            self.start = None
            self.first = x.detach()[:1].clone() if self.first is None else self.first
            self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return self.out(x)


SHIFT = {"train": 0.0, "held out": 0.0, "held out, fewer": 0.0}


class Data:
    """A task whose data is another one, or of another length, if ``SHIFT`` is changed."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def train_data(self) -> list[Tensor]:
        return [sample + SHIFT["train"] for sample in DATA]

    def eval_data(self) -> list[Tensor]:
        rows = len(DATA) - int(SHIFT["held out, fewer"])
        return [sample * 2 + SHIFT["held out"] for sample in DATA[:rows]]

    def loss(self, model: Any, batch: Tensor) -> Loss:
        return Loss((model(batch) - 1).square().sum(), len(batch))


def attempt_at(
    place: Path, *overrides: str, forced: tuple[str, ...] = (), target: str = f"{__name__}.Data"
) -> dict[str, Any]:
    """Train, maybe from the newest checkpoint in ``place``, and return summary.json."""
    plan = make_plan_for(*KEYS, *overrides, samples=len(DATA), run_dir=str(place))
    task = dataclasses.replace(plan.task, target=target)
    train(dataclasses.replace(plan, task=task, forced=forced), lambda: False)
    return json.loads((place / "summary.json").read_text())


@pytest.mark.parametrize("changed", ["", "hardware", "ranks", "train.loader_workers=1", "train.clip_norm=null"])
def test_figures_of_other_hardware_or_settings_are_not_mixed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt_at(tmp_path, "train.steps=2")
    if changed == "hardware":
        monkeypatch.setattr(calibration, "device_model", lambda _: "another processor")
    elif changed == "ranks":  # of the same hardware
        alone = engine.hardware_of
        monkeypatch.setattr(engine, "hardware_of", lambda *each: dict.fromkeys(alone(*each), 2))
    capsys.readouterr()
    keys = [changed] if "=" in changed else []
    summary = attempt_at(tmp_path, *keys, "train.steps=4", forced=("train.clip_norm",))
    since = [line.get("progress/measured_since", 0) for line in records(tmp_path)]
    assert since == [0, 0, *[2 if changed else 0] * 2]
    output = capsys.readouterr().out
    assert ("measured again on other hardware: another processor, " in output) == (changed == "hardware")
    assert ("other hardware" in output) == (changed == "hardware")
    listed = changed in ("hardware", "ranks")
    assert [*summary.get("worlds", [{}])[0]] == (["step", "from", "to"] if listed else [])


def test_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("run.calibrate_s=0", "checkpoint.every=2", "checkpoint.best=eval/loss", "train.eval_every=2")

    def attempt(steps: int, *forced: str) -> dict[str, Any]:
        return attempt_at(tmp_path, *keys, f"train.steps={steps}", forced=forced)

    attempt(4)
    attempt(6)  # the same data
    for name, text in (
        ("train", r"train_data\(\): sample \d+"),
        ("held out", r"eval_data\(\): sample \d+"),
        ("held out, fewer", r"eval_data\(\): it has another number of samples"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(SHIFT, name, 1.0)
            with pytest.raises(WrongCheckpoint, match=rf"was saved with other data \({text}[^\n]*\n.* --force"):
                attempt(8)
    monkeypatch.setitem(SHIFT, "held out", 5.0)
    before = {record["eval/loss"] for record in records(tmp_path) if "eval/loss" in record}
    assert attempt(8, DATA_KEY)["best"]["value"] not in before, "evaluations of other held-out data no longer count"
    assert "The data has changed, which was forced (eval_data(): sample" in capsys.readouterr().out


def engine_of(
    place: Path, model: nn.Module, *callbacks: Any, forced: tuple[str, ...] = (), optimizer: Optimizer | None = None
) -> Engine:
    plan = make_plan(
        [f"run.dir={place}", "run.name=a", "batch.global_size=4", "train.steps=8", "cluster.device=cpu",
         "precision=fp32", "train.loader_workers=0"], samples=len(DATA),
    )  # fmt: skip
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plan = dataclasses.replace(plan, forced=forced)
    return Engine(model, optimizer or AdamW(trained, 0.05), plan, callbacks=callbacks)


def run(engine: Engine, until: int) -> Path:
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward((engine.model(batch) - 1).square().sum(), len(batch))
        if engine.step().step == until:
            break
    return save.write(save.take_snapshot(engine, Fence.here(engine.plan.paths)))


def test_buffers_that_training_has_enlarged_or_filled(tmp_path: Path) -> None:
    first = Grows()
    place = run(engine_of(tmp_path, first), 3)
    second = Grows()
    engine = engine_of(tmp_path, second)
    load.load(engine, place)
    assert len(first.seen) == 3
    assert second.seen.equal(first.seen)
    assert first.first is not None
    assert second.first is not None
    assert second.first.equal(first.first)
    assert second.late.tolist() == first.late.tolist() == [3.0, 3.0]
    assert second.out.hidden == first.out.hidden
    assert second.start is None
    assert second.state_dict().keys() == first.state_dict().keys()


class Notes(nn.Identity):
    """A module with this extra state."""

    def __init__(self, notes: Any) -> None:
        super().__init__()
        self.notes = notes

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


def test_extra_state_of_any_form(tmp_path: Path) -> None:
    """Empty, None, with keys that are no texts, or other than when the model was built; also as initial values."""
    inner = {0: 3, "none": {}, "parts": [{}, {"at": torch.ones(2)}]}
    saved = [{}, [], {"a": {}}, [{}], {}, inner, {}, None]
    new = [{}, [], {"a": {}}, [{}], {"a": 1, "b": {"c": 2}}, {}, None, None]
    first, second = (nn.Sequential(nn.Linear(4, 1), *map(Notes, notes)) for notes in (saved, new))
    place = run(engine_of(tmp_path, first), 1)
    load.load(engine_of(tmp_path, second), place)
    third = nn.Sequential(nn.Linear(4, 1), *map(Notes, new))
    source, weights = InitialWeights(path=str(tmp_path), run=None, step=None, digest=""), open_weights(place)
    require_fit(third, source, weights)
    values = InitialValues(source, World(0, 1, 0))
    values._weights = weights  # pyright: ignore[reportPrivateUsage]
    values.fill(third)
    assert third[0].weight.equal(first[0].weight)
    for model in (second, third):
        assert [each.get_extra_state() for each in model[1:6]] == saved[:5]
        found = model[6].get_extra_state()
        assert found.pop("parts")[1]["at"].equal(torch.ones(2))
        assert found == {0: 3, "none": {}}
        assert [each.get_extra_state() for each in model[7:]] == [{}, None]
    assert misfits(model_state(nn.Sequential(nn.Linear(4, 1), Notes(None))), weights.tensors) == []


START = [0.0]


class Projects(nn.Module):
    """With constants that no checkpoint has: one is another at each start, another is rounded otherwise, and one
    has a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        START[0] += 1
        wave = torch.sin(torch.arange(12.0) * START[0]).reshape(3, 4)
        self.out, self.rounded, self.sized = nn.Linear(4, 1), torch.ones(4) + START[0] * 1e-7, torch.ones(int(START[0]))
        self.aim = wave.numpy()
        self.mask = torch.full((2,), -torch.inf)
        self.register_buffer("basis", wave, persistent=False)
        self.register_buffer("saved", wave.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def test_constants_that_are_others_after_a_resume_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = run(engine_of(tmp_path, Projects()), 3)
    for same in (True, False):
        START[0] -= same
        engine = engine_of(tmp_path, Projects())
        load.load(engine, place)
        out = capsys.readouterr().out
        assert ("no checkpoint has them: model.aim, model.basis.\n" in out) == (not same)
        assert ("no checkpoint has them" in out) == (not same)


def test_a_forced_argument_keeps_the_optimizers_state(tmp_path: Path) -> None:
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [Remembers(model.parameters()) for model in models]
    place = run(engine_of(tmp_path, models[0], optimizer=optimizers[0]), 3)
    engine = engine_of(tmp_path, models[1], forced=("optimizer.lr",), optimizer=optimizers[1])
    load.load(engine, place)
    states = [optimizer.state[model.weight] for optimizer, model in zip(optimizers, models, strict=True)]
    assert {*states[0]} == {*states[1]}
    assert [past.tolist() for past in states[1]["history"]] == [past.tolist() for past in states[0]["history"]]
    assert states[1]["late"].equal(states[0]["late"])
    assert optimizers[1].seen == 3
