"""The record, metrics.jsonl: one JSON object of floats per logged step. W&B and the terminal show what it contains.

Names and units of metrics are part of the public interface; other modules compute the values, this one names them.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from launcher.errors import RecordFailed
from launcher.heartbeat import PULSE, Role
from launcher.plan.run_plan import RunPlan
from launcher.quantities import Interval, count
from launcher.train.engine.calibration import Calibrated
from launcher.train.engine.window_totals import StepResult
from launcher.train.measure.noise_scale import Noise

Metrics = dict[str, float]


class Sink(Protocol):
    """Destination of metrics records."""

    def write(self, step: int, metrics: Metrics) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class NoRecord:
    """Null sink, for every rank but 0."""

    def write(self, step: int, metrics: Metrics) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Record:
    """Writer that appends to metrics.jsonl. Each line reaches the operating system before the next step starts.

    Args:
        waits: if the disk is full, keep lines in memory until there is room; otherwise raise an error.
    """

    def __init__(self, path: Path, *, waits: bool) -> None:
        self._path, self._waits = path, waits
        self._file = path.open("ab", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)
        self._left: list[bytes] = []

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line.

        Raises:
            RecordFailed: it cannot be written, and ``waits`` is false.
        """
        self._left.append(json.dumps(as_record(step, metrics)).encode() + b"\n")
        self._hand_over()

    @PULSE.doing(Role.io)
    def _hand_over(self) -> None:
        while self._left:
            try:
                if self._file.write(self._left[0]) < len(self._left[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                # remove an incomplete line; not by path, which names another file once a newer attempt has started
                self._file.truncate(self._size)
                if not self._waits:
                    raise self._failed(error) from None
                if len(self._left) == 1:
                    print(f"{self._failed(error)}\n  The lines wait for it (checkpoint.on_error=continue).", flush=True)
                return
            self._size += len(self._left.pop(0))

    def _failed(self, error: OSError) -> RecordFailed:
        return RecordFailed(f"{self._path} cannot be written: {error.strerror}.\n  Make room on that disk.")

    @PULSE.doing(Role.io)
    def sync(self) -> None:
        """Sync the written lines to disk."""
        with suppress(OSError):  # the checkpoint that is saved next will report an error of the disk
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._hand_over()
        self._file.close()
        if self._left:
            raise RecordFailed(
                f"{count(len(self._left), 'line')} of {self._path} were not written: the disk was full to the end.\n"
                "  The checkpoint is whole; of these steps there is no record."
            )


def as_record(step: int, metrics: Metrics) -> dict[str, Any]:
    """Return one line of the record as a dict. nan and inf become None: they are not valid JSON, and would make the
    line unreadable."""
    return {"step": step, **{name: value if math.isfinite(value) else None for name, value in metrics.items()}}


def step_metrics(result: StepResult, plan: RunPlan, seen: tuple[int, int], total_s: float, peak_memory: int) -> Metrics:
    """Return the metrics of one step.

    Args:
        seen: (samples, items) of the run so far.
        total_s: wall-clock seconds of training so far, over all attempts.
        peak_memory: bytes.
    """
    samples, items = seen
    metrics: Metrics = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "batch/global_size": plan.batch.global_size_at(result.window),
        "batch/micro_size": plan.batch.micro_size,
        "batch/accumulation": result.micro_batches,
        "batch/world_size": plan.batch.world_size,
        "batch/samples": result.samples,
        "batch/items": result.items,
        "progress/samples": samples,
        "progress/items": items,
        "progress/epoch": samples / plan.task.samples if plan.task.samples else result.epoch,
        "comm/collectives": result.comm.collectives,
        "comm/payload_bytes": result.comm.payload_bytes,
        "comm/wire_bytes": result.comm.wire_bytes,
        "comm/wire_bytes_every": result.comm.wire_bytes_every,
        "comm/wire_bytes_saved": result.comm.wire_bytes_every - result.comm.wire_bytes,
        "comm/saved_fraction": result.comm.saved_fraction,
        "comm/time_s": result.comm.time_s,
        "comm/flags_bytes": result.flags_bytes,
        "time/step_s": result.step_s,
        "time/data_s": result.data_s,
        "time/total_s": total_s,
        "throughput/samples_per_s": result.samples / result.step_s,
        "throughput/items_per_s": result.items / result.step_s,
        "memory/peak_bytes": peak_memory,
    }
    if result.scale is not None:
        metrics["amp/scale"] = result.scale
    if result.noise is not None:
        metrics |= noise_metrics(result.noise)
    if result.spent is not None:
        metrics["time/compute_s"] = result.spent.compute_s
        metrics["time/compute_s_max"] = result.spent.compute_most_s
        metrics["time/wait_s"] = result.spent.wait_s
    if result.straggler is not None:
        metrics["straggler/rank"] = float(result.straggler.rank)
        metrics["straggler/share"] = result.straggler.share
    for kind, traffic in result.comm.kinds.items():
        metrics[f"comm/{kind.value}/collectives"] = traffic.collectives
        metrics[f"comm/{kind.value}/payload_bytes"] = traffic.payload_bytes
        metrics[f"comm/{kind.value}/wire_bytes"] = traffic.wire_bytes
    return metrics


def calibration_metrics(calibrated: Calibrated, step_s: float, data_s: float, *, reads_ahead: bool) -> Metrics:
    """Return the calibration applied to a whole step of ``step_s`` seconds; see ``Calibrated.step_s_every``."""
    metrics: Metrics = {}
    if (every := calibrated.step_s_every(step_s, data_s, reads_ahead=reads_ahead)) is not None:
        speedup = Interval(every.value / step_s, every.low / step_s, every.high / step_s)
        metrics |= {"comm/step_s": step_s, "comm/step_s_every": every.value, **speedup.as_record("comm/speedup")}
    if (exposed := calibrated.exposed) is not None and (overlap := calibrated.overlap) is not None:
        metrics |= {**exposed.as_record("comm/exposed_s"), "comm/overlap": overlap}
    return metrics | {"comm/calibration_rounds": calibrated.rounds} if metrics else {}


def noise_metrics(noise: Noise) -> Metrics:
    """Return the metrics of ``noise``, without ``noise/scale`` if unknown and ``noise/scale_high`` if infinite."""
    metrics = {"noise/grad_sq": noise.grad_sq, "noise/variance": noise.variance, "noise/scale_low": noise.low}
    if math.isfinite(noise.high):
        metrics["noise/scale_high"] = noise.high
    return metrics if noise.scale is None else metrics | {"noise/scale": noise.scale}


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: allocated on its GPU, or resident in host memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
