"""Work of a planned job: what the device at hand needs for it, measured on it. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.schema import ClusterKind, Device, Sync
from launcher.plan.forecast import PREDICTIONS
from launcher.plan.forecast_cache import ContentCache
from launcher.plan.gpus import CONTEXT_BYTES
from launcher.plan.host import allowed_env, free_host_bytes, is_virtual, shares_gpus, visible_gpus
from launcher.plan.measuring_processes import MODULE, environment_of, run_ranks
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import SHARDED
from launcher.quantities import sign_place
from launcher.rundir.files import value_from_json

SHORT, LONG = 2, 6  # micro-batches of the windows from which the time of any other follows
# Least relative error: a run differs by so much from another one on the same machine. The speed of a virtual machine's
# cores also changes with what other machines do on their host (docs/explanations/forecasts.md).
FLOOR, VIRTUAL_FLOOR = 0.02, 0.1
MEASURE_S = 8.0  # seconds for all windows, without the start of the processes and the first steps
BUSY_SHARE = 0.1  # of this machine's cores: if others use more of them, a note says so
OTHERS_BUSY = "Other processes used"  # first words of that note
PROCESS_BYTES = 500 * 10**6  # torch in a process without a model
FULL_SHARE = 0.8  # of the free memory that the ranks may be predicted to need
# variables of the workers that change how fast they compute
_SPEED_ENV = (
    "OMP_*", "MKL_*", "ONEDNN_*", "DNNL_*", "ATEN_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "CUDA_*", "CUBLAS_*", "NVIDIA_*",
    "NCCL_*", "GLOO_*", "PYTORCH_*", "TORCH*", "TRITON_*", "LD_PRELOAD", "LAUNCHER_SHARE_GPU",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Measured duration.

    Attributes:
        value: seconds.
        error: relative half width of a 90% interval.
    """

    value: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds that parts of a window take on the device at hand while all ranks of a host are at work.

    Attributes:
        forward, backward: one micro-batch of a rank, without collectives and their buffers.
        optimizer: everything after the last backward pass: unscaling, norm, clipping, the optimizer step, zeroing the
            gradients.
        window: everything else in the largest window of ``windows``: data, records, and what is done once for each
            window.
        windows: whole windows of 1, SHORT and LONG micro-batches, or of 1 and one of the others, under each sync
            policy. On one host with their collectives; on several hosts without them, but with the copies into and out
            of their buffers.
        collectives: whether the windows contain their collectives.
        notes: what the user should know about the measurement, such as other load on this machine.
        busy: whether other processes used this machine meanwhile.
    """

    forward: Seconds
    backward: Seconds
    optimizer: Seconds
    window: Seconds
    windows: dict[Sync, dict[int, Seconds]]
    collectives: bool
    notes: tuple[str, ...] = ()
    busy: bool = False

    def of_window(self, sync: Sync, accumulation: int) -> Seconds | None:
        """Return the time of a window of ``accumulation`` micro-batches, with or without collectives as in ``windows``.
        None if the policy was not measured."""
        if sync not in self.windows:
            return None
        sizes = self.windows[sync]
        return sizes[accumulation] if accumulation in sizes else _on_line(sizes, accumulation)

    def of_parts(self, steady: Sync | None, accumulation: int) -> tuple[float, float]:
        """Return the time of a window of ``accumulation`` micro-batches in its passes, and in all besides passes,
        optimizer step and collectives.

        A further micro-batch takes longer than its passes by themselves: it needs data and the engine's work, which are
        in ``window``. The rest, such as waiting for a core on a busy machine, counts as passes.

        Args:
            steady: policy under which a further micro-batch adds no collective. None if there is none: everything but
                the passes is then taken to be the same in each window.
        """
        passes_s = self.forward.value + self.backward.value
        if steady is None or steady not in self.windows:
            return accumulation * passes_s, self.window.value
        short, long = sorted(self.windows[steady])[-2:]
        longer_s = self.windows[steady][long].value - self.windows[steady][short].value
        each_s = max(0.0, longer_s / (long - short) - passes_s)
        data_s = min(each_s, self.window.value / long)
        return accumulation * (passes_s + each_s - data_s), self.window.value + (accumulation - long) * data_s

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Work:
        windows = {
            Sync(sync): {int(size): value_from_json(Seconds, seconds) for size, seconds in sizes.items()}
            for sync, sizes in fields["windows"].items()
        }
        parts = {name: value_from_json(Seconds, fields[name]) for name in _PARTS}
        collectives, notes, busy = fields["collectives"], tuple(fields["notes"]), fields["busy"]
        return cls(**parts, windows=windows, collectives=collectives, notes=notes, busy=busy)


_PARTS = ("forward", "backward", "optimizer", "window")


def _on_line(sizes: Mapping[int, Seconds], accumulation: int) -> Seconds:
    """Return the time of a window from the line through the two largest windows that were measured."""
    short, long = sorted(sizes)[-2:]
    share = (accumulation - short) / (long - short)
    parts = (1 - share) * sizes[short].value, share * sizes[long].value
    half = math.hypot(parts[0] * sizes[short].error, parts[1] * sizes[long].error)
    value = sum(parts)
    if accumulation > long:  # what noise cannot change: it takes at least as long, and no longer for each micro-batch
        value = min(max(value, sizes[long].value), accumulation / long * sizes[long].value)
    return _with_error(value, half)


def _with_error(value: float, half: float) -> Seconds:
    return Seconds(value=value, error=half / abs(value) if value else 1.0)


def seconds_of(durations: Iterable[float]) -> Seconds:
    """Return the median with its 90% interval: the narrowest pair of order statistics that covers the true median with
    this probability. Fewer than five have no such pair; twice their range is taken."""
    ordered = sorted(durations)
    n, middle = len(ordered), statistics.median(ordered)
    if n < 5:
        return _with_error(middle, ordered[-1] - ordered[0] if n > 1 else middle)
    place = sign_place(n, 0.1)
    return _with_error(middle, (ordered[n - 1 - place] - ordered[place]) / 2)


def measure_work(
    plan: RunPlan,
    policies: Sequence[Sync],
    *,
    ranks: int | None = None,
    only_known: bool = False,
    budget_s: float | None = None,
) -> tuple[Work | None, str]:
    """Measure the work of ``plan`` on this machine, or return that of an equal earlier measurement.

    It takes about ten seconds, of a slow job up to a minute, in which all cores of this machine that the job would use
    are busy. What was measured while other processes used this machine is measured again, unless only what is known is
    asked for.

    Args:
        policies: sync policies of the plan's strategy that are measured.
        ranks: of a plan for several hosts, the ranks that compute on this machine at the same time. Default: those of
            one host.
        only_known: whether only an earlier measurement is returned.
        budget_s: seconds for all windows; a slow job needs more. Default: MEASURE_S.

    Returns:
        The work, or None and the reason in a sentence without its full stop.
    """
    ranks = ranks or plan.cluster.workers_per_node
    if (problem := _not_at_hand(plan, ranks)) is not None:
        return None, problem
    if plan.cluster.device is Device.cuda and plan.cluster.nodes > 1 and not shares_gpus():
        ranks = min(ranks, visible_gpus(os.environ))  # GPUs compute independently of each other
    measured = _measurable(plan, policies)
    cache, key = ContentCache(), _key(plan, measured, ranks)
    found = cache.get(key)
    if found is None and only_known:
        return None, "it was not measured on this machine yet"
    since = time.time()
    if found is None or (found.get("busy") and not only_known):
        found = _run(plan, measured, ranks, MEASURE_S if budget_s is None else budget_s)
        depends_on = found.pop("depends_on", None)
        if depends_on is not None:
            cache.put(key, found, map(Path, depends_on["paths"]), variables=depends_on["variables"], since=since)
    if "problem" in found:
        return None, found["problem"].rstrip(".")
    work = Work.from_json(found["work"])
    # without collectives all policies are the same
    windows = {sync: work.windows.get(sync, work.windows[measured[0]]) for sync in policies}
    notes = work.notes
    if plan.cluster.kind is ClusterKind.slurm:
        notes += ("The time of a step was measured on this machine, and the nodes of the job may be of another kind.",)
    return dataclasses.replace(work, windows=windows, notes=notes), ""


def _not_at_hand(plan: RunPlan, ranks: int) -> str | None:
    """Return why this machine cannot measure the plan; None if it can."""
    cluster = plan.cluster
    if cluster.gpu is not None:
        return f"the plan is for cluster.gpu={cluster.gpu}"
    if cluster.kind is ClusterKind.elsewhere:
        return "the hosts of cluster=elsewhere are not at hand"
    if not plan.task.target:
        return "the job has a training loop of its own"
    peaks = [forecast.peak_bytes for forecast in plan.strategy.forecasts if forecast.peak_bytes is not None]
    needed = max(peaks, default=4 * (plan.task.parameters or 0))
    if cluster.device is Device.cpu:
        needed, free = ranks * (PROCESS_BYTES + needed), free_host_bytes()
        if needed > FULL_SHARE * free:
            return f"{ranks} ranks need {needed / 1e9:,.1f} GB here, and {free / 1e9:,.1f} GB are free"
        return None
    gpus = visible_gpus(os.environ)
    if not gpus:
        return "this machine has no GPU that torch can use"
    if gpus < ranks and cluster.nodes == 1 and not shares_gpus():
        return f"{ranks} ranks need a GPU each, and this machine has {gpus}"
    return _gpus_in_use(needed + CONTEXT_BYTES)


def _gpus_in_use(needed: int) -> str | None:
    """Return why the visible GPUs of this machine should be left alone; None if they have ``needed`` bytes free, and no
    other process is at work on them."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used,memory.free,utilization.gpu", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if re.fullmatch(r"(\d+|GPU-[\w-]+)(,(\d+|GPU-[\w-]+))*", visible):  # names that nvidia-smi has too
        query += ["-i", visible]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        rows = [[int(word) for word in line.split(",")] for line in lines]
    except (OSError, subprocess.SubprocessError, ValueError):
        return "nvidia-smi does not tell whether the GPUs are in use"
    for number, used, free, utilization in rows:
        if used * 2**20 > CONTEXT_BYTES or utilization > 100 * BUSY_SHARE:
            return f"GPU {number} of this machine is in use"
        if needed > free * 2**20:
            return f"a rank needs {needed / 1e9:,.1f} GB, and GPU {number} has {free * 2**20 / 1e9:,.1f} GB"
    return None


