"""Trial of the loss in the first window of a run: whether ``total`` is a sum over the items of a micro-batch.

A mean in its place trains without a message, with a gradient that is too small by the number of items. The halves P and
R of a micro-batch, which are A together, and each half twice and three times, show it under the same random numbers:

    f(A) = f(P) + f(R), f(PP) = 2 f(P)              a sum
    f(A) = their mean,  f(PP) = f(P)                a mean
    f(PP) = 2 f(P) - c, f(PPP) = 3 f(P) - 2 c       a sum, and a part c that is no sum

A verdict needs all of these to fit. A loss that depends on other samples or on noise, or a batch that cannot be taken
apart, has none. Meanwhile there is no dropout, and BatchNorm is in eval mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from launcher.config.schema import PrecisionKind
from launcher.errors import TaskError
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.loss import Loss
from launcher.plan.sync_policy import SHARDED
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import EngineParts
from launcher.train.engine.modes import eval_flags, without_dropout

# relative differences: of the same input twice; of values with other random numbers, beyond which there is no verdict
SAME, NOISE = 1e-6, 0.05
# relative tolerance for a mean, which is far from a sum
MEAN_TOLERANCE = 0.02
# smallest part that is no sum, far beyond rounding, in fp32 and in narrower formats; and how well two sizes agree on it
SMALLEST_PART, AGREEMENT = {True: 5e-5, False: 0.03}, 0.05

TotalKind = Literal["sum", "mean", "part"]  # a sum, a mean, a sum and a part that is none


@dataclass(frozen=True)
class TriedTerm:
    """Totals and items of a term: of the half P, again with other random numbers, again with the same ones, of the half
    R, of both, and of P and R, each twice and three times.

    Attributes:
        wide: the totals are in fp32 or wider.
    """

    totals: Sequence[float]
    items: Sequence[float]
    wide: bool = True


def can_try_loss(parts: EngineParts) -> bool:
    """Return False if the model is compiled: each new size would be compiled, and later ones as a size that varies."""
    return not parts.plan.train.compile and not any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in parts.parallel.module.modules()
    )


def try_loss(
    parts: EngineParts, run: Callable[[MicroBatch], list[Loss]], micro: MicroBatch, micro_batches: int
) -> None:
    """Run the trial of the loss of one micro-batch on each rank, and restore what it can change. All ranks call it.

    Args:
        run: the forward pass of a copy of a micro-batch through the unwrapped model.
        micro_batches: number in the window of this rank.

    Raises:
        TaskError: the total of a term is a mean, or has a part that is no sum; on all ranks.
    """
    values = _values(parts, run, micro)
    if values is None and parts.plan.strategy.kind in SHARDED:
        return  # an error of this rank alone shows in the window; the others wait in this pass until then
    found = _verdicts(parts, values or [], several=micro_batches * parts.world.size > 1)
    of_ranks = parts.world.of_all(found)
    for term in range(max(map(len, of_ranks))):
        of_term = [found for verdicts in of_ranks if term < len(verdicts) and (found := verdicts[term]) is not None]
        if len({kind for kind, _ in of_term}) == 1 and of_term[0][0] != "sum":
            raise TaskError(of_term[0][1])


def _values(parts: EngineParts, run: Callable[[MicroBatch], list[Loss]], micro: MicroBatch) -> list[TriedTerm] | None:
    """Return the values of each term, none if the batch cannot be divided; None if a pass fails."""
    kept, half = parts.preserve(), micro.samples // 2
    one, other = (range(half), range(half, micro.samples)) if half else (range(1), range(1))
    losses: list[list[Loss]] = []
    changed = ""
    try:
        repeated = [[*half] * times for half in (one, other) for times in (2, 3)]
        for number, chosen in enumerate([one, one, one, other, [*one, *other], *repeated]):
            try:  # ranks without samples run the passes, too
                data = taken(micro.data, chosen, micro.samples)
                part = MicroBatch(data, len(chosen))
            except NotDivisible:
                part = micro
            losses.append(forward_pass(parts, run, part))
            if part is micro:
                losses[-1] = []
            if number:  # the second pass continues with the state and the random numbers of the first one
                changed = kept.undo()
    except Exception:  # training shows the error, unless it is due to the size
        return None
    finally:
        changed = kept.undo() or changed
        if changed:
            print(f"The trial of the loss before the first step changed {changed}.", flush=True)
    if len({len(terms) for terms in losses}) > 1:
        return []
    columns = zip(*losses, strict=True)
    return [
        TriedTerm(
            [float(t.total) for t in terms],
            [float(t.items) for t in terms],
            wide=all(torch.as_tensor(t.total).dtype.itemsize >= 4 for t in terms),
        )
        for terms in columns
    ]


def _verdicts(parts: EngineParts, terms: Sequence[TriedTerm], *, several: bool) -> list[tuple[TotalKind, str] | None]:
    precision = parts.plan.precision
    exact = precision.kind is PrecisionKind.fp32 and not precision.tf32
    found: list[tuple[TotalKind, str] | None] = []
    for number, values in enumerate(terms, 1):
        verdict = kind_of_total(values, exact=exact and values.wide)
        if verdict == "part" and not several:  # the whole loss of each step is in one micro-batch
            verdict = None
        which = f"term {number} of the loss" if len(terms) > 1 else "the loss"
        found.append(verdict and (verdict, _message(verdict, which, values)))
    return found


def kind_of_total(values: TriedTerm, *, exact: bool) -> TotalKind | None:
    """Return the kind of a term's total; None if no kind fits.

    Args:
        exact: the loss is computed in fp32 or wider.
    """
    p, noisy, again, r, a, pp, ppp, rr, rrr = values.totals
    n_p, _, _, n_r, n_a, n_pp, _, n_rr, _ = values.items
    scale = max(abs(p), abs(r), abs(a))
    additive = (
        n_p > 0
        and n_r > 0
        and all(math.isclose(*pair, rel_tol=SAME) for pair in ((n_a, n_p + n_r), (n_pp, 2 * n_p), (n_rr, 2 * n_r)))
    )
    if not all(map(math.isfinite, values.totals)) or min(abs(p), abs(r)) < max(0.05 * scale, 1e-8) or not additive:
        return None
    noise = abs(noisy - p) / scale
    if abs(again - p) > SAME * scale or noise > NOISE:
        return None
    mean = (n_p * p + n_r * r) / n_a
    tolerance = MEAN_TOLERANCE + 2 * noise
    if max(abs(pp - p) / abs(p), abs(rr - r) / abs(r), abs(a - mean) / scale) <= tolerance:
        return "mean"
    if noise > SAME:
        return None
    # parts that do not double, in each half, and in both for a constant and for a mean
    c_p, c_r = 2 * p - pp, 2 * r - rr
    c_a = (n_p * c_p + n_r * c_r) / n_a
    unexplained, smallest = abs(p + r - a - (c_p + c_r - c_a)), SMALLEST_PART[exact] * scale
    if max(abs(c_p), abs(c_r), unexplained) < smallest:
        return "sum"
    is_part = min(abs(c_p), abs(c_r)) >= smallest and unexplained <= max(abs(c_p), abs(c_r))
    agree = all(abs(c - (3 * f - fff) / 2) <= AGREEMENT * abs(c) for f, fff, c in ((p, ppp, c_p), (r, rrr, c_r)))
    return "part" if is_part and agree else None


def _message(verdict: TotalKind, which: str, values: TriedTerm) -> str:
    p, _, _, r, a, pp, *_ = values.totals
    if verdict == "mean":
        return (
            f"Loss(total, items): the total of {which} is a mean over the micro-batch, and must be a sum: halves of a "
            f"micro-batch have {p:.6g}\n  and {r:.6g}, and together {a:.6g}. It is divided by the items of the window "
            'once more.\n  Return the sum: reduction="sum" in torch\'s losses, .sum() in place of .mean(), or mean * '
            "items."
        )
    return (
        f"Loss(total, items): a part of the total of {which} is no sum over the micro-batch's items: it is {p:.6g} for "
        f"half of a micro-batch,\n  and {pp:.6g} for the same samples twice. Such a part counts once for each "
        "micro-batch and rank, and is divided by all items.\n  Multiply it by the number of items, or return it as a "
        "term of its own: [Loss(total, items), Loss(penalty * items, items)]."
    )


def forward_pass(parts: EngineParts, run: Callable[[MicroBatch], list[Loss]], micro: MicroBatch) -> list[Loss]:
    """Return the terms of a forward pass without gradient, without dropout and with BatchNorm in eval mode."""
    HEARTBEAT.beat(Phase.computing, 1)
    parts.norms.trial(alone=True)
    with (
        torch.no_grad(),
        parts.parallel.meter.unchecked(),
        parts.parallel.evaluation(),
        without_dropout(parts.parallel.module),
        eval_flags(module for module in parts.parallel.module.modules() if isinstance(module, _BatchNorm)),
        parts.precision.autocast(),
    ):
        return run(micro)


class NotDivisible(Exception):
    """A batch has parts that do not belong to single samples."""


def taken(data: Any, chosen: Sequence[int], samples: int) -> Any:
    """Return the ``chosen`` samples of a batch of ``samples``: of tensors with a row, and of lists with an element, for
    each sample.

    Raises:
        NotDivisible: it has other parts.
    """
    match data:
        case Tensor() if data.ndim and len(data) == samples and data.layout is torch.strided:
            return data[torch.tensor(chosen, device=data.device)]
        case dict() if type(data) is dict:
            return {key: taken(value, chosen, samples) for key, value in data.items()}
        case list() | tuple() if type(data) in (list, tuple) or hasattr(data, "_fields"):
            try:
                parts = [taken(value, chosen, samples) for value in data]
            except NotDivisible:
                if len(data) != samples:
                    raise
                parts = [data[index] for index in chosen]
            return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
        case None:
            return None
        case _:
            raise NotDivisible
