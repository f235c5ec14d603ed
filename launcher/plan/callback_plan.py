"""Callbacks of a plan: their entries, and the methods that a callback may have. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.errors import ConfigError, did_you_mean
from launcher.plan.host import without_path
from launcher.quantities import count
from launcher.targets import find_target, load_entry_point, present_entry_points, require_arguments

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
GROUP = "launcher.callbacks"
# entry of ``notify`` for the terminal in which `launch` waits for the run
BELL = "bell"
# verdict of a run that Slurm starts again
REQUEUED = "requeued"

# callbacks that were removed, with what to use instead
_REMOVED = {
    "Email": "Use notify=[env:NAME], and in that environment variable an address of apprise, such as "
    "mailtos://USER:PASSWORD@HOST."
}

Entry = dict[str, Any]
# config key of an entry, and the entry
Keyed = tuple[str, Entry]


@dataclass(frozen=True, kw_only=True)
class InstalledCallback:
    """Callback of an installed package, which users name without its module.

    An entry point ``launcher.callbacks`` NAME = "package.module:OBJECT" names such an object. Every command that plans
    a job imports its module, so it imports no torch.

    Attributes:
        target: its class by dotted path.
        defined: the same class by the module that defines it, if ``target`` only imports it from there.
        notes: called with the entries of this class, the run's steps (None: not known) and ranks; returns notes of the
            plan, and raises ConfigError.
        require: called with an entry and the environment where the run's outcome is reported; raises ConfigError.
        notifier: returns the entry that sends the messages of a word of ``notify``, and raises ConfigError.
        reports: it has the method ``on_outcome``, which only sends messages.
        averages: its state has averages of the parameters.
    """

    target: str
    defined: str = ""
    notes: Callable[[Sequence[Keyed], int | None, int], list[str]] = lambda _entries, _steps, _ranks: []
    require: Callable[[Keyed, Mapping[str, str]], None] = lambda _entry, _env: None
    notifier: Callable[[str], Entry] | None = None
    reports: bool = False
    averages: bool = False


@cache
def installed_callbacks() -> dict[str, InstalledCallback]:
    """Return the callbacks of installed packages by name, except those whose files are gone.

    Raises:
        SiteError: one cannot be imported.
    """
    return {name: load_entry_point(each, f"callbacks={name}") for name, each in present_entry_points(GROUP).items()}


def installed_callback(entry: Entry) -> InstalledCallback | None:
    """Return the installed callback of an entry; None for a class of the user's."""
    return next((each for each in installed_callbacks().values() if each.target == entry[TARGET]), None)


def solve_callbacks(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the callbacks of a config, each with its class by dotted path under ``_target_`` and its arguments.

    Raises:
        ConfigError: an entry names no class.
    """
    solved: list[Entry] = []
    for number, entry in enumerate(entries):
        name = entry.get(TARGET)
        if not isinstance(name, str):
            raise ConfigError(
                f"callbacks[{number}]", entry, "has no key _target_.",
                "Name the callback's class: {_target_: Ema, decay: 0.999}.",
            )  # fmt: skip
        known = installed_callbacks()
        targets = {word: each.target for short, each in known.items() for word in (short, each.defined)}
        if name not in known and "." not in name:
            remedy = f"{did_you_mean(name, known)}Installed: {', '.join(known)}. A class of your own: MODULE.CLASS."
            problem, remedy = "no callback of this name is installed.", _REMOVED.get(name, remedy)
            raise ConfigError(f"callbacks[{number}].{TARGET}", name, problem, remedy)
        solved.append({**entry, TARGET: targets.get(name, name)})
    return tuple(solved)


def notify_entries(words: Sequence[str]) -> tuple[Entry, ...]:
    """Return the callbacks that send the messages of ``notify``, in its order, the bell excluded.

    Raises:
        ConfigError: an entry has no known form, or no package that sends messages is installed.
    """
    words = [word for word in words if word != BELL]
    if not words:
        return ()
    notifier = next((each.notifier for each in installed_callbacks().values() if each.notifier), None)
    if notifier is None:
        shown = [without_path(word) for word in words]
        raise ConfigError("notify", shown, "no callback that sends messages is installed.", "Use notify=[bell].")
    return tuple(map(notifier, words))


def name_of(entry: Entry) -> str:
    """Return the class of an entry without its module."""
    return str(entry[TARGET]).rpartition(".")[2]


def class_arguments(entry: Entry) -> Entry:
    """Return the arguments of an entry's class."""
    return {name: value for name, value in entry.items() if name != TARGET}


def may_report(entry: Entry, verdict: str = "") -> bool:
    """Return False for a callback that certainly has no method ``on_outcome``, and need not be imported for it.

    Args:
        verdict: of the run. Before a requeue there is no time to import classes of the user's.
    """
    installed = installed_callback(entry)
    return verdict != REQUEUED if installed is None else installed.reports


def without_reports(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the callbacks without the installed ones that send messages."""
    return tuple(entry for entry in entries if installed_callback(entry) is None or not may_report(entry))


def callback_notes(entries: Sequence[Entry], steps: int | None, ranks: int) -> list[str]:
    """Return the notes of installed callbacks on a plan. Raises ConfigError."""
    notes: list[str] = []
    for each in installed_callbacks().values() if entries else ():
        own = [(f"callbacks[{number}]", entry) for number, entry in enumerate(entries) if entry[TARGET] == each.target]
        notes += each.notes(own, steps, ranks) if own else []
    return notes


def require_environment(entries: Sequence[Keyed], env: Mapping[str, str]) -> None:
    """Check that installed callbacks find what they read from the environment.

    Args:
        env: variables where the outcome is reported.

    Raises:
        ConfigError: one of them lacks a variable.
    """
    for key, entry in entries:
        if (installed := installed_callback(entry)) is not None:
            installed.require((key, entry), env)


def require_callbacks(entries: Sequence[dict[str, Any]], search_path: Sequence[str], task: object = None) -> None:
    """Check that each callback can be imported, takes the given arguments, and has methods that are called. A class of
    the user's is not constructed.

    Args:
        task: the job's task; installed callbacks may need a method of it.

    Raises:
        ConfigError: for the first one of which that is not true.
    """
    for number, entry in enumerate(entries):
        key, target = f"callbacks[{number}]", entry[TARGET]
        made = find_target(f"{key}.{TARGET}", target, search_path)
        arguments = require_arguments(key, target, made, class_arguments(entry))
        if installed_callback(entry) is not None:
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
        given = _ARGUMENTS.get(name, 1)
        try:
            inspect.signature(getattr(cls, name)).bind(*range(1 + given))
        except TypeError as error:
            problem = f"{name} is called with {count(given, 'argument')} besides self: {error}."
            raise ConfigError(key, target, problem) from None
        except ValueError:  # built in C
            continue