def _measurable(plan: RunPlan, policies: Sequence[Sync]) -> list[Sync]:
    """Return the policies that have to run: one stands for all where a rank has no other to exchange anything with, and
    DDP with an option that forbids others has its own only."""
    strategy = plan.strategy
    if plan.batch.world_size == 1 or strategy.static_graph or strategy.find_unused_parameters:
        return [strategy.sync]
    return sorted(policies)


def _key(plan: RunPlan, policies: Sequence[Sync], ranks: int) -> dict[str, Any]:
    """Return everything that a measurement depends on, besides the files that it reads."""
    fields = json.loads(plan.to_json())
    strategy, batch, train, cluster = fields["strategy"], fields["batch"], fields["train"], fields["cluster"]
    for name in ("sync", *PREDICTIONS):
        del strategy[name]
    alone = plan.cluster.nodes > 1
    # replicas on other hosts change nothing for a rank that is alone
    world = None if alone and plan.strategy.kind not in SHARDED else plan.batch.world_size
    return {
        "module": MODULE,
        "policies": policies,
        "ranks": ranks,
        "alone": alone,
        "world_size": world,
        "fullness": plan.batch.global_size / (plan.batch.accumulation * plan.batch.world_size),
        "batch": {name: batch[name] for name in ("micro_size", "norm", "on_oom", "balance")},
        "train": {
            name: train[name]
            for name in (
                "seed", "loader_workers", "compile", "clip_norm", "deterministic", "shuffle", "on_nonfinite",
                "straggler_share", "data_shards",
            )
        },
        "cluster": {name: cluster[name] for name in ("device", "cwd", "import_from")},
        "environment": allowed_env(environment_of(plan), _SPEED_ENV),
        "machine": [platform.machine(), _processor(), len(os.sched_getaffinity(0)), os.cpu_count(), _gpu_names(plan)],
        "strategy": strategy,
    } | {name: fields[name] for name in ("task", "precision", "optimizer", "schedule")}  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpu_names(plan: RunPlan) -> str:
    if plan.cluster.device is not Device.cuda:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout


