"""Metrics of a task's ``eval_metrics()``, where sums do not suffice: torchmetrics objects, merged over the ranks.

torchmetrics is imported by the user's code only. Its objects do not communicate here: a rank that has no sample would
have states of another shape than the others, for which torchmetrics waits without end. Instead rank 0 receives the
states of the ranks that have samples, reduces each by its own ``dist_reduce_fx``, and computes. The members of a
MetricCollection are updated one by one: its compute groups would share states between metrics whose states happen to be
equal after the first micro-batch.
"""

from __future__ import annotations

import inspect
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from launcher.errors import DataError, TaskError
from launcher.heartbeat import HEARTBEAT, Wait
from launcher.loss import METRIC_NAME, Loss
from launcher.quantities import count
from launcher.task import Task, eval_metrics
from launcher.train.world import World

_Result = dict[str, float] | DataError | TaskError | None
_REMEDY = (
    "  eval_metrics() returns a torchmetrics Metric, or a MetricCollection or dict of several by name. For a metric of "
    "your own\n  derive from torchmetrics.Metric; sums and counts need none: Loss(..., metrics={name: (sum, count)})."
)


def metrics_by_name(returned: Any) -> dict[str, Any]:
    """Return what ``eval_metrics()`` has returned as metrics by name; a single one has the name of its class.

    Raises:
        TaskError: it is something else, or a name cannot be part of a metric's name.
    """
    if returned is None:
        return {}
    named = callable(getattr(returned, "items", None))
    members: dict[Any, Any] = dict(returned.items()) if named else {type(returned).__name__: returned}
    for name, member in members.items():
        where = f"eval_metrics()[{name!r}]" if named else "eval_metrics()"
        if not _is_metric(member):
            raise TaskError(
                f"{where} is a {type(member).__name__}, whose state cannot be merged over ranks: it is no torchmetrics "
                f"Metric.\n{_REMEDY}"
            )
        if not isinstance(name, str) or not METRIC_NAME.fullmatch(name) or name == "loss":
            raise TaskError(
                f"eval_metrics() has the name {name!r}: a name has letters, digits, and any of _ . @ -, starts with a "
                "letter, and is not loss.\n  It is logged as eval/NAME; prefix= and postfix= are not needed."
            )
    return members


def _parts(metric: Any) -> list[Any]:
    """Return the metric and those that it wraps, in an order that is the same on all ranks."""
    return [part for part in metric.modules() if _is_metric(part)]


def _is_metric(value: Any) -> bool:
    return isinstance(getattr(value, "_reductions", None), dict)


