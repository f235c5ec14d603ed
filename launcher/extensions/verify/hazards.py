"""Hazards: causes of a difference between accumulation and the big batch, in the data and in the task.

The probes of the data run on all ranks together, those of the task on rank 0. They read samples and run a few
micro-batches, and compare the results. Only BatchNorm and dropout are also detected by module type, for torch's own
modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from launcher.config.schema import Norm
from launcher.extensions.verify.accumulated import read_mapped, read_stream
from launcher.extensions.verify.certificate import FP32, Effect, Hazard, counts_differ
from launcher.extensions.verify.comparison import distance, dropout_modules
from launcher.extensions.verify.reference import Reference, ReferenceWindow
from launcher.loss import loss_form
from launcher.plan.run_plan import RunPlan
from launcher.plan.solve import what_norms_do
from launcher.quantities import first_names
from launcher.task import seed_everything
from launcher.train.data.fingerprint import outline
from launcher.train.data.sample_order import SampleOrder, samples_per_epoch
from launcher.train.data.stream import blocks_in_turn, is_sharded
from launcher.train.engine.modes import eval_flags, without_dropout
from launcher.train.parallel.batchnorm import batch_norms
from launcher.train.world import World

# number of samples that are compared
COMPARED_SAMPLES = 64


def probe_length(dataset: Any, plan: RunPlan, world: World) -> Hazard | None:
    """Return the hazard if a rank's dataset length differs from the plan, which the engine would refuse.

    All ranks must call it (collective).
    """
    if plan.task.samples is None:
        return None
    lengths = world.of_all(samples_per_epoch(dataset, plan.train.seed) if isinstance(dataset, Sized) else None)
    if set(lengths) == {plan.task.samples}:
        return None
    return _differs(f"lengths by rank: {', '.join(map(str, lengths))}; the plan was made for {plan.task.samples}")


def probe_data(dataset: Any, plan: RunPlan, world: World) -> list[Hazard]:
    """Return the hazards in the data, the same on every rank. All ranks must call it (collective)."""
    return [*(_probe_stream if plan.task.samples is None else _probe_mapped)(dataset, plan, world)]


def _probe_mapped(dataset: Any, plan: RunPlan, world: World) -> Iterator[Hazard]:
    assert plan.task.samples is not None
    seed, count = plan.train.seed, min(COMPARED_SAMPLES, plan.task.samples)
    order = SampleOrder(dataset, plan.task.samples, seed, shuffle=plan.train.shuffle)
    indices = [*order.take(0, 0, count)]
    first, again, other = (_digests(read_mapped(dataset, indices, each, 0)) for each in (seed, seed, seed + 1))
    all_ranks = world.of_all((first, _different(first, again), _different(first, other)))
    # data that changes between readings cannot be compared further
    if unstable := sorted({place for _, places, _ in all_ranks for place in places}):
        yield _unstable(f"{len(unstable)} of {count} samples, first the one with index {indices[unstable[0]]}")
        return
    if differ := sorted({place for digests, _, _ in all_ranks for place in _different(all_ranks[0][0], digests)}):
        yield _differs(f"{len(differ)} of {count} samples, first the one with index {indices[differ[0]]}")
    if any(random for _, _, random in all_ranks):
        yield Hazard(
            name="random data",
            effect=Effect.noted,
            seen="Samples depend on random numbers: augmentation.",
            matters="The numbers are fixed by the sample's place in its epoch, so a run is repeatable with any "
            "number of ranks.",
            remedy="Nothing. The comparison reads every sample with its own numbers.",
        )


def _probe_stream(dataset: Any, plan: RunPlan, world: World) -> Iterator[Hazard]:
    def read() -> list[str]:
        blocks = read_stream(dataset, blocks_in_turn(plan.batch.micro_size, 1, 0), plan.train.seed)
        return _digests(itertools.islice(itertools.chain.from_iterable(blocks), COMPARED_SAMPLES))

    first, again = read(), read()
    all_ranks = world.of_all((first, first != again))
    same = [digests == all_ranks[0][0] for digests, _ in all_ranks]
    sharded = is_sharded(dataset)
    if any(unstable for _, unstable in all_ranks):
        yield _unstable("the beginning of the stream")
    elif not sharded and not all(same):
        yield _differs(f"the beginning of the stream, first on rank {same.index(False)}")
    elif sharded and world.size > 1 and all(same):
        yield Hazard(
            name="a stream that is not sharded",
            effect=Effect.breaks,
            seen="The stream has sharded = True, and all ranks read the same samples first.",
            matters="Each sample counts as many times as there are ranks.",
            remedy="Give each rank samples of its own, or leave the attribute out.",
        )


def _differs(what: str) -> Hazard:
    return Hazard(
        name="data that differs between ranks",
        effect=Effect.breaks,
        seen=f"Not the same on all ranks: {what}.",
        matters="Ranks select a window's samples by index. If an index means different samples on different ranks, "
        "some are used twice in an epoch, and others never.",
        remedy="Build the data in the same way on every rank: seed its shuffling, sort its files.",
    )


def _unstable(what: str) -> Hazard:
    return Hazard(
        name="data that differs at each reading",
        effect=Effect.blinds,
        seen=f"Read twice with the same random numbers, it differs: {what}.",
        matters="Neither the big batch nor a resumed run can read what the micro-batches have read.",
        remedy="Draw from torch's, Python's or NumPy's global generators only: they are seeded for every sample.",
    )


def _digests(samples: Iterable[Any]) -> list[str]:
    return [outline(sample).exact for sample in samples]


def _different(one: list[str], two: list[str]) -> list[int]:
    return [place for place, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]


# relative tolerance within which the same arithmetic is reproducible on any device
REPEATABLE = 1e-5
# number of micro-batches that are compared with one batch
_PARTS = 4


def probe_task(make: Callable[[], Reference], window: Sequence[Any], micro_size: int, rounding: float) -> list[Hazard]:
    """Return all hazards of the task found on a window's samples.

    Later comparisons are skipped if results are not reproducible or depend on earlier micro-batches, since they would
    fail for that reason.

    Args:
        make: builds the task and the model, in fp32.
        rounding: relative rounding error of the model's gradient in fp32.
    """
    first = list(window[:micro_size])
    other = list(window[micro_size : 2 * micro_size]) or list(window[: max(1, micro_size // 2)])
    reference = make()
    hazards = [*_loss_form(reference, first), *_batch_norm(reference)]
    for probe in (
        _state_across_micro_batches(make, first, other),
        _randomness(reference, first),
    ):  # each runs when it is iterated
        hazards += (more := list(probe))
        if any(hazard.effect is not Effect.noted for hazard in more):
            return hazards
    if loss_form(reference.task) is not None:  # which is no sum over micro-batches, and needs not be
        return hazards
    tolerance = min(FP32.most, max(10 * REPEATABLE, FP32.uncapped(rounding)))
    with without_dropout(reference.model):
        return [*hazards, *_additivity(reference, window, micro_size, tolerance)]


def _loss_form(reference: Reference, samples: Sequence[Any]) -> Iterator[Hazard]:
    """Check the form of the task's loss."""
    reference.restore()
    if isinstance(reference.task_loss(samples), Tensor):
        yield Hazard(
            name="bare mean",
            effect=Effect.noted,
            seen="loss() returns a bare tensor, which is taken for the mean over the micro-batch's samples.",
            matters="If it is a mean over something else, such as tokens, samples with few of them count too much.",
            remedy="Return launcher.Loss(total=the sum over items, items=how many).",
        )


