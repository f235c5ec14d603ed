"""Certificate of `launch verify`: the workers' measurements and the rule of the verdict. Imports no torch.

The rule. The accumulated gradient g of a window is compared with r, the gradient of the same samples as one big batch
in one process, at the same parameters and with dropout off. This is done twice: with both in fp32, where they can
differ only by rounding or by a mistake, and with g in the job's own arithmetic (precision, parameter format, TF32,
compression).

- The limit follows from r's own rounding error, measured for each window:
  in fp32, ten times the distance between r and a second r, with the samples in the opposite order and each parameter
  moved to a neighbouring fp32 number; at least 1e-5, for kernels that sum in another order, and at most 1e-3;
  in the job's arithmetic, three times the distance between r in fp32 and one big batch in that arithmetic, at least
  three times the format's unit roundoff, and at most 1/8. There g may be compared with either of these two.
- A window agrees if ||g - r|| / ||r|| of the whole gradient is within that limit, and the error of each group of
  parameters is at most the same multiple of its own rounding error (or of the whole gradient's, if that is more), or
  at most a tenth of the limit of the whole: the gradient of a parameter on which the loss hardly depends (the bias of
  attention's keys: not at all) consists of rounding, and has no correct digits to compare.
- Facts that break the claim for windows that were not compared (data that differs between ranks) decide by themselves.
- Suspicions from the probes (a loss that is not a sum, hidden state) explain a difference. If all windows agree with
  one big batch, the windows decide, and the suspicion is a warning for other micro-batches and world sizes.
- If the result is not reproducible, or rounding exceeds the largest limit, a difference proves nothing, and neither
  outcome is certified.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from launcher.errors import EXIT_DONE, EXIT_FAILED
from launcher.quantities import first_names
from launcher.rundir.job_end import end_status, failed_summary


@dataclass(frozen=True)
class Rule:
    """Limit on the accumulated gradient's relative error.

    Args:
        times: multiple of the rounding error of one big batch.
        least_error: lower bound assumed for the rounding error.
        most: largest limit.
    """

    times: float
    least_error: float
    most: float

    def uncapped(self, error: float) -> float:
        """Return the limit for a rounding ``error`` of one big batch, without the cap ``most``."""
        return self.times * max(error, self.least_error)


FP32 = Rule(times=10, least_error=1e-6, most=1e-3)


def narrow_rule(roundoff: float) -> Rule:
    """Return the rule for the job's own arithmetic. ``roundoff``: unit roundoff of its coarsest format."""
    return Rule(times=3, least_error=roundoff, most=1 / 8)


class Effect(StrEnum):
    """Effect of a hazard on the verdict.

    Attributes:
        noted: none.
        suspect: explains a difference, but is outweighed by windows that agree.
        breaks: decides the verdict.
        blinds: a difference proves nothing in its presence.
    """

    noted = "noted"
    suspect = "suspect"
    breaks = "breaks"
    blinds = "blinds"


class VerifyOutcome(StrEnum):
    exact = "exact"
    differs = "not the big batch"
    refused = "training would fail"
    undecided = "cannot be compared"


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """Hazard found by a probe: the observation (``seen``), why it matters, and the remedy."""

    name: str
    effect: Effect
    seen: str
    matters: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Distance of some parameters' gradient g from the reference r.

    Args:
        name: of the group or parameter.
        parameters: number of scalars.
        norm: ||r||.
        error: ||g - r|| / ||r||; None if r is zero and g is not.
        share: ||g - r|| / the norm of the whole reference gradient; None if that is zero and g is not.
        limit: largest share that counts as rounding.
    """

    name: str
    parameters: int
    norm: float
    error: float | None
    share: float | None
    limit: float

    @property
    def excess(self) -> float:
        """Return share / limit; above 1, the deviation exceeds rounding."""
        return math.inf if self.share is None else self.share / self.limit

    @property
    def within(self) -> bool:
        return self.excess <= 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One window's gradient against one big batch, in one arithmetic.

    Args:
        arithmetic: description such as "fp32" or "bf16".
        one_batch: relative rounding error of one big batch in it; None if that overflows.
        uncapped: limit that follows from ``one_batch``, without the cap.
        whole: deviation of the whole gradient.
        groups: deviation of each group of parameters.
        worst: parameters that deviate most, for display only.
    """

    arithmetic: str
    one_batch: float | None
    uncapped: float | None
    whole: Deviation
    groups: tuple[Deviation, ...]
    worst: tuple[Deviation, ...]

    @property
    def agrees(self) -> bool:
        return self.whole.within and all(group.within for group in self.groups)

    @property
    def drowned(self) -> bool:
        """Return whether it disagrees, but not by more than rounding without the cap."""
        if self.agrees or self.whole.share is None:
            return False
        groups = all(group.within for group in self.groups)
        return groups and self.whole.share <= (math.inf if self.uncapped is None else self.uncapped)