def _run(plan: RunPlan, policies: Sequence[Sync], ranks: int, budget_s: float) -> dict[str, Any]:
    """Measure with one process for each rank. Return ``work`` as JSON, ``busy`` and ``depends_on``; or ``problem``."""
    answers = run_ranks(plan, policies, ranks, budget_s)
    if problems := [answer["problem"] for answer in answers if "problem" in answer]:
        return {"problem": problems[0]} | {name: answers[0].get(name) for name in ("depends_on",) if name in answers[0]}
    notes = _notes(answers)
    fields = {"busy": len(notes) > 0, "depends_on": answers[0]["depends_on"]}
    if "too_slow" in answers[0]:
        return fields | {"problem": answers[0]["too_slow"]}
    return fields | {"work": dataclasses.asdict(_work(plan, answers, notes))}


def _work(plan: RunPlan, answers: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Work:
    """Return the work of the slowest rank, for which the others wait."""
    timings = [answer["timings"] for answer in answers]
    drifts = plan.cluster.device is Device.cpu and is_virtual()

    def slowest(lists: Iterable[Sequence[float]]) -> Seconds:
        seconds = max((seconds_of(durations) for durations in lists), key=lambda each: each.value)
        return dataclasses.replace(seconds, error=math.hypot(seconds.error, VIRTUAL_FLOOR if drifts else FLOOR))

    windows = {
        Sync(sync): {int(size): slowest(each["windows"][sync][size] for each in timings) for size in sizes}
        for sync, sizes in timings[0]["windows"].items()
    }
    parts = {name: slowest(each[name] for each in timings) for name in _PARTS}
    return Work(**parts, windows=windows, collectives=plan.cluster.nodes == 1, notes=tuple(notes), busy=len(notes) > 0)


def _notes(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the notes on what makes the measurement differ from the job."""
    others = answers[0]["busy_s"] - sum(answer["own_s"] for answer in answers)
    cores, took_s = len(os.sched_getaffinity(0)), answers[0]["took_s"]
    notes: list[str] = []
    if others > BUSY_SHARE * cores * took_s:
        notes.append(
            f"{OTHERS_BUSY} {others / took_s:.1f} of {cores} cores while the time of a step was measured: it is "
            "that of a busy machine."
        )
    return notes
