"""What each rank of `launch verify` runs: together the job's windows on its engine, then rank 0 alone the reference.

    python -m launcher.train.verify.worker PLAN

Rank 0 leaves certificate.json and summary.json in the run's directory.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.certificate import Certificate, Effect, Hazard, WindowCheck, judge, tolerance_for
from launcher.config import Compress, ShortWindow
from launcher.paths import write_json
from launcher.plan import RunPlan
from launcher.process import AGENT_PID, die_with_parent, join_output_streams, leave, lower_shield, mark_last_words
from launcher.train.precision import Precision
from launcher.train.task import load_task
from launcher.train.verify.accumulated import Accumulated, Taken, accumulate, in_fp32
from launcher.train.verify.data_probes import probe_data, probe_length
from launcher.train.verify.measure import deviations, distance
from launcher.train.verify.probes import probe
from launcher.train.verify.reference import Plain, Whole
from launcher.train.verify.still import without_dropout
from launcher.train.verify.trials import choose
from launcher.train.world import World, device_of, disband, join


def main(plan_path: str) -> None:
    die_with_parent(int(os.environ[AGENT_PID]))
    join_output_streams()
    mark_last_words()
    lower_shield()  # there is nothing to save: a signal ends it

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
    """All ranks call it; rank 0 gets the certificate."""
    device = device_of(world, plan.cluster.device)
    join(world, device, plan.train.hang_timeout)
    together = _together(dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, ramp=())), world)
    gc.collect()  # the engines' memory is the reference's
    disband()
    if world.rank:
        return None
    # the user's code may ask for its rank, and a module that normalises over ranks finds this one alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _certify(plan, device, together)
    finally:
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Together:
    """What the ranks found out together. ``taken``: None where the data is such that no window can begin.
    ``configured``: with the job's own precision and compression, where that is something else than fp32; ``samples``:
    of each window, on rank 0."""

    hazards: list[Hazard]
    taken: Taken | None
    configured: Taken | None
    samples: list[list[Any]]


def _together(plan: RunPlan, world: World) -> Together:
    data = load_task(plan.task.target, plan.task.params, plan.cluster.import_from).train_data()
    if (length := probe_length(data, plan, world)) is not None:
        return Together([length], None, None, [])
    hazards = probe_data(data, plan, world)
    windows = choose(data, plan, world)
    samples = windows.samples() if world.rank == 0 else []
    _say(world, f"{len(windows.trials)} windows on {world.size} ranks, in fp32")
    plain = in_fp32(plan)
    with full_fp32():
        taken = accumulate(plain, world, windows)
    if plain == plan or plan.strategy.compress is Compress.powersgd or taken.refused is not None:
        return Together(hazards, taken, None, samples)
    _say(world, f"the same windows as configured, in {plan.precision.kind.value}")
    return Together(hazards, taken, accumulate(plan, world, windows), samples)


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


@contextmanager
def full_fp32() -> Iterator[None]:
    """Without TF32, which a GPU may use for fp32: it rounds like bf16's neighbour, and hides what is looked for."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _certify(plan: RunPlan, device: torch.device, found: Together) -> Certificate:
    """On rank 0, alone."""
    taken = found.taken
    if taken is None:
        return _certificate(plan, None, [], found.hazards, [], "Its data is not the same on all ranks.")

    print("the reference: each window as one batch", flush=True)
    plain, narrow = Plain(plan, taken.beginning, device), Precision(plan.precision, device)
    with full_fp32(), without_dropout(plain.model):
        wholes = [plain.whole(samples) for samples in found.samples]
        rounding = distance(wholes[0].gradient, plain.whole(found.samples[0][::-1]).gradient)
        narrow_wholes = (
            [plain.whole(samples, narrow.autocast) for samples in found.samples] if found.configured is not None else []
        )
    print("the hazards", flush=True)

    def make() -> Plain:
        return Plain(plan, taken.beginning, device, plain.most)

    with_items = [n for n, whole in enumerate(wholes) if whole.items]
    if not with_items and taken.refused is None:
        return _certificate(plan, None, [], found.hazards, [], "None of its first windows holds an item.")
    first = found.samples[with_items[0] if with_items else 0]
    with full_fp32():
        hazards = [*found.hazards, *_unused(wholes), *probe(make, first, plan.batch.micro_size)]
    configured = None if found.configured is None else found.configured.windows
    checks = [
        _check(
            window,
            wholes[n],
            None if configured is None or n >= len(configured) else configured[n],
            narrow_wholes[n] if narrow_wholes else None,
        )
        for n, window in enumerate(taken.windows)
    ]
    refused = taken.refused or (found.configured.refused if found.configured is not None else None)
    return _certificate(plan, rounding, checks, hazards, _notes(plan, found, plain, wholes), refused)


def _certificate(
    plan: RunPlan,
    rounding: float | None,
    checks: list[WindowCheck],
    hazards: list[Hazard],
    notes: list[str],
    refused: str | None,
) -> Certificate:
    rounding = rounding if rounding is not None and math.isfinite(rounding) else None
    tolerance = tolerance_for(rounding or 0.0)
    outcome, reason = judge(checks, hazards, refused, tolerance)
    return Certificate(
        job=_job(plan), rounding=rounding, tolerance=tolerance, windows=tuple(checks), hazards=tuple(hazards),
        notes=tuple(notes), refused=refused, outcome=outcome, reason=reason,
    )  # fmt: skip


def _check(window: Accumulated, whole: Whole, configured: Accumulated | None, narrow: Whole | None) -> WindowCheck:
    all_of_it, groups, worst = deviations(window.gradient, whole.gradient)
    one_batch = None if narrow is None else distance(whole.gradient, narrow.gradient)
    return WindowCheck(
        name=window.trial.name,
        samples=window.samples,
        items=window.items,
        reference_items=whole.items,
        micro_batches=window.micro_batches,
        reference_batches=whole.batches,
        loss=window.loss,
        reference_loss=whole.loss,
        whole=all_of_it,
        groups=groups,
        worst=worst,
        configured=None if configured is None else _finite(distance(whole.gradient, configured.gradient)),
        configured_one_batch=None if one_batch is None else _finite(one_batch),
    )


def _finite(value: float) -> float | None:
    """fp16 without a loss scale may overflow in one batch: then nothing is known of it."""
    return value if math.isfinite(value) else None


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


def _notes(plan: RunPlan, found: Together, plain: Plain, wholes: Sequence[Whole]) -> list[str]:
    notes = ["Gradients are compared before the clip, at the parameters that training begins with, without dropout."]
    if any(whole.batches > 1 for whole in wholes):
        notes.append(
            f"A window did not fit into memory as one batch: the reference adds up batches of {plain.most} samples "
            "at most."
        )
    if plan.strategy.compress is Compress.powersgd:
        notes.append(
            "PowerSGD was left out: what it keeps back in one window it sends in later ones, so that no single "
            f"gradient is exact. The first {plan.strategy.powersgd_start} synchronisations are sent whole."
        )
    if plan.train.compile and found.configured is None:
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
