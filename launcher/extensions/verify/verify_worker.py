"""Rank of `launch verify`: all ranks run the job's windows on its engine, then rank 0 alone computes the reference.

    python -m launcher.extensions.verify.verify_worker PLAN

Rank 0 writes certificate.json and summary.json to the run's directory.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.config.schema import Compress, ShortWindow
from launcher.extensions.verify.accumulated import EngineRun, EngineWindow, Trial, choose_windows, in_fp32, run_windows
from launcher.extensions.verify.certificate import (
    FP32,
    Certificate,
    Comparison,
    Effect,
    Hazard,
    Rule,
    WindowCheck,
    judge_windows,
    narrow_rule,
)
from launcher.extensions.verify.comparison import Gradient, compare_gradients
from launcher.extensions.verify.hazards import probe_data, probe_length, probe_task
from launcher.extensions.verify.reference import Reference, ReferenceWindow
from launcher.plan.float_format import float_format
from launcher.plan.run_plan import RunPlan
from launcher.plan.strategy import job_lines
from launcher.plan.sync_policy import SHARDED
from launcher.process import prepare_worker, run_and_exit, unblock_stop_signals
from launcher.quantities import count, first_names
from launcher.rundir.files import write_json
from launcher.task import eval_set_text, eval_sets, first_samples, load_task, train_data
from launcher.train import precision
from launcher.train.data.length_balance import arranged
from launcher.train.engine.loss_terms import require_terms
from launcher.train.engine.modes import without_dropout
from launcher.train.precision import DTYPES
from launcher.train.world import World, device_of, disband, join


def main(plan_path: str) -> None:
    prepare_worker()
    unblock_stop_signals()  # nothing to save: a signal may end the process

    from torch.distributed.elastic.multiprocessing.errors import record

    run_and_exit(partial(record(_run), RunPlan.load(Path(plan_path))))


def _run(plan: RunPlan) -> None:
    torch.use_deterministic_algorithms(plan.train.deterministic)
    certificate = verify(plan, World.here())
    if certificate is not None:
        write_json(plan.paths.certificate, dataclasses.asdict(certificate))
        write_json(plan.paths.summary, {"verdict": "done"})


def verify(plan: RunPlan, world: World) -> Certificate | None:
    """Return the certificate on rank 0, None on other ranks. All ranks must call it."""
    device = device_of(world, plan.cluster.device)
    join(world, device, plan.train.hang_timeout)
    plan = precision.resolve_precision(plan, world, device, plan.paths.precision)
    batch, train = dataclasses.replace(plan.batch, ramp=()), dataclasses.replace(plan.train, data_shards=1)
    measured = _measure(dataclasses.replace(plan, batch=batch, train=train), world)
    gc.collect()  # free the engines' memory for the reference
    disband()
    if world.rank:
        return None
    # the user's code may query its rank, and a module that normalises over ranks must see a world of one
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _certify(plan, device, measured)
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Measured:
    """Results that all ranks measured together.

    Args:
        fp32: the windows in fp32; None if the data allows no window to start.
        own: the windows in the job's own arithmetic under ``own_plan``; None if that is fp32 too.
        trials: the windows that were to be run.
    """

    hazards: list[Hazard]
    fp32: EngineRun | None
    own: EngineRun | None
    own_plan: RunPlan
    trials: list[Trial]


def _measure(plan: RunPlan, world: World) -> Measured:
    own_plan, seed = plan, plan.train.seed
    if plan.strategy.compress.keeps_residue:
        own_plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, compress=Compress.none))
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, seed)
    before = dict(getattr(task, "__dict__", {}))
    data = train_data(task, seed)
    # tokenising and reading may take long: tasks constructed later repeat it only if the loss may need the result
    with_data = any(value is not before.get(name) for name, value in getattr(task, "__dict__", {}).items())
    data = arranged(data, task, plan, world)
    if (length := probe_length(data, plan, world)) is not None:
        return Measured([length], None, None, own_plan, [])
    hazards = probe_data(data, plan, world)
    trials = choose_windows(data, plan, world)
    _say(world, f"{count(len(trials), 'window')} on {count(world.size, 'rank')}, in fp32")
    fp32 = run_windows(in_fp32(own_plan), world, trials, with_data=with_data)
    if in_fp32(own_plan) == own_plan or fp32.refused is not None:
        return Measured(hazards, fp32, None, own_plan, trials)
    _say(world, f"{count(len(trials), 'window')} on {count(world.size, 'rank')}, as configured")
    return Measured(hazards, fp32, run_windows(own_plan, world, trials, with_data=with_data), own_plan, trials)


def arithmetic_of(plan: RunPlan, run: EngineRun) -> str:
    """Return a description of the arithmetic that the job computes in."""
    names = {dtype: kind for kind, dtype in reversed(DTYPES.items())}  # bf16 is the first of its dtype
    kept = {names[value.dtype] for value in run.values.values() if value.dtype in names}
    parts = [plan.precision.kind.value, *(f"{name} parameters" for name in sorted(kept))]
    if (sent := _sent_as(plan)) is not None:
        parts.append(f"gradients sent as {names[sent]}")
    if plan.train.compile:
        parts.append("compiled")
    return ", ".join(parts)


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def _certify(plan: RunPlan, device: torch.device, measured: Measured) -> Certificate:
    """Return the certificate. Runs on rank 0 only."""
    fp32, own, samples = measured.fp32, measured.own, [trial.samples for trial in measured.trials]
    if fp32 is None:
        return _certificate(plan, [], measured.hazards, [], "The data is not the same on all ranks.")
    print("computing the reference: each window as one batch", flush=True)
    references, comparisons, most = _compare_in_fp32(plan, device, fp32, samples)
    if own is not None:
        print("computing the reference as configured", flush=True)
        for of_window, one in zip(
            comparisons, _compare_as_configured(measured, own, device, references, most), strict=False
        ):
            of_window.append(one)
    print("looking for hazards", flush=True)

    def make() -> Reference:
        return Reference(in_fp32(plan), fp32, device, most)

    with_items = [n for n, reference in enumerate(references) if any(reference.items_of_terms)]
    if not with_items and fp32.refused is None:
        return _certificate(plan, [], measured.hazards, [], "None of the first windows holds an item.")
    first = samples[with_items[0] if with_items else 0]
    rounding = max((of_window[0].one_batch or 0.0 for of_window in comparisons), default=0.0)
    of_task = probe_task(make, first, plan.batch.micro_size, rounding)
    hazards = [*measured.hazards, *_unused(references), *of_task]
    windows = [_window_check(*one) for one in zip(fp32.windows, references, comparisons, strict=False)]
    refused = fp32.refused or (own.refused if own is not None else None)
    if refused is None:
        refused = _evaluation_error(make() if own is None else Reference(measured.own_plan, own, device, most))
    return _certificate(plan, windows, hazards, _notes(plan, measured, most, references), refused)


def _evaluation_error(reference: Reference) -> str | None:
    """Return the error of evaluating the first micro-batch of each held-out set; None if there is none."""
    reference.model.eval()
    plan, of_set = reference.plan, ""
    try:
        for name, data in eval_sets(reference.task, plan.train.seed).items():
            of_set = f" of {eval_set_text(name)}" if name else ""
            with torch.no_grad(), reference.context.evaluation(name or None):
                losses = reference.losses(first_samples(data, plan.eval_size))
            require_terms(losses)
    except Exception as error:  # user code may raise anything
        return f"The evaluation{of_set} fails: {type(error).__name__}: {error}"
    return None


def _compare_in_fp32(
    plan: RunPlan, device: torch.device, run: EngineRun, samples: Sequence[Sequence[Any]]
) -> tuple[list[ReferenceWindow], list[list[Comparison]], int | None]:
    """Return each window's reference, its comparisons so far, and how many samples fit into one batch."""
    reference = Reference(in_fp32(plan), run, device)
    windows = list(_in_turn(reference, samples))
    # a separate model, so that hidden state, if any, has seen the same number of earlier windows
    second = Reference(in_fp32(plan), run, device, reference.most)
    backwards = [of_window[::-1] for of_window in samples]
    with second.perturbed():
        comparisons = [
            [compare_gradients("fp32", own.gradient, window.gradient, other.gradient, FP32)]
            for own, window, other in zip(run.windows, windows, _in_turn(second, backwards), strict=False)
        ]
    return windows, comparisons, reference.most


