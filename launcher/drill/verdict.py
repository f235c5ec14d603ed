"""Verdict of a drill: the records of its runs side by side, and the rule. No torch.

The rule. The job ran its first windows undisturbed, then once for each kind of interruption, to the same step.

- A disturbed run must come to that step: by itself where it should, else by `launch resume`. Its record must have each
  step once, no process of it may be left, and no checkpoint that is not whole.
- Its last checkpoint and its record must be those of the undisturbed run, bit by bit.
- Where they are not, the undisturbed run is made once more. If that differs from the first one too, the job is not
  deterministic by itself, and a disturbed run is damaged only where it is off by more than four times as much.
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


class Kind(StrEnum):
    """What is done to the job."""

    preempt = "preempt"
    worker = "kill a worker"
    tree = "kill the tree"
    requeue = "requeue"


class DrillOutcome(StrEnum):
    survives = "survives"
    varies = "survives, and is not deterministic by itself"
    damaged = "does not survive"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Of one run from another at the same step.

    Args:
        tensors, differing: in the last checkpoint: how many were compared, and how many differ in any bit.
        first: the first of those that differ, parameters before the optimizer's state; None where none does.
        absolute: the largest |a - b|; relative: the largest |a - b| of a tensor / the largest |b| of that tensor.
        norm: ||a - b|| / ||b|| of all parameters.
        steps: of the record: what is wrong with them, in words; empty where each is there once, in order.
        figure: of the record: the first figure that differs, with both values; empty where none does.
    """

    tensors: int
    differing: int
    first: str | None
    absolute: float
    relative: float
    norm: float
    steps: str
    figure: str

    @property
    def identical(self) -> bool:
        return not self.differing and not self.steps and not self.figure

    def within(self, other: Difference) -> bool:
        """Whether this is of the size of ``other``, which is that of two undisturbed runs."""
        return not self.steps and other.norm > 0 and self.norm <= BY_ITSELF_TIMES * other.norm


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """One disturbed run.

    Args:
        what: what was done, and to whom.
        at_step: recorded when it died; from_step: that it went on after. None where it did not.
        saving_s: seconds from the signal to the end of a run that is asked to stop; None for other deaths.
        recovery_s: seconds from the death to the first new step in the record, a queue's wait included.
        left: what was left of it at the end: processes, and checkpoints that are not whole.
        problem: why it did not come to the end; empty where it did.
        difference: from the undisturbed run; None where it did not come to the end.
    """

    kind: Kind
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
        """Steps that were computed twice."""
        if self.at_step is None or self.from_step is None:
            return None
        return max(0, self.at_step - self.from_step)

    def fault(self, by_itself: Difference | None) -> str:
        """What it lost, in words; empty where nothing. ``by_itself``: the job's difference from itself, undisturbed."""
        if self.problem or self.difference is None:
            return self.problem or "it did not come to the end"
        if self.left:
            return f"left behind: {', '.join(self.left)}"
        if self.difference.identical or (by_itself is not None and self.difference.within(by_itself)):
            return ""
        return self.difference.steps or "it is not the undisturbed run"


@dataclass(frozen=True, kw_only=True)
class Drilled:
    """What is printed, what ``--json`` prints and drill.json holds.

    Args:
        job: what was drilled, line by line; changed: what of its settings is another one than the user's.
        windows, every: optimizer steps of each run, and from one checkpoint to the next.
        cold_start_s: seconds from the start of the undisturbed run to its first step in the record, and ``run_s`` to
            its end.
        by_itself: of a second undisturbed run from the first; None where it was not needed.
    """

    job: dict[str, str]
    changed: tuple[str, ...]
    windows: int
    every: int
    cold_start_s: float
    run_s: float
    interrupted: tuple[Interrupted, ...]
    by_itself: Difference | None
    outcome: DrillOutcome
    reason: str

    @property
    def exit_status(self) -> int:
        return EXIT_FAILED if self.outcome is DrillOutcome.damaged else EXIT_DONE


def judge(interrupted: Sequence[Interrupted], by_itself: Difference | None) -> tuple[DrillOutcome, str]:
    """The verdict, and the sentence that gives its reason."""
    faults = [f"{one.kind.value}: {fault}" for one in interrupted if (fault := one.fault(by_itself))]
    if faults:
        return DrillOutcome.damaged, f"{'; '.join(faults)}."
    kinds = ", ".join(one.kind.value for one in interrupted)
    if all(one.difference is not None and one.difference.identical for one in interrupted):
        return DrillOutcome.survives, f"{kinds}: each time it ended as the undisturbed run, bit by bit."
    return DrillOutcome.varies, (
        f"{kinds}: no step was lost, and it differs from the undisturbed run by no more than that differs from itself. "
        "train.deterministic=true may make it repeatable."
    )


# what two runs of the same job have in common; the rest is times and memory
_LEARNED = ("train/", "eval/", "batch/", "progress/", "noise/", "amp/")


@dataclass(frozen=True)
class Record:
    """The whole lines of a record. ``file``: its inode, 0 where it is not there: a run that goes on has a new one."""

    file: int = 0
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, metrics: Path) -> Record:
        try:
            with metrics.open("rb") as stream:
                file = os.fstat(stream.fileno()).st_ino
                text = stream.read()
        except OSError:
            return cls()
        return cls(file, tuple(text[: text.rfind(b"\n") + 1].decode(errors="replace").splitlines()))

    @property
    def step(self) -> int:
        """The last one recorded."""
        return int(json.loads(self.lines[-1])["step"]) if self.lines else 0

    def kept_of(self, before: Record) -> int:
        """How many of its first lines are those of ``before``, to the letter: the times in them never come twice."""
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.lines, before.lines, strict=False))
        return sum(1 for _ in pairs)


def wrong_steps(record: Record, steps: int) -> str:
    """What is wrong with the steps of a run of ``steps``, in words; empty where each is there once, in order."""
    seen = [int(json.loads(line)["step"]) for line in record.lines]
    if seen == list(range(1, steps + 1)):
        return ""
    missing = sorted(set(range(1, steps + 1)) - set(seen))
    twice = sorted({step for step in seen if seen.count(step) > 1})
    parts = [f"{words} {', '.join(map(str, these[:5]))}" for words, these in (("without", missing), ("twice", twice))
             if these]  # fmt: skip
    return f"the record's steps: {'; '.join(parts) or 'out of order'}"


def first_difference(ours: Record, theirs: Record) -> str:
    """The first figure of what was learned that is another one, with both values; empty where there is none."""
    by_step: dict[int, dict[str, Any]] = {fields["step"]: fields for fields in map(json.loads, theirs.lines)}
    for fields in map(json.loads, ours.lines):
        other = by_step.get(fields["step"], {})
        for name in sorted({*fields, *other}):
            if name.startswith(_LEARNED) and fields.get(name) != other.get(name):
                return f"{name} of step {fields['step']}: {fields.get(name)} instead of {other.get(name)}"
    return ""
