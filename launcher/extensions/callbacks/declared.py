"""Callbacks of this package, as the plan knows them: checks before the start, and addresses of messages. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

from launcher.errors import ConfigError
from launcher.extensions.callbacks import HOMES
from launcher.plan.callback_plan import REQUEUED, TARGET, Entry, InstalledCallback, Keyed
from launcher.quantities import count, first_names

VERDICTS = ("done", "stopped", "failed", "killed", REQUEUED)
_PACKAGE = "launcher.extensions.callbacks"
_VARIABLE = "env:"
# without a user and a password, which urllib would take for a part of the host's name
_WEB_ADDRESS = r"https?://([^/?#@:\[\]\s]+|\[[0-9A-Fa-f:.]+\])(:\d+)?([/?#]\S*)?"


def require_one_evaluated(entries: Sequence[Keyed], _steps: int | None, _ranks: int) -> list[str]:
    """Check that at most one Ema evaluates its averages. Raises ConfigError."""
    evaluated = [key for key, entry in entries if entry.get("evaluate") is not False]
    if len(evaluated) > 1:
        raise ConfigError(
            f"{evaluated[1]}.evaluate", True,
            f"{evaluated[0]} evaluates its averages in place of the parameters already.",
            "Use evaluate: false for all Ema but one.",
        )  # fmt: skip
    return []


def profile_notes(entries: Sequence[Keyed], steps: int | None, ranks: int) -> list[str]:
    """Return a note for each Profile of which some steps do not take place.

    Raises:
        ConfigError: none of its steps takes place, or the job lacks one of its ranks.
    """
    notes: list[str] = []
    for key, entry in entries:
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


def _numbers(entry: Entry, name: str) -> list[int]:
    """Return a list of numbers among the arguments of ``entry``; its types are checked later."""
    value: Any = entry.get(name)
    return [each for each in cast("list[Any]", value) if isinstance(each, int)] if isinstance(value, list) else []


def notifier(word: str) -> Entry:
    """Return the Webhook of a word of ``notify``.

    Raises:
        ConfigError: it has no known form.
    """
    variable = word.removeprefix(_VARIABLE)
    if not is_web_address(word) and (variable == word or not variable.isidentifier()):
        raise ConfigError(
            "notify", scheme_only(word), "must be bell, an https:// address without a user, or env:NAME.",
            "An e-mail: notify=[env:NAME], and in that environment variable an address of apprise, such as "
            "mailtos://USER:PASSWORD@HOST.",
        )  # fmt: skip
    address = {"url": word} if variable == word else {"url_from": variable}
    return {TARGET: WEBHOOK.target, **address, "verdicts": [*VERDICTS]}


def scheme_only(word: str) -> str:
    """Return an address that has no known form for people to read: any part after the scheme may be a secret."""
    return re.sub(r"://.+", "://...", word, flags=re.DOTALL)


def is_web_address(word: str) -> bool:
    return re.fullmatch(_WEB_ADDRESS, word) is not None


def require_address(keyed: Keyed, env: Mapping[str, str]) -> None:
    """Check that the environment variable from which a Webhook reads an address has one. Raises ConfigError."""
    key, entry = keyed
    variable = entry.get("url_from")
    if not isinstance(variable, str):
        return
    value, hint = env.get(variable), f"export {variable}=..."
    if value is None:
        problem = "there is no such environment variable here."
    elif not value:
        problem = "this environment variable is empty."
    elif is_web_address(value):
        return
    elif find_spec("apprise") is None:
        problem = "its content is not an http:// or https:// address without a user."
        hint = "Addresses of other services, such as mailtos://, need apprise: pip install samebatch[notify]."
    elif not _is_of_apprise(value):
        problem = "its content is neither an http:// or https:// address without a user nor one that apprise knows."
    else:
        return
    of_notify = key == "notify"
    raise ConfigError(
        key if of_notify else f"{key}.url_from", f"{_VARIABLE}{variable}" if of_notify else variable, problem, hint
    )


def _is_of_apprise(address: str) -> bool:
    apprise: Any = import_module("apprise")
    return not address.startswith("http") and apprise.Apprise.instantiate(address) is not None


def _own(name: str, **facts: Any) -> InstalledCallback:
    return InstalledCallback(target=f"{_PACKAGE}.{name}", defined=f"{HOMES[name]}.{name}", **facts)


EMA = _own("Ema", notes=require_one_evaluated, averages=True)
PROFILE = _own("Profile", notes=profile_notes)
MEMORY_SNAPSHOT = _own("MemorySnapshot")
GENERATED_SAMPLES = _own("GeneratedSamples")
WEBHOOK = _own("Webhook", require=require_address, notifier=notifier, reports=True)
