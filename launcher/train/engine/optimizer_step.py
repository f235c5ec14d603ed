"""Optimizer step at the end of a window: exact mean, clip, update, schedule, counters.

Each backward pass runs on loss_sum / C with a constant C, the strategy averages over W ranks (DDP) or sums (FSDP:
W = 1), and this module multiplies the gradients once by C*W/N, with N the window's number of items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from launcher.config.schema import Compress, OnNonfinite
from launcher.errors import DataError, NotFinite
from launcher.loss import Loss
from launcher.quantities import first_names
from launcher.train.engine.build import EngineParts
from launcher.train.engine.sharded_step import sharded_step
from launcher.train.engine.window_loss import WindowLoss
from launcher.train.engine.window_totals import ReducedTotals, WindowTotals, explain_bad_loss
from launcher.train.parallel.base import local
from launcher.train.schedules import (
    MakeSchedule,
    build_schedule,
    require_length,
    require_schedule,
    restore_schedule,
    schedule_state,
)

# most windows without items in a row; a stream may have no end
MAX_EMPTY_WINDOWS = 1000
# most windows in a row whose loss or gradient is not finite, with train.on_nonfinite=skip
MAX_NONFINITE_WINDOWS = 20
_PROGRESS = ("steps", "skipped_steps", "empty_windows", "nonfinite_windows", "samples", "items")


class OptimizerStep:
    """Optimizer step of each window: applies its gradient to the parameters; keeps the schedule and the counters.

    Attributes:
        steps: optimizer steps taken.
        skipped_steps: windows that were not applied because fp16 overflowed.
        empty_windows: windows that were not applied because they held no item.
        nonfinite_windows: windows that were not applied because their loss or gradient was not finite.
        nonfinite: what was not finite in the latest window; None if it was not left out for that.
        samples, items: number seen so far, on all ranks of all sites.
        schedule: learning rate schedule, of the plan unless the engine was given another.
        follows_plan: ``schedule`` still sets the learning rate; false once the user's own loop has set it.
        lr: learning rate of the first parameter group in the latest window's optimizer step.
    """

    def __init__(self, parts: EngineParts, loss: WindowLoss, schedule: MakeSchedule | None) -> None:
        plan = parts.plan
        self._plan, self._world, self._device = plan, parts.world, parts.device
        self._parallel, self._precision, self._norms = parts.parallel, parts.precision, parts.norms
        self._optimizer = optimizer = parts.optimizer
        self._loss = loss
        self._accumulation = plan.batch.accumulation
        if schedule is None:
            self.schedule = build_schedule(optimizer, plan.schedule, plan.schedule_steps)
        else:
            self.schedule = require_schedule(
                schedule(optimizer, plan.schedule_steps), "schedule(optimizer, steps)", optimizer
            )
        require_length(self.schedule, plan.schedule_steps)
        self.follows_plan = True
        self.lr = float(self.schedule.get_last_lr()[0])
        self._stepped = False  # by this process
        self._divisor: float | None = None
        self._items_in_epoch = False  # the epoch has had an item so far
        self._empty_in_a_row = self._nonfinite_in_a_row = 0
        self.nonfinite: str | None = None
        self.steps = self.samples = 0
        self.items: float = 0
        self.skipped_steps = self.empty_windows = self.nonfinite_windows = 0

    @property
    def divisor(self) -> float:
        """C, which is determined in the first micro-batch."""
        assert self._divisor is not None
        return self._divisor

    @property
    def scale(self) -> float | None:
        """Loss scale of fp16; None in other precisions."""
        return self._precision.scaler.get_scale() if self._precision.scales else None

    def weight(self, losses: Sequence[Loss] | None, samples: int) -> float:
        """Return the factor of a micro-batch's loss in its backward pass: 1/C, or 0 for a stand-in without samples.

        Args:
            losses: the terms; None on a rank that ran out of memory in this micro-batch.
        """
        if self._divisor is None or self._loss.parts is None:
            most = self._loss.agree(losses, samples)  # the number of items in a rank's first micro-batch
            if self._divisor is None:
                self._divisor = _power_of_two(most * self._accumulation)
        return (samples > 0) / self._divisor

    def change_accumulation(self, accumulation: int) -> None:
        """Run the current window again, in ``accumulation`` micro-batches."""
        self._accumulation = accumulation
        self._loss.forget()
        if not self.items:  # C was estimated from micro-batches of another size
            self._divisor = None

    def apply(
        self, gradients: list[Tensor], agreed: ReducedTotals, totals: WindowTotals, samples: Callable[[int], str]
    ) -> float:
        """Take the window's step, unless fp16 overflowed, the window holds no item, or it is not finite and
        train.on_nonfinite=skip.

        Args:
            samples: returns the text on the samples of a micro-batch, by its number from 1.

        Returns:
            The norm of the mean gradient before the clip; not finite if no step was taken.

        Raises:
            DataError: the window holds no item, and PowerSGD's residue would be lost.
            NotFinite: the loss is not finite, or the gradient is not, and a smaller loss scale will not help.
        """
        self.nonfinite = None
        self._read_rates()
        if not math.isfinite(agreed.loss_sum):
            self._leave_out_nonfinite(explain_bad_loss(totals, samples, self._world, self.steps + 1))
            return math.nan
        if not agreed.divisor:
            self._leave_out()
            return math.nan
        factor = self.divisor * self._parallel.averaged_over / agreed.divisor
        norm, clip_norm = agreed.grad_norm * factor, self._plan.train.clip_norm
        scale = self.scale
        if math.isfinite(norm):
            # one pass over the gradients: the exact mean and the clip
            torch._foreach_mul_(
                gradients, factor if clip_norm is None else factor * min(1.0, clip_norm / (norm + 1e-6))
            )
            with nullcontext() if self._stepped else sharded_step(self._optimizer, self._plan.strategy.kind):
                self._precision.step(self._optimizer)
            self._stepped = True
            if self.follows_plan:
                self.schedule.step()
            self._norms.track()
            self.steps += 1
            self._nonfinite_in_a_row = 0
        # a scale of 1 changes nothing: what overflows then is the gradient itself, and no smaller scale will help
        elif scale is None or scale <= 1:
            self._leave_out_nonfinite(self._explain(norm))
            return norm
        else:
            self.skipped_steps += 1
        self._precision.update()
        self._parallel.zero_grad()
        if self._precision.scales and not self.items:
            # the first micro-batch, which C was estimated from, may have had few items, or none
            self._divisor = _power_of_two(agreed.divisor / self._world.size)
        return norm

    def _read_rates(self) -> None:
        """Read the learning rates of this step. If they are not the plan's, the user's own schedule has set them, and
        the plan's schedule is not applied any more: a schedule that multiplies the present rate would otherwise
        multiply the plan's."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self.lr, planned = rates[0], [float(rate) for rate in self.schedule.get_last_lr()]
        if not self.follows_plan or rates == planned:
            return
        self.follows_plan = False
        if self._world.rank == 0:
            print(
                f"step {self.steps + 1}: the learning rate was set to {rates[0]:g} outside of the engine, which had "
                f"set {planned[0]:g}. From this step on, the plan's schedule={self._plan.schedule.name} has no "
                "effect.\n  With a schedule of your own, use schedule=constant schedule.warmup_steps=0.",
                flush=True,
            )

    def _leave_out(self) -> None:
        """Skip a window without items, which has no mean: parameters and loss scale stay as they are."""
        if self._plan.strategy.compress is Compress.powersgd:
            raise DataError(
                f"The window of step {self.steps + 1} holds no item. With strategy.compress=powersgd it cannot be "
                "skipped: the part of earlier gradients that was not sent yet would be lost.\n"
                "  Remove samples without items from train_data(), or use another strategy.compress."
            )
        self.empty_windows += 1
        self._precision.keep_scale()
        self._parallel.zero_grad()

    def _leave_out_nonfinite(self, error: NotFinite) -> None:
        """Skip a window for which ``error`` would end the run; the loss scale stays as it is."""
        if self._plan.train.on_nonfinite is OnNonfinite.stop:
            raise error
        if self._nonfinite_in_a_row == MAX_NONFINITE_WINDOWS:
            raise NotFinite(
                f"{error}\n  The {MAX_NONFINITE_WINDOWS} windows before it were not finite either, and were skipped "
                "(train.on_nonfinite=skip)."
            )
        self.nonfinite = str(error).splitlines()[0]
        self.nonfinite_windows += 1
        self._nonfinite_in_a_row += 1
        self._precision.keep_scale()
        self._parallel.zero_grad()

    def count(self, agreed: ReducedTotals, epoch: int, *, epoch_over: bool) -> None:
        """Add the window to the counters.

        Raises:
            DataError: a whole epoch, or MAX_EMPTY_WINDOWS windows in a row, held no item.
        """
        sites = self._plan.batch.sites  # all have as many samples, and are taken to have as many items
        self.samples += agreed.samples * sites
        self.items += agreed.items * sites
        self._items_in_epoch |= agreed.divisor > 0
        self._empty_in_a_row = 0 if agreed.divisor else self._empty_in_a_row + 1
        if (epoch_over and not self._items_in_epoch) or self._empty_in_a_row >= MAX_EMPTY_WINDOWS:
            which = f"No window of epoch {epoch + 1}" if epoch_over else f"None of {MAX_EMPTY_WINDOWS} windows in a row"
            raise DataError(
                f"{which} holds an item: the loss cannot be averaged.\n"
                "  Check the data, and the number of items that the loss returns."
            )
        if epoch_over:
            self._items_in_epoch = False

    def _explain(self, norm: float) -> NotFinite:
        """Return the error for a gradient that is not finite, although the loss is. All ranks call it."""
        gradients = {name: p.grad for name, p in self._parallel.module.named_parameters() if p.grad is not None}
        own = [name for name, gradient in gradients.items() if not torch.isfinite(local(gradient)).all().item()]
        bad = [*dict.fromkeys(name for names in self._world.of_all(own) for name in names)]
        return NotFinite(
            f"The gradient of step {self.steps + 1} has norm {norm}, though its loss is finite: "
            f"{first_names(bad) or 'the norm alone'}.\n"
            "  Nothing was applied. Check for a square root or a logarithm at 0, or try precision=fp32."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "progress": {name: getattr(self, name) for name in _PROGRESS},
            "schedule": schedule_state(self.schedule),
            "follows_plan": self.follows_plan,
            "scaler": self._precision.scaler.state_dict(),
            "divisor": self._divisor,
            "items_in_epoch": self._items_in_epoch,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in _PROGRESS:
            setattr(self, name, state["progress"].get(name, 0))
        restore_schedule(self.schedule, state["schedule"])
        require_length(self.schedule, self._plan.schedule_steps)
        self.follows_plan = state.get("follows_plan", True)
        if self._precision.scales and state["scaler"]:  # a run that was in another precision has none
            self._precision.scaler.load_state_dict(state["scaler"])
        self._divisor = state["divisor"]
        self._items_in_epoch = state["items_in_epoch"]
        self._nonfinite_in_a_row = state.get("nonfinite_in_a_row", 0)


def _power_of_two(items: float) -> float:
    """Return C for a rank's window of ``items``: close to it, so that fp16 stays in range, and a power of two, so that
    scaling by it is exact."""
    return 2.0 ** round(math.log2(min(max(2.0**-60, items), 2.0**60))) if items > 0 else 1.0