def _in_turn(reference: Reference, windows: Sequence[Sequence[Any]]) -> Iterator[ReferenceWindow]:
    """Yield each window as one batch. As in training, a window starts with the buffers left by the previous one."""
    with without_dropout(reference.model):
        for number, samples in enumerate(windows):
            reference.enter(number)
            window = reference.window(samples)
            reference.save()
            yield window


def _compare_as_configured(
    measured: Measured, own: EngineRun, device: torch.device, wide: Sequence[ReferenceWindow], most: int | None
) -> Iterator[Comparison]:
    """Yield the comparison of each window in the job's own arithmetic. ``wide``: references in fp32."""
    plan = measured.own_plan
    arithmetic, rule = arithmetic_of(plan, own), _rule(plan, own)
    windows = _in_turn(Reference(plan, own, device, most), [trial.samples for trial in measured.trials])
    for window, reference, narrow in zip(own.windows, wide, windows, strict=False):
        sent = _as_sent(narrow.gradient, plan)
        comparison = compare_gradients(arithmetic, window.gradient, reference.gradient, sent, rule)
        if not comparison.agrees:
            # as far from the reference in this arithmetic as one big batch in it is from the reference in fp32
            moved = {name: part + sent[name] - reference.gradient[name] for name, part in narrow.gradient.items()}
            other = compare_gradients(arithmetic, window.gradient, narrow.gradient, moved, rule)
            comparison = other if other.agrees else comparison
        yield comparison


