"""The current window: its micro-batches are handed out one by one."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from launcher.config.schema import OnNonfinite
from launcher.errors import ConfigError, EngineMisuse
from launcher.heartbeat import HEARTBEAT, Phase
from launcher.loss import Loss
from launcher.train.data.loader import MicroBatch, copied
from launcher.train.data.window_feed import Window
from launcher.train.engine import loss_terms, oom
from launcher.train.engine.build import EngineParts
from launcher.train.engine.optimizer_step import OptimizerStep
from launcher.train.engine.preserved_state import PreservedState
from launcher.train.engine.window_totals import WindowLoss, WindowTotals
from launcher.train.measure.observer import Observer
from launcher.train.parallel.replicas import Buffers

# the loop's own forward pass: (model, batch) -> (loss_sum, items), a Loss, or a list of several
Forward = Callable[[Callable[..., Any], Any], tuple[Tensor, float | Tensor] | Loss | Sequence[Loss]]
# batch -> number of items of each term
Items = Callable[[Any], Sequence[float | Tensor]]
# (function of (model, batch), micro-batch) -> its result for a copy of the batch, with the unwrapped model
RunCopy = Callable[[Callable[..., Any], MicroBatch], Any]

# first windows of a size in which several ranks of `launch train` can give up a window: the size has turned out to fit
# after them, and the host no longer waits for the device before the last backward pass. If it does not fit after all,
# `launch train` restarts with smaller ones. Loops of the user's own have no restart, and may always give up a window
SETTLING = 50


class WindowPass(NamedTuple):
    """Passes over all micro-batches of a window, before the first one is handed out.

    Args:
        due: (number of micro-batches) -> whether a window needs them; None: no window will.
        prepare: runs them.
    """

    due: Callable[[int], bool | None]
    prepare: Callable[[list[MicroBatch]], object]


class LossOverWindow(Observer):
    """Loss of an engine's windows that is no sum over micro-batches, see ``launcher.loss.LossForm``. All ranks call the
    methods; on several ranks a window cannot run again after one of them was out of memory."""

    def begin(self, window: int) -> None:
        """Start the window with the index ``window``."""
        raise NotImplementedError

    def look_ahead(self, micro_batches: Sequence[MicroBatch], run: RunCopy) -> None:
        """Compute what ``loss`` needs in a window of several micro-batches, before the first one runs."""
        raise NotImplementedError

    def loss(self, model: Callable[..., Any], batch: Any, samples: int) -> Loss:
        """Return the share of the current micro-batch in the window's loss: the sum of all shares has the loss and the
        gradient of the window.

        Args:
            samples: of the micro-batch; 0 of a stand-in.
        """
        raise NotImplementedError


class Stage(Enum):
    """Stage of an open window."""

    calibrating = auto()
    """The calibration runs, before the first micro-batch is handed out: no rank can leave its collectives."""
    running = auto()
    """Micro-batches are handed out, or will be."""
    restarting = auto()
    """The first micro-batch has shown that the loss has several terms, and runs again after their items were counted.
    """


class CurrentWindow:
    """This rank's progress in its current window.

    Attributes:
        window: None between two windows.
        stage: that of the window.
        handed_out: number of micro-batches handed out so far.
        micro: the micro-batch that was handed out last, until ``backward`` is called for it.
        sync: the job's policy.
        forward, items: the loop's own forward pass and count of the items of a batch's terms, if they were given.
        passes: passes that the next window may need ahead; none for a plain loss, after its first windows.
        started: start of the window, by ``time.perf_counter``.
        data_s: seconds waited for data.
        saved: state from the start of the window, if it may be restored.
        notes: ``MicroBatch.note`` of those handed out so far; the last is None while its micro-batch is waited for.
    """

    def __init__(
        self,
        parts: EngineParts,
        buffers: Buffers,
        optimizer_step: OptimizerStep,
        loss: WindowLoss,
        outputs: LossOverWindow | None,
    ) -> None:
        plan, self._device = parts.plan, parts.device
        self._parallel, self._precision, self._norms = parts.parallel, parts.precision, parts.norms
        self._norm = plan.batch.norm
        self._buffers, self._optimizer_step, self._loss, self._outputs = buffers, optimizer_step, loss, outputs
        self._abandons = oom.can_abandon(plan, self._norms) and (outputs is None or plan.batch.world_size == 1)
        self._settles = plan.batch.world_size > 1 and bool(plan.task.target)
        self._windows = 0  # of this size
        self._skips = plan.train.on_nonfinite is OnNonfinite.skip
        self._may_abandon = False
        self.window: Window | None = None
        self.micro: MicroBatch | None = None
        self.stage = Stage.running
        self.handed_out, self.sync = 0, plan.strategy.sync
        self._batches: Generator[Any, None, None] | None = None
        self.saved: PreservedState | None = None
        self._uncounted: PreservedState | None = None  # before the micro-batch that shows how many terms the loss has
        self._preserve, self._functions = parts.preserve, parts.functions
        self.forward: Forward | None = None
        self.items: Items | None = None
        self.passes: list[WindowPass] = []
        self.notes: list[Any] = []
        self._queueing_s = 0.0

    def open(self, window: Window, batches: Generator[Any, None, None]) -> Iterator[Any]:
        """Start a window, and return ``batches``, which yields the data of its micro-batches."""
        self.window = window
        self.data_s = 0.0
        self.handed_out, self.stage, self.notes = 0, Stage.running, []
        self._windows += 1
        self._may_abandon = self._abandons and not (self._settles and self._windows > SETTLING)
        self.saved = self._preserve() if self._may_abandon or self._skips else None
        self._batches = batches
        self.started = time.perf_counter()
        return batches

    def start(self) -> None:
        """Measure the window from here on: without the calibration, the trial of the loss, or the passes that showed
        several terms."""
        self.started = time.perf_counter()
        self._share_buffers()

    def _share_buffers(self) -> None:
        self._parallel.meter.open_window()
        self._buffers.share(self._parallel.meter)

    def set_forward(self, forward: Forward | None, items: Items | None, calibration: WindowPass) -> None:
        """Set the loop's own forward pass, its own function for the number of items of a batch's terms, and the passes
        that windows may need ahead.

        Raises:
            ConfigError: a ``batch.norm`` that looks ahead, without the forward pass.
        """
        if forward is None and self._norms.look_ahead is not None:
            raise ConfigError(
                "batch.norm", self._norm, "runs each micro-batch several times, and this loop's own forward pass is "
                "not known to the engine.",
                "Give it: engine.windows(..., forward=function of (model, batch) that returns loss_sum and items); or "
                "use batch.norm=sync.",
            )  # fmt: skip
        self.forward, self.items = forward, items
        self._functions[:] = [each for each in (forward, items) if each is not None]
        self.passes = [
            calibration._replace(prepare=functools.partial(self._calibrate, calibration.prepare)),
            WindowPass(self._counts, self._count_items),
        ]
        if (look_ahead := self._norms.look_ahead) is not None:
            self.passes.append(WindowPass(lambda _: True, functools.partial(self._look_ahead, look_ahead)))
        if self._outputs is not None:
            ahead = functools.partial(self._outputs.look_ahead, run=self._run_copy)
            self.passes.append(WindowPass(lambda count: count > 1, ahead))

    def prepare(self, window: Window) -> Iterator[MicroBatch]:
        """Return the window's micro-batches, after the passes that need all of them before the first one runs.

        Gradients and collectives of passes that the loop ran before it requested the first micro-batch do not count.
        """
        self._parallel.begin_window()
        self._share_buffers()
        if self._outputs is not None:
            self._outputs.begin(window.index)
        if not self.passes:
            return window.micro_batches
        known = self.forward is not None or self.items is not None
        learns = known and window.count > 1 and self._loss.parts is None and not self._loss.several
        self._uncounted = self._preserve() if learns else None
        due = [(each, each.due(window.count)) for each in self.passes]
        self.passes = [each for each, needed in due if needed is not None]
        if not any(needed for _, needed in due):
            return window.micro_batches
        started, ahead = time.perf_counter(), _copies(window.micro_batches)
        self.data_s += time.perf_counter() - started
        for each, needed in due:
            if needed:
                each.prepare(ahead)
        return iter(ahead)

    def _calibrate(self, calibrate: Callable[[list[MicroBatch]], object], ahead: list[MicroBatch]) -> None:
        self.stage = Stage.calibrating  # also after an exception
        calibrate(ahead)
        self.stage = Stage.running
        self.start()
        self.started -= self.data_s

    def _look_ahead(self, look_ahead: Callable[..., None], ahead: list[MicroBatch]) -> None:
        look_ahead(ahead, self._scaled_loss, self._preserve())
        if self._counts(len(ahead)):  # the first passes of a process show that the loss has several terms
            self._count_items(ahead)
            look_ahead(ahead, self._scaled_loss, self._preserve())

    def fetch(self, micro_batches: Iterator[MicroBatch]) -> MicroBatch:
        """Wait for the next micro-batch, and return it."""
        started = time.perf_counter()
        HEARTBEAT.beat(Phase.data, self.handed_out + 1)
        self.notes.append(None)
        self.micro = micro = next(micro_batches)
        self.handed_out, self.notes[-1] = self.handed_out + 1, micro.note
        self.data_s += time.perf_counter() - started
        HEARTBEAT.beat(Phase.computing, self.handed_out)
        return micro

    def _counts(self, count: int) -> bool | None:
        """Return whether the items of the loss's terms must be counted before the next micro-batch of a window of
        ``count``; None for a plain loss."""
        if self._loss.plain:
            return None
        ahead = count > 1 or self._norms.look_ahead is not None  # whose passes need the terms' weights
        return ahead and self._loss.several and self._loss.counted is None

    def _count_items(self, micro_batches: list[MicroBatch]) -> None:
        """Count the items of all micro-batches of the window by ``items``, or by forward passes without gradient, after
        which the state that they can change is restored. All ranks call it.

        Raises:
            TaskError: the terms differ between micro-batches or ranks, a number is no count, or a forward pass has
                changed state that cannot be restored.
            WindowAbandoned: another rank ran out of memory.
        """
        if self.items is not None:
            for micro in micro_batches:
                if micro.samples:
                    self._loss.count(self.items(micro.data))
        else:
            state = self._preserve()
            with torch.no_grad(), self._parallel.meter.unchecked(), self._parallel.evaluation():
                for number, micro in enumerate(micro_batches, 1):
                    HEARTBEAT.beat(Phase.computing, number)
                    self._norms.trial(alone=True)
                    with self._precision.autocast():
                        losses = self.run_unwrapped(micro)
                    self._loss.require_parts(losses)
                    if micro.samples:
                        self._loss.count([loss.items for loss in losses])
            _restore_uncounted(state)
        if not self._loss.share_counts():
            raise oom.WindowAbandoned

    def must_count(self) -> bool:
        """Return whether the micro-batch cannot run backward, because the items of the loss's terms must be counted
        first. The window then starts again.

        Raises:
            EngineMisuse: they cannot be counted.
        """
        assert self.window is not None
        if self._counts(self.window.count):
            if self._uncounted is None:
                raise EngineMisuse(
                    "A loss of several terms needs the number of items of each term in the whole window before its "
                    f"first backward pass, and this window has {self.window.count} micro-batches.\n"
                    "  Pass engine.windows(..., items=function of a batch that returns the number of items of each "
                    "term), or forward=function of (model, batch) that returns the terms; or use batch.accumulation=1."
                )
            self.stage = Stage.restarting
        return self.stage is Stage.restarting

    def count_first(self, micro: MicroBatch, rest: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Count the items of the window, of which ``micro`` has run, and return all of its micro-batches."""
        assert self._uncounted is not None
        self.stage = Stage.running
        ahead = _copies([micro])  # before its memory is restored
        self._parallel.abandon()
        _restore_uncounted(self._uncounted)
        self._uncounted = None  # its copies may be large
        ahead += _copies(rest)
        self.start()
        self.handed_out, self.notes = 0, []
        self._count_items(ahead)
        return iter(ahead)

    def close(self, arrived: float) -> float:
        """End the window and return its duration in seconds.

        On a GPU the optimizer step has only been queued by now, so the time since ``arrived``, when the host had waited
        for the gradients, counts for the next window: duration = queueing of the previous window + (arrived - started).
        """
        self.window, ended = None, time.perf_counter()
        if self._device.type != "cuda":
            return ended - self.started
        before_s, self._queueing_s = self._queueing_s, ended - arrived
        return before_s + arrived - self.started

    def require_closed(self) -> None:
        """Raise EngineMisuse if the loop has left the window without ``engine.step``."""
        if self.window is not None:
            raise EngineMisuse(
                f"A window was left without engine.step(), after {self.handed_out} of its {self.window.count} "
                "micro-batches.\n"
                "  Run all of them and then engine.step(). An exception that leaves a window must end the process: the "
                "ranks may be in the middle of an exchange. Skip bad samples in the dataset or in collate."
            )

    def close_batches(self) -> None:
        """Leave the contexts of the current micro-batch, such as autocast, if the loop has left it."""
        if self._batches is not None:
            self._batches.close()

    @property
    def may_abandon(self) -> bool:
        """True if a window is open that can run again, the same on all ranks."""
        return self._may_abandon and self.window is not None and self.stage is not Stage.calibrating

    def abandoned_for(self, error: BaseException, totals: WindowTotals) -> bool:
        """Return whether ``error``, which the loop's body raised, makes all ranks run the window again because one of
        them is out of memory. Everything that the window has done so far is discarded then."""
        if not isinstance(error, oom.WindowAbandoned):
            if not self.may_abandon or totals.sent or not oom.is_out_of_memory(error):
                return False
            self._report_out_of_memory(totals)
        self.micro = None
        self.close_batches()
        self._parallel.abandon()
        self.restore()
        self.window, self._windows = None, 0
        return True

    def _report_out_of_memory(self, totals: WindowTotals) -> None:
        """Notify the other ranks, in the collective that they will wait in."""
        assert self.window is not None
        self._optimizer_step.weight(None, 0)  # where they wait for this rank's first micro-batch
        if self._counts(self.window.count):
            self._loss.share_counts(out_of_memory=True)
        else:
            totals.send_out_of_memory()
            totals.out_of_memory()

    def restore(self) -> None:
        """Restore the state that passes can change from the start of the window."""
        assert self.saved is not None
        self.saved.restore(
            "a window that is left out or runs again", "Use batch.on_oom=stop and train.on_nonfinite=stop."
        )

    def run(self, forward: Forward, micro: MicroBatch) -> list[Loss]:
        """Run ``forward`` on the unwrapped model and a copy of the micro-batch, and return the terms of its loss;
        training uses the original."""
        return loss_terms.terms_of_forward(self._run_copy(forward, micro))

    def _run_copy(self, forward: Callable[..., Any], micro: MicroBatch) -> Any:
        self.micro = micro
        try:
            return forward(self._parallel.module, copy.deepcopy(micro.data))
        except Exception:
            self.notes = [micro.note]
            raise
        finally:
            self.micro = None

    def run_unwrapped(self, micro: MicroBatch) -> list[Loss]:
        """Run the loop's forward pass on a copy of the micro-batch, with the unwrapped model."""
        assert self.forward is not None
        return self.run(self.forward, micro)

    def _scaled_loss(self, micro: MicroBatch) -> Tensor:
        """Return the scalar of the backward pass of ``micro``, by the unwrapped model, without collectives."""
        with self._precision.autocast():
            losses = self.run_unwrapped(micro)
        weight = self._optimizer_step.weight(losses, micro.samples)
        # while the items of several terms are not counted yet, each term has the same weight
        items = self._loss.counted or [1.0] * len(losses)
        return self._precision.scaled(self._loss.weighted(losses, weight, items))


def _restore_uncounted(state: PreservedState) -> None:
    state.restore(
        "the items of the loss's terms were counted",
        "Give the task a method items(batch) that returns the number of items of each term.",
    )


def _copies(micro_batches: Iterable[MicroBatch]) -> list[MicroBatch]:
    """Return copies of all micro-batches: a collate function may write each of them into the same memory."""
    return [replace(micro, data=copied(micro.data)) for micro in micro_batches]
