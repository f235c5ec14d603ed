"""Progress of runs, as `launch top` shows it: from the end of their records, and from the processes of this machine."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeGuard

from launcher.config.schema import ClusterKind
from launcher.plan.callback_plan import BELL
from launcher.quantities import Interval
from launcher.report.run_list import last_event
from launcher.rundir import history
from launcher.rundir.files import last_lines, object_from_json, read_json
from launcher.rundir.paths import RunPaths, find, find_sweeps
from launcher.runs.status import ACTIVE, Run, RunState, newest, statuses_of
from launcher.sweeps.reuse import look_at_sweeps

_RECORDS = 200  # newest records of a run that are read: 64 KiB at most
_BARS = "▁▂▃▄▅▆▇█"
_NVIDIA_SMI_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RunProgress:
    """Progress of one run.

    Attributes:
        name: name by which commands accept it; that of a cell is SWEEP/CELL.
        losses: training losses of the newest records that have one, oldest first.
        record: last record of metrics.jsonl; empty without one.
        event: its newest event, with the time of day; empty without one.
        rings: whether it asks for the terminal's bell at its end (``notify``).
    """

    run: Run
    name: str
    losses: Sequence[float] = ()
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    event: str = ""
    rings: bool = False

    @classmethod
    def of(cls, run: Run) -> Self:
        name = run.name if run.sweep is None else f"{Path(run.sweep).name}/{run.cell}"
        if not run.dir:  # a cell that has not started
            return cls(run=run, name=name)
        paths = RunPaths(Path(run.dir))
        lines = last_lines(paths.metrics, _RECORDS)
        records = [record for line in lines if (record := object_from_json(line)) is not None]
        return cls(
            run=run,
            name=name,
            losses=[float(loss) for record in records if _is_number(loss := record.get("train/loss"))],
            record=records[-1] if records else {},
            event=last_event(paths),
            rings=BELL in (read_json(paths.plan) or {}).get("notify", ()),
        )

    @property
    def speedup(self) -> str:
        """Measured speed-up over synchronising every micro-batch: 1.93x, or "none" if no difference was measured."""
        measured = Interval.of_record(self.record, "comm/speedup")
        return "" if measured is None else f"{measured.value:.2f}x" if measured.excludes(1) else "none"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


class ProgressReader:
    """Reader of the runs of a directory and of its sweeps. What has not changed since the last call is not read again.

    Args:
        most: number of runs that are returned, the newest ones.
    """

    def __init__(self, runs: Path, most: int) -> None:
        self._runs, self._most = runs, most
        self._read: dict[str, tuple[Run, float, RunProgress]] = {}

    def newest(self) -> list[RunProgress]:
        """Return the newest runs: active ones first, then by age."""
        cells = [cell for cells in look_at_sweeps(find_sweeps(self._runs)).values() for cell in cells if cell.dir]
        found = {run.dir: run for run in [*cells, *statuses_of(newest(find(self._runs), self._most))]}
        ordered = sorted(found.values(), key=lambda run: run.created, reverse=True)
        ordered.sort(key=lambda run: run.state not in ACTIVE)
        return [self._progress(run) for run in ordered[: self._most]]

    def _progress(self, run: Run) -> RunProgress:
        metrics = RunPaths(Path(run.dir)).metrics
        changed = metrics.stat().st_mtime if metrics.exists() else 0.0
        known, when, progress = self._read.get(run.dir, (None, 0.0, None))
        if progress is None or known != run or when != changed:
            try:
                progress = RunProgress.of(run)
            except Exception as error:  # a damaged file must not hide other runs
                progress = RunProgress(run=run, name=run.name, event=f"cannot be read: {error}")
            self._read[run.dir] = run, changed, progress
        return progress


def sparkline(values: Sequence[float], width: int) -> str:
    """Return ``values`` as a curve of at most ``width`` characters, each the mean of a part of them."""
    count = min(width, len(values))
    parts = [values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = high - low or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)


def device_use(runs: Iterable[Run]) -> dict[str, str]:
    """Return how much of this machine's cores or GPUs each active local run uses, by the run's directory.

    Cores are counted since the last call: the first one returns none.
    """
    local = [run for run in runs if run.kind != ClusterKind.slurm and run.state is RunState.running]
    if not local:
        return {}
    import psutil

    # psutil keeps these objects, and with them what a process had used before
    processes = {process.pid: process for process in psutil.process_iter()}
    gpus = _gpu_use()
    used: dict[str, str] = {}
    for run in local:
        starter = history.submissions(RunPaths(Path(run.dir)))[-1].pid
        if starter not in processes:
            continue
        try:
            family = [starter, *(child.pid for child in processes[starter].children(recursive=True))]
            on_gpus = [gpus[pid] for pid in family if pid in gpus]
            cores = sum(processes[pid].cpu_percent() for pid in family if pid in processes) / 100
        except psutil.Error:  # it has just ended
            continue
        used[run.dir] = f"GPU {sum(on_gpus) / len(on_gpus):.0f}%" if on_gpus else f"{cores:.1f} cores" if cores else ""
    return used


def _gpu_use() -> dict[int, float]:
    """Return the utilisation, in percent, of the GPU of each process that has one; none without nvidia-smi."""

    def rows(query: str) -> list[list[str]]:
        command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
        return [line.split(", ") for line in answer.stdout.splitlines()]

    try:
        of_gpu = {uuid: float(percent) for uuid, percent in rows("gpu=uuid,utilization.gpu")}
        return {int(pid): of_gpu[uuid] for pid, uuid in rows("compute-apps=pid,gpu_uuid")}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return {}
