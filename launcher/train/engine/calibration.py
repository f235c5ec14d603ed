"""Calibration: measures before the first window what the sync policy saves and what communication still costs.

The micro-batches of the first window run forward and backward with sync=every, with the job's own policy, and without
any collective. After a warm-up, the three alternate in rounds of shuffled order, so that other load on the machine
affects all of them equally, and each round gives paired differences. Gradients are discarded, and no optimizer step is
taken; what the passes can change is restored (see ``PreservedState``), and so is the strategy's own state. Training is
bit by bit the same as without calibration. run.calibrate_s=0 turns the phase off.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Self

import torch
import torch.distributed as dist

from launcher.config.schema import Device, StrategyKind, Sync
from launcher.errors import EngineMisuse, OutOfMemory, SyncPolicyViolated
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.loss import Loss
from launcher.plan.host import device_model, measured_device
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import transfers_per_window
from launcher.quantities import Interval, count, interval
from launcher.rundir.files import value_from_json as from_json
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import EngineParts
from launcher.train.engine.loss_terms import require_gradient, sum_of_own_means
from launcher.train.engine.loss_watches import require_dense_gradients
from launcher.train.engine.oom import fits_in_memory, is_out_of_memory
from launcher.train.world import World

MIN_ROUNDS, MAX_ROUNDS = 3, 20
# With run.calibrate_s=null: seconds at most, and the share of the run's predicted time. The first MIN_ROUNDS may take
# the longer of the share and, up to DEFAULT_S, the run's whole time, so that short runs are measured, too.
DEFAULT_S, DEFAULT_SHARE = 15.0, 0.1

Run = Callable[[MicroBatch], list[Loss]]


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Result of a calibration. Times are seconds of one full window's forward and backward passes on the slowest rank.

    Args:
        asked_s: value of ``run.calibrate_s``.
        rounds: number of measured rounds.
        gain: time with sync=every minus time with the job's policy; None if both send the same, or if nothing was
            measured.
        exposed: time with the job's policy minus time without collectives; None if not measured.
        comm_s: time during which a collective was in progress, with the job's policy; median.
        not_measured: reason if nothing was measured; otherwise empty.
    """

    asked_s: float | None = None
    rounds: int = 0
    gain: Interval | None = None
    exposed: Interval | None = None
    comm_s: float = 0.0
    not_measured: str = ""

    def step_s_every(self, step_s: float, data_s: float, *, reads_ahead: bool) -> Interval | None:
        """Return the seconds that a whole step would take with sync=every.

        Args:
            step_s: seconds of a step with the job's policy, including data and optimizer.
            data_s: seconds of these that were spent waiting for data.
            reads_ahead: loader processes read while the step runs. A longer step then waits less for data, which hides
                up to ``data_s`` of a difference.
        """
        if self.gain is None:
            return None
        hidden = data_s if reads_ahead else 0.0

        def with_gain(gain: float) -> float:
            return max(0.0, step_s + math.copysign(max(0.0, abs(gain) - hidden), gain))

        return Interval(*map(with_gain, (self.gain.value, self.gain.low, self.gain.high)))

    @classmethod
    def restored(cls, state: dict[str, Any] | None, plan: RunPlan) -> Self | None:
        """Return the result in a checkpoint; None if there is none, or if ``run.calibrate_s`` has changed since a
        calibration that measured nothing."""
        if state is None:
            return None
        calibrated = from_json(cls, state)
        return None if calibrated.not_measured and calibrated.asked_s != plan.train.calibrate_s else calibrated

    @property
    def overlap(self) -> float | None:
        """Fraction of the communication that was hidden behind computation, 0 to 1."""
        if self.exposed is None:
            return None
        return min(1.0, max(0.0, 1 - self.exposed.value / self.comm_s)) if self.comm_s else 0.0


