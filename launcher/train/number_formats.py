"""precision=auto decided where the workers run, and the warning about a format that a device only emulates.

Also a process of its own (`launcher.api` asks it before the start): reads a JSON request from standard input, writes
its answer to the file named on the command line.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from launcher import native
from launcher.config import Device, PrecisionKind
from launcher.paths import write_json
from launcher.plan import RunPlan
from launcher.process import die_with_parent
from launcher.train.precision import DTYPES
from launcher.train.world import World

_SIZE = {"cpu": 384, "cuda": 2048}  # of the square matrices that are multiplied
_MEASURED_S = 0.4  # for each of the two formats

_checked: set[PrecisionKind] = set()


def is_native(kind: PrecisionKind, device: torch.device) -> bool:
    """Return whether ``device`` computes in ``kind`` without emulation."""
    if kind not in DTYPES:
        return True
    if device.type == "cuda":
        return kind is PrecisionKind.fp16 or torch.cuda.is_bf16_supported(including_emulation=False)
    onednn = torch.ops.mkldnn
    supports = onednn._is_mkldnn_bf16_supported if kind is PrecisionKind.bf16 else onednn._is_mkldnn_fp16_supported
    # oneDNN supports bf16 on every AVX-512 CPU, also on those without units for it, where it takes longer than fp32
    has_units = platform.machine() != "x86_64" or native.has_units(kind)
    return bool(supports()) and has_units


def slowdown(kind: PrecisionKind, device: torch.device) -> float:
    """Return how many times as long as in fp32 a matrix product takes in ``kind``: the best of several."""
    return _seconds(DTYPES[kind], device) / _seconds(torch.float32, device)


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    size = _SIZE[device.type]
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    best, until = float("inf"), time.perf_counter() + _MEASURED_S
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def decided(plan: RunPlan, world: World, device: torch.device, record: Path | None = None) -> RunPlan:
    """Return ``plan`` with a precision that is not auto, the same on all ranks, which call it together.

    auto becomes bf16 if every rank's device computes it natively, else fp32. A format that some device emulates is
    kept if the user or an earlier start of the run chose it, with a warning that states the measured cost.

    Args:
        record: where the decision is stored, for later starts of the same run. ``RunPlan.load`` reads it.
    """
    # a host that joined a run on its way, with a directory of its own, has no record of the decision
    plans = world.of_all((plan.precision.kind, plan.precision.reason))
    if any(kind is PrecisionKind.auto for kind, _ in plans):
        earlier = [(kind, reason) for kind, reason in plans if kind is not PrecisionKind.auto]
        kind, reason = earlier[0] if earlier else _decide(world, device)
        if record is not None and world.local_rank == 0:
            write_json(record, {"kind": kind.value, "reason": reason})
        plan = plan.with_precision(kind, reason)
        if world.rank == 0:
            print(f"Precision: {kind.value} ({reason}).", flush=True)
    if plan.precision.kind in DTYPES and plan.precision.kind not in _checked:
        _checked.add(plan.precision.kind)
        _warn_of_emulation(plan.precision.kind, world, device)
    return plan


def _decide(world: World, device: torch.device) -> tuple[PrecisionKind, str]:
    natives = world.of_all(is_native(PrecisionKind.bf16, device))
    if all(natives):
        return PrecisionKind.bf16, native.reason(PrecisionKind.bf16, "every worker's device")
    return PrecisionKind.fp32, native.reason(PrecisionKind.fp32, f"the device of rank {natives.index(False)}")


def _warn_of_emulation(kind: PrecisionKind, world: World, device: torch.device) -> None:
    natives = world.of_all(is_native(kind, device))
    if all(natives):
        return
    first = natives.index(False)
    factors = world.of_all(slowdown(kind, device) if world.rank == first else 0.0)
    if world.rank == 0:
        where = "" if natives.count(False) == world.size else f" of rank {first}"
        print(f"Warning: {native.warning(kind, f'this device{where} ({device.type})', factors[first])}", flush=True)


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    request: dict[str, Any] = json.load(sys.stdin)
    kind = PrecisionKind(request["kind"])
    device = torch.device(Device(request["device"]).value)
    answer: dict[str, Any] = {"native": is_native(kind, device)}
    if request["measure"] and not answer["native"]:
        answer["slowdown"] = slowdown(kind, device)
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
