"""A save and a resume leave parameters, optimizer and random state as they are, whatever the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LinearLR, SequentialLR, StepLR

from launcher import Engine, make_plan
from launcher.errors import TaskError, WrongCheckpoint
from launcher.rundir.fencing import Fence
from launcher.train.checkpoint import load, save
from launcher.train.checkpoint.contents import Staging, checkpoint_tensors, own_share, require_restorable
from launcher.train.checkpoint.file_format import unpickled
from launcher.train.checkpoint.optimizer_parts import optimizer_state
from launcher.train.engine import carried_state
from launcher.train.engine.carried_state import MAX_READ, LeftOut
from launcher.train.world import World
from tests.infra.checkpoints import tensors
from tests.train.checkpoint.stateful_optimizers import EachParameter, Remembers, TwoPoints
from tests.train.checkpoint.test_load_changed import DATA, Notes, engine_of

STEPS = 6


class Langevin(EachParameter):
    """Without state; it adds noise that the learning rate does not scale."""

    def change(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        parameter.sub_(lr * gradient).add_(torch.randn_like(parameter), alpha=0.01)


class ThawsLate:
    def on_setup(self, engine: Engine) -> None:
        engine.freeze("^1")

    def on_step(self, engine: Engine, result: Any) -> None:
        if result.step == 3:
            engine.unfreeze("^1")


Make = Callable[[nn.Sequential], Sequence[Optimizer]]
OPTIMIZERS: dict[str, Make] = {
    "noise": lambda model: [Langevin(model.parameters())],
    "one of two has no state yet": lambda model: [
        AdamW(model[0].parameters(), 0.05),
        Adam(model[1].parameters(), 0.05),
    ],
    "all kinds of state": lambda model: [Remembers(model.parameters())],
    "two of all kinds": lambda model: [Remembers(model[0].parameters()), Remembers(model[1].parameters())],
    "two points": lambda model: [TwoPoints(model.parameters())],
    "rates are tensors": lambda model: [AdamW(model.parameters(), torch.tensor(0.05))],
}


Schedule = Callable[[Optimizer, int | None], Any]


def warm_then_cosine(optimizer: Optimizer, steps: int | None) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, 1.0, 2), CosineAnnealingLR(optimizer, steps or 0)]
    return SequentialLR(optimizer, parts, [3])


def both_at_once(optimizer: Optimizer, _: int | None) -> ChainedScheduler:
    return ChainedScheduler([LinearLR(optimizer, 0.1, 1.0, 4), StepLR(optimizer, 2, 0.5)])


def train(
    place: Path, make: Make, *, schedule: Schedule | None = None, saves: Sequence[int] = (), resume: int = 0
) -> Tensor:
    """Return the parameters after STEPS steps, from the checkpoint of step ``resume`` on."""
    plan = make_plan(
        [f"run.dir={place}", "run.name=a", "batch.global_size=4", f"train.steps={STEPS}", "cluster.device=cpu",
         "precision=fp32", "train.loader_workers=0", "schedule=cosine"], samples=len(DATA),
    )  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    engine = Engine(model, make(model), plan, callbacks=[ThawsLate()], schedule=schedule)
    if resume:
        load.load(engine, plan.paths.checkpoint(resume))
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward((engine.model(batch) - 1).square().sum(), len(batch))
        if engine.step().step in saves:
            save.write(save.take_snapshot(engine, Fence.here(plan.paths)))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saves_and_a_resume_do_not_change_what_is_learned(tmp_path: Path, name: str) -> None:
    undisturbed = train(tmp_path / "never", OPTIMIZERS[name])
    assert train(tmp_path / "saved", OPTIMIZERS[name], saves=(1, 2, 4)).equal(undisturbed)
    for step in (2, 4):
        assert train(tmp_path / "saved", OPTIMIZERS[name], resume=step).equal(undisturbed)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("schedule", [warm_then_cosine, both_at_once])
def test_a_schedule_made_of_others_continues(tmp_path: Path, schedule: Schedule) -> None:
    adam = OPTIMIZERS["one of two has no state yet"]
    undisturbed = train(tmp_path / "never", adam, schedule=schedule)
    assert train(tmp_path / "saved", adam, schedule=schedule, saves=(2, 4)).equal(undisturbed)
    for step in (2, 4):
        assert train(tmp_path / "saved", adam, schedule=schedule, resume=step).equal(undisturbed)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_evaluation_and_a_checkpoint_have_the_values_for_evaluation(tmp_path: Path) -> None:
    model = nn.Linear(4, 1, bias=False)
    engine = engine_of(tmp_path, model, optimizer=TwoPoints(model.parameters()))

    def loss(model: Any, batch: Tensor) -> tuple[Tensor, int]:
        return (model(batch) - 1).square().sum(), len(batch)

    for window in engine.windows(DATA):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        engine.step()
    y, z = model.weight.detach().clone(), engine.optimizer.state[model.weight]["z"]
    x = y.lerp(z, -0.25)
    expected = sum((sample @ x.T - 1).square().item() for sample in DATA) / len(DATA)
    assert engine.evaluate(DATA, loss)["eval/loss"] == pytest.approx(expected, rel=1e-5)
    place = save.write(save.take_snapshot(engine, Fence.here(engine.plan.paths)))
    assert tensors(place)["model.weight"].equal(x)
    assert model.weight.equal(y), "training continues with the bits that it had"


class KeepsAnObject(Adam):
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        super().step()
        for state in self.state.values():
            state["memory"] = [object()]


@pytest.mark.usefixtures("alone")
def test_state_that_no_checkpoint_gives_back_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    engine = engine_of(tmp_path, model, optimizer=KeepsAnObject(model.parameters()))
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
    with pytest.raises(TaskError, match=r"\(KeepsAnObject: state of weight\): [^\n]*\n[^\n]*checkpoint.enabled=false"):
        optimizer_state(engine)


class Older(nn.Linear):
    """With the signature that load_state_dict had before torch 2.1."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().load_state_dict(state_dict, strict)