def hardware_of(world: World, device: torch.device) -> dict[str, int]:
    """Return the number of ranks on each model of device. All ranks call it."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device_model(Device.cpu) or 'CPU'}, {count(torch.get_num_threads(), 'thread')}"
    return dict(sorted(Counter(world.of_all(measured_device(name))).items()))


class WindowSync(Enum):
    """Communication during a window's passes: by the job's own policy, by sync=every, or none."""

    policy = auto()
    every = auto()
    none = auto()


class Calibration:
    """The calibration phase on one rank.

    Attributes:
        result: None before the calibration.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._world, self._device, self._preserve = parts.world, parts.device, parts.preserve
        self._parallel, self._precision, self._norms = parts.parallel, parts.precision, parts.norms
        self.result: Calibrated | None = None

    def wanted(self, plan: RunPlan) -> bool:
        """Return whether the phase takes place: it does not with one rank, and with ``run.calibrate_s=0``."""
        return self._world.size > 1 and plan.train.calibrate_s != 0

    def measure(self, plan: RunPlan, run: Run, micro_batches: Sequence[MicroBatch], steps_done: int) -> None:
        """Run the phase if it is ``wanted``. All ranks call it. Engine, model and random state stay unchanged.

        Args:
            run: the loop's forward pass of a micro-batch, which returns the terms of the loss.
            micro_batches: micro-batches of this rank, on the device; repeated if a full window has more. With
                ``batch.micro_tokens`` they are the window.

        Raises:
            SyncPolicyViolated: the collectives that ran are not those of the policy.
        """
        if not self.wanted(plan):
            return
        if not micro_batches:
            raise EngineMisuse("engine.calibrate() needs at least one batch.")
        self._plan, self._run, self._count = plan, run, plan.batch.accumulation
        if plan.batch.micro_tokens is not None:
            self._count = int(self._agree(len(micro_batches))[0])
        self._steps_left = math.inf if plan.train.steps is None else plan.train.steps - steps_done
        self._comm_s: list[float] = []
        self._cold = True  # nothing has run yet
        if plan.strategy.static_graph:
            self.result = self._without("DDP cannot skip a reduction of a static graph")
            return
        kinds = self._kinds()
        if len(kinds) < 2:
            self.result = self._without("there is nothing to compare the job's policy with")
            return
        with self._parallel.without_effects():
            self._micro_batches = micro_batches
            self._kept = self._preserve()
            try:
                self.result = self._measure(kinds)
            finally:  # free the copies of tensors, and the batches
                del self._kept, self._micro_batches
        if self._device.type == "cuda":  # the record's peaks are those of training
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def _kinds(self) -> list[WindowSync]:
        strategy = self._plan.strategy
        sent = [transfers_per_window(strategy.kind, sync, self._count) for sync in (strategy.sync, Sync.every)]
        return [WindowSync.none] * strategy.rehearses + [WindowSync.policy] + [WindowSync.every] * (sent[0] != sent[1])

    def _measure(self, kinds: list[WindowSync]) -> Calibrated:
        # the first micro-batch compiles, tunes and allocates, which the first window needs anyway: it is not timed
        cold_s = self._time(kinds[0], 1)
        if math.isinf(cold_s):
            if self._plan.strategy.kind is StrategyKind.ddp:  # the policies need as much memory
                return self._without("a micro-batch does not fit into memory")
            if len(kinds) < 3:
                return self._without("the gathered parameters do not fit into memory")
            if self._world.rank == 0:
                print(
                    "The gathered parameters do not fit into memory: exposed communication is not measured.", flush=True
                )
            return self._measure(kinds[1:])
        self._started = time.perf_counter()
        window_s = self._count * self._time(kinds[0], 1)
        if math.isinf(window_s):
            return self._without("a micro-batch does not fit into memory")
        limits = first_s, _ = self._limits(window_s)
        if len(kinds) * window_s * (1 + MIN_ROUNDS) > first_s and len(kinds) > 2:
            kinds = kinds[1:]  # the speed-up alone
        if (needed_s := len(kinds) * window_s * (1 + MIN_ROUNDS)) > first_s:
            return self._too_long(needed_s, first_s)
        # the second synchronised forward pass is the one in which DDP rebuilds its buckets
        for kind in kinds if WindowSync.every in kinds else [*kinds, WindowSync.policy]:
            if math.isinf(self._time(kind, self._count)):
                return self._without("a window without communication does not fit into memory")
        self._comm_s.clear()
        return self._rounds(kinds, *limits)

    def _rounds(self, kinds: list[WindowSync], first_s: float, limit_s: float) -> Calibrated:
        order = random.Random(0)  # the same on every rank, without drawing from the user's generators
        times: dict[WindowSync, list[float]] = {kind: [] for kind in kinds}
        elapsed_s = self._agree(time.perf_counter() - self._started)[0]
        round_s = 0.0
        for rounds in range(MAX_ROUNDS):
            missing = MIN_ROUNDS - rounds
            if elapsed_s + round_s * max(1, missing) > (first_s if missing > 0 else limit_s):
                break
            before_s = elapsed_s
            for kind in order.sample(kinds, len(kinds)):
                times[kind].append(self._time(kind, self._count))
                if math.isinf(times[kind][-1]):
                    return self._without("a window without communication does not fit into memory")
            elapsed_s = self._agree(time.perf_counter() - self._started)[0]
            round_s = elapsed_s - before_s
        rounds = len(times[WindowSync.policy])
        if rounds < MIN_ROUNDS:
            return self._too_long(elapsed_s + (MIN_ROUNDS - rounds + 1) * round_s, first_s)

        def difference(more: WindowSync, less: WindowSync) -> Interval | None:
            if more not in times or less not in times:
                return None
            return interval([a - b for a, b in zip(times[more], times[less], strict=True)])

        return Calibrated(
            asked_s=self._plan.train.calibrate_s,
            rounds=rounds,
            gain=difference(WindowSync.every, WindowSync.policy),
            exposed=difference(WindowSync.policy, WindowSync.none),
            comm_s=statistics.median(self._comm_s),
        )

    def _limits(self, window_s: float) -> tuple[float, float]:
        """Return the seconds after which the phase ends without a result, and with one."""
        if (asked_s := self._plan.train.calibrate_s) is not None:
            return asked_s, asked_s
        run_s = self._steps_left * window_s
        share_s = DEFAULT_SHARE * run_s
        return max(share_s, min(DEFAULT_S, run_s)), min(DEFAULT_S, share_s)

    def _too_long(self, needed_s: float, limit_s: float) -> Calibrated:
        return self._without(
            f"{MIN_ROUNDS} rounds take at least {needed_s:.2g} s, and the limit is {limit_s:.2g} s: "
            f"set run.calibrate_s={math.ceil(1.5 * needed_s)} to allow it"
        )

    def _without(self, reason: str) -> Calibrated:
        return Calibrated(asked_s=self._plan.train.calibrate_s, not_measured=reason)

    def _time(self, kind: WindowSync, count: int) -> float:
        """Run ``count`` micro-batches, and return the seconds on the slowest rank: infinite if silent passes ran out of
        memory on some rank. That is possible without blocking the others, since silent passes wait for no rank.

        Entering gathers parameters, which all ranks must complete; the ranks therefore agree first that it fits.
        """
        silent, meter = kind is WindowSync.none, self._parallel.meter
        sync = Sync.every if kind is WindowSync.every else self._plan.strategy.sync
        with ExitStack() as contexts:
            fits = not silent or fits_in_memory(self._parallel.bytes_to_gather(), self._device)
            entered_s = self._agree(0.0 if fits else math.inf)[0] if silent else 0.0
            if silent and not math.isinf(entered_s):
                self._gather(contexts)
            meter.open_window()
            layout = meter.layout
            took_s = self._agree(entered_s)[0]  # ranks start together
            began = time.perf_counter()
            try:
                if not math.isinf(took_s):
                    self._passes(sync, count, silent=silent)
                    took_s = time.perf_counter() - began
            except Exception as error:
                if not silent or not is_out_of_memory(error):
                    raise
                took_s = math.inf
            # a narrow parameter that is first used outside of autocast's products is gathered again: the layout changes
            if silent and not meter.silent and meter.layout == layout:
                raise SyncPolicyViolated("Passes without communication have run collectives.")
        comm_s = 0.0
        if not silent:
            meter.check(count, sync)
            comm_s = meter.close_window(count, sync).time_s
        self._parallel.zero_grad()
        self._kept.restore("the calibration", "Do not calibrate: run.calibrate_s=0.")
        took_s, comm_s = self._agree(took_s, comm_s)
        if kind is WindowSync.policy:
            self._comm_s.append(comm_s)
        return took_s

    def _gather(self, contexts: ExitStack) -> None:
        try:
            contexts.enter_context(self._parallel.without_collectives())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"Rank {self._world.rank} ran out of memory when the calibration gathered the parameters: {error}\n"
                "  Do not calibrate: run.calibrate_s=0."
            ) from None

    def _passes(self, sync: Sync, count: int, *, silent: bool) -> None:
        for number in range(count):
            HEARTBEAT.beat(Phase.computing, number + 1)
            micro = self._micro_batches[number % len(self._micro_batches)]
            self._norms.trial(alone=silent)
            with (
                nullcontext()
                if silent
                else self._parallel.micro_batch(sync, first=number == 0, last=number == count - 1)
            ):
                with self._precision.autocast():
                    losses = self._run(micro)
                require_gradient(losses)
                if self._cold:
                    require_dense_gradients(losses, self._parallel.module)
                    self._cold = False
                part = sum_of_own_means(losses, count)
                with self._parallel.backward(part):
                    self._precision.backward(part)
        if not silent:
            self._parallel.gradients()  # all of them have arrived
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _agree(self, *values: float) -> list[float]:
        """Return each value's maximum over the ranks. All ranks call it, and wait for each other."""
        most = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return most.tolist()
