"""Input of the trackers: one entry for each record of metrics.jsonl, and the settings and the summary of the run."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

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
    add("", {name: value for name, value in fields.items() if name not in _NO_SETTINGS})
    return flat


def library(name: str) -> Any:
    """Return a module of a tracker's library. It has no types, and need not be installed where this code is checked.

    Raises:
        ImportError: it is not installed here.
    """
    return importlib.import_module(name)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