class Oldest(nn.Linear):
    def load_state_dict(self, state: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().load_state_dict(state)


class Broken(nn.Linear):
    def load_state_dict(self, state_dict: Any, **_: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().load_state_dict(state_dict["model"])


class Forgets(nn.Linear):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"weight": self.weight}


@pytest.mark.usefixtures("alone")
def test_extra_state_that_no_reader_accepts_is_refused_before_it_is_saved(tmp_path: Path) -> None:
    """torch pickles some values, such as empty bytes, by names that its own reader without code refuses."""
    for notes in (b"", {"a": [1, b""]}, numpy.zeros(2), numpy.float64(1)):
        first = engine_of(tmp_path, nn.Sequential(nn.Linear(4, 1), model := Notes(None)))
        for each in (b"x", {1}, {"a": [None, 1j]}):
            model.notes = each
            require_restorable(first)
        model.notes = notes
        for refuses in (require_restorable, lambda engine: save.take_snapshot(engine, Fence.here(engine.plan.paths))):
            with pytest.raises(TaskError, match=r"_extra_state in .*: a \w+ cannot be read from a checkpoint again"):
                refuses(first)


class Fails(Notes):
    def get_extra_state(self) -> Any:
        raise LookupError("lost")


class Unwilling:
    def __reduce__(self) -> Any:
        raise ValueError("stays here")


@pytest.mark.usefixtures("alone")
def test_extra_state_that_cannot_be_saved_names_its_module(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    shard = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    for part, words in (
        (Fails(None), r"restored from a checkpoint: in 1\.0, LookupError: lost\."),
        (Notes({"a": [Unwilling()]}), r"^1\.0\._extra_state in .*: a dict cannot .* \(stays here\)"),
        (Notes({"a": [shard]}), r"^1\.0\._extra_state in .*: it contains a sharded parameter; .* full_tensor\(\)"),
    ):
        with pytest.raises(TaskError, match=words):
            require_restorable(engine_of(tmp_path, nn.Sequential(nn.Linear(4, 1), nn.Sequential(part))))


@pytest.mark.usefixtures("alone")
def test_extra_state_of_rank_0_is_saved_as_it_was(tmp_path: Path) -> None:
    """Later changes in place do not reach what an asynchronous save writes."""
    notes = {"at": torch.arange(4.0), "count": 3}
    engine = engine_of(tmp_path, nn.Sequential(nn.Linear(4, 1), Notes(notes)))
    state = checkpoint_tensors(engine, [])
    shares = [own_share(state, World(rank, 2, rank)) for rank in range(2)]
    assert ["1._extra_state" in share["model"] for share in shares] == [True, False]
    staged = Staging(torch.device("cpu")).copy(shares[0])
    notes["at"].zero_()
    notes["count"] = 4
    found = unpickled(staged["model"]["1._extra_state"])
    assert (found["at"].tolist(), found["count"]) == ([0, 1, 2, 3], 3)


@pytest.mark.usefixtures("alone")
def test_models_with_methods_of_their_own(tmp_path: Path) -> None:
    for kind in (Older, Oldest):
        first, second = (engine_of(tmp_path / kind.__name__, kind(4, 1)) for _ in range(2))
        require_restorable(first)
        place = save.write(save.take_snapshot(first, Fence.here(first.plan.paths)))
        load.load(second, place)
        assert first.model.state_dict()["weight"].equal(second.model.state_dict()["weight"]), kind
    with pytest.raises(TaskError, match=r"state of Broken cannot be restored from a checkpoint: KeyError: 'model'"):
        require_restorable(engine_of(tmp_path, Broken(4, 1)))
    with pytest.raises(TaskError, match=r"leaves out trained parameters: bias\.\n[^\n]* return all parameters"):
        require_restorable(engine_of(tmp_path, Forgets(4, 1)))


class Adapter(nn.Module):
    """Whose checkpoints have no base, as those of adapters."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Linear(4, 1)
        nn.init.constant_(self.base.weight, base)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.base(x))

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        state = super().state_dict(*arguments, **keywords)
        return {name: value for name, value in state.items() if not name.startswith("base.")}


class PlainAdapter(Adapter):
    """With a method that takes no arguments."""

    def state_dict(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().state_dict()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [Adapter, PlainAdapter])
def test_frozen_parameters_that_a_state_dict_leaves_out(tmp_path: Path, kind: type[Adapter]) -> None:
    first = engine_of(tmp_path, kind(0.5))
    require_restorable(first)
    place = save.write(save.take_snapshot(first, Fence.here(first.plan.paths)))
    load.load(engine_of(tmp_path, kind(0.5)), place)
    with pytest.raises(WrongCheckpoint, match=r"no checkpoint has them: model\.base\.weight\.\n"):
        load.load(engine_of(tmp_path, kind(0.6)), place)
    first.left_out.require_unchanged()
    with torch.no_grad():
        first.model.get_parameter("base.weight").mul_(0.9)
    with pytest.raises(TaskError, match=r"Training changes base\.weight, which the model's state_dict\(\) leaves out"):
        first.left_out.require_unchanged()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [MAX_READ, 50])
def test_frozen_parameters_that_differ_by_rounding(
    dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations of adapters add a product to a frozen weight and subtract it; others restore a copy."""
    monkeypatch.setattr(carried_state, "MAX_READ", limit)
    model = Adapter(0.5)
    weight = nn.Parameter(torch.sin(torch.arange(160.0)).reshape(16, 10).to(dtype), requires_grad=False)
    model.base.weight, update = weight, torch.cos(torch.arange(160.0)).reshape(16, 10).to(dtype)
    left_out, before = LeftOut(model), weight.clone()
    for _ in range(3):
        weight.add_(update).sub_(update)
        left_out.require_unchanged()
    assert not weight.equal(before)
    weight.copy_(before)
    left_out.require_unchanged()
    for column in range(10):
        weight[:, column] += 1
        with pytest.raises(TaskError, match=r"Training changes base\.weight, "):
            left_out.require_unchanged()
        weight.copy_(before)
