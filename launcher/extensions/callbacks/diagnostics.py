"""Diagnostics of chosen steps: torch.profiler traces, and snapshots of GPU memory when it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from launcher.errors import ConfigError
from launcher.train.context import current
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult


class Profile:
    """Traces of chosen steps by torch.profiler, in the run's directory as ``traces/step_000010.rank0.json``.

    A trace shows in Perfetto (ui.perfetto.dev) or chrome://tracing. It covers the whole window: data, forward and
    backward passes, collectives and the optimizer step. A profiled step is slower than others.

    Args:
        steps: optimizer steps, from 1.
        ranks: ranks that are profiled.
        shapes: record the shapes of operators' inputs.
        stacks: record the Python stacks of operators.
        memory: record allocations.
    """

    def __init__(
        self, steps: list[int], ranks: Sequence[int] = (0,), shapes: bool = False, stacks: bool = False,
        memory: bool = False,
    ) -> None:  # fmt: skip
        for name, numbers, least in (("steps", steps, 1), ("ranks", ranks, 0)):
            if not numbers or any(number < least for number in numbers):
                raise ConfigError(name, list(numbers), f"must be a list of numbers of at least {least}.")
        self._steps, self._ranks = set(steps), set(ranks)
        self._options: dict[str, Any] = {"record_shapes": shapes, "with_stack": stacks, "profile_memory": memory}
        self._profile: profile | None = None

    def on_start(self, engine: Engine) -> None:
        if unknown := sorted(rank for rank in self._ranks if rank >= engine.world.size):
            raise ConfigError("ranks", unknown, f"the job has ranks 0 to {engine.world.size - 1}.")

    def on_window(self, engine: Engine) -> None:
        if self._profile is not None:  # the window is repeated, because a rank ran out of memory
            self._profile.stop()
            self._profile = None
        if engine.world.rank in self._ranks and current().step in self._steps:
            activities = [ProfilerActivity.CPU]
            if engine.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, **self._options)
            self._profile.start()

    def on_step(self, engine: Engine, result: StepResult) -> None:
        if self._profile is None:
            return
        taken, self._profile = self._profile, None
        taken.stop()
        if result.skipped:  # the next window is this step
            return
        path = engine.plan.paths.trace(result.step, engine.world.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        taken.export_chrome_trace(str(path))
        print(f"step {result.step}: trace of rank {engine.world.rank} in {path}", flush=True)


class MemorySnapshot:
    """Snapshot of a rank's GPU memory when it runs out, in the run's directory as ``memory/step_000010.rank0.pickle``.

    It lists the live allocations with their stacks, and shows at pytorch.org/memory_viz. Recording slows allocations
    slightly. Without GPUs it has no effect, and says so.

    Args:
        max_entries: number of the newest allocations and releases that are kept.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        if max_entries < 1:
            raise ConfigError("max_entries", max_entries, "must be at least 1.")
        self._max_entries = max_entries

    def on_setup(self, engine: Engine) -> None:
        if engine.device.type != "cuda":
            if engine.world.rank == 0:
                print("MemorySnapshot has no effect: the job runs on CPUs.", flush=True)
            return
        torch.cuda.memory._record_memory_history(max_entries=self._max_entries)
        rank, paths = engine.world.rank, engine.plan.paths

        def out_of_memory(*_: Any) -> None:
            path = paths.memory_snapshot(current().step, rank)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.cuda.memory._dump_snapshot(str(path))
                print(f"Rank {rank} ran out of memory: what was allocated is in {path}", flush=True)
            except Exception as error:  # called by torch's allocator, which could not handle it
                print(f"Rank {rank} ran out of memory; no snapshot in {path}: {error}", flush=True)

        cast("Any", torch._C)._cuda_attach_out_of_memory_observer(out_of_memory)