def _batch_norm(reference: Reference) -> Iterator[Hazard]:
    description = what_norms_do(len(batch_norms(reference.model)), reference.plan.batch)
    if description is None or (norm := reference.plan.batch.norm) is Norm.freeze or norm.looks_ahead:
        return
    yield Hazard(
        name="BatchNorm",
        effect=Effect.noted,
        seen=description,
        matters="Statistics of a part of the window give another gradient than those of the whole window.",
        remedy="Keep it if the parts are large enough; or change batch.norm; or use GroupNorm or LayerNorm.",
    )


def _state_across_micro_batches(
    make: Callable[[], Reference], first: Sequence[Any], other: Sequence[Any]
) -> Iterator[Hazard]:
    """Check that a micro-batch's gradient is reproducible and does not depend on earlier micro-batches."""
    fresh, second = make(), make()
    with without_dropout(fresh.model), without_dropout(second.model):
        alone = fresh.in_batches([first])
        apart = _relative_difference(alone, second.in_batches([first]))
        if apart > REPEATABLE:
            yield _not_repeatable(apart)
            return
        changed = _changed_buffers(second)
        worst = 0.0
        for samples in (first, other, first):
            result = second.in_batches([samples])
            if samples is first:
                worst = max(worst, _relative_difference(alone, result))
        if worst > REPEATABLE:
            yield _hidden_state(worst)
        elif changed:
            second.in_batches([other])
            second.save()  # with the buffers that ``other`` has changed
            yield _buffers(changed, _relative_difference(alone, second.in_batches([first])))


