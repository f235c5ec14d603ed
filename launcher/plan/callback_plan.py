"""Callbacks of a plan: their entries, and the methods that a callback may have. Imports no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from launcher.errors import ConfigError, did_you_mean
from launcher.quantities import count, first_names
from launcher.targets import find_target, require_arguments

# methods that are called in the workers, with the engine as the first argument
EVENTS = ("on_setup", "on_start", "on_window", "on_step", "on_evaluation", "on_save", "on_end")
AROUND_EVALUATION = "around_evaluation"
# called outside of the workers, after they have ended
OUTCOME = "on_outcome"
# its state in checkpoints; a callback has both or neither
STATE = ("state_dict", "load_state_dict")
METHODS = (*EVENTS, AROUND_EVALUATION, OUTCOME, *STATE)
# number of arguments that each method is called with
_ARGUMENTS = {"on_step": 2, "on_evaluation": 2, "on_save": 2, "on_end": 2, "state_dict": 0}
TARGET = "_target_"
BUNDLED = "launcher.callbacks."
# bundled callback that acts on the outcome of a run
_WEBHOOK = "Webhook"
# entry of ``notify`` for the terminal in which `launch` waits for the run
BELL = "bell"
_VARIABLE = "env:"
# without a user and a password, which urllib would take for a part of the host's name
_WEB_ADDRESS = r"https?://([^/?#@:\[\]\s]+|\[[0-9A-Fa-f:.]+\])(:\d+)?([/?#]\S*)?"
# verdict of a run that Slurm starts again
REQUEUED = "requeued"
_NOTIFIED = ("done", "stopped", "failed", "killed", REQUEUED)


def solve_callbacks(entries: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the callbacks of a config, each with its class under ``_target_`` and that class's arguments.

    Raises:
        ConfigError: an entry names no class, or several evaluate other parameters than the model's.
    """
    averages: int | None = None
    for number, entry in enumerate(entries):
        if entry.get(TARGET) == f"{BUNDLED}Email":
            raise ConfigError(
                f"callbacks[{number}]", entry[TARGET], "there is no such callback any more.",
                "Use notify=[env:NAME], and in that environment variable an address of apprise, such as "
                "mailtos://USER:PASSWORD@HOST.",
            )  # fmt: skip
        if not isinstance(entry.get(TARGET), str):
            raise ConfigError(
                f"callbacks[{number}]", entry, "has no key _target_.",
                "Name the callback's class: {_target_: launcher.callbacks.Ema, decay: 0.999}.",
            )  # fmt: skip
        if entry[TARGET] != f"{BUNDLED}Ema" or entry.get("evaluate") is False:
            continue
        if averages is not None:
            raise ConfigError(
                f"callbacks[{number}].evaluate", True,
                f"callbacks[{averages}] evaluates its averages in place of the parameters already.",
                "Use evaluate: false for all Ema but one.",
            )  # fmt: skip
        averages = number
    return tuple(dict(entry) for entry in entries)


def solve_notify(words: Sequence[str]) -> tuple[str, ...]:
    """Return the entries of ``notify``.

    Raises:
        ConfigError: one has no known form.
    """
    notify_entries(words)
    return tuple(words)


