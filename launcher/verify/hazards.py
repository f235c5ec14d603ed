"""Hazards: causes of a difference between accumulation and the big batch, found by running the task on rank 0.

Every probe runs a few micro-batches and compares the results. Only BatchNorm and dropout are also detected by module
type, for torch's own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.config.schema import Norm
from launcher.plan.solve import what_norms_do
from launcher.task import Loss, seed_everything
from launcher.train.parallel.batchnorm import batch_norms
from launcher.verify.certificate import FP32, Effect, Hazard
from launcher.verify.comparison import Gradient, distance, dropout_modules, without_dropout
from launcher.verify.reference import Plain, Whole

# relative tolerance within which the same arithmetic is reproducible on any device
SAME = 1e-5


def probe_memory(make: Callable[[], Plain], first: Sequence[Any], other: Sequence[Any]) -> list[Hazard]:
    """Check that a micro-batch's gradient is reproducible and does not depend on earlier micro-batches."""
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
    if plain.plan.batch.norm is Norm.window:  # the engine's layers count windows; the plain model's count micro-batches
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


_PARTS = 4


def probe(make: Callable[[], Plain], window: Sequence[Any], micro_size: int, rounding: float) -> list[Hazard]:
    """Return all hazards found on a window's samples.

    Later comparisons are skipped if results are not reproducible or depend on earlier micro-batches, since they would
    fail for that reason.

    Args:
        make: builds the task and the model, in fp32.
        rounding: relative rounding error of the model's gradient in fp32.
    """
    first = list(window[:micro_size])
    other = list(window[micro_size : 2 * micro_size]) or list(window[: max(1, micro_size // 2)])
    plain = make()
    found = [*_answer(plain, first), *_batch_norm(plain)]
    memory = probe_memory(make, first, other)
    found += memory
    if all(hazard.effect is Effect.noted for hazard in memory):
        random = _randomness(plain, first)
        found += random
        if all(hazard.effect is Effect.noted for hazard in random):
            with without_dropout(plain.model):
                found += _sum(plain, window, micro_size, min(FP32.most, max(10 * SAME, FP32.uncapped(rounding))))
    return found


def _answer(plain: Plain, samples: Sequence[Any]) -> list[Hazard]:
    """Check the form of the task's loss."""
    plain.put_back()
    answer = plain.ask(samples)
    if not isinstance(answer, Loss):
        return [
            Hazard(
                name="bare mean",
                effect=Effect.noted,
                seen="loss() returns a bare tensor, which is taken for the mean over the micro-batch's samples.",
                matters="If it is a mean over something else, tokens say, samples with few of them count too much.",
                remedy="Return launcher.Loss(total=the sum over items, items=how many).",
            )
        ]
    items = float(answer.items)
    problem = "are negative" if items < 0 else "are no whole number" if items != int(items) else ""
    if not problem:
        return []
    return [
        Hazard(
            name="items",
            effect=Effect.suspect,
            seen=f"The items {problem}: {items:g} in the first micro-batch.",
            matters="The window's gradient is divided by the sum of its items, counted as whole ones.",
            remedy="Count what the total sums over.",
        )
    ]


def _sum(plain: Plain, window: Sequence[Any], micro_size: int, same: float) -> list[Hazard]:
    """Compare loss and gradient of several micro-batches as one batch with the sum over the micro-batches.

    The gradient matters because all items may have the same loss when training starts. BatchNorm's statistics are a
    separate hazard, and are excluded here.
    """
    many = window[: min(_PARTS * micro_size, plain.most or len(window))]
    size = micro_size if len(many) > micro_size else -(-len(many) // 2)
    if len(many) <= size:
        return []
    normed = [module for module in plain.model.modules() if _uses_batch(module) and module.track_running_stats]
    for module in normed:
        module.training = False
    together = plain.in_batches([many])
    apart = plain.in_batches([many[i : i + size] for i in range(0, len(many), size)])
    for module in normed:
        module.training = True
    found: list[Hazard] = []
    # both results are means over their own items
    factor = apart.items / (together.items or 1.0)
    added = {name: None if part is None else part * factor for name, part in apart.gradient.items()}
    off = max(
        distance(together.gradient, added),
        abs(apart.loss * factor - together.loss) / (_loss_scale(plain, together) or 1.0),
    )
    if off > same:
        found.append(
            Hazard(
                name="a loss that is no sum over items",
                effect=Effect.suspect,
                seen=f"{len(many)} samples as one batch have another total, or gradient of it, than as {apart.batches} "
                f"micro-batches together: by {off:.1e}.",
                matters="It is a mean, over items of which samples have unequal numbers, or samples see each other "
                "within a batch (statistics of the batch, contrastive losses): then the split decides what is learned.",
                remedy="Return launcher.Loss(total=the sum over items, items=how many). A loss that needs the whole "
                "batch cannot be accumulated: use batch.accumulation=1, and gather what it needs.",
            )
        )
    if together.items != apart.items:
        found.append(
            Hazard(
                name="items that do not add up",
                effect=Effect.suspect,
                seen=f"{len(many)} samples as one batch have {together.items:g} items; as {apart.batches} "
                f"micro-batches together {apart.items:g}.",
                matters="What a sample counts depends on its neighbours: padding is counted, perhaps.",
                remedy="Count only what the total sums over, such as (targets != padding).sum().",
            )
        )
    return found


def _loss_scale(plain: Plain, whole: Whole) -> float:
    """Return the magnitude to which the loss's rounding error is relative: |loss| or, if larger, sum |gradient *
    parameter|, since terms of both signs may cancel in the loss (such as centred advantages), but not in its condition
    number."""
    parameters = dict(plain.model.named_parameters())
    parts = ((parameters[name].detach().cpu(), part) for name, part in whole.gradient.items() if part is not None)
    return max(abs(whole.loss), sum((value * part).abs().sum(dtype=torch.float64).item() for value, part in parts))


def _randomness(plain: Plain, samples: Sequence[Any]) -> list[Hazard]:
    """Check whether the loss depends on random numbers, with dropout and without."""

    def differs() -> bool:
        totals: list[float] = []
        for seed in (1, 2):
            plain.put_back()
            seed_everything(seed)
            totals.append(plain.loss(samples).total.item())
        return abs(totals[0] - totals[1]) > SAME * abs(totals[0])

    modules = dropout_modules(plain.model)
    random = differs()
    with without_dropout(plain.model):
        left = differs()
    found: list[Hazard] = []
    if left:
        found.append(
            Hazard(
                name="randomness in the forward pass",
                effect=Effect.blinds,
                seen="With other random numbers the same micro-batch has another loss, with dropout switched off too.",
                matters="One big batch draws other numbers than the micro-batches do, so the two cannot be compared.",
                remedy="Verify with the noise switched off by a parameter of the task; training is not affected.",
            )
        )
    elif random:
        where = f" ({', '.join(modules[:4])}{' and so on' if len(modules) > 4 else ''})" if modules else ""
        found.append(
            Hazard(
                name="dropout",
                effect=Effect.noted,
                seen=f"The model drops activations at random{where}. It was switched off for the comparison.",
                matters="Masks depend on the micro-batches' shape and on the rank, so the loss curve is repeated only "
                "with the same micro_size, accumulation and world; its expectation is the same in all of them.",
                remedy="Nothing, unless curves of different worlds are to be laid over each other: then no dropout.",
            )
        )
    return found


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _batch_norm(plain: Plain) -> list[Hazard]:
    said = what_norms_do(len(batch_norms(plain.model)), plain.plan.batch)
    if said is None or plain.plan.batch.norm in (Norm.freeze, Norm.window):
        return []
    return [
        Hazard(
            name="BatchNorm",
            effect=Effect.noted,
            seen=said,
            matters="Statistics of a part of the window give another gradient than those of the whole of it.",
            remedy="Leave it so, if the parts are large enough; or choose as above; or use GroupNorm or LayerNorm.",
        )
    ]
