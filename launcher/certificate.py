"""The certificate of `launch verify`: what the workers measured, the rule of its verdict. No torch.

The rule. The accumulated gradient g and the reference r, one big batch in one process, are both computed in fp32 with
dropout off, at the same parameters, on the same samples, so that what is left between them is rounding or a mistake.

- A group of parameters agrees where ||g - r|| / ||r|| of that group is at most the tolerance, or ||g - r|| is at most a
  tenth of the tolerance of the norm of the *whole* reference gradient: the gradient of a parameter that the loss hardly
  depends on (the bias of attention's keys: not at all) is rounding itself, and has no correct digits to compare.
- The tolerance is 1e-5, or ten times what this very model rounds in fp32 where that is more: measured as the difference
  between the reference and the reference on the same samples in the opposite order. It is never above 1e-3: a wrong
  average is off by more than that.
- What the user's own precision and compression add is rounding too, but of another size: it is compared with the same
  reference, and must be at most four times what one big batch in that precision is off by, or 2^-4, where that is more.
  A wrong average is in the fp32 comparison as well, so this catches only what goes wrong in the narrow format alone.
- A hazard that breaks the claim for windows that were not looked at (a mean over unequal items, hidden state, data that
  differs between ranks) decides too, whatever the numbers are.
- Where the result cannot be computed twice alike, a difference says nothing: then nothing is certified either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from launcher.errors import EXIT_DONE, EXIT_FAILED

TOLERANCE, MOST_TOLERANCE = 1e-5, 1e-3
ROUNDINGS = 10
NARROW_TIMES, NARROW_FLOOR = 4, 2**-4


class Effect(StrEnum):
    """What a hazard does to the verdict: nothing; it breaks the claim; nothing can be said in its presence."""

    noted = "noted"
    breaks = "breaks"
    blinds = "blinds"


class Outcome(StrEnum):
    exact = "exact"
    differs = "not the big batch"
    refused = "training would fail"
    undecided = "cannot be compared"


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """``seen``: what was found, with its numbers; ``matters``: why; ``remedy``: what to do."""

    name: str
    effect: Effect
    seen: str
    matters: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Of some parameters' gradient g from the reference r.

    Args:
        name: of the group, or of the one parameter.
        parameters: how many numbers.
        norm: ||r||.
        error: ||g - r|| / ||r||; None where r is zero and g is not.
        share: ||g - r|| / the norm of the whole reference gradient; None where that is zero and g is not.
    """

    name: str
    parameters: int
    norm: float
    error: float | None
    share: float | None

    @property
    def excess(self) -> float:
        """What the tolerance is compared with: the relative error, or ten times the share, the smaller one."""
        return min(math.inf if self.error is None else self.error, math.inf if self.share is None else 10 * self.share)

    def within(self, tolerance: float) -> bool:
        return self.excess <= tolerance


@dataclass(frozen=True, kw_only=True)
class WindowCheck:
    """One window, accumulated, against its reference.

    Args:
        name: which one.
        samples, items: of the window, by the engine's count; reference_items: by the reference's.
        micro_batches: of each rank.
        reference_batches: in how many batches the reference had to be computed; 1 is what was wanted.
        loss, reference_loss: means over the items.
        whole: the whole gradient's deviation; groups: each group's; worst: the parameters that deviate most.
        configured: ||g - r|| / ||r|| with the user's precision and compression; None where they are fp32 and none.
        configured_one_batch: the same of one big batch in that precision.
    """

    name: str
    samples: int
    items: int
    reference_items: float
    micro_batches: int
    reference_batches: int
    loss: float
    reference_loss: float
    whole: Deviation
    groups: tuple[Deviation, ...]
    worst: tuple[Deviation, ...]
    configured: float | None
    configured_one_batch: float | None

    def agrees(self, tolerance: float) -> bool:
        return (
            self.items == self.reference_items
            and self.whole.within(tolerance)
            and all(group.within(tolerance) for group in self.groups)
        )

    @property
    def narrow_agrees(self) -> bool:
        if self.configured is None:
            return True
        return self.configured <= max(NARROW_FLOOR, NARROW_TIMES * (self.configured_one_batch or 0.0))


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What is printed, and what ``--json`` has.

    Args:
        job: what was verified, line by line.
        rounding: what this model rounds in fp32, relative; None where that is not known.
        refused: the error with which training would end.
        notes: what the reader should know of the comparison.
    """

    job: dict[str, str]
    rounding: float | None
    tolerance: float
    windows: tuple[WindowCheck, ...]
    hazards: tuple[Hazard, ...]
    notes: tuple[str, ...]
    refused: str | None
    outcome: Outcome
    reason: str

    @property
    def exit_status(self) -> int:
        return EXIT_DONE if self.outcome is Outcome.exact else EXIT_FAILED


def tolerance_for(rounding: float) -> float:
    """``rounding``: relative difference of two fp32 references that differ in the order of their samples only."""
    return min(MOST_TOLERANCE, max(TOLERANCE, ROUNDINGS * rounding))


def judge(
    windows: Sequence[WindowCheck], hazards: Sequence[Hazard], refused: str | None, tolerance: float
) -> tuple[Outcome, str]:
    """The verdict, and the sentence that gives its reason."""
    if refused is not None:
        return Outcome.refused, refused
    breaking = [hazard.name for hazard in hazards if hazard.effect is Effect.breaks]
    wide = [window for window in windows if not window.agrees(tolerance)]
    narrow = [window for window in windows if not window.narrow_agrees]
    if breaking:
        return Outcome.differs, f"Because of: {', '.join(breaking)}."
    if not wide and not narrow:
        return Outcome.exact, "The accumulated gradient is that of one big batch, to rounding."
    blinding = [hazard.name for hazard in hazards if hazard.effect is Effect.blinds]
    if blinding:
        return Outcome.undecided, f"Two computations differ by themselves: {', '.join(blinding)}."
    names = ", ".join(window.name for window in wide or narrow)
    if wide:
        suspects = ", ".join(hazard.name for hazard in hazards)
        return Outcome.differs, f"In fp32, beyond rounding: {names}.{f' See: {suspects}.' if suspects else ''}"
    return Outcome.differs, f"In fp32 it is, but not in the job's own precision, beyond its rounding: {names}."