def notify_entries(words: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Return the callbacks that send the messages of ``notify``, in its order, the bell excluded.

    Raises:
        ConfigError: an entry has no known form.
    """
    return tuple(_notifier(word) for word in words if word != BELL)


def _notifier(word: str) -> dict[str, Any]:
    variable = word.removeprefix(_VARIABLE)
    if not is_web_address(word) and (variable == word or not variable.isidentifier()):
        raise ConfigError(
            "notify", scheme_only(word), "must be bell, an https:// address without a user, or env:NAME.",
            "An e-mail: notify=[env:NAME], and in that environment variable an address of apprise, such as "
            "mailtos://USER:PASSWORD@HOST.",
        )  # fmt: skip
    address = {"url": word} if variable == word else {"url_from": variable}
    return {TARGET: f"{BUNDLED}{_WEBHOOK}", **address, "verdicts": [*_NOTIFIED]}


def scheme_only(word: str) -> str:
    """Return an address that has no known form for people to read: any part after the scheme may be a secret."""
    return re.sub(r"://.+", "://...", word, flags=re.DOTALL)


def is_web_address(word: str) -> bool:
    return re.fullmatch(_WEB_ADDRESS, word) is not None


def name_of(entry: dict[str, Any]) -> str:
    """Return the class of an entry without its module."""
    return str(entry[TARGET]).rpartition(".")[2]


def class_arguments(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an entry's class."""
    return {name: value for name, value in entry.items() if name != TARGET}


def may_report(entry: dict[str, Any], verdict: str = "") -> bool:
    """Return False for a callback that certainly has no method ``on_outcome``, and need not be imported for it.

    Args:
        verdict: of the run. Before a requeue there is no time to import classes of the user's.
    """
    if not entry[TARGET].startswith(BUNDLED):
        return verdict != REQUEUED
    return name_of(entry) == _WEBHOOK


def without_reports(entries: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the callbacks without the bundled ones that send messages."""
    return tuple(entry for entry in entries if not (entry[TARGET].startswith(BUNDLED) and may_report(entry)))


def profile_notes(callbacks: Sequence[dict[str, Any]], steps: int | None, ranks: int) -> list[str]:
    """Return a note for each bundled ``Profile`` of which some steps do not take place.

    Args:
        steps: of the run; None: not known.

    Raises:
        ConfigError: none of its steps takes place, or the job lacks one of its ranks.
    """
    notes: list[str] = []
    for number, entry in enumerate(callbacks):
        if entry[TARGET] != f"{BUNDLED}Profile":
            continue
        key = f"callbacks[{number}]"
        if missing := [rank for rank in _numbers(entry, "ranks") if rank >= ranks]:
            raise ConfigError(f"{key}.ranks", missing, f"the job has ranks 0 to {ranks - 1}.")
        chosen = _numbers(entry, "steps")
        late = [] if steps is None else [step for step in chosen if step > steps]
        if late and len(late) == len(chosen):
            raise ConfigError(
                f"{key}.steps", late, f"the run ends after {count(steps or 0, 'step')}, so nothing is profiled.",
                f"Choose steps from 1 to {steps}, or a later train.steps.",
            )  # fmt: skip
        if late:
            notes.append(f"{key}.steps: {first_names([*map(str, late)])} after the end of the run: not profiled.")
    return notes


def _numbers(entry: dict[str, Any], name: str) -> list[int]:
    """Return a list of numbers among the arguments of ``entry``; its types are checked later."""
    value: Any = entry.get(name)
    return [each for each in cast("list[Any]", value) if isinstance(each, int)] if isinstance(value, list) else []


def require_variables(
    entries: Sequence[dict[str, Any]], env: Mapping[str, str], *, passed_on: bool, key: str | None = None
) -> None:
    """Check that the environment variables from which bundled callbacks read addresses have one.

    Args:
        key: config key that the entries were made from. Default: callbacks.
        env: variables where the outcome is reported.
        passed_on: ``env`` has only what is passed to a batch job.

    Raises:
        ConfigError: one has none, or an address to which nothing can be sent.
    """
    for number, entry in enumerate(entries):
        variable = entry.get("url_from")
        if not str(entry[TARGET]).startswith(BUNDLED) or not isinstance(variable, str):
            continue
        value, hint = env.get(variable), f"export {variable}=..."
        if value is None:
            where = "among those that the batch job gets" if passed_on else "here"
            problem = f"there is no such environment variable {where}."
            hint = f"List it: cluster.env=[{variable}]." if passed_on else hint
        elif not value:
            problem = "this environment variable is empty."
        elif is_web_address(value):
            continue
        elif find_spec("apprise") is None:
            problem = "its content is not an http:// or https:// address without a user."
            hint = "Addresses of other services, such as mailtos://, need apprise: pip install launcher[notify]."
        elif not _is_of_apprise(value):
            problem = "its content is neither an http:// or https:// address without a user nor one that apprise knows."
        else:
            continue
        shown = variable if key is None else f"{_VARIABLE}{variable}"
        raise ConfigError(key or f"callbacks[{number}].url_from", shown, problem, hint)


def _is_of_apprise(address: str) -> bool:
    apprise: Any = import_module("apprise")
    return not address.startswith("http") and apprise.Apprise.instantiate(address) is not None


def require_callbacks(entries: Sequence[dict[str, Any]], search_path: Sequence[str], task: object = None) -> None:
    """Check that each callback can be imported, takes the given arguments, and has methods that are called. A class of
    the user's is not constructed.

    Args:
        task: the job's task; bundled callbacks may need a method of it.

    Raises:
        ConfigError: for the first one of which that is not true.
    """
    for number, entry in enumerate(entries):
        key, target = f"callbacks[{number}]", entry[TARGET]
        made = find_target(f"{key}.{TARGET}", target, search_path)
        arguments = require_arguments(key, target, made, class_arguments(entry))
        if target.startswith(BUNDLED):
            try:
                bundled = made(**arguments)
                if callable(require := getattr(bundled, "require_task", None)):
                    require(task, search_path)
            except ConfigError as error:
                error.args = (f"{key}.{error}",)
                raise
        if inspect.isclass(made):
            require_methods(f"{key}.{TARGET}", target, made)


def require_methods(key: str, target: str, cls: type[Any]) -> None:
    """Check the methods of a callback's class.

    Raises:
        ConfigError: it has none of the methods that are called, a method with a name that is close to one of them, or
            one that takes other arguments.
    """
    own = [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name, None))]
    known = [name for name in own if name in METHODS]
    strange = [name for name in own if name.startswith("on_") and name not in METHODS]
    if strange or not known:
        problem = f"has a method {strange[0]}, which nothing calls." if strange else "has none of a callback's methods."
        near = did_you_mean(strange[0], METHODS) if strange else ""
        raise ConfigError(key, target, problem, f"{near}The methods of a callback: {', '.join(METHODS)}.")
    stateful = [name for name in STATE if name in own]
    if len(stateful) == 1:
        raise ConfigError(
            key, target, f"has {stateful[0]} alone.", "It needs state_dict and load_state_dict, or neither."
        )
    for name in known:
        _require_signature(key, target, getattr(cls, name), name)


def _require_signature(key: str, target: str, method: Callable[..., Any], name: str) -> None:
    given = _ARGUMENTS.get(name, 1)
    try:
        inspect.signature(method).bind(*range(1 + given))
    except TypeError as error:
        raise ConfigError(
            key, target, f"{name} is called with {count(given, 'argument')} besides self: {error}."
        ) from None
    except ValueError:  # built in C
        return
