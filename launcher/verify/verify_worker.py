"""Rank of `launch verify`: all ranks run the job's windows on its engine, then rank 0 alone computes the reference.

    python -m launcher.verify.verify_worker PLAN

Rank 0 writes certificate.json and summary.json to the run's directory.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.config.schema import Compress, ShortWindow
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import SHARDED
from launcher.process import AGENT_PID, die_with_parent, join_output_streams, leave, lower_shield, mark_last_words
from launcher.quantities import count
from launcher.rundir.files import write_json
from launcher.task import eval_data, first_samples, load_task, train_data
from launcher.train import precision
from launcher.train.engine.window_totals import require_sum
from launcher.train.precision import DTYPES
from launcher.train.world import World, device_of, disband, join
from launcher.verify.accumulated import Accumulated, Taken, accumulate, choose, in_fp32
from launcher.verify.certificate import (
    FP32,
    Certificate,
    Comparison,
    Effect,
    Hazard,
    Rule,
    WindowCheck,
    judge,
    narrow_rule,
)
from launcher.verify.comparison import Gradient, compare, without_dropout
from launcher.verify.data_hazards import probe_data, probe_length
from launcher.verify.hazards import probe
from launcher.verify.reference import Plain, Whole


def main(plan_path: str) -> None:
    die_with_parent(int(os.environ[AGENT_PID]))
    join_output_streams()
    mark_last_words()
    lower_shield()  # nothing to save: a signal may end the process

    from torch.distributed.elastic.multiprocessing.errors import record

    record(_run)(RunPlan.load(Path(plan_path)))
    leave(0)


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
    plan = precision.decided(plan, world, device, plan.paths.precision)
    together = _together(dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, ramp=())), world)
    gc.collect()  # free the engines' memory for the reference
    disband()
    if world.rank:
        return None
    # the user's code may query its rank, and a module that normalises over ranks must see a world of one
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _certify(plan, device, together)
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Together:
    """Results that all ranks obtained together.

    Args:
        taken: the windows in fp32; None if the data allows no window to start.
        own: the windows in the job's own arithmetic under ``own_plan``; None if that is fp32 too.
        samples: samples of each window, on rank 0 only.
    """

    hazards: list[Hazard]
    taken: Taken | None
    own: Taken | None
    own_plan: RunPlan
    samples: list[list[Any]]


def _together(plan: RunPlan, world: World) -> Together:
    own_plan, seed = plan, plan.train.seed
    if plan.strategy.compress is Compress.powersgd:
        own_plan = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, compress=Compress.none))
    task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, seed)
    before = dict(getattr(task, "__dict__", {}))
    data = train_data(task, seed)
    # tokenising and reading may take long: tasks constructed later repeat it only if the loss may need the result
    with_data = any(value is not before.get(name) for name, value in getattr(task, "__dict__", {}).items())
    if (length := probe_length(data, plan, world)) is not None:
        return Together([length], None, None, own_plan, [])
    hazards = probe_data(data, plan, world)
    windows = choose(data, plan, world)
    samples = windows.samples() if world.rank == 0 else []
    _say(world, f"{count(len(windows.trials), 'window')} on {count(world.size, 'rank')}, in fp32")
    plain = in_fp32(own_plan)
    taken = accumulate(plain, world, windows, with_data=with_data)
    if plain == own_plan or taken.refused is not None:
        return Together(hazards, taken, None, own_plan, samples)
    _say(world, "the same windows as configured")
    return Together(hazards, taken, accumulate(own_plan, world, windows, with_data=with_data), own_plan, samples)


def arithmetic_of(plan: RunPlan, taken: Taken) -> str:
    """Return a description of the arithmetic that the job computes in."""
    names = {dtype: kind.value for kind, dtype in DTYPES.items()}
    kept = {names[value.dtype] for value in taken.beginning.values.values() if value.dtype in names}
    parts = [plan.precision.kind.value, *(f"{name} parameters" for name in sorted(kept))]
    if (sent := _sent_as(plan)) is not None:
        parts.append(f"gradients sent as {names[sent]}")
    if plan.train.compile:
        parts.append("compiled")
    return ", ".join(parts)


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def _certify(plan: RunPlan, device: torch.device, found: Together) -> Certificate:
    """Return the certificate. Runs on rank 0 only."""
    taken, own = found.taken, found.own
    if taken is None:
        return _certificate(plan, [], found.hazards, [], "Its data is not the same on all ranks.")
    print("the reference: each window as one batch", flush=True)
    wholes, in_each, most = _compared_in_fp32(plan, device, taken, found.samples)
    if own is not None:
        print("the reference in the job's own arithmetic", flush=True)
        for comparisons, one in zip(in_each, _compared_as_configured(found, own, device, wholes, most), strict=False):
            comparisons.append(one)
    print("the hazards", flush=True)

    def make() -> Plain:
        return Plain(in_fp32(plan), taken.beginning, device, most)

    with_items = [n for n, whole in enumerate(wholes) if whole.items]
    if not with_items and taken.refused is None:
        return _certificate(plan, [], found.hazards, [], "None of its first windows holds an item.")
    first = found.samples[with_items[0] if with_items else 0]
    rounding = max((comparisons[0].one_batch or 0.0 for comparisons in in_each), default=0.0)
    hazards = [*found.hazards, *_unused(wholes), *probe(make, first, plan.batch.micro_size, rounding)]
    windows = [_check(*one) for one in zip(taken.windows, wholes, in_each, strict=False)]
    refused = taken.refused or (own.refused if own is not None else None)
    if refused is None:
        refused = _evaluation_error(make() if own is None else Plain(found.own_plan, own.beginning, device, most))
    return _certificate(plan, windows, hazards, _notes(plan, found, most, wholes), refused)


def _evaluation_error(plain: Plain) -> str | None:
    """Return the error of evaluating the first held-out micro-batch; None if it succeeds."""
    plain.model.eval()
    try:
        data: Any = eval_data(plain.task, plain.plan.train.seed)
        if data is None:
            return None
        with torch.no_grad():
            loss = plain.loss(first_samples(data, plain.plan.batch.micro_size))
        require_sum(loss.total, loss.items)
    except Exception as error:  # user code may raise anything
        return f"The evaluation fails: {type(error).__name__}: {error}"
    return None


def _compared_in_fp32(
    plan: RunPlan, device: torch.device, taken: Taken, samples: Sequence[Sequence[Any]]
) -> tuple[list[Whole], list[list[Comparison]], int | None]:
    """Return each window's reference, its comparisons so far, and how many samples fit into one batch."""
    plain = Plain(in_fp32(plan), taken.beginning, device)
    wholes = list(_in_turn(plain, samples))
    # a separate model, so that hidden state, if any, has seen the same number of earlier windows
    twin = Plain(in_fp32(plan), taken.beginning, device, plain.most)
    backwards = [of_window[::-1] for of_window in samples]
    with twin.nudged():
        in_each = [
            [compare("fp32", window.gradient, whole.gradient, nudged.gradient, FP32)]
            for window, whole, nudged in zip(taken.windows, wholes, _in_turn(twin, backwards), strict=False)
        ]
    return wholes, in_each, plain.most


