"""Engine: keeps the batch contract for any training loop. ``launcher.Engine`` is RunEngine, which adds a run's record.

    engine = Engine(model, optimizer, plan)
    for window in engine.windows(dataset):          # one optimizer step each
        for batch in window:                        # this rank's micro-batches
            loss_sum, items = ...                   # with engine.model
            engine.backward(loss_sum, items)
        result = engine.step()

The gradient applied is that of (sum of losses) / (number of items) over all of a window's ranks and micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from launcher.errors import EngineMisuse
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.loss import Loss, loss_form
from launcher.plan.run_plan import RunPlan, part
from launcher.plan.sync_policy import reduces
from launcher.train import precision
from launcher.train.callback_set import CallbackSet, callbacks_of
from launcher.train.checkpoint.initial import InitialValues, initial_values
from launcher.train.context import ContextSource
from launcher.train.data.loader import Collate, MicroBatch, to_device
from launcher.train.data.stream import StreamCheckpoint
from launcher.train.data.window_feed import BEGINNING, Window, WindowPosition, open_feed
from launcher.train.engine import loss_terms, oom
from launcher.train.engine.build import ModelFrom, OptimizerFrom, build_parts
from launcher.train.engine.calibration import Calibrated, Calibration, hardware_of
from launcher.train.engine.carried_state import (
    EXAMINED_WINDOW,
    CarriedState,
    LeftOut,
    constants_of,
    print_other_constants,
)
from launcher.train.engine.loss_trial import can_try_loss, try_loss
from launcher.train.engine.loss_watches import ForeignLeaves, GradientWatch, LossCollectives, LossWatch
from launcher.train.engine.optimizer_step import Counters, OptimizerStep, TrainedParameters
from launcher.train.engine.window import CurrentWindow, Forward, Items, LossOverWindow, Stage, WindowPass
from launcher.train.engine.window_totals import ReducedTotals, StepResult, WindowLoss, WindowTotals
from launcher.train.measure.noise_scale import Noise, NoiseScale
from launcher.train.measure.observer import EndedWindow, Observer
from launcher.train.measure.straggler import StragglerDetector
from launcher.train.parallel.base import ShardUnits
from launcher.train.parallel.replicas import Buffers
from launcher.train.schedules import MakeSchedule
from launcher.train.sites import own_site, sites_of
from launcher.train.world import device_of, join

# engines with checkpoint.init_from in loops of users' own, by the directory of the run
_STARTED: WeakValueDictionary[str, Engine] = WeakValueDictionary()


class Engine:
    """A model wrapped as the plan says, whose windows of micro-batches become optimizer steps.

    Args:
        model: moved to this rank's device in place; or a function that makes it: then no rank ever holds a whole model
            that is to be sharded.
        optimizer: over the model's parameters, with the peak learning rate, which the plan's schedule multiplies; or a
            list of several; or a function of the parameters that makes it, after the model was sharded.
        plan: for as many ranks as the process group has.
        stop: called once a window; if it returns true on any rank, all ranks stop after that window.
        save_due: called once a window on rank 0; StepResult.save_due has the result on all ranks.
        shard_units: modules that FSDP gathers as one and that recompute wraps. Default: the model's repeated blocks.
        owner: object that the forward pass belongs to, such as the task; calibration restores its attributes, and its
            ``compile_units(model)``, if it has one, names the modules that train.compile compiles. Its
            ``state_dict()`` and ``load_state_dict(state)`` are its state in checkpoints.
        schedule: (optimizer, steps) -> learning rate schedule, instead of the plan's.
        callbacks: objects with methods of those in docs/guides/callbacks.md. Default: the plan's.

    Attributes:
        callbacks: the callbacks, and their state.
        left_out: frozen parameters that the model's state_dict leaves out.
        outputs: loss of whole windows, see launcher.loss.LossForm; None for a loss that is a sum over samples.
        buffers: the model's buffers that training changes; ``sites``: the sites of the job.
        context: source of ``launcher.current()``; its ``take_scalars()`` returns what was logged there.
        position: position of the next window in the data, the same on all ranks.
        stream: state of a stream, for checkpoints.
        tries_loss: the next window starts with a trial of the loss, see ``try_loss``.
        schedule: learning rate schedule; the engine steps it.
        lacks_values: the run has a checkpoint, so that checkpoint.init_from was not read, and it was not loaded yet.
        preserve: function that copies the state that forward and backward passes change; see ``PreservedState``.

    Raises:
        ConfigError: the plan is for another number of ranks.
        EngineMisuse: the optimizer lacks some of the model's parameters, or took steps before it was sharded.
        SiteError: not started by torchrun, or no device for this rank.
        TaskError: the model cannot be sharded by ``shard_units``.
    """

    def __init__(
        self,
        model: ModelFrom,
        optimizer: OptimizerFrom,
        plan: RunPlan,
        stop: Callable[[], bool] = bool,  # bool() is False, without a call of Python code in each step
        shard_units: ShardUnits | None = None,
        save_due: Callable[[], bool] = bool,
        owner: object = None,
        schedule: MakeSchedule | None = None,
        callbacks: Sequence[object] | None = None,
    ) -> None:
        self.world, plan = own_site(plan)
        self.world.require_size(plan.batch.world_size)
        self.device = device_of(self.world, plan.cluster.device)
        join(self.world, self.device, plan.train.hang_timeout)
        self.plan = plan = precision.resolve_precision(plan, self.world, self.device)
        self.lacks_values = False
        values = self._initial_values()
        parts = build_parts(model, optimizer, plan, self.device, shard_units, self.world, owner, values)
        self._parts, self.parallel, self.optimizer = parts, parts.parallel, parts.optimizer
        self.precision, self._reduces_each = parts.precision, reduces(plan.strategy.sync, last=False)
        self._norms = None if parts.norms.plain else parts.norms
        self._trained = TrainedParameters(self.parallel)
        self.buffers = Buffers(self.parallel.module, self.world, self.device)
        self.left_out = LeftOut(self.parallel.module)
        first = self.world.rank == 0
        self._constants = constants_of(self.parallel.module, owner, self.left_out) if first else {}
        self._loss = WindowLoss(self.world, self.device, self.parallel.meter)
        self._optimizer_step = step = OptimizerStep(parts, self._loss, schedule)
        self.schedule = step.schedule
        self._loss_form = form = loss_form(owner)
        self.outputs: LossOverWindow | None = None if form is None else form.in_windows(parts)
        self._watches: list[LossWatch] = [LossCollectives()] if self.world.size > 1 and plan.batch.accumulates else []
        self._watches += [ForeignLeaves(parts), GradientWatch(parts)]
        self._current = CurrentWindow(parts, self.buffers, step, self._loss, self.outputs)
        self._calibration, self.preserve = Calibration(parts), parts.preserve
        self._stop, self._save_due = stop, save_due if self.world.rank == 0 else bool
        self._around_windows: Callable[[], AbstractContextManager[object]] = nullcontext
        self.stragglers = StragglerDetector(self.world, plan.train.straggler_share)
        self.noise_scale = NoiseScale(
            self.world.size, self.device, self.parallel.local_norm, random=plan.batch.random_parts and form is None
        )
        self._observers: list[Observer] = [self.noise_scale, self.buffers, self.stragglers, *self.parallel.observers]
        if self.outputs is not None:
            self._observers.append(self.outputs)
        self._bytes_of_norm = 8 if plan.strategy.shard_size > 1 else 0  # fp64, see Fsdp.total_norm
        self._totals = WindowTotals(self.world, self.device, self.parallel.meter, self._loss, self._observers)
        self.tries_loss, self._carried, self._again = False, None, False
        self.position, self.stream, self._finished = BEGINNING, StreamCheckpoint(), False
        self.context = ContextSource(self.device, plan.train.seed, *self.world.in_job, progress=self._step_and_epoch)
        self.context.activate()
        self.owner, self.sites = owner, sites_of(self.world, plan)
        listed = callbacks_of(plan) if callbacks is None else callbacks
        self.callbacks = CallbackSet([*self.sites.callbacks, *listed], owner, self.model)
        self.callbacks.call("on_setup", self)

    def _initial_values(self) -> InitialValues | None:
        """Return the weights of checkpoint.init_from; None if there are none, or the run has a checkpoint."""
        plan, values = self.plan, initial_values(self.plan, self.world)
        if plan.initial is None:
            return None
        if not plan.task.target:
            if plan.run.dir in _STARTED:
                raise EngineMisuse(
                    "checkpoint.init_from is for one engine of a script, and an earlier one has it.\n  Give the others"
                    " a plan without it: dataclasses.replace(plan, initial=None); their models keep their own values."
                )
            _STARTED[plan.run.dir] = self
        self.lacks_values = values is None
        return values

    def attach(
        self,
        stop: Callable[[], bool],
        save_due: Callable[[], bool],
        around_windows: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Let a run around the engine take part.

        Args:
            stop, save_due: called once a window, besides those of the engine.
            around_windows: returns the context of a loop over the windows.
        """
        own_stop, own_save_due = self._stop, self._save_due
        self._stop = lambda: own_stop() or stop()
        if self.world.rank == 0:
            self._save_due = lambda: own_save_due() or save_due()
        self._around_windows = around_windows

    def finish(self) -> None:
        """Yield no further window, although the plan may have some."""
        self._finished = True

    def require_closed(self, message: str | None = None) -> None:
        """Raise EngineMisuse if a window is open. ``message``: another one than that it was left without ``step``."""
        if message is not None and self._current.window is not None:
            raise EngineMisuse(message)
        self._current.require_closed()

    @property
    def model(self) -> nn.Module:
        """The user's own model, for the forward pass: its methods, attributes and parameters can be used as well."""
        return self.parallel.module

    @property
    def counters(self) -> Counters:
        """Counters of the run."""
        return self._optimizer_step.counters

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return self.counters.steps

    @property
    def skipped_steps(self) -> int:
        """Windows not applied because fp16 overflowed."""
        return self.counters.skipped_steps

    @property
    def empty_windows(self) -> int:
        """Windows not applied because they held no item."""
        return self.counters.empty_windows

    @property
    def nonfinite_windows(self) -> int:
        """Windows not applied because their loss or gradient was not finite (train.on_nonfinite=skip)."""
        return self.counters.nonfinite_windows

    @property
    def samples(self) -> int:
        """Samples seen so far, on all ranks."""
        return self.counters.samples

    @property
    def items(self) -> float:
        """Items seen so far, on all ranks."""
        return self.counters.items

    @property
    def over(self) -> bool:
        """True if the plan's steps or epochs are done."""
        steps, epochs = self.plan.train.steps, self.plan.train.epochs
        over_by_steps = steps is not None and self.steps >= steps
        return over_by_steps if epochs is None else self.position.epoch >= epochs

    @property
    def samples_in_batch(self) -> int:
        """Samples of the current micro-batch; 0 in a placeholder that only keeps step with the other ranks."""
        if self._current.micro is None:
            raise EngineMisuse("No micro-batch is under way.")
        return self._current.micro.samples

    @property
    def window_index(self) -> int:
        """Index of the next window in the run, from 0."""
        return self.position.index

    def metrics(self) -> dict[str, float]:
        """Return the metrics of what is measured beside the step, as of the newest window."""
        return self.noise_scale.metrics() | self.stragglers.metrics()

    @property
    def calibrated(self) -> Calibrated | None:
        """Result of the calibration; None without one."""
        return self._calibration.result

    @property
    def noise(self) -> Noise | None:
        """Gradient noise scale; None before enough windows."""
        return self.noise_scale.estimate

    def _step_and_epoch(self) -> tuple[int, int]:
        return self.steps + (self._current.window is not None), self.position.epoch

    def windows(
        self, dataset: Any, collate: Collate | None = None, forward: Forward | None = None, items: Items | None = None,
        *, compare_data: bool = True,
    ) -> Iterator[Iterator[Any]]:  # fmt: skip
        """Yield one iterator of this rank's batches for each optimizer step, until the plan's steps or epochs are done.

        Args:
            forward: the loop's own forward pass, (model, batch) -> (loss_sum, items) or the terms of the loss. It
                receives copies of batches: of the first window for the calibration; of all windows with a
                ``batch.norm`` that looks ahead, and with several terms, unless ``items`` is given. Default: no
                calibration, and such a ``batch.norm`` is refused.
            items: batch -> number of items of each term, for a loss of several terms in windows of several
                micro-batches.
            compare_data: whether the ranks compare their data before the first window.

        Raises:
            ConfigError: ``batch.norm`` looks ahead, and there is no ``forward``.
            DataError: the data is not that of the plan, or differs between ranks.
            EngineMisuse: the loop left a window before ``step``.
        """
        current = self._current
        calibration = WindowPass(self._calibrates, functools.partial(self._calibrate, forward))
        current.set_forward(forward, items, calibration)
        current.require_closed()
        if self.over or self._finished:
            return
        self.callbacks.start(self)
        self._again = True
        with self._around_windows():
            while self._again:  # once more for each halving of the micro-batch, see `shrinks`: the same window again
                self._again = False
                self._feed = feed = open_feed(
                    dataset, self.plan, self.world, self.device, collate, self.position, compare=compare_data,
                    checkpoint=self.stream,
                )  # fmt: skip
                compare_data = False
                try:
                    for window in feed.windows():
                        step = self.steps + 1
                        self.parallel.last_window = self.plan.ends_with(step, window.index)
                        self._totals.clear(metrics=self.plan.records(step, window.index))
                        self.context.activate()
                        HEARTBEAT.begin_window(window.index + 1, step)
                        batches = current.open(window, self._micro_batches(window))
                        self.callbacks.call("on_window", self)
                        yield batches
                        if self._again:
                            current.set_forward(forward, items, calibration)
                            break
                        current.require_closed()
                        if self._finished:
                            return
                finally:
                    if self._feed is feed:  # no other loop over windows has started since
                        current.close_batches()
                    feed.close()

    def _micro_batches(self, window: Window) -> Generator[Any, None, None]:
        """Yield the window's batches; the loop runs forward and ``backward`` of each before it requests the next."""
        current, count = self._current, window.count
        micro_batches = current.prepare(window)
        if self.tries_loss or self._carried is not None:
            micro_batches = self._try_loss(micro_batches, window)
        while current.handed_out < count:
            micro = current.fetch(micro_batches)
            number = current.handed_out
            # the loop's forward and backward run in this context: DDP decides in forward whether to synchronise
            with self.parallel.micro_batch(current.sync, first=number == 1, last=number == count):
                if self._norms is not None:
                    self._norms.micro_batch(counts=micro.samples > 0)
                if self._watches:
                    self._watches = [watch for watch in self._watches if not watch.finished]
                for watch in self._watches:
                    watch.before_loss(number, count)
                try:
                    with self.precision.autocast():
                        yield micro.data
                finally:
                    for watch in self._watches:
                        watch.stop()
                if current.micro is not None:
                    raise EngineMisuse("engine.backward(loss_sum, items) was not called for a micro-batch.")
                for watch in self._watches:
                    watch.after_micro_batch()
            if current.stage is Stage.restarting:
                micro_batches = current.count_first(micro, micro_batches)

    def _try_loss(self, micro_batches: Iterator[MicroBatch], window: Window) -> Iterator[MicroBatch]:
        """Return the window's micro-batches, after checks that run the loss several times with the first of them: the
        trial of the loss in the first window, and the examination of carried state in window ``EXAMINED_WINDOW``.
        """
        first_window, self.tries_loss = self.tries_loss and self.outputs is None, False
        due = self._carried is not None and window.index >= EXAMINED_WINDOW
        if self._carried is not None and window.index == 1:
            self._carried.note_first_step()
        if not (first_window or due):
            return micro_batches
        current = self._current
        if current.forward is None or self._parts.norms.look_ahead is not None or not can_try_loss(self._parts):
            return micro_batches
        first = next(micro_batches)
        if self._carried is not None:
            self._carried.examine(current.run_unwrapped, first, window.count)
        else:
            try_loss(self._parts, current.run_unwrapped, first, window.count)
        self._carried = CarriedState(self._parts, self.schedule, self.callbacks) if first_window else None
        self.context.take_scalars()  # the window itself logs them again
        current.start()
        return itertools.chain([first], micro_batches)

    def backward(
        self, loss: Tensor | Loss | Sequence[Loss], items: float | Tensor | None = None,
        metrics: loss_terms.MetricSums | None = None,
    ) -> None:  # fmt: skip
        """Accumulate the gradient of one micro-batch, and synchronise it if the sync policy says so.

        Args:
            loss: scalar, the loss summed over the micro-batch's items; or a ``Loss``, or a list of several terms.
            items: number of these items, or the sum of their weights.
            metrics: (sum, count) by name, averaged over the window.

        Raises:
            EngineMisuse: several terms in a window of several micro-batches, whose items cannot be counted ahead.
            TaskError: the loss is no scalar, ``items`` no number of at least 0, terms or metrics are not those of
                other micro-batches, or the loss or a hook changes gradients or parameters itself.
        """
        current, totals, micro = self._current, self._totals, self._current.micro
        if micro is None or current.window is None:
            raise EngineMisuse("engine.backward() must be called once for each micro-batch of `for batch in window`.")
        current.micro, count = None, current.window.count
        losses = loss_terms.as_terms(loss, items, metrics)
        if not losses[0].total.requires_grad:
            loss_terms.require_gradient(losses)
        for watch in self._watches:
            watch.before_backward(losses, micro, count)
        weight = self._optimizer_step.weight(losses, micro.samples)
        if not self._loss.plain or len(losses) > 1 or losses[0].metrics or losses[0].name is not None:
            self._loss.require_parts(losses)
        if self._loss.several and current.must_count():
            return  # the window starts again, after the count
        if micro.samples:
            self._loss.sums.add(losses, metrics=self._loss.due)
            totals.samples += micro.samples
        first, last = current.handed_out == 1, current.handed_out == count
        if (first or last or self.parallel.local_norm.due) and not self._loss.several:
            self.noise_scale.before_backward(current.sync, totals.own_part, first=first, last=last)
        if last or self._reduces_each:  # before gradients of other parameters than the other ranks' are reduced
            self._trained.require_same()
        if last:
            stop, save_due = self._stop(), self._save_due()
            if self.sites.count > 1:
                stop, save_due = self.sites.agree(self.position.index, stop=stop, save_due=save_due)
            totals.send(more=self._feed.has_next(), stop=stop, save_due=save_due)
            if current.may_abandon and self.world.size > 1 and totals.out_of_memory():
                raise oom.WindowAbandoned
        if self._loss.several:  # items that were not counted ahead are in the totals: the window is one micro-batch
            total = self._loss.weighted(losses, weight, self._loss.counted or totals.items_by_term())
        else:
            total = losses[0].total * weight
        with self.parallel.backward(total, totals.denominator if last else None):
            self.precision.backward(total)
        for watch in self._watches:
            watch.after_backward()

    def step(self) -> StepResult:
        """Take the window's optimizer step: sum over ranks, check, average exactly, clip, apply, schedule.

        Raises:
            DataError: no window of an epoch held an item.
            NotFinite: the loss is inf or nan, or the gradient is at every loss scale, and train.on_nonfinite=stop. On
                all ranks; nothing is applied.
            SyncPolicyViolated: other collectives ran than those of the sync policy.
            UnusedParameters: a parameter has no gradient.
        """
        current, window, totals, step = self._current, self._current.window, self._totals, self._optimizer_step
        if window is None or not totals.sent:
            after = "twice, or before the first micro-batch of a window"
            if window is not None:
                after = f"after {current.handed_out} of {window.count} micro-batches"
            raise EngineMisuse(
                f"engine.step() must be called once, after the last micro-batch of a window; it was called {after}."
            )
        HEARTBEAT.beat(Phase.waiting, window.count)
        gradients = self.parallel.gradients()
        if self.precision.scales:
            self.precision.unscale(self.optimizer)
        agreed = totals.receive(self.parallel.total_norm(gradients))
        arrived = time.perf_counter()  # the host has just waited for the device
        if current.saved is not None:
            current.saved.keep_changing()
        self.parallel.meter.check(window.count, current.sync)

        HEARTBEAT.beat(Phase.updating, window.count)
        scale, gradient_unit = self.precision.scale, step.gradient_unit  # before `apply`, which may change them
        norm = step.apply(gradients, agreed, totals, self._samples_text)
        skipped = not math.isfinite(norm)
        if step.nonfinite is not None:
            current.restore()
        # a GPU has its optimizer step by now, and works on it while the host reads the timers
        comm = self.parallel.meter.close_window(window.count, current.sync)
        step_s = current.close(arrived)
        self._observe(window, agreed, norm, gradient_unit / (scale or 1.0), step_s)
        self.position = self._feed.advance(agreed.more)
        step.count(agreed, window.epoch, epoch_over=self.position.epoch > window.epoch)
        over = self.over
        self._finished = over or agreed.stop
        result = StepResult(
            step=step.counters.steps, window=window.index, epoch=window.epoch, micro_batches=window.count,
            samples=agreed.samples, items=agreed.items, grad_norm=norm, lr=step.lr,
            loss=agreed.loss, padding_fraction=window.padding_fraction,
            skipped=skipped, nonfinite=step.nonfinite, scale=scale, sync=current.sync, comm=comm,
            step_s=step_s, data_s=current.data_s, last=self._finished, stopped=agreed.stop and not over,
            save_due=agreed.save_due, flags_bytes=totals.payload_bytes + self._bytes_of_norm,
            metrics=self._loss.averages,
        )  # fmt: skip
        if self.callbacks.names:
            self.callbacks.call("on_step", self, result)
        self.parallel.end_step()
        if result.last:
            self.sites.leave()
        return result

    def _observe(self, window: Window, agreed: ReducedTotals, norm: float, gradient_unit: float, step_s: float) -> None:
        """Notify the observers of how the window ended."""
        batch, size = self.plan.batch, agreed.samples
        whole = batch.global_size_at(window.index) if batch.ramp else batch.global_size
        full = size == whole and size % batch.unit == 0
        ended = EndedWindow(
            samples=size, items=agreed.items, grad_norm=norm,
            comparable=full and math.isfinite(norm) and not self.parallel.frozen,
            gradient_unit=gradient_unit, step_s=step_s, data_s=self._current.data_s,
            wait_s=self.parallel.meter.waited_s,
        )  # fmt: skip
        for observer in self._observers:
            observer.window_ended(ended)

    @property
    def place(self) -> str:
        """Step, rank, and the micro-batch's samples or number, where the loop's body is."""
        number = len(self._current.notes)
        if samples := self._samples_text(number):
            which = f", with {samples} of the training data"
        else:  # before the first micro-batch of the window, passes may have run any of them
            which = f", in micro-batch {number}" if self._current.handed_out else ""
        return f"step {self.steps + 1} on rank {self.world.rank_in_job}{which}"

    def _samples_text(self, number: int) -> str:
        """Return the names of the samples of the window's micro-batch ``number``, from 1; empty if they are unknown."""
        notes = self._current.notes
        return self._feed.samples_text(notes[number - 1]) if 0 < number <= len(notes) else ""

    def shrinks(self, error: BaseException) -> bool:
        """Return whether the window whose body raised ``error`` runs again, in micro-batches of half the size.

        That is ``batch.on_oom=shrink``. The body raises on every rank then, and every rank calls this:

            for window in engine.windows(dataset):
                try:
                    ...
                except Exception as error:
                    if engine.shrinks(error):
                        continue                    # the next window is the same one
                    raise

        It returns False if a collective was in progress: no rank can leave it, and ``error`` must end the process.
        """
        smaller = self.plan.batch.shrunk()
        if smaller is None or not self._current.abandoned_for(error, self._totals):
            return False
        self.plan = self.plan.with_micro_batches(smaller)
        self._optimizer_step.change_accumulation(smaller.accumulation)
        self._calibration.result = None  # it was of larger micro-batches
        self._again = True
        return True

    def calibrate(self, forward: Forward, batches: Iterable[Any]) -> Calibrated | None:
        """Measure what the sync policy saves and what communication costs. All ranks call it, between two windows.

        Args:
            forward: (model, batch) -> (loss_sum, items) or the terms; it receives copies of the batches. In its place
                runs an owner's loss over windows, of each batch on its own.
            batches: of this rank, each of micro-batch size; repeated if a window has more. With batch.micro_tokens they
                are the window.

        Returns:
            The result; None with one rank, and with ``run.calibrate_s=0``.
        """
        if self._current.window is not None:
            raise EngineMisuse("engine.calibrate() must be called between two windows.")
        size = self.plan.batch.micro_size
        self._calibrate(forward, [MicroBatch(to_device(batch, self.device), size) for batch in batches])
        return self.calibrated

    def _calibrates(self, _: int = 0) -> bool | None:
        """Return whether the next window starts with the calibration; None: no later one will, either."""
        due = self._current.forward is not None and self._calibration.wanted(self.plan) and self.calibrated is None
        return due or None

    def _calibrate(self, forward: Forward | None, micro_batches: list[MicroBatch]) -> None:
        if self._loss_form is not None:
            forward = self._loss_form.of_batch  # without the other ranks' outputs
        assert forward is not None
        self._calibration.measure(self.plan, functools.partial(self._current.run, forward), micro_batches, self.steps)
        self.context.take_scalars()  # the window itself logs them again

    def freeze(self, match: str) -> list[str]:
        """Stop to train the parameters that ``match`` selects, and return their names: they keep value and optimizer
        state, and are no part of the gradient's norm. All ranks call it, between two windows.

        Args:
            match: regular expression for names, or a number of dimensions ("ndim<2"), as in optimizer.groups.
        """
        return self._trained.freeze(match)

    def unfreeze(self, match: str) -> list[str]:
        """Train the parameters that ``match`` selects again, and return their names."""
        return self._trained.unfreeze(match)

    def share_buffers(self, *, watch: bool = True) -> None:
        """Copy rank 0's changing buffers to all ranks, as each window does. ``watch``: look for more of them first."""
        self.buffers.share(self.parallel.meter, watch=watch)

    def measured_as(self) -> dict[str, Any]:
        """Return the settings and the hardware that measurements depend on, as JSON values. All ranks call it."""
        return {"hardware": self._hardware, **part(self.plan, "time")}

    @functools.cached_property
    def _hardware(self) -> dict[str, int]:
        return hardware_of(self.world, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint's part that JSON can hold. All ranks call it, between two windows."""
        if self.noise_scale.waits:
            self.noise_scale.receive(self._totals.sum_of(self.noise_scale))
        return {
            **self._optimizer_step.state_dict(),
            "place": dataclasses.asdict(self.position),
            "calibration": self.calibrated and dataclasses.asdict(self.calibrated),
            "measured_as": self.measured_as(),
            "noise": self.noise_scale.state_dict(),
            "gathered_by_every": self.parallel.meter.gathered_by_every,
            "changing_buffers": self.buffers.changing,
            "late_buffers": self.buffers.late,
            "gone_buffers": self.buffers.gone,
            "constants": self._constants,
            "gradient_order": self.parallel.gradient_order(),
            "frozen": self._trained.frozen,
        }

    def load_state_dict(self, state: dict[str, Any], *, alike: bool = True, same_order: bool = True) -> None:
        """Restore ``state`` into a new engine that already has its parameters and optimizer state. All ranks call it.

        Args:
            alike: whether a step's time and traffic are those of the saved run; if not, measurements are dropped.
            same_order: whether gradients are summed over as many ranks, so that the order of the sums can be kept.
        """
        self._optimizer_step.load_state_dict(state)
        self.load_progress(state)
        if alike:
            self._calibration.result = Calibrated.restored(state["calibration"], self.plan)
            self.parallel.meter.gathered_by_every = state["gathered_by_every"]
        self.noise_scale.load_state_dict(state["noise"])
        self.buffers.mark_changing(state["changing_buffers"])
        if self.world.rank == 0:
            print_other_constants(state["constants"], self._constants, self.left_out)
        self._trained.restore(state["frozen"])
        if same_order:
            self.parallel.take_gradient_order(state["gradient_order"])

    def load_progress(self, state: dict[str, Any]) -> None:
        """Restore the counters and the position in ``state``, and nothing of the optimizer."""
        self._optimizer_step.counters = Counters(**state["progress"])
        self.position, self.lacks_values = WindowPosition(**state["place"]), False
