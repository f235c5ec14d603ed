"""Loss of a micro-batch: sums, and the numbers of items that they are averaged over. No torch at import."""

# pyright: basic

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

from launcher.errors import TaskError
from launcher.targets import load_entry_point, present_entry_points

if TYPE_CHECKING:
    from importlib import metadata

    from torch import Tensor

# name of a metric, or of a term: letters, digits, and any of _ . @ -, with a letter first
METRIC_NAME = re.compile(r"[A-Za-z][\w.@-]*")
# metrics of the launcher's own, as train/NAME or eval/NAME: no term and no metric of a loss has such a name
RESERVED_NAMES = ("loss", "lr", "grad_norm")


@dataclass
class Loss:
    """Loss of one micro-batch, returned by a task; or one term of it, if a list of several is returned.

    Several terms are averaged over their own items each, over the whole window, and then added.

    Args:
        total: sum of the loss over the micro-batch's items, a scalar that requires grad.
        items: number of items (such as target tokens, or samples), or the sum of their weights: an int, a float, or a
            scalar tensor on the same device. 0 if there is none.
        metrics: by name, further sums and the numbers that they are averaged over, as numbers or scalar tensors:
            {"accuracy": (correct, count)}. The same names in every micro-batch; (0, 0) where there is nothing to count.
            They are logged as train/NAME and eval/NAME.
        name: of a term, whose mean is logged as train/loss_NAME and eval/loss_NAME.
        outputs: arguments of ``update`` of the task's ``eval_metrics()``, such as (predictions, targets), or a dict of
            them by name; of one term only. Used in the evaluation only.
    """

    total: Tensor
    items: int | float | Tensor
    metrics: Mapping[str, tuple[float | Tensor, float | Tensor]] = field(default_factory=dict)
    name: str | None = None
    outputs: Any = field(default=None, repr=False)


# registry in which the warnings module stores what it has shown
_SHOWN_WARNINGS: dict[str | tuple[str, type[Warning], int], int] = {}


def _line_of_loss(target: str) -> tuple[str, int]:
    """Return file and first line of the task's ``loss``, which a warning about it shows."""
    module, _, name = target.rpartition(".")
    code = getattr(getattr(getattr(sys.modules.get(module), name, None), "loss", None), "__code__", None)
    return (target, 1) if code is None else (code.co_filename, code.co_firstlineno)


def as_losses(value: Loss | Sequence[Loss] | Tensor, samples: int, target: str) -> list[Loss]:
    """Return the terms of a task's loss: one ``Loss``, or the elements of a list of several. A scalar tensor is taken
    as a mean over samples, with a warning.

    Args:
        value: result of the task's ``loss``.
        samples: number of samples in the micro-batch.
        target: dotted path of the task, for messages.

    Raises:
        TaskError: it is none of these.
    """
    if isinstance(value, Loss):
        return [value]
    from torch import Tensor

    if isinstance(value, Tensor) and value.numel() == 1:
        warnings.warn_explicit(
            f"{target}.loss returned a bare tensor: taken for the mean over the micro-batch's samples. Where the items "
            "are tokens, return launcher.Loss(total=sum over tokens, items=number of tokens) for the exact average.",
            UserWarning,
            *_line_of_loss(target),
            registry=_SHOWN_WARNINGS,
        )
        return [Loss(total=value.reshape(()) * samples, items=samples)]
    if isinstance(value, list | tuple) and value and all(isinstance(term, Loss) for term in cast("Any", value)):
        return list(value)
    raise TaskError(
        f"task._target_={target}: loss() returned {describe_result(value)}.\n"
        "  Return launcher.Loss(total=sum over items, items=how many), a list of several, or a scalar tensor: the mean "
        "over samples."
    )


class LossForm:
    """Form of a task's loss that an installed package adds by the entry point ``launcher.losses``: a function of all
    samples of a window that is no sum over them.

    Args:
        task: it has the method that the entry point is named after.

    Attributes:
        methods: names of further methods, without which a task's loss has not this form.

    Raises:
        TaskError: the task has what belongs to another form, too.
    """

    methods: ClassVar[Sequence[str]] = ()

    def __init__(self, task: Any) -> None:
        self.task = task

    def of_batch(self, model: Callable[..., Any], batch: Any) -> Loss:
        """Return the loss of a batch on its own, without the rest of its window."""
        raise NotImplementedError

    def in_windows(self, parts: Any) -> Any:
        """Return the ``LossOverWindow`` of an engine (launcher/train/engine/window.py), made of its ``EngineParts``."""
        raise NotImplementedError

    def held_out(self, engine: Any, data: Any) -> Any:
        """Return the loss of the held-out data set ``data``: an object with the methods ``add(module, batch, samples)``
        and ``rest()``, which yield the loss and the number of samples of each group of samples that is complete, and of
        the rest. All ranks call them."""
        raise NotImplementedError


@functools.cache
def _points() -> dict[str, metadata.EntryPoint]:
    return present_entry_points("launcher.losses")


def loss_form(task: object) -> LossForm | None:
    """Return the added form of the task's loss; None for a loss that is a sum over samples."""
    for name, point in _points().items():
        if callable(getattr(task, name, None)):
            kind = load_entry_point(point, f"{type(task).__name__}.{name}")
            if all(callable(getattr(task, each, None)) for each in kind.methods):
                return kind(task)
    return None


def loss_of_batch(task: Any, model: Callable[..., Any], batch: Any) -> Loss | Sequence[Loss] | Tensor:
    """Return the task's loss of a batch on its own, without the rest of its window."""
    form = loss_form(task)
    return task.loss(model, batch) if form is None else form.of_batch(model, batch)


def describe_result(value: object) -> str:
    """Return the type of what a task's loss has returned, for messages."""
    if not isinstance(value, list | tuple):
        return f"a {type(value).__name__}"
    if not value:
        return f"an empty {type(value).__name__}"
    kinds = ", ".join(dict.fromkeys(type(element).__name__ for element in value))
    return f"a {type(value).__name__} of {kinds}"
