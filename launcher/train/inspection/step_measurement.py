"""Measurement of a planned job's windows on this machine: one rank of a host.

    python -m launcher.train.inspection.step_measurement ANSWER_FILE PARENT_PID < request as JSON

``launcher.plan.measuring_processes`` starts one process for each rank of a host. They train real windows of the task by
the real engine, in turns under each sync policy, and write how long each took. The ranks of one host run their real
collectives. Of several hosts only one host's ranks run: each in a process group of the job's size in which it is alone,
whose collectives give it its own data at once, so that it holds and computes what one rank of the job does. Nothing is
saved.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, Subset

from launcher.config.schema import Balance, ShortWindow, Sync
from launcher.errors import DataError, LauncherError
from launcher.loss import Loss
from launcher.plan.measuring_processes import HOST
from launcher.plan.run_plan import RunPlan
from launcher.plan.work import LONG, SHORT
from launcher.process import die_with_parent, exit_without_teardown
from launcher.rundir.files import value_from_json
from launcher.task import first_samples, load_task, seed_everything, train_data
from launcher.train.data.length_balance import arranged
from launcher.train.data.sample_order import ArrangedData
from launcher.train.data.window_feed import BEGINNING
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.inspection.cpu_use import CpuUse
from launcher.train.inspection.dependencies import Dependencies
from launcher.train.inspection.fake_model import problem_text
from launcher.train.inspection.lone_rank import alone_in_group
from launcher.train.inspection.measured_windows import Parts, PlannedWindow, Timings, WindowSizes
from launcher.train.trainer import optimizer_of, schedule_of
from launcher.train.training_loop import items_method_of, losses_of
from launcher.train.world import World, device_of

LIMIT_S = 60.0  # seconds for the fewest turns; a slower job has shorter windows, or is not measured
FEWEST_TURNS, TURNS, MOST_TURNS = 4, 8, 20  # TURNS: for which the time should suffice
# Micro-batches of the windows in a turn. A window of 16 that follows from those of 1 and SHORT has twice their relative
# noise (15 and 14 times that of each in seconds), one that follows from those of 1 and LONG hardly more than they.
SIZES, SIZES_OF_SLOW, SIZES_OF_SLOWEST = (1, SHORT, LONG), (1, LONG), (1, SHORT)
# Windows of one size under one policy follow each other, and the first of them are not counted: what other windows have
# left behind differs (gradients that are zero or None, gathered parameters, samples that were read ahead).
NOT_COUNTED = {1: 3, SHORT: 2, LONG: 1}
MOST_COUNTED = 20
QUIETEST = (Sync.gather_once, Sync.boundary, Sync.replicas_at_boundary, Sync.every)  # by number of collectives
MEETS_WITHIN = timedelta(minutes=10)
STEPS = 10**6  # of the run that is measured, which never ends


@dataclass(frozen=True, kw_only=True)
class Request:
    """One rank's part of a measurement.

    Attributes:
        plan: as JSON.
        policies: to be measured; the first one is warmed up first.
        number, ranks: of this process, from 0, and of all processes that measure.
        collectives: whether they are the whole job and run its collectives.
        port: of the store on this host by which they meet.
        listener: file descriptor of the store's listening socket, on process 0.
        budget_s: seconds for all turns, if the fewest do not take longer.
    """

    plan: str
    policies: list[str]
    number: int
    ranks: int
    collectives: bool
    port: int
    listener: int | None
    budget_s: float


class MeasuredEngine(Engine):
    """Engine whose plan and policy change between windows."""

    def restart(self, plan: RunPlan) -> None:
        """Start with other windows at the beginning of the data."""
        self.plan, self.position = plan, BEGINNING

    def set_policy(self, sync: Sync) -> None:
        self._current.sync = sync


class Meeting:
    """Point where the processes wait for each other."""

    def __init__(self, store: dist.Store, number: int, ranks: int) -> None:
        self._store, self._number, self._ranks = store, number, ranks
        self._times = 0

    def agree(self, value: Any) -> Any:
        """Wait for all processes, and return the ``value`` of process 0, which must be JSON."""
        self._times += 1
        place = f"meeting/{self._times}"
        if self._store.add(f"{place}/arrived", 1) == self._ranks:
            self._store.set(f"{place}/complete", "1")
        self._store.wait([f"{place}/complete"])
        if self._number == 0:
            self._store.set(f"{place}/value", json.dumps(value))
        return json.loads(self._store.get(f"{place}/value"))

    def leave(self) -> None:
        """Return when no other process needs the store any more, if this one serves it."""
        left = self._store.add("left", 1)
        while self._number == 0 and left < self._ranks:
            time.sleep(0.01)
            left = self._store.add("left", 0)


class Measurement:
    """Measurement on this rank. All ranks construct it and call ``run`` together."""

    def __init__(self, request: Request, plan: RunPlan, store: dist.Store) -> None:
        self._meeting = Meeting(store, request.number, request.ranks)
        self._budget_s = request.budget_s
        self._policies = [Sync(name) for name in request.policies]
        self._quiet = next(sync for sync in QUIETEST if sync in self._policies)
        world, plan = World.here(), _without_ends(plan)
        # alone in its group, a rank counts only its own samples
        self._counted_ranks = 1 if request.collectives else world.size
        device = device_of(world, plan.cluster.device)
        self._cuda = device.type == "cuda"
        self._task = task = load_task(plan.task.target, plan.task.params, plan.cluster.import_from, plan.train.seed)
        seed_everything(plan.train.seed)
        torch.use_deterministic_algorithms(plan.train.deterministic)
        self._engine = MeasuredEngine(
            task.model,
            optimizer_of(task, plan),
            plan,
            shard_units=getattr(task, "shard_units", None),
            owner=task,
            schedule=schedule_of(task, plan),
            callbacks=(),
        )
        self._plan = self._engine.plan  # its precision is decided
        self._data = train_data(task, plan.train.seed)
        seed_everything(plan.train.seed + 1 + world.rank)
        self._timings = Timings()

    def run(self) -> dict[str, Any]:
        """Return the answer of this rank."""
        cpu, micro_s = CpuUse(), self._warm_up()
        turn = self._turn(SIZES)
        if FEWEST_TURNS * _micro_batches(turn) * micro_s > self._budget_s:
            turn = self._turn(SIZES_OF_SLOW)
            if FEWEST_TURNS * _micro_batches(turn) * micro_s > LIMIT_S:
                turn = self._turn(SIZES_OF_SLOWEST)
        elif (counted := self._budget_s / (TURNS * _micro_batches(turn) * micro_s)) > 1:
            turn = self._turn(SIZES, counted=min(MOST_COUNTED, round(counted)))
        if (needed_s := FEWEST_TURNS * _micro_batches(turn) * micro_s) > LIMIT_S:
            reason = f"a micro-batch takes {micro_s:.2g} s, so a measurement would take {needed_s:,.0f} s"
            return {"too_slow": f"{reason}; the limit is {LIMIT_S:.0f} s"} | cpu.since()
        cpu = CpuUse()
        self._measure(turn)
        if not self._timings.optimizer:
            return {"problem": "no window of the training data was full and had its optimizer step"}
        return {"timings": dataclasses.asdict(self._timings)} | cpu.since()

    def _turn(self, sizes: Sequence[int], counted: int = 1) -> list[PlannedWindow]:
        """Return the windows of one turn, with ``counted`` ones of each size under each policy that count."""
        turn: list[PlannedWindow] = []
        for sync in self._policies:
            for size in sizes:
                splits = size == sizes[-1] and sync is self._quiet
                turn += [PlannedWindow(sync, size)] * NOT_COUNTED[size]
                turn += [PlannedWindow(sync, size, counts=True, splits=splits and not self._cuda)] * counted
                turn += [PlannedWindow(sync, size, splits=True)] * (splits and self._cuda)
        return turn

    def _warm_up(self) -> float:
        """Run windows of samples in memory under each policy, and return the seconds of a micro-batch."""
        samples = first_samples(self._data, self._plan.batch.micro_size)
        if not samples:
            raise DataError("train_data() has no sample.")
        # DDP lays out its buckets again in the second synchronised pass; fp16 looks for its scale
        windows = [PlannedWindow(sync, SHORT) for sync in [self._policies[0], *self._policies, *self._policies]]
        plan = self._with_windows(windows)
        batch = dataclasses.replace(plan.batch, balance=Balance.none)
        size = batch.global_size * len(windows)
        plan = dataclasses.replace(
            plan,
            batch=batch,
            task=dataclasses.replace(plan.task, samples=size, own_order=False),
            train=dataclasses.replace(plan.train, loader_workers=0, data_shards=1),
        )
        data = Subset(_Listed(samples), [index % len(samples) for index in range(size)])
        micro_s = 0.0
        for number, result in enumerate(self._windows(plan, data, windows)):
            micro_s = self._meeting.agree(result.step_s / SHORT)
            if number and FEWEST_TURNS * _micro_batches(self._turn(SIZES_OF_SLOWEST)) * micro_s > LIMIT_S:
                break
        return micro_s

    def _measure(self, turn: Sequence[PlannedWindow]) -> None:
        windows = [*turn] * MOST_TURNS
        plan, data = self._with_data(self._with_windows(windows))
        started = time.perf_counter()
        for ran, _ in enumerate(self._windows(plan, data, windows, records=True), 1):
            if ran % len(turn) == 0:
                turns, passed_s = ran // len(turn), time.perf_counter() - started
                late = passed_s * (turns + 1) / turns > self._budget_s
                if self._meeting.agree(turns >= FEWEST_TURNS and (late or self._timings.stable)):
                    return

    def _with_windows(self, windows: Sequence[PlannedWindow]) -> RunPlan:
        sizes = [window.micro_batches for window in windows]
        return dataclasses.replace(self._plan, batch=WindowSizes.of(self._plan.batch, sizes))

    def _with_data(self, plan: RunPlan) -> tuple[RunPlan, Any]:
        """Return the plan, and its data, repeated if it is smaller than the largest window."""
        data, size = self._data, plan.batch.global_size
        arrangement = arranged(data, self._task, plan, self._engine.world)
        if plan.task.samples is None or plan.task.samples >= size:
            return plan, arrangement
        times = -(-size // len(data))
        repeated: Any = Subset(data, [*range(len(data))] * times)
        if isinstance(arrangement, ArrangedData) and arrangement.lengths is not None:
            repeated = ArrangedData(repeated, None, arrangement.lengths.repeat(times))
        return dataclasses.replace(plan, task=dataclasses.replace(plan.task, samples=len(repeated))), repeated

    def _windows(
        self, plan: RunPlan, data: Any, planned: Sequence[PlannedWindow], *, records: bool = False
    ) -> Iterator[StepResult]:
        """Train ``planned`` windows, and yield the result of each. ``records``: record their times."""
        engine, task = self._engine, self._task
        engine.restart(plan)

        def loss(model: Any, batch: Any) -> list[Loss]:
            return losses_of(task, engine, model, batch)

        windows = engine.windows(data, getattr(task, "collate", None), loss, items_method_of(task), compare_data=False)
        with closing(cast("Generator[Iterator[Any]]", windows)):
            for each in planned:
                if (window := next(windows, None)) is None:
                    return
                engine.set_policy(each.sync)
                result, parts = self._train(each, window, loss)
                full = result.samples * self._counted_ranks >= plan.batch.global_size_at(result.window)
                if records and full and not result.skipped:
                    self._timings.add(each, result.step_s, parts)
                yield result
                engine.context.take_scalars()

    def _train(
        self, planned: PlannedWindow, window: Iterator[Any], loss: Callable[..., list[Loss]]
    ) -> tuple[StepResult, Parts]:
        engine, splits, parts = self._engine, planned.splits, Parts()
        for batch in window:
            began = self._clock(splits)
            losses = loss(engine.model, batch)
            ran = self._clock(splits)
            engine.backward(losses)
            parts.backward.append(self._clock(splits) - ran)
            parts.forward.append(ran - began)
        waited_s, began = engine.parallel.meter.waited_s, self._clock(splits)
        result = engine.step()
        step_s = self._clock(splits) - began
        parts.window = max(0.0, result.step_s - sum(parts.forward) - sum(parts.backward) - step_s)
        parts.optimizer = max(0.0, step_s - (engine.parallel.meter.waited_s - waited_s))
        return result, parts

    def _clock(self, splits: bool) -> float:
        if splits and self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _micro_batches(windows: Sequence[PlannedWindow]) -> int:
    return sum(window.micro_batches for window in windows)


def _without_ends(plan: RunPlan) -> RunPlan:
    """Return a plan that runs on and leaves out what is no part of every window."""
    steps = None if plan.schedule_steps is None else max(plan.schedule_steps, STEPS)
    return dataclasses.replace(
        plan,
        schedule=dataclasses.replace(plan.schedule, steps=steps),
        train=dataclasses.replace(plan.train, steps=STEPS, epochs=None, calibrate_s=0.0, hang_timeout=None),
        epoch=dataclasses.replace(plan.epoch, short_window_policy=ShortWindow.drop),
        # PowerSGD starts after windows without compression, and needs two of them
        strategy=dataclasses.replace(plan.strategy, powersgd_start=min(2, plan.strategy.powersgd_start)),
        initial=None,
    )


class _Listed(Dataset[Any]):
    """Samples in memory."""

    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def _store(request: Request) -> dist.TCPStore:
    """Return the store by which the processes meet; process 0 serves it."""
    return dist.TCPStore(
        HOST, request.port, None, request.listener is not None, MEETS_WITHIN, wait_for_workers=False,
        master_listen_fd=request.listener,
    )  # fmt: skip


def _answer(request: Request) -> dict[str, Any]:
    dependencies = Dependencies()
    store = _store(request)
    try:
        with nullcontext() if request.collectives else alone_in_group(World.here().size):
            answer = Measurement(request, RunPlan.from_json(request.plan), store).run()
        answer["depends_on"] = dependencies.found()
    except LauncherError as error:
        answer = {"problem": str(error)}
    except Exception as error:
        answer = {"problem": problem_text(error)}
    if "problem" not in answer:  # the store ends with process 0
        Meeting(store, request.number, request.ranks).leave()
    return answer


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    request = value_from_json(Request, json.load(sys.stdin))
    warnings.simplefilter("ignore")  # the job itself will print what there is to print
    logging.disable()
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    Path(sys.argv[1]).write_text(json.dumps(_answer(request)), encoding="utf-8")
    exit_without_teardown(0)


if __name__ == "__main__":
    main()
