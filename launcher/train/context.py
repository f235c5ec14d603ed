"""Context of the user's code that an engine runs: rank, device, step, epoch, evaluation, and scalars to be recorded.

``launcher.current()`` returns it in a task's ``loss``, in a model's forward pass, in a callback and in the user's own
loop. It is a snapshot: request it where it is needed.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.errors import EngineMisuse

# scalars of the user's code are recorded under this prefix, which no metric of the launcher has
PREFIX = "task/"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]*")
Scalar = float | Tensor


@dataclass(frozen=True, kw_only=True)
class Context:
    """Position of the calling code in a job.

    Attributes:
        rank, world_size: this process, and the number of ranks.
        device: device of this rank.
        seed: the job's seed (train.seed), the same on all ranks.
        step: the optimizer step that is being computed, from 1; between two windows, the last one taken.
        epoch: from 0.
        evaluating: held-out data is being evaluated.
        eval_set: name of the evaluation set; None if the task has one set without a name, and in training.
    """

    rank: int
    world_size: int
    device: torch.device
    seed: int
    step: int
    epoch: int
    evaluating: bool
    eval_set: str | None
    _scalars: dict[str, Scalar] = field(repr=False, compare=False)

    def log(self, name: str, value: Scalar) -> None:
        """Record a scalar of this rank as ``task/NAME``, or as ``task/eval/NAME`` in an evaluation.

        The record has the newest value of rank 0 at each recorded step. Other ranks' values are ignored, so that
        logging needs no communication; metrics that a task's loss returns are averaged over all ranks and the whole
        window. A tensor on a GPU is read when the step is recorded, without a wait at the call.

        Raises:
            EngineMisuse: the name is not made of letters, digits and _ . / -, or the value is not one real number.
        """
        if self.rank:
            return
        if not _NAME.fullmatch(name):
            raise EngineMisuse(
                f"launcher.current().log({name!r}, ...): a name is made of letters, digits, spaces and _ . / -"
            )
        if isinstance(value, Tensor):
            if value.numel() != 1 or value.is_complex():
                raise EngineMisuse(
                    f"launcher.current().log({name!r}, ...): the value is a tensor of shape {list(value.shape)} and "
                    f"{value.dtype}, and must be one real number.\n  Use its mean() or sum()."
                )
            value = value.detach().clone()  # the caller may change it before it is read
        else:
            try:
                value = float(value)
            except (TypeError, ValueError):
                raise EngineMisuse(
                    f"launcher.current().log({name!r}, ...): the value is a {type(value).__name__}, and must be one "
                    "real number."
                ) from None
        within = "" if not self.evaluating else f"eval/{self.eval_set}/" if self.eval_set else "eval/"
        self._scalars[f"{PREFIX}{within}{name}"] = value


class ContextSource:
    """Source of the contexts of one engine, or of user code that runs without one, such as a reference for
    `launch verify`.

    Args:
        progress: function that returns (step, epoch).
    """

    def __init__(
        self,
        device: torch.device,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        progress: Callable[[], tuple[int, int]] = lambda: (1, 0),
    ) -> None:
        self._rank, self._world_size, self._device, self._seed = rank, world_size, device, seed
        self._progress = progress
        self._evaluating = False
        self._eval_set: str | None = None
        self._scalars: dict[str, Scalar] = {}

    def context(self) -> Context:
        step, epoch = self._progress()
        return Context(
            rank=self._rank, world_size=self._world_size, device=self._device, seed=self._seed, step=step, epoch=epoch,
            evaluating=self._evaluating, eval_set=self._eval_set, _scalars=self._scalars,
        )  # fmt: skip

    def take_scalars(self) -> dict[str, float]:
        """Return the scalars that were logged since the last call, by their names in the record. Waits for the device
        if one of them is there. Empty on every rank but 0."""
        if not self._scalars:
            return {}
        taken = {name: float(value) for name, value in self._scalars.items()}
        self._scalars.clear()
        return taken

    @contextmanager
    def evaluation(self, name: str | None = None) -> Iterator[None]:
        """Context manager for the evaluation of the set ``name``; None: the task's only set."""
        self.activate()
        self._evaluating, self._eval_set = True, name
        try:
            yield
        finally:
            self._evaluating, self._eval_set = False, None

    def activate(self) -> None:
        """Let ``current()`` return this source's context. Of several engines, it is that whose window was opened
        last."""
        global _active, _process
        _active, _process = weakref.ref(self), os.getpid()  # must not keep the engine's memory

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager that activates this source, and the previous one at the end."""
        global _active, _process
        before = _active, _process
        self.activate()
        try:
            yield
        finally:
            _active, _process = before


_active: weakref.ref[ContextSource] | None = None
_process: int | None = None


def current() -> Context:
    """Return the context of the calling code: rank, device, step, epoch, whether this is an evaluation, and ``log``.

    Raises:
        EngineMisuse: no engine runs the calling code.
    """
    source = None if _active is None else _active()
    if source is None:
        raise EngineMisuse(
            "launcher.current() was called where no engine runs.\n"
            "  It works in loss(), in forward passes, in callbacks and in a loop over engine.windows(). The task's "
            "constructor, model(), train_data() and eval_data() also run without a job, to inspect the task."
        )
    if _process != os.getpid():
        raise EngineMisuse(
            "launcher.current() was called in a loader process, which reads ahead of the step.\n"
            "  Call it in loss(), or use train.loader_workers=0, which reads and collates in the step's own process."
        )
    return source.context()
