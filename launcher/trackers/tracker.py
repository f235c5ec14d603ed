"""Contract of a tracker, and its input: one entry for each record of metrics.jsonl, and the settings of the run."""

from __future__ import annotations

import importlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

from launcher.config.schema import Config
from launcher.plan.host import without_secrets
from launcher.plan.run_plan import RunPlan
from launcher.rundir.files import read_bytes
from launcher.rundir.paths import RunPaths

# parts of the plan that describe the environment and predictions, not the job
_NO_SETTINGS = ("format", "env", "command", "notes", "notify", "fewer", "forced")


@dataclass(frozen=True)
class StepEntry:
    """Record of one step.

    Attributes:
        record: the JSON object of the line, with its ``step``; None stands for inf and nan.
        files: texts (.txt) and images (.png) that callbacks wrote at this step.
        at: Unix time in seconds at which the step was made, as far as its record tells: the run's creation plus its
            training time. It is the same in each delivery, so that stores recognise what they already have.
    """

    record: Mapping[str, Any]
    files: tuple[Path, ...]
    at: float

    @property
    def step(self) -> int:
        return self.record["step"]

    @cached_property
    def numbers(self) -> dict[str, float]:
        """The record's numbers by name. What is not finite is nan."""
        return {
            name: math.nan if value is None else float(value)
            for name, value in self.record.items()
            if name != "step" and (value is None or isinstance(value, int | float))
        }

    @cached_property
    def texts(self) -> dict[str, str]:
        """Texts by name: samples/NAME, and values of the record that are no numbers, as JSON."""
        texts = {name: _text(value) for name, value in self.record.items() if name not in {"step", *self.numbers}}
        for file in self.files:
            if file.suffix == ".txt":
                texts[sample_name(file)] = read_bytes(file).decode(errors="replace")
        return texts

    @property
    def images(self) -> dict[str, Path]:
        """PNG files by name: samples/NAME."""
        return {sample_name(file): file for file in self.files if file.suffix == ".png"}


class Tracker(ABC):
    """One tracker: a subclass is all that describes it (docs/development/extensions.md).

    An object lives in the tracker's process. Its methods raise whatever they like: the delivery is tried again by a
    new object in a new interpreter, and reported if it fails in succession; ImportError and UserError end it. The
    module is imported on the control side too, so it imports the tracker's library in its methods only.

    Attributes:
        title: name in messages and tables.
        module: module of the tracker's library; where it is missing, a start is refused.
        install: command that installs it.
        remedy: sentence on what to check when the server does not answer or refuses the login.
    """

    title: ClassVar[str]
    module: ClassVar[str] = ""
    install: ClassVar[str] = ""
    remedy: ClassVar[str] = ""

    def __init__(self, plan: RunPlan, status: Mapping[str, Any]) -> None:
        """Keep the plan, and the status that the last process left: fields that ``open`` returned."""
        self.plan, self.status = plan, status

    @classmethod  # noqa: B027
    def check(cls, config: Config, env: Mapping[str, str]) -> None:
        """Check settings before the start. Raises ConfigError.

        Args:
            env: environment of the command that starts the job.
        """

    @classmethod
    def destination(cls, plan: RunPlan, env: Mapping[str, str]) -> str:  # noqa: ARG003
        """Return where it stores a run, for the table of the plan; paths are absolute."""
        return ""

    @abstractmethod
    def open(self) -> dict[str, Any]:
        """Open the tracker's run: create it, or continue it.

        Returns:
            Fields of the status: ``delivered``, the last step that the store has; ``url`` or ``dir``; and ``problem``,
            one that does not prevent the delivery.
        """

    @abstractmethod
    def log(self, entries: Sequence[StepEntry]) -> str | None:
        """Deliver entries, of increasing steps. When it returns, a later ``open`` finds them in the store.

        Returns:
            A problem that did not prevent the delivery of the numbers.
        """

    def log_output(self, lines: Sequence[str]) -> None:  # noqa: B027
        """Deliver lines that rank 0 has printed. Lines whose delivery a kill has interrupted may be repeated."""

    @abstractmethod
    def finish(self, summary: dict[str, Any]) -> None:
        """Deliver the run's summary and verdict, and close the tracker's run."""


def sample_name(file: Path) -> str:
    return f"samples/{file.stem}"


def entries_of(plan: RunPlan, lines: Iterable[str], after: int) -> Iterator[StepEntry]:
    """Yield an entry for each line with a step above all before it and above ``after``.

    A run that resumes from an earlier checkpoint truncates its record and repeats steps: the first delivery counts.
    """
    created = datetime.fromisoformat(plan.run.created).timestamp()
    for line in lines:
        record: dict[str, Any] = json.loads(line)
        if record["step"] > after:
            after = record["step"]
            files = sample_files(plan.paths, after) if plan.callbacks else ()
            yield StepEntry(record, files, created + (record.get("time/total_s") or after / 1000))


def sample_files(paths: RunPaths, step: int) -> tuple[Path, ...]:
    """Return the files of what the model generated after ``step``. They are complete before that step's record is
    written."""
    directory = paths.samples(step)
    if not directory.is_dir():
        return ()
    return tuple(sorted(file for file in directory.iterdir() if file.suffix in (".txt", ".png") and file.stem))


def settings_of(plan: RunPlan) -> dict[str, str | float | bool]:
    """Return the effective settings of a run: the plan's values by dotted key; lists as JSON, no nulls."""
    flat: dict[str, str | float | bool] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in cast("dict[str, Any]", value).items():
                add(f"{prefix}.{key}" if prefix else key, inner)
        elif value is not None:
            flat[prefix] = value if isinstance(value, bool | int | float | str) else json.dumps(value)

    fields = without_secrets(json.loads(plan.to_json()))
    add("", {name: value for name, value in (fields | fields.pop("added")).items() if name not in _NO_SETTINGS})
    return flat


def library(name: str) -> Any:
    """Return a module of a tracker's library. It has no types, and need not be installed where this code is checked.

    Raises:
        ImportError: it is not installed here.
    """
    return importlib.import_module(name)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
