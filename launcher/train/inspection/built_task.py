"""Task, data and model of an inspection, built once for all questions about the task."""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from launcher.errors import TaskError
from launcher.task import Task, build_model, eval_sets, find_class, load_task, seed_everything, seed_for, train_data

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


class BuiltTask:
    """Task of one config, whose parts are built when they are first needed.

    Attributes:
        notes: notes on the data.
        seconds: time that each part took.
        seeded: whether building used the job's seed: another seed may then give another plan.
        in_eval_mode: whether ``model()`` returned a model in eval mode; checks put it into training mode.
    """

    def __init__(self, target: str, params: dict[str, Any], search_path: Sequence[str], seed: int) -> None:
        self._target, self._params, self._search_path, self._seed = target, params, search_path, seed
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}
        self.seeded = self.in_eval_mode = False

    @cached_property
    def task(self) -> Task:
        def load() -> Task:
            return load_task(self._target, self._params, self._search_path, self._seed)

        return self._build("__init__()", "task", load)

    @cached_property
    def data(self) -> Any:
        return self._build("train_data()", "data", lambda: train_data(self.task, self._seed, self.notes))

    @cached_property
    def held_out(self) -> dict[str, Any]:
        return self._build("eval_data()", "data", lambda: eval_sets(self.task, self._seed, self.notes))

    @cached_property
    def model(self) -> nn.Module:
        model = self._build("model()", None, lambda: build_inspected(self.task, self._target, self._seed))
        self.in_eval_mode = not model.training
        return model

    @cached_property
    def flops_per_sample(self) -> float | None:
        """FLOPs of a sample, counted in the task's loss; None if the task has a method for them, or none can be."""
        if callable(getattr(self.task, "flops_per_sample", None)):
            return None
        from launcher.train.measure.flops import flops_per_sample

        with attributes_restored(self.task):
            return flops_per_sample(self.task, self.model, self.data)

    def _build(self, name: str, part: str | None, build: Callable[[], T]) -> T:
        """Return what ``build`` returns, and note how long it took and whether it used the job's seed.

        Args:
            part: see ``seed_for``; None: the generators have the job's seed itself.
        """
        import torch

        started, initial_seed = time.monotonic(), torch.initial_seed

        def noted() -> int:
            self.seeded = True
            return initial_seed()

        seed = self._seed if part is None else seed_for(self._seed, part)
        with patch.object(torch, "initial_seed", noted):
            if part == "task":
                seed_everything(seed)
                find_class(self._target, self._search_path)
                self._look_at_generators(seed)
            built = build()
        self.seconds[name] = time.monotonic() - started
        self._look_at_generators(seed)
        return built

    def _look_at_generators(self, seed: int) -> None:
        """Seed the generators as they were, and note whether numbers had been drawn since."""
        before = _generators()
        seed_everything(seed)
        self.seeded |= before != _generators()


def _generators() -> tuple[object, ...]:
    """Return the state of the global generators."""
    import torch

    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    drawn = None if of_numpy is None else (of_numpy[1].tobytes(), *of_numpy[2:])
    return torch.get_rng_state().tolist(), random.getstate(), drawn


@contextmanager
def attributes_restored(task: Task) -> Iterator[None]:
    """Return a context after which the task's attributes are those of before, as one pass of its loss must not change
    another one."""
    attributes = getattr(task, "__dict__", {})
    before = dict(attributes)
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(before)


def build_inspected(task: Task, task_target: str, seed: int) -> nn.Module:
    """Return the model, on the meta device if possible, which takes no memory.

    Raises:
        TaskError: it is no module.
    """
    import torch

    try:
        # load_state_dict and others warn about meta tensors, which the job's model does not have
        with torch.device("meta"), _without_random_values(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build_model(task, seed)
    except Exception:  # a constructor that uses the values of its tensors needs real ones
        model = build_model(task, seed)
    target = f"task._target_={task_target}"
    if not isinstance(model, torch.nn.Module):
        raise TaskError(f"{target}: model() returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _without_random_values() -> AbstractContextManager[object]:
    """Return a mode that skips the random initialisation of meta tensors by nn's layers. Meta tensors have no values,
    but torch imports its compiler for these operators, which takes a second; for other random operators it still
    does."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    draws = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)

    class WithoutRandomValues(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func in draws and args[0].is_meta else func(*args, **(kwargs or {}))

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            """Keep torch from wrapping the method above in a function that imports the compiler (test_imports.py)."""
            return False

    return WithoutRandomValues()