def _in_turn(plain: Plain, windows: Sequence[Sequence[Any]]) -> Iterator[Whole]:
    """Yield each window as one batch. As in training, a window starts with the buffers left by the previous one."""
    with without_dropout(plain.model):
        for samples in windows:
            whole = plain.whole(samples)
            plain.keep()
            yield whole


def _compared_as_configured(
    found: Together, own: Taken, device: torch.device, wholes: Sequence[Whole], most: int | None
) -> Iterator[Comparison]:
    """Yield the comparison of each window in the job's own arithmetic."""
    plan = found.own_plan
    arithmetic, rule = arithmetic_of(plan, own), _rule(plan, own)
    plain = Plain(plan, own.beginning, device, most)
    for window, whole, one in zip(own.windows, wholes, _in_turn(plain, found.samples), strict=False):
        narrow = one.gradient
        sent = _as_sent(narrow, _sent_as(plan), plan.batch.world_size)
        comparison = compare(arithmetic, window.gradient, whole.gradient, sent, rule)
        if not comparison.agrees:
            other = compare(arithmetic, window.gradient, narrow, _moved(narrow, whole.gradient, sent), rule)
            comparison = other if other.agrees else comparison
        yield comparison


def _sent_as(plan: RunPlan) -> torch.dtype | None:
    """Return the format in which ranks send gradients; None if it is fp32."""
    if plan.batch.world_size > 1 and plan.strategy.kind in SHARDED:
        return DTYPES.get(plan.precision.reduce_dtype)
    return torch.bfloat16 if plan.strategy.compress is Compress.bf16 else None


def _rule(plan: RunPlan, own: Taken) -> Rule:
    """Return the rule for the coarsest format in which the job computes, stores or sends."""
    formats = {DTYPES.get(plan.precision.kind), _sent_as(plan), *(t.dtype for t in own.beginning.values.values())}
    roundoffs = [torch.finfo(each).eps / 2 for each in DTYPES.values() if each in formats]
    return narrow_rule(max(roundoffs)) if roundoffs else FP32


