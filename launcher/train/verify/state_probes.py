"""Does a micro-batch leave something behind that changes the next one? On rank 0, on plain models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from launcher.certificate import Effect, Hazard
from launcher.config import Norm
from launcher.train.norm import batch_norms
from launcher.train.verify.measure import Gradient, distance
from launcher.train.verify.reference import Plain
from launcher.train.verify.still import without_dropout

# relative; the same arithmetic gives the same to this on any device
SAME = 1e-5


def probe_memory(make: Callable[[], Plain], first: Sequence[Any], other: Sequence[Any]) -> list[Hazard]:
    """Is a micro-batch's gradient another after other micro-batches, or another each time?"""
    fresh, again = make(), make()
    with without_dropout(fresh.model), without_dropout(again.model):
        fresh.put_back()
        alone = fresh.backward(first)
        again.put_back()
        twin = again.backward(first)
        if (apart := _apart(alone, twin)) > SAME:
            return [_not_repeatable(apart)]
        found: list[Hazard] = []
        changed = _changed_buffers(again)
        worst = 0.0
        for samples in (first, other, first):
            again.put_back()
            result = again.backward(samples)
            if samples is first:
                worst = max(worst, _apart(alone, result))
        if worst > SAME:
            found.append(_hidden_state(worst))
        elif changed:
            again.put_back()
            again.backward(other)
            carried = _apart(alone, again.backward(first))
            found.append(_buffers(changed, carried))
    return found


def _apart(one: tuple[float, float, Gradient], two: tuple[float, float, Gradient]) -> float:
    return max(abs(one[0] - two[0]) / max(abs(one[0]), 1e-30), distance(one[2], two[2]))


def _changed_buffers(plain: Plain) -> list[str]:
    now = dict(plain.model.named_buffers())
    was = plain.beginning.values
    if plain.plan.batch.norm is Norm.window:  # the engine's layers count windows, unlike those of the plain model
        for layer, module in batch_norms(plain.model).items():
            for name, _ in module.named_buffers(layer, recurse=False):
                now.pop(name, None)
    return [name for name, buffer in now.items() if not torch.equal(buffer.cpu(), was[name])]


def _not_repeatable(apart: float) -> Hazard:
    return Hazard(
        name="non-determinism",
        effect=Effect.blinds,
        seen=f"Two fresh models with the same parameters and random numbers differ by {apart:.1e} on one micro-batch.",
        matters="What differs by itself cannot be compared, nor repeated: a clock, a generator of the model's own, or "
        "state that outlives the model.",
        remedy="Draw random numbers from torch's default generator only; try train.deterministic=true on a GPU.",
    )


def _hidden_state(apart: float) -> Hazard:
    return Hazard(
        name="hidden state",
        effect=Effect.suspect,
        seen=f"After other micro-batches the same micro-batch gives another result (by {apart:.1e}), though "
        "parameters, buffers and random numbers are as they were.",
        matters="The model, or the task, remembers micro-batches in something that is no declared buffer: the result "
        "depends on their order and number, each rank has its own, and no checkpoint holds it.",
        remedy="Remove it, reset it in loss(), or declare it with register_buffer().",
    )


def _buffers(names: list[str], carried: float) -> Hazard:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    matters = f"The gradient depends on them: by {carried:.1e} after one other micro-batch." if carried > SAME else (
        "The gradient does not depend on them. They count micro-batches, not windows, and each window begins with "
        "those of rank 0."
    )  # fmt: skip
    return Hazard(
        name="changing buffers",
        effect=Effect.suspect if carried > SAME else Effect.noted,
        seen=f"The forward pass changes the buffers {shown}.",
        matters=matters,
        remedy="Update once a window what the gradient depends on." if carried > SAME else "Nothing, where that is so.",
    )
