"""The protocol a user implements. No torch at module level: the command line names these too."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from launcher.errors import TaskError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

REQUIRED_METHODS = ("model", "train_data", "loss")


@dataclass
class Loss:
    """What a task's loss returns for one micro-batch.

    ``total``: the sum of the loss over the micro-batch's items, a scalar that requires grad. ``items``: how many items
    that is (target tokens, or samples), an int or a scalar tensor on the same device.
    """

    total: Tensor
    items: int | Tensor


class Task(Protocol):
    """What `task._target_` names. No base class is needed.

    Optional, found by name:
        ``collate(samples: list) -> batch``: default, torch's default_collate.
        ``flops_per_sample() -> float``: forward and backward of one sample; gives throughput/mfu on a known GPU.
    """

    def model(self) -> nn.Module: ...
    def train_data(self) -> Dataset[Any]: ...
    def eval_data(self) -> Dataset[Any] | None: ...
    def loss(self, model: Callable[..., Any], batch: Any) -> Loss | Tensor: ...


def load_task(target: str, params: dict[str, Any], search_path: Sequence[str]) -> Task:
    """Import the class named ``target`` and construct it with ``params``.

    Args:
        target: dotted path, "package.module.Class".
        params: keyword arguments of its constructor.
        search_path: directories looked in before Python's own.

    Raises:
        TaskError: no such module, class, parameter or method; the message says what was searched.
    """
    for place in reversed(search_path):
        if place not in sys.path:
            sys.path.insert(0, place)
    cls = _find(target, search_path)
    _check_params(target, cls, params)
    task = cls(**params)
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(task, name, None))]
    if missing:
        raise TaskError(
            f"task._target_={target}: the class has no method {' and no method '.join(missing)}.\n"
            "  A task has model(), train_data(), loss(model, batch), and eval_data() if there is held-out data."
        )
    return cast("Task", task)


def file_of(task: Task) -> Path | None:
    """In which its class is written."""
    file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    return None if file is None else Path(file)


def eval_data(task: Task) -> Dataset[Any] | None:
    """The task's held-out data; None where it has none."""
    return task.eval_data() if callable(getattr(task, "eval_data", None)) else None


def _find(target: str, search_path: Sequence[str]) -> Callable[..., Any]:
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        raise TaskError(f"task._target_={target}: want a dotted path, such as my_tasks.MyTask.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise TaskError(
                f"task._target_={target}: no module {error.name!r}.\n"
                f"  Searched: {', '.join(search_path)}, and the packages installed for {sys.executable}."
            ) from None
        raise
    found = getattr(module, class_name, None)
    if found is None:
        public = [
            name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module_name
        ]
        raise TaskError(
            f"task._target_={target}: {module.__file__} has no {class_name!r}.\n"
            f"  {did_you_mean(class_name, public)}Its classes: {', '.join(public) or 'none'}."
        )
    if not callable(found):
        raise TaskError(f"task._target_={target}: this is a {type(found).__name__}, not a class.")
    return cast("Callable[..., Any]", found)


def _check_params(target: str, cls: Callable[..., Any], params: dict[str, Any]) -> None:
    signature = inspect.signature(cls)
    try:
        signature.bind(**params)
    except TypeError as error:
        known = list(signature.parameters)
        wrong = next((name for name in params if name not in known), "")
        raise TaskError(
            f"task: {target} {error}.\n  {did_you_mean(wrong, known)}Its parameters: {', '.join(known) or 'none'}."
        ) from None