def _as_sent(gradient: Gradient, dtype: torch.dtype | None, ranks: int) -> Gradient:
    """Return ``gradient`` with the rounding error of being sent as ``dtype``.

    A ring rounds each number when it is sent, at each addition, and when it is divided.
    """
    if dtype is None:
        return gradient
    return {
        name: None if part is None else part + (ranks + 1) * (part.to(dtype).to(part.dtype) - part)
        for name, part in gradient.items()
    }


def _moved(gradient: Gradient, start: Gradient, end: Gradient) -> Gradient:
    """Return ``gradient`` + ``end`` - ``start``."""
    return {
        name: None if part is None or (b := end[name]) is None else part + b - (0 if (a := start[name]) is None else a)
        for name, part in gradient.items()
    }


def _certificate(
    plan: RunPlan, windows: list[WindowCheck], hazards: list[Hazard], notes: list[str], refused: str | None
) -> Certificate:
    outcome, reason = judge(windows, hazards, refused)
    return Certificate(
        job=_job(plan), windows=tuple(windows), hazards=tuple(hazards), notes=tuple(notes), refused=refused,
        outcome=outcome, reason=reason,
    )  # fmt: skip


def _check(window: Accumulated, whole: Whole, comparisons: Sequence[Comparison]) -> WindowCheck:
    return WindowCheck(
        name=window.trial.name,
        samples=window.samples,
        items=window.items,
        reference_items=whole.items,
        micro_batches=window.micro_batches,
        reference_batches=whole.batches,
        loss=window.loss,
        reference_loss=whole.loss,
        comparisons=tuple(comparisons),
    )


def _unused(wholes: Sequence[Whole]) -> list[Hazard]:
    names = [name for name in wholes[0].gradient if all(whole.gradient[name] is None for whole in wholes)]
    if not names:
        return []
    return [
        Hazard(
            name="unused parameters",
            effect=Effect.noted,
            seen=f"The loss does not depend on {', '.join(names[:4])}{' and so on' if len(names) > 4 else ''}, in any "
            "of these windows.",
            matters="Ranks wait for each other's gradients: training refuses it, but for strategy=ddp with "
            "find_unused_parameters and sync=every.",
            remedy="Freeze them (requires_grad_(False)), or use them in the loss.",
        )
    ]


def _notes(plan: RunPlan, found: Together, most: int | None, wholes: Sequence[Whole]) -> list[str]:
    notes = [
        "Gradients are compared before the clip, at the parameters that training begins with, in training mode with "
        f"dropout off, and in {_formats(found)}."
    ]
    if any(whole.batches > 1 for whole in wholes):
        notes.append(
            f"A window did not fit into memory as one batch: the reference adds up batches of {most} samples at most."
        )
    if plan.strategy.compress is Compress.powersgd:
        notes.append(
            "PowerSGD was left out: what it keeps back in one window it sends in later ones, so that no single "
            f"gradient is exact. The first {plan.strategy.powersgd_start} synchronisations are sent whole."
        )
    if plan.train.compile and found.own is None:
        notes.append("The model was not compiled.")
    if empty := [window.trial.name for window in found.taken.windows if not window.items] if found.taken else []:
        notes.append(f"Without items, and so left out of training: {', '.join(empty)}.")
    if plan.batch.ramp:
        notes.append(
            f"batch.ramp was left out: verified are windows of {plan.batch.global_size} samples. Those before have "
            "fewer micro-batches of the same size."
        )
    if plan.epoch.short_window_policy is ShortWindow.drop:
        notes.append("batch.short_window=drop: there is no short window to verify.")
    return notes


def _formats(found: Together) -> str:
    """Return the arithmetic of the comparison, and which settings fp32 replaces."""
    own, plain = found.own_plan, in_fp32(found.own_plan)
    if own == plain:
        return "fp32, as configured"
    wide = dataclasses.asdict(plain.precision)
    values = {name: value for name, value in dataclasses.asdict(own.precision).items() if value != wide[name]}
    replaced = [f"precision.{name}={str(value).lower()}" for name, value in values.items()]
    replaced += [f"strategy.compress={own.strategy.compress.value}"] if own.strategy != plain.strategy else []
    replaced += ["train.compile=true"] if own.train.compile else []
    then = "" if found.own is None else f", then as configured ({arithmetic_of(own, found.own)})"
    return f"fp32 in place of {', '.join(replaced)}{then}"


def _job(plan: RunPlan) -> dict[str, str]:
    strategy = plan.strategy
    compress = "" if strategy.compress is Compress.none else f", gradients sent as {strategy.compress.value}"
    return {
        "task": plan.task.target,
        "batch": plan.batch.words,
        "strategy": f"{strategy.kind.value}, sync {strategy.sync.value}{compress}",
        "precision": plan.precision.kind.value,
        "device": plan.cluster.device.value,
    }


if __name__ == "__main__":
    main(sys.argv[1])
