"""Exceptions of the launcher. Every message names the key or place, the value, what is allowed, what to do next."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: stopped from outside, nothing lost; `launch resume` continues
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells


class LauncherError(Exception):
    """Base class of all exceptions that this package raises on purpose."""

    exit_status = EXIT_FAILED


class UserError(LauncherError):
    """Wrong input: one message, no traceback."""

    exit_status = EXIT_USER


class ConfigError(UserError):
    """Wrong key, value or combination of values. ``key``: dotted config key."""

    def __init__(self, key: str, value: object, problem: str, remedy: str = "") -> None:
        shown = f"{key}={without_credentials(_shown(value))}" if value is not None else key
        super().__init__(f"{shown}: {problem}" + (f"\n  {remedy}" if remedy else ""))
        self.key = key


class TaskError(UserError):
    """Wrong task: a method is missing, or has a wrong result."""


class CollectiveInLoss(TaskError):
    """Samples of other ranks in the loss of one of several micro-batches."""


class EngineMisuse(UserError):
    """The user's loop left out a call."""


class SiteError(UserError):
    """Wrong machine: GPUs, directories or credentials are missing."""


class RunError(LauncherError):
    """Failure of a job that has started."""


class NotFinite(RunError):
    """A loss or a gradient is inf or nan."""


class OutOfMemory(RunError):
    """A micro-batch, or the optimizer's state, does not fit into a rank's memory."""


class RecordFailed(RunError):
    """The disk takes no more of metrics.jsonl, or of the verdict."""


class SyncPolicyViolated(RunError):
    """The collectives that ran are not those of the sync policy."""


class ReplicasDiffer(RunError):
    """Replicas of the model, or their learning rates, have become different."""


class UnusedParameters(RunError):
    """The backward pass reached only part of the model."""


class DataError(RunError):
    """The dataset is not what the plan says."""


class CallbackFailed(RunError):
    """A callback raised an exception."""


class CheckpointFailed(RunError):
    """A checkpoint could not be written, or there is no space for any."""


class NoGoodCheckpoint(RunError):
    """There are checkpoints to resume from, and all of them are damaged."""


class ExportFailed(RunError):
    """A file of an export could not be written, or is not what was written."""


class WrongCheckpoint(RunError):
    """The newest checkpoint is intact, but of another model, another contract, or another format."""


class ConnectionLost(RunError):
    """The connection to the login node was lost; jobs that were submitted there continue."""


class Superseded(RunError):
    """The run continues elsewhere: this process belongs to an earlier attempt."""


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))


# ends of the names of a URI's query values that are no one else's business
_SECRET_VALUES = "password|passwd|pwd|token|secret|user|username"


def without_credentials(text: str, mark: str = "***") -> str:
    """Return ``text`` with each URI's user and password, and its query values of such names, replaced by ``mark``.

    A password may contain an @: the host follows the last one of the authority.

    Args:
        mark: "": an address to be opened, in which the user and its @ are left out.
    """
    text = re.sub(r"(\w://)[^/?#\s]*@", rf"\1{mark}@" if mark else r"\1", text)
    return re.sub(rf"([?&;][\w.-]*(?:{_SECRET_VALUES})=)[^&;#\s]*", rf"\g<1>{mark}", text, flags=re.IGNORECASE)


def did_you_mean(word: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return ``"did you mean 'x'? "`` with the closest of ``candidates`` after ``prefix``; empty if none is close."""
    names = list(candidates)
    closest = [name for name in names if name.lower() == word.lower()]
    closest = closest or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean '{prefix}{closest[0]}'? " if closest else ""


def _subclasses(cls: type[LauncherError]) -> Iterable[type[LauncherError]]:
    yield cls
    for child in cls.__subclasses__():
        yield from _subclasses(child)


def class_named(name: str) -> type[LauncherError] | None:
    """Return the launcher's exception class ``name``; None means that the error came from other code."""
    return next((cls for cls in _subclasses(LauncherError) if cls.__name__ == name), None)
