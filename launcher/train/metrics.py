"""The record, metrics.jsonl: one JSON object of floats per logged step. W&B and the terminal show what it contains.

Names and units of metrics are part of the public interface; other modules compute the values, this one names them.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import orjson
import torch

from launcher.config.schema import OnError, ShortWindow
from launcher.errors import RecordFailed
from launcher.heartbeat import HEARTBEAT, Wait
from launcher.plan.run_plan import RunPlan
from launcher.plan.windows import Windows
from launcher.quantities import Interval, count
from launcher.rundir.fencing import Fence
from launcher.rundir.files import open_file, replacing
from launcher.train.engine.calibration import Calibrated
from launcher.train.engine.window_totals import StepResult

Metrics = dict[str, float]


class NoRecord:
    """Stand-in for the record, on every rank but 0."""

    def write(self, step: int, metrics: Metrics) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Record:
    """Writer that appends to metrics.jsonl. Each line reaches the operating system before the next step starts.

    Args:
        wait_for_space: if the disk is full, keep lines in memory until there is space; otherwise raise an error.
    """

    def __init__(self, path: Path, *, wait_for_space: bool) -> None:
        self._path, self._wait_for_space = path, wait_for_space
        self._file = path.open("ab", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)
        self._pending: list[bytes] = []

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line.

        Raises:
            RecordFailed: it cannot be written, and ``wait_for_space`` is false.
        """
        self._pending.append(orjson.dumps(as_record(step, metrics), option=orjson.OPT_APPEND_NEWLINE))
        self._flush()

    @HEARTBEAT.waiting_for(Wait.io)
    def _flush(self) -> None:
        while self._pending:
            try:
                if self._file.write(self._pending[0]) < len(self._pending[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                # remove an incomplete line; not by path, which names another file once a newer attempt has started
                self._file.truncate(self._size)
                if not self._wait_for_space:
                    raise self._failed(error) from None
                if len(self._pending) == 1:
                    print(
                        f"{self._failed(error)}\n  Until then lines stay in memory (checkpoint.on_error=continue).",
                        flush=True,
                    )
                return
            self._size += len(self._pending.pop(0))

    def _failed(self, error: OSError) -> RecordFailed:
        return RecordFailed(f"{self._path} cannot be written: {error.strerror}.\n  Free space on that disk.")

    @HEARTBEAT.waiting_for(Wait.io)
    def sync(self) -> None:
        """Sync the written lines to disk."""
        with suppress(OSError):  # the checkpoint that is saved next will report an error of the disk
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._flush()
        self._file.close()
        if self._pending:
            raise RecordFailed(
                f"{count(len(self._pending), 'line')} of {self._path} were not written: the disk was still full "
                "when the run ended.\n  The checkpoint is complete; these steps have no record."
            )


def as_record(step: int, metrics: Metrics) -> dict[str, Any]:
    """Return one line of the record as a dict of JSON values.

    nan and inf become None: they are not valid JSON, and would make the line unreadable. NumPy's scalars, which a task
    may return, and integers of more than 64 bits become floats: orjson refuses them.
    """
    return {"step": step, **{name: _json_number(value) for name, value in metrics.items()}}


def _json_number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) and abs(value) < 2**63 else float(value)


@HEARTBEAT.waiting_for(Wait.io)
def open_record(
    plan: RunPlan, fence: Fence, step: int, last: dict[str, Any] | None, *, amended: bool = False
) -> Record:
    """Truncate metrics.jsonl to ``step``, since later steps will be repeated, and open it.

    Args:
        last: the record of ``step``, in case the run ended between the checkpoint and its record.
        amended: ``last`` replaces the record of ``step`` that is in the file.

    Raises:
        RecordFailed: the truncated file cannot be written.
        Superseded: a newer attempt has started.
    """
    fence.check()
    path = plan.paths.metrics
    try:
        truncate_record(path, step - amended, last)
    except OSError as error:
        raise RecordFailed(
            f"{path} cannot be truncated to step {step}: {error.strerror}.\n  Free space on that disk."
        ) from None
    return Record(path, wait_for_space=plan.checkpoint.on_error is not OnError.stop)


def truncate_record(path: Path, step: int, last: dict[str, Any] | None) -> None:
    """Replace the record by a file that ends with the last complete line of ``step`` or an earlier step, and sync it to
    disk.

    Anything after that line is a later step, an incomplete line, or garbage from a machine that crashed: records up to
    a checkpoint's step are synced before the checkpoint is committed. The file is replaced, not changed, so that a
    process of an older attempt, which may still have it open, cannot write to the new one.

    Args:
        last: the record of ``step``, in case its line is missing.
    """
    for leftover in path.parent.glob(f".{path.name}.*"):  # of an attempt that was killed in this function
        leftover.unlink(missing_ok=True)
    with replacing(path) as partial, partial.open("a+b") as file:
        if path.exists():
            with open_file(path) as record:
                shutil.copyfileobj(record, file)
            file.flush()
        end, newest = _newest_record(file, step)
        file.truncate(end)
        if last is not None and (newest is None or newest["step"] < last["step"]):
            file.write(orjson.dumps(last, option=orjson.OPT_APPEND_NEWLINE))
        file.flush()
        os.fsync(file.fileno())


@HEARTBEAT.waiting_for(Wait.io)
def read_record(path: Path, step: int) -> dict[str, Any] | None:
    """Return the record of ``step``; None if it has no line."""
    if not path.exists():
        return None
    with open_file(path) as file:
        _, newest = _newest_record(file, step)
    return newest if newest is not None and newest["step"] == step else None


def _newest_record(file: IO[bytes], step: int) -> tuple[int, dict[str, Any] | None]:
    """Return the offset at which the last line up to ``step`` ends, and its record; (0, None) if there is none."""
    if not os.fstat(file.fileno()).st_size:  # mmap refuses an empty file
        return 0, None
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end = text.rfind(b"\n") + 1  # what follows is an incomplete line
        while end:
            begin = text.rfind(b"\n", 0, end - 1) + 1
            try:
                record: Any = orjson.loads(text[begin:end])
                if record["step"] <= step:
                    return end, record
            except (ValueError, TypeError, LookupError):  # not a record
                pass
            end = begin
    return 0, None


def epochs_done(samples: int, result: StepResult, plan: RunPlan) -> float:
    """Return the number of epochs so far, with that of the current one as a fraction."""
    of_epoch, size = plan.task.samples, plan.batch.global_size * plan.batch.sites
    if not of_epoch:
        return result.epoch
    if plan.epoch.short_window_policy is ShortWindow.drop and of_epoch >= size:
        if plan.batch.sites == 1:
            at = Windows(of_epoch, plan.batch, keep_short=False).at(result.window + 1)
            return at.epoch + at.first / of_epoch
        of_epoch -= of_epoch % size  # the rest of an epoch is dropped
    return samples / of_epoch


def step_metrics(result: StepResult, plan: RunPlan, seen: tuple[int, float], total_s: float) -> Metrics:
    """Return the metrics of one step; those of what is measured beside it are ``Engine.metrics()``.

    Args:
        seen: (samples, items) of the run so far.
        total_s: wall-clock seconds of training so far, over all attempts.
    """
    sites = plan.batch.sites  # of outer steps; all have as many samples, and are taken to have as many items
    samples, items = seen
    metrics: Metrics = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/lr": result.lr,
        "batch/global_size": plan.batch.global_size_at(result.window) * sites,
        "batch/micro_size": plan.batch.micro_size,
        "batch/accumulation": result.micro_batches,
        "batch/world_size": plan.batch.world_size * sites,
        "batch/samples": result.samples * sites,
        "batch/items": result.items * sites,
        "progress/samples": samples,
        "progress/items": items,
        "progress/epoch": epochs_done(samples, result, plan),
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
        "throughput/samples_per_s": result.samples * sites / result.step_s,
        "throughput/items_per_s": result.items * sites / result.step_s,
    }
    if result.padding_fraction is not None:
        metrics["balance/padding_fraction"] = result.padding_fraction
    if result.scale is not None:
        metrics["amp/scale"] = result.scale
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


def peak_memory(device: torch.device) -> Metrics:
    """Return the peak memory of this rank in bytes: what torch has allocated and reserved on its GPU since the
    calibration, or what is resident in host memory on a CPU."""
    if device.type == "cuda":
        peaks = torch.cuda.memory_stats(device)  # once: each call collects all statistics
        allocated, reserved = (peaks.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
        return {"memory/peak_bytes": allocated, "memory/reserved_bytes": reserved}
    return {"memory/peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
