"""Verdict of a drill: compares the records of its runs. No torch.

The job runs its first windows undisturbed, then once per kind of interruption, to the same step.

- A disturbed run must reach that step, by itself or through `launch resume`, as its kind requires. Its record must
  contain each step once, and no process and no incomplete checkpoint of it may be left.
- Its last checkpoint and its record must equal those of the undisturbed run bit by bit.
- If they do not, the undisturbed run is repeated. If that differs from the first one too, the job is not deterministic
  by itself, and a disturbed run counts as damaged only if it differs by more than four times as much.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_FAILED

BY_ITSELF_TIMES = 4


class Interruption(StrEnum):
    """Kind of interruption."""

    preempt = "preempt"
    worker = "kill a worker"
    tree = "kill the tree"
    requeue = "requeue"


class DrillOutcome(StrEnum):
    """Outcome of a drill, in the words in which it is printed."""

    survives = "survives"
    varies = "survives, and is not deterministic by itself"
    damaged = "does not survive"


@dataclass(kw_only=True)
class Difference:
    """Difference of a run a from a run b at the same step.

    Args:
        tensors, differing: tensors of the last checkpoint that were compared, and that differ in any bit. One that is
            missing or has another shape differs, and does not enter ``absolute``, ``relative`` and ``norm``.
        first: first tensor that differs, parameters before the optimizer's state; None if none does.
        absolute: largest |a - b|.
        relative: largest |a - b| of a tensor / largest |b| of that tensor.
        norm: ||a - b|| / ||b|| of all parameters.
        steps: description of what is wrong with the record's steps; empty if each occurs once, in order.
        figure: first figure of the record that differs, with both values; empty if none does.
    """

    tensors: int = 0
    differing: int = 0
    first: str | None = None
    absolute: float = 0.0
    relative: float = 0.0
    norm: float = 0.0
    steps: str = ""
    figure: str = ""

    @property
    def identical(self) -> bool:
        return not self.differing and not self.steps and not self.figure

    def within(self, other: Difference) -> bool:
        """Return True if this difference is comparable to ``other``, that of two undisturbed runs."""
        return not self.steps and other.norm > 0 and self.norm <= BY_ITSELF_TIMES * other.norm


@dataclass(kw_only=True)
class InterruptedRun:
    """Result of one interrupted run, filled in while it runs.

    Args:
        what: description of the interruption and its target.
        at_step: last step recorded when it died.
        from_step: step from which it resumed; None if it did not.
        saving_s: seconds from the signal to the end of a run that was asked to stop; None for other interruptions.
        recovery_s: seconds from its death to the first new step in the record, including time in a queue.
        left: what it left behind: processes, and incomplete checkpoints.
        problem: why it did not reach the end; empty if it did.
        difference: from the undisturbed run; None if it did not reach the end.
    """

    kind: Interruption
    what: str
    at_step: int | None = None
    from_step: int | None = None
    saving_s: float | None = None
    recovery_s: float | None = None
    left: tuple[str, ...] = ()
    problem: str = ""
    difference: Difference | None = None

    @property
    def repeated(self) -> int | None:
        """Number of steps that were computed twice."""
        if self.at_step is None or self.from_step is None:
            return None
        return max(0, self.at_step - self.from_step)

    def fault(self, rerun_difference: Difference | None) -> str:
        """Return a description of the damage; empty if there is none. ``rerun_difference``: see ``DrillResult``."""
        if self.problem or self.difference is None:
            return self.problem or "it did not reach the end"
        if self.left:
            return f"left behind: {', '.join(self.left)}"
        if self.difference.identical or (rerun_difference is not None and self.difference.within(rerun_difference)):
            return ""
        return self.difference.steps or "it differs from the undisturbed run"


@dataclass(frozen=True, kw_only=True)
class DrillResult:
    """Result of a drill, as printed, printed by ``--json``, and stored in drill.json.

    Args:
        job: description of the job, by subject.
        changed: description of each setting that differs from the user's.
        windows, every: optimizer steps of each run, and between checkpoints.
        cold_start_s, run_s: seconds from the start of the undisturbed run to its first step in the record, and to its
            end.
        rerun_difference: difference of a second undisturbed run from the first; None if it was not needed.
    """

    job: dict[str, str]
    changed: tuple[str, ...]
    windows: int
    every: int
    cold_start_s: float
    run_s: float
    interrupted: tuple[InterruptedRun, ...]
    rerun_difference: Difference | None
    outcome: DrillOutcome
    reason: str

    @property
    def exit_status(self) -> int:
        return EXIT_FAILED if self.outcome is DrillOutcome.damaged else EXIT_DONE


def judge_drill(interrupted: Sequence[InterruptedRun], rerun_difference: Difference | None) -> tuple[DrillOutcome, str]:
    """Return the verdict and a sentence with its reason. ``rerun_difference``: see ``DrillResult``."""
    faults = [f"{run.kind.value}: {fault}" for run in interrupted if (fault := run.fault(rerun_difference))]
    if faults:
        return DrillOutcome.damaged, f"{'; '.join(faults)}."
    kinds = ", ".join(run.kind.value for run in interrupted)
    if all(run.difference is not None and run.difference.identical for run in interrupted):
        return DrillOutcome.survives, f"{kinds}: each run ended like the undisturbed one, bit by bit."
    return DrillOutcome.varies, (
        f"{kinds}: no step was lost, and no run differs more from the undisturbed one than a repetition of that does. "
        "train.deterministic=true may make it repeatable."
    )


# prefixes of metrics that two runs of the same job share; the others are times and memory
_REPRODUCIBLE = ("train/", "eval/", "best/", "batch/", "progress/", "noise/", "amp/")


@dataclass(frozen=True)
class RecordLines:
    """Complete lines of a record. ``file``: inode, which a resumed run replaces; 0 if there is no file."""

    file: int = 0
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, metrics: Path) -> RecordLines:
        try:
            with metrics.open("rb") as stream:
                file = os.fstat(stream.fileno()).st_ino
                text = stream.read()
        except OSError:
            return cls()
        return cls(file, tuple(text[: text.rfind(b"\n") + 1].decode(errors="replace").splitlines()))

    @property
    def step(self) -> int:
        """Last recorded step; 0 without one."""
        return int(json.loads(self.lines[-1])["step"]) if self.lines else 0

    def shared_lines(self, before: RecordLines) -> int:
        """Return how many first lines equal those of ``before``; lines contain times, so a repeated step differs."""
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.lines, before.lines, strict=False))
        return sum(1 for _ in pairs)


def wrong_steps(record: RecordLines, steps: int) -> str:
    """Return what is wrong with the record's steps; empty if each of 1 to ``steps`` occurs once, in order."""
    seen = [int(json.loads(line)["step"]) for line in record.lines]
    if seen == list(range(1, steps + 1)):
        return ""
    missing = sorted(set(range(1, steps + 1)) - set(seen))
    twice = sorted({step for step in seen if seen.count(step) > 1})
    faults = (("without", missing), ("twice", twice))
    parts = [f"{fault} {', '.join(map(str, numbers[:5]))}" for fault, numbers in faults if numbers]
    return f"the record's steps: {'; '.join(parts) or 'out of order'}"


def first_difference(ours: RecordLines, theirs: RecordLines) -> str:
    """Return the first reproducible metric that differs, with both values; empty if none does."""
    by_step: dict[int, dict[str, Any]] = {fields["step"]: fields for fields in map(json.loads, theirs.lines)}
    for fields in map(json.loads, ours.lines):
        other = by_step.get(fields["step"], {})
        for name in sorted({*fields, *other}):
            if name.startswith(_REPRODUCIBLE) and fields.get(name) != other.get(name):
                return f"{name} of step {fields['step']}: {fields.get(name)} instead of {other.get(name)}"
    return ""
