"""Callbacks of a config: each mistake is one message before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, UserError
from launcher.plan import callback_plan
from launcher.plan.callback_plan import (
    installed_callback,
    installed_callbacks,
    name_of,
    require_callbacks,
    require_environment,
    solve_callbacks,
)
from launcher.targets import find_target
from tests.conftest import Launch
from tests.helpers import make_plan
from tests.infra.runs import OWN

HOOKED = "tests.plan.test_callback_plan"
SAMPLES = "launcher.extensions.callbacks.GeneratedSamples"


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


class Stateful:
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Speaking:
    """A task."""


def speak(model: Any, loudly: bool) -> str: ...


WRONG = [
    ({"decay": 1}, "callbacks[0]={'decay': 1}: has no key _target_"),
    ({"_target_": None}, "has no key _target_"),
    ({"_target_": "Emma"}, "callbacks[0]._target_=Emma: no callback of this name is installed.\n  did you mean 'Ema'?"),
    ({"_target_": "no_such.Thing"}, "callbacks[0]._target_=no_such.Thing: no module 'no_such'"),
    ({"_target_": "launcher.extensions.callbacks.Emma"}, "has no 'Emma'.\n  did you mean 'Ema'? Its classes: Ema, "),
    ({"_target_": "launcher.extensions.callbacks.EMA"}, "has no 'EMA'.\n  did you mean 'Ema'?"),
    ({"_target_": SAMPLES}, "Speaking has no method sample(model), which callbacks.GeneratedSamples calls"),
    (
        {"_target_": SAMPLES, "function": f"{HOOKED}.speek"},
        f"callbacks[0].function={HOOKED}.speek: {__file__} has no 'speek'.\n  did you mean 'speak'? Its functions: ",
    ),
    (
        {"_target_": SAMPLES, "function": f"{HOOKED}.speak"},
        f"callbacks[0].function={HOOKED}.speak: is called as function(model): missing a required argument: 'loudly'",
    ),
    ({"_target_": "Ema", "decai": 0.9}, "did you mean 'callbacks[0].decay'?"),
    ({"_target_": "Ema", "decay": "high"}, "callbacks[0].decay=high: launcher.extensions.callbacks.Ema takes"),
    ({"_target_": "Ema", "decay": 1.5}, "callbacks[0].decay=1.5: must be above 0 and below 1"),
    ({"_target_": f"{HOOKED}.Fine"}, f"callbacks[0].size: {HOOKED}.Fine needs this argument"),
    ({"_target_": f"{HOOKED}.Idle"}, "has a method on_stop, which nothing calls.\n  did you mean 'on_st"),
    ({"_target_": f"{HOOKED}.Nothing"}, "has none of a callback's methods.\n  The methods of a callback: on_setup, on"),
    ({"_target_": f"{HOOKED}.Narrow"}, "on_step is called with 2 arguments besides self: too many positional"),
    ({"_target_": f"{HOOKED}.Forgetful"}, "has state_dict alone."),
]


@pytest.mark.parametrize(("entry", "words"), WRONG)
def test_mistakes(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        require_callbacks(solve_callbacks([entry]), ["here"], Speaking())
    assert words in str(caught.value)


def test_what_is_right() -> None:
    entries = [
        {"_target_": f"{HOOKED}.Fine", "size": 3, "anything": [1]},
        {"_target_": "launcher.extensions.callbacks.Ema", "decay": 0.9},
        {"_target_": f"{HOOKED}.Stateful"},
    ]
    assert [*solve_callbacks(entries)] == entries
    require_callbacks(entries, [])
    assert [name_of(entry) for entry in entries] == ["Fine", "Ema", "Stateful"]
    plan = make_plan("callbacks=[{_target_: a.B, size: 3}]")
    assert type(plan).from_json(plan.to_json()).callbacks == ({"_target_": "a.B", "size": 3},)
    assert make_plan().callbacks == ()


@pytest.mark.parametrize("name", installed_callbacks())
def test_an_installed_callback_has_a_short_name_and_two_paths(name: str) -> None:
    known = installed_callbacks()[name]
    assert find_target("", known.defined) is find_target("", known.target)
    for word in (name, known.target, known.defined):
        (entry,) = solve_callbacks([{"_target_": word}])
        assert installed_callback(entry) is known


def test_without_callbacks_no_package_of_them_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callback_plan, "installed_callbacks", lambda: pytest.fail("it imports them"))
    assert make_plan("notify=[bell]").callbacks == ()


PROFILE = "callbacks=[{_target_: Profile, %s}]"


def test_what_a_profile_cannot_see() -> None:
    for profile, words in (
        ("steps: [10], ranks: [0, 7]", r"callbacks\[0\].ranks=\[7\]: the job has ranks 0 to 1."),
        ("steps: [100]", r"callbacks\[0\].steps=\[100\]: the run ends after 30 steps, .*\n  Choose steps"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_plan("cluster.workers_per_node=2", "train.steps=30", PROFILE % profile)
    plan = make_plan("train.steps=30", PROFILE % "steps: [10, 100, 200]")
    assert "callbacks[0].steps: 100, 200 after the end of the run: not profiled." in plan.notes
    assert not any("profiled" in note for note in make_plan("train.steps=30", PROFILE % "steps: [10, 30]").notes)


def test_one_average_is_evaluated() -> None:
    ema = "{_target_: Ema, decay: 0.9%s}"
    with pytest.raises(ConfigError, match=r"callbacks\[1\].evaluate=true: callbacks\[0\] evaluates its averages"):
        make_plan(f"callbacks=[{ema % ''},{ema % ', evaluate: true'}]")
    assert len(make_plan(f"callbacks=[{ema % ', evaluate: false'},{ema % ''}]").callbacks) == 2


def test_variables_of_messages_exist_before_the_start() -> None:
    entries = solve_callbacks([
        {"_target_": "my.Own", "url_from": "ANYTHING"},
        {"_target_": "launcher.extensions.callbacks.Webhook", "url_from": "NOPE"},
    ])  # fmt: skip
    keyed = [(f"callbacks[{number}]", entry) for number, entry in enumerate(entries)]
    require_environment(keyed, {"NOPE": "http://x"})
    with pytest.raises(ConfigError, match=r"callbacks\[1\].url_from=NOPE: there is no such .* here.\n  export NOPE="):
        require_environment(keyed, {})


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_the_command_refuses_before_anything_starts(launch: Launch, project: Path) -> None:
    own, variable = "{_target_: speech.hooked.Recorder, label: a, size: 3}", "{_target_: Webhook, url_from: NO_SUCH}"
    for job, entry, words in (
        (OWN, own, "callbacks[0].size=3: speech.hooked.Recorder has no"),
        (OWN, variable, "callbacks[0].url_from=NO_SUCH: there is no such environment variable here"),
        ((), "{_target_: Ema, decay: 2}", "callbacks[0].decay=2: must be above 0 and below 1"),  # a bundled task
    ):
        done = launch("train", *job, f"callbacks=[{entry}]")
        assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
    assert not (project / "runs").exists()
