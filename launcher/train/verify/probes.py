"""What can make accumulation differ from the big batch, looked for by running the task: on rank 0, on plain models.

Every probe runs a few micro-batches and compares; only BatchNorm and dropout are also named, where the modules are
torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.certificate import FP32, Effect, Hazard
from launcher.config import Norm
from launcher.norms import what_norms_do
from launcher.train.norm import batch_norms
from launcher.train.randomness import seed_everything
from launcher.train.task import Loss
from launcher.train.verify.measure import distance
from launcher.train.verify.reference import Plain
from launcher.train.verify.state_probes import SAME, probe_memory
from launcher.train.verify.still import dropout_modules, without_dropout

_PARTS = 4


def probe(make: Callable[[], Plain], window: Sequence[Any], micro_size: int, rounding: float) -> list[Hazard]:
    """Return all that is found on a window's samples.

    What is not the same twice, or remembers, fails every later comparison too, so those are left out then.

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
    """Of what form is the task's loss?"""
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
    """Compare the loss of several micro-batches together with the sum of theirs, and their gradients: when training
    starts all items may have the same loss. Statistics of BatchNorm are another matter, and left out."""
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
    # both are means over their own items
    factor = apart.items / (together.items or 1.0)
    added = {name: None if part is None else part * factor for name, part in apart.gradient.items()}
    off = max(distance(together.gradient, added), abs(apart.loss * factor / (together.loss or 1.0) - 1))
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


def _randomness(plain: Plain, samples: Sequence[Any]) -> list[Hazard]:
    """Do other random numbers give another loss, with dropout and without?"""

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
