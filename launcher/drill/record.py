"""metrics.jsonl of a run under way, and two of them side by side."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