def _relative_difference(one: ReferenceWindow, two: ReferenceWindow) -> float:
    return max(abs(one.loss - two.loss) / max(abs(one.loss), 1e-30), distance(one.gradient, two.gradient))


def _changed_buffers(reference: Reference) -> list[str]:
    buffers = dict(reference.model.named_buffers())
    if reference.plan.batch.norm.looks_ahead:  # the engine's layers count windows; these count micro-batches
        for layer, module in batch_norms(reference.model).items():
            for name, _ in module.named_buffers(layer, recurse=False):
                buffers.pop(name, None)
    before = reference.run.values
    return [name for name, buffer in buffers.items() if not torch.equal(buffer.cpu(), before[name])]


def _not_repeatable(apart: float) -> Hazard:
    return Hazard(
        name="non-determinism",
        effect=Effect.blinds,
        seen=f"Two fresh models with the same parameters and random numbers differ by {apart:.1e} on one micro-batch.",
        matters="A result that differs by itself can be neither compared nor repeated. It may depend on a clock, a "
        "generator of the model's own, or state that outlives the model.",
        remedy="Draw random numbers from torch's default generator only; try train.deterministic=true on a GPU.",
    )


def _hidden_state(apart: float) -> Hazard:
    return Hazard(
        name="hidden state",
        effect=Effect.suspect,
        seen=f"After other micro-batches the same micro-batch gives another result (by {apart:.1e}), with the same "
        "parameters, buffers and random numbers.",
        matters="The model, or the task, remembers micro-batches outside of its buffers: the result depends on their "
        "order and number, each rank has its own, and no checkpoint holds it.",
        remedy="Remove it, reset it in loss(), or declare it with register_buffer().",
    )


def _buffers(names: list[str], carried: float) -> Hazard:
    matters = carried > REPEATABLE
    return Hazard(
        name="changing buffers",
        effect=Effect.suspect if matters else Effect.noted,
        seen=f"The forward pass changes the buffers {first_names(names)}.",
        matters=f"The gradient depends on them: by {carried:.1e} after one other micro-batch."
        if matters
        else "The gradient does not depend on them. They count micro-batches, not windows, and each window starts with "
        "those of rank 0.",
        remedy="Update buffers on which the gradient depends once per window." if matters else "Nothing.",
    )


