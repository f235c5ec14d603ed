"""Callbacks of a config: each mistake is one message before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.plan.callback_plan import name_of, require_callbacks, solve_callbacks
from tests.conftest import Launch
from tests.helpers import make_plan
from tests.infra.runs import OWN

HOOKED = "tests.plan.test_callback_plan"


class Fine:
    def __init__(self, size: int, name: str = "x", **others: Any) -> None: ...
    def on_step(self, engine: Any, result: Any) -> None: ...
    def around_evaluation(self, engine: Any) -> Any: ...


class Idle:
    def on_stop(self, engine: Any) -> None: ...


class Nothing:
    pass


class Narrow:
    def on_step(self, engine: Any) -> None: ...


class Forgetful:
    def on_end(self, engine: Any, verdict: str) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...


WRONG = [
    ({"decay": 1}, "callbacks[0]={'decay': 1}: has no key _target_"),
    ({"_target_": None}, "has no key _target_"),
    ({"_target_": "Ema"}, "callbacks[0]._target_=Ema: must be a dotted path"),
    ({"_target_": "no_such.Thing"}, "callbacks[0]._target_=no_such.Thing: no module 'no_such'"),
    ({"_target_": "launcher.callbacks.Emma"}, "has no 'Emma'"),
    ({"_target_": "launcher.callbacks.Ema", "decai": 0.9}, "did you mean 'callbacks[0].decay'?"),
    ({"_target_": "launcher.callbacks.Ema", "decay": "high"}, "callbacks[0].decay=high: launcher.callbacks.Ema takes"),
    ({"_target_": "launcher.callbacks.Ema", "decay": 1.5}, "callbacks[0].decay=1.5: must be above 0 and below 1"),
    ({"_target_": f"{HOOKED}.Fine"}, f"callbacks[0].size: {HOOKED}.Fine needs this argument"),
    ({"_target_": f"{HOOKED}.Idle"}, "has a method on_stop, which nothing calls.\n  did you mean 'on_st"),
    ({"_target_": f"{HOOKED}.Nothing"}, "has none of a callback's methods.\n  The methods of a callback: on_setup, on"),
    ({"_target_": f"{HOOKED}.Narrow"}, "on_step is called with 2 arguments besides self: too many positional"),
    ({"_target_": f"{HOOKED}.Forgetful"}, "has state_dict alone."),
]


@pytest.mark.parametrize(("entry", "words"), WRONG)
def test_mistakes(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        require_callbacks(solve_callbacks([entry]), ["here"])
    assert words in str(caught.value)


def test_what_is_right() -> None:
    entries = [
        {"_target_": f"{HOOKED}.Fine", "size": 3, "anything": [1]},
        {"_target_": "launcher.callbacks.Ema", "decay": 0.9},
    ]
    assert [*solve_callbacks(entries)] == entries
    require_callbacks(entries, [])
    assert [name_of(entry) for entry in entries] == ["Fine", "Ema"]
    plan = make_plan("callbacks=[{_target_: a.B, size: 3}]")
    assert type(plan).from_json(plan.to_json()).callbacks == ({"_target_": "a.B", "size": 3},)
    assert make_plan().callbacks == ()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_the_command_refuses_before_anything_starts(launch: Launch, project: Path) -> None:
    for entry, words in (
        ("{_target_: speech.hooked.Recorder, label: a, size: 3}", "callbacks[0].size=3: speech.hooked.Recorder has no"),
        ("{label: a}", "callbacks[0]={'label': 'a'}: has no key _target_"),
    ):
        done = launch("train", *OWN, f"callbacks=[{entry}]")
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert not (project / "runs").exists()
    done = launch("train", "callbacks=[{_target_: launcher.callbacks.Ema, decay: 2}]")  # a bundled task
    assert done.returncode == 2
    assert "callbacks[0].decay=2: must be above 0 and below 1" in done.stderr
