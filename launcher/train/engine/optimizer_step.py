"""Optimizer step at the end of a window: exact mean, clip, update, schedule, counters.

Each backward pass runs on loss_sum / C with a constant C. The strategy sums over the ranks (A = 1) or averages over A
ranks (DDP under ``every``, or with PowerSGD), and this module multiplies the gradients once by C*A/N, with N the
window's number of items. Example: C = 8, N = 16, a sum over the ranks: the factor is 0.5.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.config.schema import OnNonfinite, StrategyKind
from launcher.errors import DataError, EngineMisuse, NotFinite, TaskError
from launcher.loss import Loss
from launcher.plan.optimizer_plan import assign
from launcher.plan.sync_policy import SHARDED
from launcher.quantities import first_names
from launcher.train.engine.build import EngineParts
from launcher.train.engine.oom import is_out_of_memory
from launcher.train.engine.window_totals import ReducedTotals, WindowLoss, WindowTotals, explain_bad_loss
from launcher.train.optimizers import members_of, trained_parameters
from launcher.train.parallel.base import Parallel, local
from launcher.train.parallel.lost_writes import shard_operations
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


@dataclass
class Counters:
    """Counters of a run.

    Attributes:
        steps: optimizer steps taken.
        skipped_steps: windows that were not applied because fp16 overflowed.
        empty_windows: windows that were not applied because they held no item.
        nonfinite_windows: windows that were not applied because their loss or gradient was not finite.
        samples, items: number seen so far, on all ranks of all sites.
        items_in_epoch: the epoch has had an item so far.
        nonfinite_in_a_row: number of latest consecutive windows whose loss or gradient was not finite.
    """

    steps: int = 0
    skipped_steps: int = 0
    empty_windows: int = 0
    nonfinite_windows: int = 0
    samples: int = 0
    items: float = 0
    items_in_epoch: bool = False
    nonfinite_in_a_row: int = 0


class OptimizerStep:
    """Optimizer step of each window: applies its gradient to the parameters; keeps the schedule and the counters.

    Attributes:
        counters: of the windows so far.
        nonfinite: what was not finite in the latest window; None if it was not left out for that.
        schedule: learning rate schedule, of the plan unless the engine was given another.
        follows_plan: ``schedule`` still sets the learning rate; false once the user's own loop has set it.
        gradient_unit: C, which is determined in the first micro-batch; 0 before it.
        lr: learning rate of the first parameter group in the latest window's optimizer step.
    """

    def __init__(self, parts: EngineParts, loss: WindowLoss, schedule: MakeSchedule | None) -> None:
        plan = parts.plan
        self._plan, self._world, self._device = plan, parts.world, parts.device
        self._parallel, self._precision = parts.parallel, parts.precision
        self._norms = None if parts.norms.plain else parts.norms
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
        self.gradient_unit = 0.0
        self.counters, self._empty_in_a_row = Counters(), 0
        self.nonfinite: str | None = None

    def weight(self, losses: Sequence[Loss] | None, samples: int) -> float:
        """Return the factor of a micro-batch's loss in its backward pass: 1/C, or 0 for a stand-in without samples.

        Args:
            losses: the terms; None on a rank that ran out of memory in this micro-batch.
        """
        if not self.gradient_unit or self._loss.parts is None:
            most = self._loss.agree(losses, samples)  # the number of items in a rank's first micro-batch
            if not self.gradient_unit:
                self.gradient_unit = _power_of_two(most * self._accumulation)
        return (samples > 0) / self.gradient_unit

    def change_accumulation(self, accumulation: int) -> None:
        """Run the current window again, in ``accumulation`` micro-batches."""
        self._accumulation = accumulation
        self._loss.forget()
        if not self.counters.items:  # C was estimated from micro-batches of another size
            self.gradient_unit = 0.0

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
            DataError: the window holds no item, and the residue of a compression would be lost.
            NotFinite: the loss is not finite, or the gradient is not, and a smaller loss scale will not help.
        """
        self.nonfinite = None
        counters = self.counters
        self._read_rates()
        if not math.isfinite(agreed.loss_sum):
            self._leave_out_nonfinite(explain_bad_loss(totals, samples, self._world, counters.steps + 1))
            return math.nan
        if not agreed.denominator:
            self._leave_out()
            return math.nan
        factor = self.gradient_unit * self._parallel.averaged_over / agreed.denominator
        norm, clip_norm = agreed.grad_norm * factor, self._plan.train.clip_norm
        if math.isfinite(norm):
            # one pass over the gradients: the exact mean and the clip
            torch._foreach_mul_(
                gradients, factor if clip_norm is None else factor * min(1.0, clip_norm / (norm + 1e-6))
            )
            with nullcontext() if self._stepped else sharded_step(self._optimizer, self._plan.strategy.kind):
                self._precision.step(self._optimizer)
            if not self._stepped and self._plan.strategy.kind is StrategyKind.ddp:
                _require_own_state(self._optimizer, gradients)
            self._stepped = True
            if self.follows_plan:
                self.schedule.step()
            if self._norms is not None:
                self._norms.track()
            counters.steps += 1
            counters.nonfinite_in_a_row = 0
        # a scale of 1 changes nothing: what overflows then is the gradient itself, and no smaller scale will help
        elif (scale := self._precision.scale) is None or scale <= 1:
            self._leave_out_nonfinite(self._explain(norm))
            return norm
        else:
            counters.skipped_steps += 1
        self._parallel.zero_grad()
        if self._precision.scales:
            self._precision.update()
            if not counters.items:
                # the first micro-batch, which C was estimated from, may have had few items, or none
                self.gradient_unit = _power_of_two(agreed.denominator / self._world.size)
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
                f"step {self.counters.steps + 1}: the learning rate was set to {rates[0]:g} outside of the engine, "
                f"which had set {planned[0]:g}. From this step on, the plan's schedule={self._plan.schedule.name} has "
                "no effect.\n  With a schedule of your own, use schedule=constant schedule.warmup_steps=0.",
                flush=True,
            )

    def _leave_out(self) -> None:
        """Skip a window without items, which has no mean: parameters and loss scale stay as they are."""
        compress = self._plan.strategy.compress
        if compress.keeps_residue:
            raise DataError(
                f"The window of step {self.counters.steps + 1} holds no item. With strategy.compress="
                f"{compress.value} it cannot be skipped: the part of earlier gradients that was not "
                "sent yet would be lost.\n"
                "  Remove samples without items from train_data(), or use another strategy.compress."
            )
        self.counters.empty_windows += 1
        self._precision.keep_scale()
        self._parallel.zero_grad()

    def _leave_out_nonfinite(self, error: NotFinite) -> None:
        """Skip a window for which ``error`` would end the run; the loss scale stays as it is."""
        if self._plan.train.on_nonfinite is OnNonfinite.stop:
            raise error
        if self.counters.nonfinite_in_a_row == MAX_NONFINITE_WINDOWS:
            raise NotFinite(
                f"{error}\n  The {MAX_NONFINITE_WINDOWS} windows before it were not finite either, and were skipped "
                "(train.on_nonfinite=skip)."
            )
        self.nonfinite = str(error).splitlines()[0]
        self.counters.nonfinite_windows += 1
        self.counters.nonfinite_in_a_row += 1
        self._precision.keep_scale()
        self._parallel.zero_grad()

    def count(self, agreed: ReducedTotals, epoch: int, *, epoch_over: bool) -> None:
        """Add the window to the counters.

        Raises:
            DataError: a whole epoch, or MAX_EMPTY_WINDOWS windows in a row, held no item.
        """
        counters, sites = self.counters, self._plan.batch.sites
        # all sites have as many samples, and are taken to have as many items
        counters.samples += agreed.samples * sites
        counters.items += agreed.items * sites
        counters.items_in_epoch |= agreed.denominator > 0
        self._empty_in_a_row = 0 if agreed.denominator else self._empty_in_a_row + 1
        if (epoch_over and not counters.items_in_epoch) or self._empty_in_a_row >= MAX_EMPTY_WINDOWS:
            which = f"No window of epoch {epoch + 1}" if epoch_over else f"None of {MAX_EMPTY_WINDOWS} windows in a row"
            raise DataError(
                f"{which} holds an item: the loss cannot be averaged.\n"
                "  Check the data, and the number of items that the loss returns."
            )
        if epoch_over:
            counters.items_in_epoch = False

    def _explain(self, norm: float) -> NotFinite:
        """Return the error for a gradient that is not finite, although the loss is. All ranks call it."""
        gradients = {name: p.grad for name, p in self._parallel.module.named_parameters() if p.grad is not None}
        own = [name for name, gradient in gradients.items() if not torch.isfinite(local(gradient)).all().item()]
        bad = [*dict.fromkeys(name for names in self._world.of_all(own) for name in names)]
        return NotFinite(
            f"The gradient of step {self.counters.steps + 1} has norm {norm}, though its loss is finite: "
            f"{first_names(bad) or 'the norm alone'}.\n"
            "  Nothing was applied. Check for a square root or a logarithm at 0, or try precision=fp32."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "progress": asdict(self.counters),
            "schedule": schedule_state(self.schedule),
            "follows_plan": self.follows_plan,
            "scaler": self._precision.scaler.state_dict(),
            "gradient_unit": self.gradient_unit or None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore_schedule(self.schedule, state["schedule"])
        require_length(self.schedule, self._plan.schedule_steps)
        self.follows_plan = state["follows_plan"]
        if self._precision.scales and state["scaler"]:  # a run that was in another precision has none
            self._precision.load_state_dict(state["scaler"])
        self.gradient_unit = state["gradient_unit"] or 0.0


def _power_of_two(items: float) -> float:
    """Return C for a rank's window of ``items``: close to it, so that fp16 stays in range, and a power of two, so that
    scaling by it is exact."""
    return 2.0 ** round(math.log2(min(max(2.0**-60, items), 2.0**60))) if items > 0 else 1.0


@contextmanager
def sharded_step(optimizer: Optimizer, strategy: StrategyKind) -> Iterator[None]:
    """Context manager of an optimizer's first step, which must be that of whole parameters.

    Raises:
        TaskError: parameters are sharded, and the step fails on them, or reads a number that is of this rank's shard
            only, such as a norm with ``item()``, and does not sum it over the ranks.
    """
    if strategy not in SHARDED:
        yield
        return
    others = [type(each).__name__ for each in members_of(optimizer) if not type(each).__module__.startswith("torch.")]
    reads = _LocalNumbers()
    try:
        if others:
            operations = shard_operations()
            operations.numbers_allowed = True
            with reads:
                yield
            operations.numbers_allowed = reads.found
        else:
            yield
    except Exception as error:
        if is_out_of_memory(error) or (isinstance(error, TaskError) and not _comes_from_step(error, optimizer)):
            raise
        names = ", ".join(type(each).__name__ for each in members_of(optimizer))
        what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise TaskError(_text(names, strategy, f"fails on sharded parameters: {what}")) from error
    if reads.found and not reads.sums:
        why = "reads numbers of sharded tensors (item(), float() or a condition), and gets those of this rank's shard"
        raise TaskError(_text(", ".join(others), strategy, why))


def _comes_from_step(error: Exception, optimizer: Optimizer) -> bool:
    """Return whether the optimizer's own step raised the error, not a hook of the user's before or after it."""
    steps = [inspect.unwrap(type(each).step).__code__ for each in members_of(optimizer)]
    return any(frame.f_code in steps for frame, _ in traceback.walk_tb(error.__traceback__))


def _require_own_state(optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    """Raise TaskError if the first step has kept a gradient itself, whose memory DDP's next window writes."""
    memory = {gradient.untyped_storage()._cdata for gradient in gradients}
    for values in itertools.chain.from_iterable(each.state.values() for each in members_of(optimizer)):
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, Tensor) and value.untyped_storage()._cdata in memory:
                names = ", ".join(type(each).__name__ for each in members_of(optimizer))
                raise TaskError(
                    f"{names} cannot be used with strategy=ddp: its state[{key!r}] is the gradient itself, whose "
                    "memory the next window writes.\n  Let it keep a copy (p.grad.clone()); or use strategy=fsdp."
                )


def _text(names: str, strategy: StrategyKind, why: str) -> str:
    return (
        f"{names} cannot be used with strategy={strategy.value}: its step {why}.\n"
        "  Use strategy=ddp; or another optimizer, such as torch.optim.AdamW."
    )


class _LocalNumbers(TorchDispatchMode):
    """Mode that notes whether numbers of sharded tensors are read, and whether collectives are called beside those of
    DTensor."""

    found = sums = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensor = args[0] if args else None
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(tensor, DTensor):
            self.found |= any(not placement.is_replicate() for placement in tensor.placements)
        self.sums |= func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


class TrainedParameters:
    """Parameters that required a gradient when the strategy and the optimizer were set up, some of them frozen since.

    They are kept by name, because FSDP has other parameter objects in forward and backward passes. A frozen parameter
    still requires a gradient, so that the same collectives run in every window; its gradient is discarded.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel, self._model = parallel, parallel.module
        self._names, self._flags = self._current_names(), self._current_flags()
        self._known = {name for name, _ in self._model.named_parameters()}
        self._compared = False  # a window has shown the names

    @property
    def frozen(self) -> list[str]:
        """Names of the frozen parameters."""
        return sorted(name for name, p in self._model.named_parameters() if p in self._parallel.frozen)

    def freeze(self, match: str) -> list[str]:
        """Freeze the parameters that ``match`` selects, and return their names.

        Raises:
            EngineMisuse: it selects none, or no parameter would be left to train.
        """
        found = self._select("freeze", match)
        if self._parallel.frozen | set(found) == {p for _, p in trained_parameters(self._model)}:
            raise EngineMisuse(f"engine.freeze({match!r}): would leave nothing to train.")
        self._parallel.frozen.update(found)
        return list(found.values())

    def unfreeze(self, match: str) -> list[str]:
        """Train the parameters that ``match`` selects again, and return their names."""
        found = self._select("unfreeze", match)
        self._parallel.frozen.difference_update(found)
        return list(found.values())

    def restore(self, frozen: list[str]) -> None:
        """Freeze exactly the parameters of these names."""
        parameters = dict(self._model.named_parameters())
        self._parallel.frozen = {parameters[name] for name in frozen}

    def _select(self, method: str, match: str) -> dict[nn.Parameter, str]:
        named = trained_parameters(self._model)
        try:
            chosen = assign([(names, p.ndim) for names, p in named], [{"match": match}])
        except re.error as error:
            raise EngineMisuse(
                f"engine.{method}({match!r}): is neither a regular expression nor a number of dimensions: {error}."
            ) from None
        found = {p: names[0] for (names, p), group in zip(named, chosen, strict=True) if group is not None}
        if not found:
            raise EngineMisuse(
                f"engine.{method}({match!r}): matches no parameter that is trained.\n"
                f"  Names: {first_names([names[0] for names, _ in named], 8)}. A parameter that did not require a "
                "gradient when the engine was made stays as it is."
            )
        return found

    def require_same(self) -> None:
        """Raise EngineMisuse if the loop has set ``requires_grad`` of parameters since then, or registered some."""
        if self._compared and self._current_flags() == self._flags:
            return
        self._compared = True
        if late := sorted({name for name, _ in self._model.named_parameters()} - self._known):
            raise EngineMisuse(
                f"Parameters were registered after the engine was made: {first_names(late, 8)}.\n"
                "  The optimizer does not have them, and a resume has no place for them. Create them in the module's "
                "__init__, or,\n  if they are not trained, register them as buffers (register_buffer)."
            )
        if (names := self._current_names()) == self._names:
            return
        changes = {"unfrozen": sorted(names - self._names), "frozen": sorted(self._names - names)}
        shown = "; ".join(f"{change}: {first_names(names, 8)}" for change, names in changes.items() if names)
        raise EngineMisuse(
            f"requires_grad of parameters has changed since the engine was made ({shown}).\n"
            "  The engine synchronises, shards and updates the parameters that were trained at that time. Let all "
            "parameters that\n  are ever trained require a gradient from the start, and use engine.freeze(match) and "
            "engine.unfreeze(match)."
        )

    def _current_names(self) -> set[str]:
        return {name for name, parameter in self._model.named_parameters() if parameter.requires_grad}

    def _current_flags(self) -> list[bool]:
        """Return ``requires_grad`` of all parameters. It runs in each window; names would take ten times as long."""
        flags, modules = list[bool](), [self._model]
        for module in modules:  # it grows
            for parameter in module._parameters.values():
                if parameter is not None:
                    flags.append(parameter.requires_grad)
            modules += filter(None, module._modules.values())
        return flags
