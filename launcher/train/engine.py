"""Engine: the batch contract for any training loop. `launch train` runs on it, and so can the user's own loop.

    engine = Engine(model, optimizer, plan)
    for window in engine.windows(dataset):          # one optimizer step each
        for batch in window:                        # this rank's micro-batches
            loss_sum, items = ...                   # with engine.model
            engine.backward(loss_sum, items)
        result = engine.step()

The gradient applied is that of sum(loss over all items of the window) / (number of items of the window), counted over
every rank and micro-batch: each backward pass runs on loss_sum / C with a constant C, the strategy averages over W
ranks (DDP) or sums (FSDP: W = 1), and at the boundary the gradients are multiplied once by C*W/N, with N the window's
true item count.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from launcher.config import Compress
from launcher.errors import ConfigError, DataError, EngineMisuse
from launcher.plan import RunPlan
from launcher.train import data, step
from launcher.train.buffers import Buffers
from launcher.train.build import ModelFrom, OptimizerFrom, build
from launcher.train.calibration import WARM_UP_WINDOWS, Calibrated, Calibration, Rehearsal, WindowTimes
from launcher.train.loader import MicroBatch
from launcher.train.noise import Noise, NoiseScale
from launcher.train.parallel import ShardUnits
from launcher.train.precision import Precision
from launcher.train.step import StepResult, WindowTotals
from launcher.train.window_norm import OverWindow, norms_of
from launcher.train.world import World, device_of, join

Replay = Callable[[Callable[..., Any], Any], tuple[Tensor, int | Tensor]]


class Engine:
    """Wraps a model as the plan says, and turns windows of micro-batches into optimizer steps.

    Args:
        model: the user's, moved to this rank's device in place; or a function that makes it: then no rank ever holds a
            whole model that is to be sharded.
        optimizer: over its parameters, with the peak learning rate: the plan's schedule multiplies it; or a function
            of the parameters that makes it. One that is given is handed the parameters that sharding makes.
        plan: for a world of as many ranks as this process group has.
        stop: asked once a window; when it is true on any rank, all stop together after that window.
        save_due: asked once a window, on rank 0; its answer reaches all ranks as StepResult.save_due.
        shard_units: the modules that FSDP gathers as one and recompute works on; default: the model's repeated blocks.

    Raises:
        ConfigError: the plan is for another number of ranks.
        EngineMisuse: the optimizer lacks some of the model's parameters, or has taken steps before it was sharded.
        SiteError: not started by torchrun, or no device for this rank.
        TaskError: the model cannot be sharded as ``shard_units`` says.
    """

    def __init__(
        self,
        model: ModelFrom,
        optimizer: OptimizerFrom,
        plan: RunPlan,
        stop: Callable[[], bool] = lambda: False,
        shard_units: ShardUnits | None = None,
        save_due: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plan = plan
        self.world = World.here()
        if self.world.size != plan.batch.world_size:
            raise ConfigError(
                "WORLD_SIZE", self.world.size, f"the plan is for {plan.batch.world_size} ranks.",
                "Make the plan in the job itself: launcher.make_plan takes the world from torchrun.",
            )  # fmt: skip
        self.device = device_of(self.world, plan.cluster.device)
        join(self.world, self.device)
        self.parallel, self.optimizer = build(model, optimizer, plan, self.device, shard_units)
        self._buffers = Buffers(self.parallel.module, self.world.size, self.device)
        self.precision = Precision(plan.precision, self.device)
        self._norms = norms_of(plan, self.parallel, self.precision, self.device)
        self.schedule = LambdaLR(self.optimizer, lambda done: plan.schedule.factor(done, plan.schedule_steps))
        self._calibration = Calibration.of(plan)
        self._stop = stop
        self._save_due = save_due if self.world.rank == 0 else lambda: False
        self._divisor: float | None = None
        self._totals = WindowTotals(self.world, self.device)
        self._noise = NoiseScale(self.world.size, self.device)
        self._windows_here = 0  # in this process
        self._place = data.BEGINNING
        self._rehearsing = False
        self._window: data.Window | None = None
        self._micro: MicroBatch | None = None
        self._items_in_epoch = False  # whether it has had any so far
        self._empty_in_a_row = 0
        self.steps = self.skipped_steps = self.empty_windows = self.samples = self.items = 0

    @property
    def model(self) -> Callable[..., Any]:
        """What the forward pass must go through."""
        return self.parallel.forward

    def windows(
        self, dataset: Any, collate: data.Collate | None = None, replay: Replay | None = None
    ) -> Iterator[Iterator[Any]]:
        """One iterator of this rank's batches for each optimizer step, until the plan's steps or epochs are done.

        Args:
            replay: for ``batch.norm=window``, which runs each micro-batch several times before it is handed out:
                (model, batch) -> what goes into ``backward``.

        Raises:
            ConfigError: ``batch.norm=window`` without it.
        """
        if replay is None and isinstance(self._norms, OverWindow):
            raise ConfigError(
                "batch.norm", "window", "runs each micro-batch several times, and this loop's own forward pass is not "
                "known to the engine.",
                "Give it: engine.windows(..., replay=function of (model, batch) that returns loss_sum and items); or "
                "use batch.norm=sync.",
            )  # fmt: skip
        self._replay = replay
        if self.over:
            return
        feed = data.open_feed(dataset, self.plan, self.world, self.device, collate, self._place)
        try:
            for window in feed.windows():
                self._open(window, feed)
                yield self._batches(window)
                if self._window is not None:
                    raise EngineMisuse("engine.step() was not called at the end of a window.")
                if self._finished:
                    return
        finally:
            feed.close()

    @property
    def over(self) -> bool:
        """Whether the plan's steps or epochs are done."""
        steps, epochs = self.plan.train.steps, self.plan.train.epochs
        if epochs is not None:
            return self._place.epoch >= epochs
        return steps is not None and self.steps >= steps

    def _open(self, window: data.Window, feed: data.Feed) -> None:
        self._window, self._feed = window, feed
        self._sync = self._calibration.sync(window.index)
        self._totals.clear()
        self._rehearsed_s: float | None = None
        self._data_s = 0.0
        self._started = time.perf_counter()
        self.parallel.meter.open_window()
        self._buffers.share(self.parallel.meter)

    def share_buffers(self) -> None:
        """Give every rank those of rank 0 that training changes. Each window begins with it; all ranks call it before
        an evaluation or a checkpoint too."""
        self._buffers.watch()
        self._buffers.share(self.parallel.meter)

    def _batches(self, window: data.Window) -> Iterator[Any]:
        if self._calibration.rehearses(window.index):
            micro_batches = list(window.micro_batches)
            yield from self._rehearse(micro_batches)
            window = dataclasses.replace(window, micro_batches=iter(micro_batches))
        if isinstance(self._norms, OverWindow):
            asked, micro_batches = time.perf_counter(), list(window.micro_batches)
            self._data_s += time.perf_counter() - asked
            self._norms.look_ahead(micro_batches, self._replayed)
            window = dataclasses.replace(window, micro_batches=iter(micro_batches))
        self._work_began = time.perf_counter()
        for number in range(window.count):
            asked = time.perf_counter()
            self._micro = next(window.micro_batches)
            self._data_s += time.perf_counter() - asked
            self._last = number == window.count - 1
            with self.parallel.micro_batch(self._sync, first=number == 0, last=self._last):
                yield from self._hand_out(self._micro)

    def _hand_out(self, micro: MicroBatch) -> Iterator[Any]:
        self._norms.micro_batch(counts=micro.samples > 0, rehearsal=self._rehearsing)
        # the user's forward and backward run inside this: DDP decides in forward whether to synchronise
        with self.precision.autocast():
            yield micro.data
        if self._micro is not None:
            raise EngineMisuse("engine.backward(loss_sum, items) was not called for a micro-batch.")

    def _replayed(self, micro: MicroBatch) -> Tensor:
        """What would go into the backward pass of ``micro``; the wrapped model's collectives are left out."""
        assert self._replay is not None
        self._micro = micro
        with self.precision.autocast():
            loss_sum, items = self._replay(self.parallel.module, micro.data)
        step.require_sum(loss_sum, items)
        self._micro = None
        return self.precision.scaled(loss_sum * self._weight(items, micro.samples))

    def _weight(self, items: int | Tensor, samples: int) -> float:
        """What a micro-batch's loss is multiplied by before its backward pass."""
        if self._divisor is None:
            self._divisor = step.agree_on_divisor(
                items if samples else 0, self.plan.batch.accumulation, self.world, self.device
            )
        return (samples > 0) / self._divisor

    def _rehearse(self, micro_batches: list[MicroBatch]) -> Iterator[Any]:
        """The window's forward and backward passes without any collective, for their time; nothing of them stays."""
        rehearsal = Rehearsal(self.parallel, self.device)
        self._rehearsing = True
        with rehearsal.under_way():
            for micro in micro_batches:
                self._micro = dataclasses.replace(micro, samples=0)
                yield from self._hand_out(micro)
        self._rehearsing = False
        self._rehearsed_s = rehearsal.slowest_s()
        self.parallel.meter.open_window()
        self._started = time.perf_counter()
        self._buffers.share(self.parallel.meter)

    @property
    def samples_in_batch(self) -> int:
        """Samples of the micro-batch under way; 0 in one that counts for nothing: it keeps the other ranks company, or
        rehearses the window that follows."""
        if self._micro is None:
            raise EngineMisuse("No micro-batch is under way.")
        return self._micro.samples

    def backward(self, loss_sum: Tensor, items: int | Tensor) -> None:
        """Accumulate the gradient of one micro-batch; synchronises where the sync policy says so.

        Args:
            loss_sum: scalar, the loss summed over the micro-batch's items.
            items: how many items that is.

        Raises:
            TaskError: these are no sum and no count.
        """
        if self._micro is None:
            raise EngineMisuse("engine.backward() belongs once into each micro-batch of `for batch in window`.")
        step.require_sum(loss_sum, items)
        if not loss_sum.requires_grad:
            raise EngineMisuse(
                "The loss does not require a gradient: it was detached, made from a number, or computed under no_grad."
            )
        samples, self._micro = self._micro.samples, None
        if self._rehearsing:
            assert self._divisor is not None
            self.precision.backward(loss_sum * (1 / self._divisor))
            return
        weight = self._weight(items, samples)
        if samples:
            self._totals.add(loss_sum, items, samples)
        if self.parallel.own.due:
            self._noise.begin(*self._totals.here)
        if self._last:
            self._totals.send(self._feed.has_next(), self._stop(), self._save_due(), self._noise.own)
            self.parallel.before_reduction(self._totals.items_of_all)
        self.precision.backward(loss_sum * weight)

    def step(self) -> StepResult:
        """The window's optimizer step: agree, check, average exactly, clip, apply, schedule.

        Raises:
            DataError: no window of an epoch held an item.
            NotFinite: a loss, or a gradient that no loss scale helps; on all ranks, before anything is applied.
            PolicyNotObserved: the collectives that ran are not those of the sync policy.
            UnusedParameters: a parameter got no gradient.
        """
        window = self._require_whole_window()
        gradients = self.parallel.gradients()
        self.precision.unscale(self.optimizer)
        agreed = self._totals.receive(self.parallel.total_norm(gradients))
        work_s = time.perf_counter() - self._work_began
        if not math.isfinite(agreed.loss_sum):
            raise step.explain_bad_loss(self._totals, self.world, self.steps + 1)
        comm = self.parallel.meter.close_window(window.count, self._sync)
        self._noise.settle(agreed.own_squares)

        lr = float(self.schedule.get_last_lr()[0])
        scale = self.precision.scaler.get_scale() if self.precision.scales else None
        assert self._divisor is not None
        unit = self._divisor / (scale or 1.0)
        norm = self._apply(gradients, agreed, scale) if agreed.items else self._leave_out()
        skipped = not math.isfinite(norm)
        if window.index == 0:
            self._buffers.watch()

        step_s = time.perf_counter() - self._started
        # a short window is faster for another reason, and its ranks' parts are not of one size
        full = agreed.samples == self.plan.batch.global_size_at(window.index)
        if full and not skipped:
            self._noise.measure(self.parallel.own, norm, agreed.items, agreed.samples, unit)
        times = WindowTimes(step_s, work_s, comm.time_s, self._rehearsed_s)
        typical = full and not skipped and self._windows_here >= WARM_UP_WINDOWS
        calibrated = self._calibration.observe(window.index, times, typical)
        self._windows_here += 1
        self.skipped_steps += skipped and agreed.items > 0
        self.samples += agreed.samples
        self.items += agreed.items
        self._window = None
        self._place = self._feed.settle(agreed.more)
        self._require_some_items(agreed.items, window.epoch)
        stopped = agreed.stop and not self.over
        self._finished = stopped or self.over
        return StepResult(
            step=self.steps, window=window.index, epoch=window.epoch, micro_batches=window.count,
            samples=agreed.samples, items=agreed.items, grad_norm=norm, lr=lr,
            loss=agreed.loss_sum / agreed.items if agreed.items else math.nan,
            skipped=skipped, scale=scale, sync=self._sync, comm=comm, calibrated=calibrated,
            noise=self._noise.now, step_s=step_s, data_s=self._data_s, last=self._finished, stopped=stopped,
            save_due=agreed.save_due,
        )  # fmt: skip

    def _apply(self, gradients: list[Tensor], agreed: step.Agreed, scale: float | None) -> float:
        """Their exact mean, clipped, to the parameters, unless fp16 overflowed. Returns its norm before the clip."""
        assert self._divisor is not None
        factor = self._divisor * self.parallel.averaged_over / agreed.items
        norm, clip_norm = agreed.grad_norm * factor, self.plan.train.clip_norm
        if math.isfinite(norm):
            # one pass over the gradients: the exact mean and the clip
            torch._foreach_mul_(
                gradients, factor if clip_norm is None else factor * min(1.0, clip_norm / (norm + 1e-6))
            )
            self.precision.step(self.optimizer)
            self.schedule.step()
            self._norms.track()
            self.steps += 1
        # a scale of 1 changes nothing: what overflows then is the gradient itself, and no smaller scale will help
        elif scale is None or scale <= 1:
            raise step.explain_bad_gradient(self.steps + 1, norm, self.parallel.module)
        self.precision.update()
        self.parallel.zero_grad()
        if self.precision.scales and not self.items:
            # the first micro-batch was a guess, and may have had few items, or none
            self._divisor = step.divisor(agreed.items / self.world.size)
        return norm

    def _leave_out(self) -> float:
        """A window without items: there is no mean, so nothing moves, and nothing is learned of the loss scale."""
        if self.plan.strategy.compress is Compress.powersgd:
            raise DataError(
                f"The window of step {self.steps + 1} holds no item, and with strategy.compress=powersgd it cannot be "
                "left out: what was kept back of earlier gradients would be lost.\n"
                "  Leave the samples without items out of train_data(), or use another strategy.compress."
            )
        self.empty_windows += 1
        self.precision.stay()
        self.parallel.zero_grad()
        return math.nan

    def _require_some_items(self, items: int, epoch: int) -> None:
        """Raises DataError where nothing was learned from an epoch, or, as a stream may have no end, for very long."""
        self._items_in_epoch |= items > 0
        self._empty_in_a_row = 0 if items else self._empty_in_a_row + 1
        over = self._place.epoch > epoch
        if (over and not self._items_in_epoch) or self._empty_in_a_row >= _MOST_EMPTY:
            which = f"No window of epoch {epoch + 1}" if over else f"None of {_MOST_EMPTY} windows in a row"
            raise DataError(
                f"{which} holds an item: the loss cannot be averaged.\n"
                "  Look at the data, and at the items that the loss returns."
            )
        if over:
            self._items_in_epoch = False

    def _require_whole_window(self) -> data.Window:
        if self._window is None or not self._totals.sent:
            raise EngineMisuse("engine.step() belongs after the last micro-batch of a window, once.")
        return self._window

    @property
    def window_index(self) -> int:
        """Of the next window, counted over the whole run."""
        return self._place.index

    def go_to(self, place: data.Place) -> None:
        """Let the next window be the one that lies there. Between two windows, on all ranks."""
        self._place = place

    @property
    def calibrated(self) -> Calibrated | None:
        """The calibration's result, once it is over."""
        return self._calibration.result_before(self.window_index)

    @property
    def noise(self) -> Noise | None:
        """What the windows so far say of the gradient's noise; None while too few of them do."""
        return self._noise.now

    @property
    def changing_buffers(self) -> list[str]:
        """Names of the model's buffers that training was seen to change."""
        return self._buffers.changing

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside tensors, as JSON has it. All ranks call it, between two windows."""
        if self._noise.waits:
            self._noise.settle(step.share_own_square(self._noise.own, self.world, self.device))
        return {
            "progress": {name: getattr(self, name) for name in _PROGRESS},
            "place": dataclasses.asdict(self._place),
            "schedule": self.schedule.state_dict(),
            "scaler": self.precision.scaler.state_dict(),
            "divisor": self._divisor,
            "calibration": self._calibration.state_dict(),
            "noise": self._noise.state_dict(),
            "items_in_epoch": self._items_in_epoch,
            "gathered_by_every": self.parallel.meter.gathered_by_every,
            "changing_buffers": self.changing_buffers,
            "gradient_order": self.parallel.gradient_order(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All ranks call it, of a fresh engine that has its parameters and optimizer state already."""
        for name in _PROGRESS:
            setattr(self, name, state["progress"][name])
        self._place = data.Place(**state["place"])
        self.schedule.load_state_dict(state["schedule"])
        self.precision.scaler.load_state_dict(state["scaler"])
        self._divisor = state["divisor"]
        self._calibration.load_state_dict(state["calibration"])
        self._noise.load_state_dict(state["noise"])
        self._items_in_epoch = state["items_in_epoch"]
        self.parallel.meter.gathered_by_every = state["gathered_by_every"]
        self._buffers.know(state["changing_buffers"])
        self.parallel.take_gradient_order(state["gradient_order"])


_MOST_EMPTY = 1000
_PROGRESS = ("steps", "skipped_steps", "empty_windows", "samples", "items")