class EvalMetrics:
    """Metrics of one task on one rank, reset between evaluations. Without any it does nothing."""

    def __init__(self, task: Task, seed: int, world: World, device: torch.device) -> None:
        self._members, self._world, self._device = metrics_by_name(eval_metrics(task, seed)), world, device
        for member in self._members.values():
            member.to(device)
        self._all_parts = [part for member in self._members.values() for part in _parts(member)]
        for part in self._all_parts:
            part.distributed_available_fn = _never

    def update(self, losses: Sequence[Loss]) -> None:
        """Update the metrics with the outputs of a micro-batch that has samples.

        Raises:
            TaskError: the loss has no outputs.
        """
        if not self._members:
            return
        given = [loss.outputs for loss in losses if loss.outputs is not None]
        if len(given) != 1:
            raise TaskError(
                f"The task has eval_metrics(), and {count(len(given), 'term')} of its loss with outputs: there must be "
                "one.\n"
                "  Return in the evaluation: Loss(total, items, outputs=(predictions, targets)), the arguments of the "
                "metrics' update(),\n  or a dict of them by name."
            )
        outputs = tree_map(_widened, given[0])
        for member in self._members.values():
            if isinstance(outputs, Mapping):
                member.update(**_accepted(member.update, cast("Mapping[str, Any]", outputs)))
            else:
                member.update(*(outputs if isinstance(outputs, tuple | list) else (outputs,)))

    def compute(self, *, trial: bool = False) -> dict[str, float] | None:
        """Return the metrics over all ranks, and reset them. All ranks call it, with the same result.

        Args:
            trial: there are only a few samples, so that a metric may fail: then return None.

        Raises:
            DataError: a metric could not be computed.
            TaskError: it is not a number.
        """
        if not self._members:
            return {}
        states = [(part.update_count, _on_host(part.metric_state)) for part in self._all_parts]
        with HEARTBEAT.waiting_for(Wait.collective):
            gathered = self._world.to_rank_0(states)
            result = self._world.of_rank_0(None if gathered is None else self._computed(gathered, trial=trial))
        self.reset()
        if isinstance(result, DataError | TaskError):
            raise result
        return result

    def reset(self) -> None:
        for member in self._members.values():
            member.reset()

    def _computed(self, states: list[list[tuple[int, Any]]], *, trial: bool) -> _Result:
        """Return the metrics of all ranks' ``states``, or the error. Runs on rank 0."""
        try:
            for part, of_ranks in zip(self._all_parts, zip(*states, strict=True), strict=True):
                self._merge(part, [state for updates, state in of_ranks if updates])
        except Exception as error:  # torchmetrics' code, or the user's
            return DataError(f"The states of eval_metrics() cannot be merged: {type(error).__name__}: {error}")
        try:
            with warnings.catch_warnings():
                # rank 0 may have had no sample; of a trial, no warning matters
                warnings.filterwarnings("ignore", "" if trial else "The ``compute`` method of metric", UserWarning)
                values = {name: _computed_by(name, member) for name, member in self._members.items()}
            return _flat(values)
        except DataError as error:
            return None if trial else error
        except TaskError as error:
            return error

    def _merge(self, part: Any, states: list[dict[str, Any]]) -> None:
        """Set the states of ``part`` to those of all ranks with samples, as ``torchmetrics.Metric.sync`` does."""
        if not states:
            return
        states = tree_map(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, states)
        for name, reduce in part._reductions.items():
            values = [state[name] for state in states]
            if len(values) == 1:
                setattr(part, name, values[0])
                continue
            if isinstance(values[0], Tensor):
                merged: Any = torch.stack(values)
                setattr(part, name, merged if reduce is None else reduce(merged))
            else:  # as after updates with all samples: compute() concatenates them, and reset() needs a list
                setattr(part, name, [element for value in values for element in value])


def _computed_by(name: str, member: Any) -> Any:
    try:
        return member.compute()
    except Exception as error:
        raise DataError(f"eval_metrics(): compute() of {name} failed: {type(error).__name__}: {error}") from None


def _flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in ``values``: those of a metric that computed a dict have its names.

    Raises:
        TaskError: a value is not a number, or a name occurs twice.
    """
    metrics: dict[str, float] = {}
    for name, value in values.items():
        for key, entry in (value if isinstance(value, Mapping) else {name: value}).items():
            if key in metrics:
                raise TaskError(f"eval_metrics() has the name {key!r} twice.\n  Give each metric a name of its own.")
            if (number := _number(entry)) is None:
                raise TaskError(
                    f"eval_metrics(): compute() of {key} returned {_shape(entry)}, and must return one number.\n"
                    "  Average over classes (average=...), or name each class with torchmetrics' ClasswiseWrapper."
                )
            metrics[key] = number
    return metrics


def _never() -> bool:
    return False


def _widened(leaf: Any) -> Any:
    """Return floating-point tensors in fp32 at least: a sum in bf16, or ranks of its few values, would not be exact."""
    if isinstance(leaf, Tensor):
        leaf = leaf.detach()
        return leaf.float() if leaf.is_floating_point() and leaf.itemsize < 4 else leaf
    return leaf


def _accepted(update: Callable[..., Any], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``outputs`` that ``update`` has a parameter for."""
    parameters = inspect.signature(update).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(outputs)
    return {name: value for name, value in outputs.items() if name in parameters}


def _on_host(state: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, state)


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, numbers.Real) else None


def _shape(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