@dataclass(frozen=True, kw_only=True)
class WindowCheck:
    """One accumulated window against its reference.

    Args:
        name: description of the window.
        samples, items: of the window, counted by the engine.
        reference_items: counted by the reference.
        micro_batches: per rank.
        reference_batches: batches in which the reference was computed; 1 unless it did not fit into memory.
        loss, reference_loss: means over the items, in the first arithmetic compared.
        comparisons: in fp32, and in the job's own arithmetic if that differs.
    """

    name: str
    samples: int
    items: float
    reference_items: float
    micro_batches: int
    reference_batches: int
    loss: float
    reference_loss: float
    comparisons: tuple[Comparison, ...]

    @property
    def counts_agree(self) -> bool:
        return not counts_differ(self.items, self.reference_items)

    @property
    def agrees(self) -> bool:
        return self.counts_agree and all(comparison.agrees for comparison in self.comparisons)


def counts_differ(one: float, other: float) -> bool:
    """Return whether two numbers of items differ; sums of weights by more than rounding in fp32."""
    weights = not (float(one).is_integer() and float(other).is_integer())
    return not math.isclose(one, other, rel_tol=1e-5 if weights else 0.0)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Result of `launch verify`, printed or written by ``--json``.

    Args:
        job: description of the job, line by line.
        refused: error that would end training, after the name of its class.
        notes: remarks on the comparison.
    """

    job: dict[str, str]
    windows: tuple[WindowCheck, ...]
    hazards: tuple[Hazard, ...]
    notes: tuple[str, ...]
    refused: str | None
    outcome: VerifyOutcome
    reason: str

    @property
    def exit_status(self) -> int:
        if self.outcome is VerifyOutcome.refused:  # that of the same error in `launch train`
            return end_status(failed_summary({"kind": str(self.refused).partition(":")[0]}))
        return EXIT_DONE if self.outcome is VerifyOutcome.exact else EXIT_FAILED


def judge_windows(
    windows: Sequence[WindowCheck], hazards: Sequence[Hazard], refused: str | None
) -> tuple[VerifyOutcome, str]:
    """Return the verdict, and the sentences that give its reason."""
    named = {effect: [hazard.name for hazard in hazards if hazard.effect is effect] for effect in Effect}
    if refused is not None:
        return VerifyOutcome.refused, refused
    if named[Effect.breaks]:
        return VerifyOutcome.differs, f"Because of: {', '.join(named[Effect.breaks])}."
    suspects = ", ".join(named[Effect.suspect])
    if all(window.agrees for window in windows):
        # a reference that was itself summed over batches cannot refute a suspicion
        if suspects and any(window.reference_batches > 1 for window in windows):
            return VerifyOutcome.differs, f"Because of: {suspects}. A window's reference is not one batch."
        exact = "The accumulated gradient is that of one big batch, to the rounding of its formats"
        warning = f" With other micro-batches or another world it may not be: {suspects}." if suspects else ""
        return VerifyOutcome.exact, f"{exact}: {'; '.join(_largest(windows))}.{warning}"
    if named[Effect.blinds]:
        return VerifyOutcome.undecided, f"Two computations differ by themselves: {', '.join(named[Effect.blinds])}."
    differing = list(_differing(windows))
    # with hidden state the rounding error cannot be measured
    if not suspects and all(comparison is not None and comparison.drowned for _, comparison in differing):
        return VerifyOutcome.undecided, f"Rounding is too large to tell: {_listed(differing)}."
    clues = ", ".join(hazard.name for hazard in hazards)
    return VerifyOutcome.differs, f"Beyond rounding: {_listed(differing)}.{f' See: {clues}.' if clues else ''}"


def comparison_text(comparison: Comparison) -> str:
    """Return the deviation of the whole gradient, its limit, and the rounding error behind the limit, as one phrase."""
    whole = comparison.whole
    off = "not zero, as one big batch's is," if whole.share is None else f"{whole.share:.1e} off"
    one = "overflows" if comparison.one_batch is None else f"rounds by {comparison.one_batch:.1e}"
    return f"in {comparison.arithmetic} {off} (limit {whole.limit:.1e}; one big batch {one})"


def _largest(windows: Sequence[WindowCheck]) -> Iterator[str]:
    """Yield, for each arithmetic, the comparison closest to its limit."""
    for same in zip(*(window.comparisons for window in windows), strict=True):
        yield comparison_text(max(same, key=lambda comparison: comparison.whole.excess))


def _differing(windows: Sequence[WindowCheck]) -> Iterator[tuple[WindowCheck, Comparison | None]]:
    """Yield each window that disagrees with its first disagreeing comparison; None if only the items differ."""
    for window in windows:
        wrong = [comparison for comparison in window.comparisons if not comparison.agrees]
        if wrong:
            yield window, wrong[0]
        elif not window.counts_agree:
            yield window, None


def _listed(differing: Sequence[tuple[WindowCheck, Comparison | None]]) -> str:
    parts: list[str] = []
    for window, comparison in differing:
        if comparison is None:
            parts.append(f"{window.name}, {window.items:g} items, as one batch {window.reference_items:g}")
            continue
        groups = [group.name for group in comparison.groups if not group.within]
        inside = f", in {first_names(groups)}" if groups else ""
        parts.append(f"{window.name}, {comparison_text(comparison)}{inside}")
    return "; ".join(parts)
