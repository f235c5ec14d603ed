"""Callbacks of an engine: their events in a loop of the user's own, their state, and what happens when one raises."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import launcher
from launcher import Engine
from launcher.errors import CallbackFailed
from launcher.train.callback_set import CallbackSet, load_tensors
from tests.conftest import Launch
from tests.helpers import make_plan
from tests.infra.runs import OWN

seen: list[tuple[Any, ...]] = []
ON_CPU: Any = SimpleNamespace(device=torch.device("cpu"), optimizer=torch.optim.SGD([torch.zeros(1)]))


class Noting:
    def __init__(self, name: str = "a") -> None:
        self.name = name

    def on_setup(self, engine: Engine) -> None:
        seen.append((self.name, "setup", engine.steps))

    def on_start(self, engine: Engine) -> None:
        torch.rand(3)
        seen.append((self.name, "start", engine.steps))

    def on_window(self, engine: Engine) -> None:  # noqa: ARG002
        seen.append((self.name, "window", launcher.current().step))

    def on_step(self, engine: Engine, result: Any) -> None:
        assert launcher.current().step == engine.steps
        seen.append((self.name, "step", result.step))

    @contextmanager
    def around_evaluation(self, engine: Engine) -> Any:  # noqa: ARG002
        seen.append((self.name, "before"))
        yield
        seen.append((self.name, "after"))


class Counting:
    def __init__(self) -> None:
        self.steps, self.parts = 0, {"0.weight": torch.zeros(2), "late": {"norm": torch.ones(())}}

    def on_step(self, engine: Engine, result: Any) -> None:  # noqa: ARG002
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "parts": self.parts, "words": {"list": [1, "a"]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["words"] == {"list": [1, "a"]}
        self.steps, self.parts = state["steps"], state["parts"]


class Failing:
    def __init__(self, event: str, error: BaseException | None = None) -> None:
        setattr(self, event, self.fail)
        self.error = error or KeyError("forgotten")

    def fail(self, *_: Any) -> Any:
        raise self.error


def engine_with(*callbacks: Any, words: tuple[str, ...] = ()) -> Engine:
    plan = make_plan(
        "cluster.workers_per_node=1", "batch.global_size=4", "batch.micro_size=2", "train.loader_workers=0",
        "train.steps=2", *words, samples=8,
    )  # fmt: skip
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    return Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan, callbacks=callbacks or None)


def train(engine: Engine) -> None:
    for window in engine.windows(TensorDataset(torch.ones(8, 3))):
        for (batch,) in window:
            engine.backward(engine.model(batch).float().square().sum(), len(batch))
        engine.step()


@pytest.mark.usefixtures("alone")
def test_events_of_an_own_loop_in_their_order() -> None:
    seen.clear()
    engine = engine_with(Noting("a"), Noting("b"))
    random = torch.get_rng_state()
    train(engine)
    assert random.equal(torch.get_rng_state()), "what a callback draws at the start is given back"
    with engine.callbacks.around_evaluation(engine):
        pass
    events = [("setup", 0), ("start", 0), ("window", 1), ("step", 1), ("window", 2), ("step", 2)]
    assert seen[:-4] == [(name, *event) for event in events for name in ("a", "b")]
    assert seen[-4:] == [("a", "before"), ("b", "before"), ("b", "after"), ("a", "after")]
    assert engine.callbacks.names == ["Noting", "Noting_2"]
    assert isinstance(engine.callbacks.find(Noting), Noting)
    assert engine.callbacks.find(Counting) is None


@pytest.mark.usefixtures("alone")
def test_callbacks_of_the_plan() -> None:
    seen.clear()
    engine = engine_with(words=(f"callbacks=[{{_target_: {__name__}.Noting, name: of the plan}}]",))
    assert engine.callbacks.names == ["Noting"]
    train(engine)
    assert seen[-1] == ("of the plan", "step", 2)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("event", ["on_setup", "on_start", "on_window", "on_step"])
def test_an_exception_names_callback_and_event(event: str) -> None:
    with pytest.raises(CallbackFailed, match=f"Callback Failing failed in {event}: KeyError: 'forgotten'\n.*in fail"):
        train(engine_with(Noting(), Failing(event)))


def test_an_evaluation_that_raises_is_not_the_callbacks_fault() -> None:
    callbacks = CallbackSet([Noting()])
    with pytest.raises(ZeroDivisionError), callbacks.around_evaluation(ON_CPU):
        raise ZeroDivisionError
    with pytest.raises(CallbackFailed, match="Failing failed in around_evaluation"):
        CallbackSet([Failing("around_evaluation")]).around_evaluation(ON_CPU).__enter__()


@pytest.mark.usefixtures("alone")
def test_an_exception_that_would_end_the_process_without_a_message() -> None:
    with pytest.raises(CallbackFailed, match="Callback Failing failed in on_step: SystemExit: 0\n"):
        train(engine_with(Failing("on_step", SystemExit(0))))


def test_around_evaluation_without_a_context_manager() -> None:
    class Forgetful:
        def around_evaluation(self, engine: Engine) -> None: ...

    with pytest.raises(
        CallbackFailed, match="Forgetful failed in around_evaluation: it returned None, and must return"
    ):
        CallbackSet([Forgetful()]).around_evaluation(ON_CPU).__enter__()


@pytest.mark.usefixtures("alone")
def test_callbacks_that_change_the_model_are_noted() -> None:
    class Changing:
        def on_window(self, engine: Engine) -> None:
            engine.optimizer.param_groups[0]["lr"] = 0.5

        @torch.no_grad()
        def on_step(self, engine: Engine, result: Any) -> None:  # noqa: ARG002
            engine.model.get_parameter("weight").add_(1)

    engine = engine_with(Noting(), Changing(), Counting())
    train(engine)
    assert engine.callbacks.changes == {"Changing": ["on_window", "on_step"]}


def test_what_is_drawn_around_an_evaluation_is_given_back() -> None:
    class Disturbing:
        @contextmanager
        def around_evaluation(self, engine: Engine) -> Any:  # noqa: ARG002
            torch.rand(1)
            yield
            torch.rand(1)

    random = torch.get_rng_state()
    with CallbackSet([Disturbing()]).around_evaluation(ON_CPU):
        pass
    assert random.equal(torch.get_rng_state())


def test_state_of_tensors_and_values() -> None:
    first = CallbackSet([Counting(), Counting()])
    one = first.find(Counting)
    one.steps, one.parts["0.weight"] = 7, torch.tensor([1.0, 2.0])
    tensors, values = first.state_dict()
    assert sorted(tensors) == [
        "Counting/parts/0.weight", "Counting/parts/late/norm", "Counting_2/parts/0.weight", "Counting_2/parts/late/norm"
    ]  # fmt: skip
    own = {"steps": 7, "parts": {"late": {}}, "words": {"list": [1, "a"]}}
    assert json.loads(json.dumps(values))["Counting"] == own

    second = CallbackSet([Counting(), Noting()])
    second.find(Counting).parts["0.weight"] = torch.zeros(3)  # of another shape: a new tensor is made
    places = load_tensors(second, {name: (value.shape, value.dtype) for name, value in tensors.items()})
    assert sorted(places) == sorted(tensors)[:2]
    for name, place in places.items():
        place.copy_(tensors[name])
    message = second.load_state_dict(places, values)
    assert message == "The state of callback Counting_2 in the checkpoint is not used: the run has none."
    assert second.find(Counting).steps == 7
    assert second.find(Counting).parts["0.weight"].tolist() == [1.0, 2.0]
    assert CallbackSet([Counting()]).load_state_dict({}, {}) == (
        "Callback Counting starts without state: the checkpoint has none of it."
    )


def test_state_that_json_cannot_hold() -> None:
    callback = Counting()
    callback.steps = float("nan")  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(CallbackFailed, match="Counting failed in state_dict: the value of steps cannot be saved: nan"):
        CallbackSet([callback]).state_dict()
    callback.steps = 1
    callback.parts["late"]["seen"] = {1}  # pyright: ignore[reportArgumentType, reportIndexIssue]
    with pytest.raises(CallbackFailed, match=r"value of parts/late/seen cannot be saved: \{1\}, of type set"):
        CallbackSet([callback]).state_dict()


@pytest.mark.parametrize(
    ("parts", "message"),
    [({3: torch.ones(1)}, "the key 3 is a int, and would be restored as a text"),
     ({"seen": [{3: 7}]}, "the key 3 is a int, and would be restored as a text"),
     ({"eval/loss": torch.ones(1)}, "the key 'eval/loss' of a tensor has a slash")],
)  # fmt: skip
def test_keys_that_would_not_be_restored(parts: Any, message: str) -> None:
    callback = Counting()
    callback.parts = parts
    with pytest.raises(CallbackFailed, match=f"Callback Counting failed in state_dict: .*{message}"):
        CallbackSet([callback]).state_dict()


def test_a_tensor_of_another_dtype_is_not_converted_to_the_present_one() -> None:
    callback = Counting()
    callback.parts["late"]["norm"] = torch.tensor(0)  # pyright: ignore[reportArgumentType, reportIndexIssue]
    place = load_tensors(CallbackSet([callback]), {"Counting/parts/late/norm": (torch.Size(), torch.float32)})
    assert place["Counting/parts/late/norm"].dtype == torch.float32


def test_an_object_without_methods() -> None:
    with pytest.raises(CallbackFailed, match="Callback object has none of the methods on_setup, on_start"):
        CallbackSet([object()])


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_in_a_job_all_events_in_order_and_one_that_raises_ends_it(launch: Launch, project: Path) -> None:
    job = [*(word for word in OWN if not word.startswith("run.name")), "train.steps=4", "train.eval_every=2"]
    job += ["checkpoint.every=2"]
    entries = "{_target_: speech.hooked.Recorder, label: a},{_target_: speech.hooked.Recorder, label: b"
    done = launch("train", *job, "run.name=fine", f"callbacks=[{entries}}}]")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (project / "events-1.jsonl").read_text().splitlines()]
    assert [line["label"] for line in lines] == ["a", "b"] * (len(lines) // 2)
    assert [line["event"] for line in lines[::2]] == [
        "setup", "start", *["window", "step"] * 2, "save", "evaluation", *["window", "step"] * 2, "save", "evaluation",
        "end",
    ]  # fmt: skip
    assert [line["directory"] for line in lines if line["event"] == "save"][::2] == ["step_000002", "step_000004"]
    assert lines[-1]["verdict"] == "done"
    assert lines[-1]["steps"] == 4

    done = launch("train", *job, "run.name=fails", f"callbacks=[{entries}, fails_in: evaluation}}]")
    assert done.returncode == 1
    assert "Callback Recorder_2 failed in on_evaluation: ValueError: no evaluation today" in done.stderr
    assert "speech/hooked.py" in done.stderr
    assert (project / "runs" / "fails" / "checkpoints" / "step_000002").exists(), "the save comes first"