def _randomness(reference: Reference, samples: Sequence[Any]) -> Iterator[Hazard]:
    """Check whether the loss depends on random numbers, with dropout and without."""

    def differs() -> bool:
        totals: list[float] = []
        for seed in (1, 2):
            reference.restore()
            seed_everything(seed)
            totals.append(reference.mean(samples))
        return abs(totals[0] - totals[1]) > REPEATABLE * abs(totals[0])

    modules, random = dropout_modules(reference.model), differs()
    with without_dropout(reference.model):
        random_without_dropout = differs()
    if random_without_dropout:
        yield Hazard(
            name="randomness in the forward pass",
            effect=Effect.blinds,
            seen="With other random numbers the same micro-batch has another loss, also with dropout switched off.",
            matters="One big batch draws other numbers than the micro-batches do, so the two cannot be compared.",
            remedy="Verify with the noise switched off by a parameter of the task; training is not affected.",
        )
    elif random:
        yield Hazard(
            name="dropout",
            effect=Effect.noted,
            seen=f"The model drops activations at random{f' ({first_names(modules)})' if modules else ''}. Dropout was "
            "switched off for the comparison.",
            matters="Masks depend on the micro-batches' shape and on the rank, so the loss curve is repeatable only "
            "with the same micro_size, accumulation and world size; its expectation is the same in all of them.",
            remedy="Nothing; leave dropout out to compare curves of different world sizes digit by digit.",
        )


def _additivity(reference: Reference, window: Sequence[Any], micro_size: int, tolerance: float) -> Iterator[Hazard]:
    """Compare loss and gradient of several micro-batches as one batch with the sum over the micro-batches.

    The gradient matters because all items may have the same loss when training starts. BatchNorm's statistics are a
    separate hazard, and are excluded here.
    """
    samples = window[: min(_PARTS * micro_size, reference.most or len(window))]
    size = micro_size if len(samples) > micro_size else -(-len(samples) // 2)
    if len(samples) <= size:
        return
    norms = [module for module in reference.model.modules() if _uses_batch(module) and module.track_running_stats]
    with eval_flags(norms):
        together = reference.in_batches([samples])
        apart = reference.in_batches([samples[i : i + size] for i in range(0, len(samples), size)])
    # both results are means over their own items
    several = len(together.items_of_terms) > 1
    factor = 1.0 if several else apart.items / (together.items or 1.0)
    added = {name: part * factor for name, part in apart.gradient.items()}
    error = max(
        distance(together.gradient, added),
        abs(apart.loss * factor - together.loss) / (_loss_scale(reference, together) or 1.0),
    )
    if error > tolerance:
        yield Hazard(
            name="a loss that is no sum over items",
            effect=Effect.suspect,
            seen=f"{len(samples)} samples as one batch have another total, or gradient of it, than as "
            f"{apart.batches} micro-batches together: by {error:.1e}.",
            matters="It is a mean, over items of which samples have unequal numbers, or samples affect each other "
            "within a batch (statistics of the batch, contrastive losses): then the split changes the result.",
            remedy="Return launcher.Loss(total=the sum over items, items=how many). A loss that needs the whole "
            "batch is window_loss(outputs) in place of loss(model, batch).",
        )
    if any(counts_differ(*counts) for counts in zip(together.items_of_terms, apart.items_of_terms, strict=True)):
        yield Hazard(
            name="items that do not add up",
            effect=Effect.suspect,
            seen=f"{len(samples)} samples as one batch have {_counts(together)} items; as {apart.batches} "
            f"micro-batches together {_counts(apart)}.",
            matters="The items of a sample depend on the other samples of its batch: perhaps padding is counted.",
            remedy="Count only what the total sums over, such as (targets != padding).sum().",
        )


def _counts(window: ReferenceWindow) -> str:
    return " and ".join(f"{items:g}" for items in window.items_of_terms)


def _uses_batch(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def _loss_scale(reference: Reference, window: ReferenceWindow) -> float:
    """Return the magnitude to which the loss's rounding error is relative: |loss| or, if larger, sum |gradient *
    parameter|, since terms of both signs may cancel in the loss (such as centred advantages), but not in its condition
    number."""
    parameters = dict(reference.model.named_parameters())
    parts = ((parameters[name].detach().cpu(), part) for name, part in window.gradient.items())
    return max(abs(window.loss), sum((value * part).abs().sum(dtype=torch.float64).item() for value, part in parts))
