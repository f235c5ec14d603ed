"""Checkpoints, evaluation and record in a loop of the user's own; two engines in one process."""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from launcher import Engine, Loss, make_plan
from launcher.errors import ConfigError, EngineMisuse, WrongCheckpoint
from launcher.plan.run_plan import RunPlan
from launcher.process import AGENT_PID
from launcher.train.world import World
from tests.helpers import series, torchrun

DATA = list(torch.sin(torch.arange(36.0)).reshape(9, 4))
AT_ONCE = "checkpoint.async_save=false"


def plan_of(place: Path, *words: str) -> RunPlan:
    common = [f"run.dir={place}", "run.name=a", "batch.global_size=4", "train.steps=8", "cluster.device=cpu",
              "precision=fp32", "train.loader_workers=0"]  # fmt: skip
    return make_plan([*common, *words], samples=len(DATA))


def close(engine: Engine) -> None:
    """End a run before its last step."""
    if engine._loop is not None:  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        engine._loop.close()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]


class FreezesOnSecondEvaluation:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_evaluation(self, engine: Engine, metrics: dict[str, float]) -> None:
        self.seen.append([engine.steps, metrics])
        if len(self.seen) == 2:
            engine.freeze("0.weight")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def train(place: Path, callback: object, every: int, *, steps: int = 8, by_hand: int = 0) -> Tensor:
    """Train until the plan's end, or until ``steps``; return the parameters."""
    plan = plan_of(place, "train.eval_every=2", f"checkpoint.every={every}", AT_ONCE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))

    def loss(model: Any, batch: Tensor) -> tuple[Tensor, int]:
        return (model(batch) - 1).square().sum(), len(batch)

    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan, callbacks=[callback])
    engine.resume(eval_data=DATA[:3], loss=loss)
    for window in engine.windows(DATA):
        for batch in window:
            engine.backward(*loss(engine.model, batch))
        result = engine.step()
        engine.finish_step(result)
        if result.step == by_hand:
            engine.save()
        if result.step == steps < 8:
            close(engine)
            break
    if engine.over:
        engine.save()  # without effect: the last step is saved
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.usefixtures("alone")
def test_an_evaluation_keeps_the_timers_of_one_batch() -> None:
    plan = make_plan(["cluster.device=cpu", "batch.micro_size=1", "train.loader_workers=0"], samples=None)
    engine = Engine(model := nn.Linear(4, 1), torch.optim.SGD(model.parameters(), 0.1), plan)
    meter, kept = engine.parallel.meter, list[int]()

    def loss(model: Any, batch: Tensor) -> tuple[Tensor, int]:
        meter.start_timer().stop()
        kept.append(len(meter._timers))  # pyright: ignore[reportPrivateUsage]
        return model(batch).sum(), len(batch)

    engine.evaluate(DATA, loss)
    assert kept == [1] * len(DATA)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("every", "by_hand"), [(2, 0), (100, 4)])
def test_a_resumed_run_has_the_callbacks_state_after_the_evaluation(tmp_path: Path, every: int, by_hand: int) -> None:
    """A step is saved before it is evaluated; ``by_hand``, after it."""
    undisturbed, before, after = (FreezesOnSecondEvaluation() for _ in range(3))
    whole = train(tmp_path / "whole", undisturbed, every)
    train(tmp_path / "killed", before, every, steps=4, by_hand=by_hand)
    assert train(tmp_path / "killed", after, every).equal(whole)
    assert after.seen == undisturbed.seen
    assert len(after.seen) == 4


def test_a_plan_needs_the_length_of_the_data() -> None:
    with pytest.raises(ConfigError, match=r"make_plan\(samples=...\): is missing.*\n.* samples=len\(dataset\)"):
        make_plan(["train.steps=3"])


@pytest.mark.usefixtures("alone")
def test_a_save_by_hand_after_a_skipped_window(tmp_path: Path) -> None:
    """The steps before it are saved, and the run resumes after the skipped window."""

    def engine() -> Engine:
        plan, model = plan_of(tmp_path, "checkpoint.every=100", "train.on_nonfinite=skip"), nn.Linear(4, 1)
        return Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)

    first = engine()
    first.resume()
    for number, window in enumerate(first.windows(DATA), 1):
        for batch in window:
            first.backward(first.model(batch).square().sum() * (torch.nan if number == 3 else 1), len(batch))
        first.finish_step(first.step())
        if number == 3:
            first.save()
            first.save()
            close(first)
            break
    second = engine()
    assert second.resume() == {}
    assert (second.steps, second.position.index, second.nonfinite_windows) == (2, 3, 1)
    close(second)