def _sent_as(plan: RunPlan) -> torch.dtype | None:
    """Return the format in which ranks send and add gradients; None if it is fp32."""
    if plan.batch.world_size > 1 and plan.strategy.kind in SHARDED:
        return DTYPES.get(plan.precision.reduce_dtype)
    return torch.bfloat16 if plan.strategy.compress is Compress.bf16 else None


def _rule(plan: RunPlan, own: EngineRun) -> Rule:
    """Return the rule for the coarsest format in which the job computes, stores or sends."""
    formats = {DTYPES.get(plan.precision.kind), _sent_as(plan), *(t.dtype for t in own.values.values())}
    roundoffs = [torch.finfo(each).eps / 2 for each in DTYPES.values() if each in formats]
    if (added := float_format(plan)) is not None:
        roundoffs.append(added.roundoff)
    return narrow_rule(max(roundoffs)) if roundoffs else FP32


def _as_sent(gradient: Gradient, plan: RunPlan) -> Gradient:
    """Return ``gradient`` with the rounding error of being sent as in ``plan``.

    A ring rounds each number when it is sent, at each addition, and when it is divided.
    """
    dtype, ranks = _sent_as(plan), plan.batch.world_size
    if dtype is None:
        return gradient
    return {name: part + (ranks + 1) * (part.to(dtype).to(part.dtype) - part) for name, part in gradient.items()}


def _certificate(
    plan: RunPlan, windows: list[WindowCheck], hazards: list[Hazard], notes: list[str], refused: str | None
) -> Certificate:
    outcome, reason = judge_windows(windows, hazards, refused)
    return Certificate(
        job=job_lines(plan) | {"device": plan.cluster.device.value}, windows=tuple(windows), hazards=tuple(hazards),
        notes=tuple(notes), refused=refused, outcome=outcome, reason=reason,
    )  # fmt: skip


def _window_check(window: EngineWindow, reference: ReferenceWindow, comparisons: Sequence[Comparison]) -> WindowCheck:
    result = window.result
    return WindowCheck(
        name=window.trial.name,
        samples=result.samples,
        items=result.items,
        reference_items=reference.items,
        micro_batches=result.micro_batches,
        reference_batches=reference.batches,
        loss=0.0 if math.isnan(result.loss) else result.loss,
        reference_loss=reference.loss,
        comparisons=tuple(comparisons),
    )


def _unused(windows: Sequence[ReferenceWindow]) -> Iterator[Hazard]:
    names = [name for name in windows[0].unused if all(name in window.unused for window in windows)]
    if not names:
        return
    yield Hazard(
        name="unused parameters",
        effect=Effect.noted,
        seen=f"The loss does not depend on {first_names(names)}, in any of these windows.",
        matters="Ranks wait for each other's gradients, so training refuses it, except with strategy=ddp, "
        "find_unused_parameters and sync=every.",
        remedy="Freeze them (requires_grad_(False)), or use them in the loss.",
    )


def _notes(plan: RunPlan, measured: Measured, most: int | None, references: Sequence[ReferenceWindow]) -> list[str]:
    notes = [
        "Gradients are compared before the clip, at the initial parameters, in training mode with dropout off, and in "
        f"{_formats(measured)}."
    ]
    if any(reference.batches > 1 for reference in references):
        notes.append(
            f"A window did not fit into memory as one batch: the reference adds up batches of {most} samples at most."
        )
    if plan.strategy.compress.keeps_residue:
        notes.append(
            f"strategy.compress={plan.strategy.compress.value} was left out: it sends the error of one window in later "
            "ones, so that no single gradient is exact."
        )
    if plan.train.compile and measured.own is None:
        notes.append("The model was not compiled.")
    windows = measured.fp32.windows if measured.fp32 is not None else []
    if empty := [window.trial.name for window in windows if math.isnan(window.result.loss)]:
        notes.append(f"Without items, and therefore skipped by training: {', '.join(empty)}.")
    if plan.batch.ramp:
        notes.append(
            f"batch.ramp was left out: only windows of {plan.batch.global_size} samples are verified. Earlier ones "
            "have fewer micro-batches of the same size."
        )
    if plan.epoch.short_window_policy is ShortWindow.drop:
        notes.append("batch.short_window=drop: there is no short window to verify.")
    return notes


def _formats(measured: Measured) -> str:
    """Return the arithmetic of the comparison, and which settings fp32 replaces."""
    own, fp32 = measured.own_plan, in_fp32(measured.own_plan)
    if own == fp32:
        return "fp32, as configured"
    wide = dataclasses.asdict(fp32.precision)
    values = {name: value for name, value in dataclasses.asdict(own.precision).items() if value != wide[name]}
    replaced = [f"precision.{name}={str(value).lower()}" for name, value in values.items()]
    if own.strategy.compress is not fp32.strategy.compress:
        replaced.append(f"strategy.compress={own.strategy.compress.value}")
    replaced += ["train.compile=true"] if own.train.compile else []
    then = "" if measured.own is None else f", then as configured ({arithmetic_of(own, measured.own)})"
    return f"fp32 in place of {', '.join(replaced)}{then}"


if __name__ == "__main__":
    main(sys.argv[1])