@pytest.mark.usefixtures("alone")
def test_stop_signals_are_received_in_each_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one that runs again in smaller micro-batches, and in a later call of engine.windows()."""
    monkeypatch.delenv(AGENT_PID, raising=False)
    plan = plan_of(tmp_path, "batch.micro_size=4", "batch.on_oom=shrink", "checkpoint.every=100")
    model, earlier = nn.Linear(4, 1), signal.getsignal(signal.SIGTERM)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    engine.resume()
    for _ in range(2):
        for number, window in enumerate(engine.windows(DATA)):
            assert signal.getsignal(signal.SIGTERM) != earlier
            for batch in window:
                if number == 0 and engine.shrinks(torch.OutOfMemoryError("injected")):
                    break
                if engine.steps == 1:
                    signal.raise_signal(signal.SIGTERM)
                engine.backward(engine.model(batch).square().sum(), len(batch))
            else:
                engine.finish_step(engine.step())
                break
        assert signal.getsignal(signal.SIGTERM) == earlier
    assert [path.name for path in (tmp_path / "a" / "checkpoints").glob("step_*")] == ["step_000002"]


@pytest.mark.usefixtures("alone")
def test_half_a_window_is_neither_saved_nor_applied(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "batch.micro_size=1", AT_ONCE)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1))
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    engine.resume()
    windows = engine.windows(DATA)
    window = next(windows)
    for batch in window:
        engine.backward(engine.model.eval()(batch).square().sum(), len(batch))
    result = engine.step()
    engine.finish_step(result)
    for window in windows:
        engine.backward(engine.model(next(window).expand(2, 4)).square().sum(), 1)
        break
    for call in (engine.step, engine.save, lambda: engine.finish_step(result), lambda: next(engine.windows(DATA))):
        with pytest.raises(EngineMisuse, match=r"1 of its 4 micro-batches|engine.step\(\) must be called once"):
            call()
    close(engine)
    assert not [*(tmp_path / "a" / "checkpoints").glob("step_*")]


@pytest.mark.usefixtures("alone")
def test_arguments_edited_in_the_script_are_named_on_resume(tmp_path: Path, capsys: Any) -> None:
    def run(lr: float, decay: float, biases: bool, *, steps: int = 8, groups: int = 2) -> str:
        plan = plan_of(tmp_path, "checkpoint.every=2", AT_ONCE)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        one = [p for p in model.parameters() if (p.ndim < 2) is biases]
        two = [p for p in model.parameters() if (p.ndim < 2) is not biases]
        split = [{"params": one, "weight_decay": decay}, {"params": two}] if groups == 2 else one + two
        engine = Engine(model, torch.optim.AdamW(split, lr), plan)
        capsys.readouterr()
        try:
            engine.resume()
            for window in engine.windows(DATA):
                for batch in window:
                    engine.backward(engine.model(batch).square().sum(), len(batch))
                engine.finish_step(engine.step())
                if engine.steps == steps:
                    break
        except WrongCheckpoint as error:
            return str(error)
        finally:
            close(engine)
        return capsys.readouterr().out

    run(2e-3, 0.0, True, steps=2)
    assert "in the code" not in run(2e-3, 0.0, True, steps=4)
    edited = run(2e-2, 0.1, True, steps=6).splitlines()
    assert [line for line in edited if "in the code" in line] == [
        "weight_decay=0.0 of the optimizer's group 0 is that of the checkpoint; 0.1 in the code is not used. To change "
        'it, set engine.optimizer.param_groups[0]["weight_decay"] = 0.1 after engine.resume().',
        *(
            f"lr=0.002 of the optimizer's group {number} is that of the checkpoint; 0.02 in the code is not used. To "
            f"change it, set engine.schedule.base_lrs[{number}] = 0.02 after engine.resume()."
            for number in range(2)
        ),
    ]
    moved = run(2e-3, 0.0, False)
    assert "has 4 parameters in other groups of the optimizer: 0.bias was in group 0, and is in group 1; also" in moved
    assert "has 2 parameter groups, and the optimizer has 1.\n  Use the same" in run(2e-3, 0.0, True, groups=1)


@pytest.mark.slow
@series(2, 4)
def test_two_models_against_each_other_are_those_of_plain_torch(part: str, cases: int, tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "two_engines_worker.py", [str(tmp_path), part], 2, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert "was saved with the further engines critic, and engine.resume was given none" in seen.pop("refused")
    assert len(seen) == cases
    for name, found in seen.items():
        assert found["error"] < 3 * found["at once"], (name, found)
        assert found["resumed alike"], name


@pytest.mark.parametrize("ending", ["breaks", "raises", "fails"])
def test_a_loop_that_ends_while_a_checkpoint_is_written_waits_for_it(tmp_path: Path, ending: str) -> None:
    worker, status = Path(__file__).parent / "early_end_worker.py", int(ending == "raises")
    output = torchrun(worker, [str(tmp_path), ending], 2, tmp_path, status=status)
    saved = [path.name for path in (tmp_path / "a" / "checkpoints").glob("step_*")]
    assert saved == ([] if ending == "fails" else ["step_000002"])
    assert ("The checkpoint in progress was not written: The disk is full." in output) is (ending == "fails")


@pytest.mark.usefixtures("alone")
def test_the_mistakes_of_a_loop_that_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(name: str) -> Engine:
        model = nn.Linear(4, 1)
        return Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan_of(tmp_path / name))

    first, second, plain = engine("first"), engine("second"), engine("plain")
    with pytest.raises(EngineMisuse, match=r"needs loss=function of \(model, batch\)"):
        first.resume(eval_data=DATA)
    with monkeypatch.context() as patch:
        patch.setattr(World, "of_all", lambda _, value, *__: [value, f"{value} of rank 1"])
        with pytest.raises(EngineMisuse, match=r"The ranks have different run directories: .*\n.*run\.name=NAME"):
            first.resume()
    assert second.resume() is None
    with pytest.raises(EngineMisuse, match="once, before the first step"):
        second.resume()
    for number, window in enumerate(second.windows(DATA)):
        for batch in window:
            second.backward(second.model(batch).square().sum(), len(batch))
        if number:
            with pytest.raises(
                EngineMisuse, match=r"engine.finish_step\(result\) was not called after step 1: this run"
            ):
                second.step()
            break
        result = second.step()
        wrong = {
            "Object of type Tensor": torch.ones(2),
            "the key 3 is a int, and would be restored as a text": [{3: 7}],
        }
        for why, value in wrong.items():
            with pytest.raises(EngineMisuse, match=f"extra must be JSON: {why}"):
                second.finish_step(result, extra={"x": value})
    close(second)
    for window in plain.windows(DATA):
        for batch in window:
            plain.backward(plain.model(batch).square().sum(), len(batch))
        with pytest.raises(
            EngineMisuse, match=r"engine.finish_step\(\) needs engine.resume\(\) before the first window"
        ):
            plain.finish_step(plain.step())
        break


@pytest.mark.usefixtures("alone")
def test_an_evaluation_of_several_sets_and_of_a_loss_as_a_tuple(tmp_path: Path) -> None:
    def with_metric(model: Any, batch: Tensor) -> Loss:
        return Loss(model(batch).square().sum(), len(batch), metrics={"mean": (batch.sum(), batch.numel())})

    def as_tuple(model: Any, batch: Tensor) -> tuple[Any, ...]:
        loss = with_metric(model, batch)
        return loss.total, loss.items, loss.metrics

    model = nn.Linear(4, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan_of(tmp_path))
    with torch.no_grad():
        loss = model(torch.stack(DATA)).square().mean().item()
    found = engine.evaluate({"one": DATA, "two": DATA[:3]}, with_metric)
    assert [found["eval/loss"], found["eval/one/loss"]] == pytest.approx([loss, loss])
    assert found["eval/two/mean"] == pytest.approx(torch.stack(DATA[:3]).mean().item())
    assert engine.evaluate(DATA, as_tuple) == engine.evaluate(DATA, with_metric)


@pytest.mark.usefixtures("alone")
def test_only_one_engine_starts_with_other_weights_and_never_silently_without(tmp_path: Path) -> None:
    save_file(nn.Linear(2, 1).state_dict(), tmp_path / "a.safetensors")
    words = ["train.steps=2", "checkpoint.every=1", AT_ONCE, f"checkpoint.init_from={tmp_path / 'a.safetensors'}"]

    def engine(**changes: Any) -> Engine:
        plan = dataclasses.replace(plan_of(tmp_path, *words), **changes)
        return Engine(nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, 0.1), plan)

    def train(engine: Engine) -> None:
        for window in engine.windows(list(torch.ones(len(DATA), 2))):
            for batch in window:
                engine.backward(engine.model(batch).sum(), len(batch))
            engine.finish_step(engine.step())

    first = engine()
    with pytest.raises(EngineMisuse, match=r"is for one engine of a script.*\n.*replace\(plan, initial=None\)"):
        engine()
    second = engine(initial=None)
    first.resume(parts={"second": second})
    train(first)
    del first
    gc.collect()

    again = engine()
    with pytest.raises(EngineMisuse, match=r"has checkpoints, so checkpoint.init_from was not read"):
        train(again)
    with pytest.raises(EngineMisuse, match=r"engine.resume\(\)"):
        again.evaluate([torch.ones(2)], lambda model, batch: (model(batch).sum(), 1))
