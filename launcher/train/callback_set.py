"""Callbacks of a run: their events, and their state in checkpoints.

A callback is an object with any of the methods in docs/guides/callbacks.md. Its events run on every rank, in the order
in which the callbacks are listed. An exception in one of them ends the run, on all ranks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from launcher.errors import CallbackFailed, ConfigError, LauncherError, NotFinite, SiteError
from launcher.plan.callback_plan import AROUND_EVALUATION, EVENTS, METHODS, TARGET, class_arguments
from launcher.plan.run_plan import RunPlan
from launcher.targets import find_target, require_arguments
from launcher.tracebacks import users_frames
from launcher.train.data.randomness import kept_random_state
from launcher.train.optimizers import evaluation_values

# events after which a checkpoint has the random state
_WITHIN_STEPS = ("on_window", "on_step")
# the task's name among those with state, and its methods
TASK = "task"
_STATE = ("state_dict", "load_state_dict")
# between the parts of a tensor's path in a callback's state; parameter names contain dots, and no slashes
_SLASH = "/"
Keys = tuple[str, ...]


class CallbackSet:
    """The callbacks of an engine, in their order, and the state of the task.

    Args:
        task: object whose state is in checkpoints, too, if it has ``state_dict`` and ``load_state_dict``.
        model: model whose parameters and buffers are left out of that state: checkpoints have them anyway.

    Attributes:
        all: the callbacks by name.
        names: of each callback: its class, numbered where there are several of one class.
        changes: by callback, the methods that have changed parameters, learning rates or what is frozen on this rank.
    """

    def __init__(self, callbacks: Sequence[Any], task: object = None, model: nn.Module | None = None) -> None:
        self._task = _StateOfModule(task, model) if isinstance(task, nn.Module) else task
        self.changes: dict[str, list[str]] = {}
        counts, self.all = Counter[str](), dict[str, Any]()
        for callback in callbacks:
            name = type(callback).__name__
            counts[name] += 1
            self.all[f"{name}_{counts[name]}" if counts[name] > 1 else name] = callback
        self.names = list(self.all)
        self._methods = {
            event: [(name, getattr(callback, event)) for name, callback in self.all.items()
                    if callable(getattr(callback, event, None))]
            for event in (*EVENTS, AROUND_EVALUATION)
        }  # fmt: skip
        for name, callback in self.all.items():
            if not any(callable(getattr(callback, method, None)) for method in METHODS):
                raise CallbackFailed(f"Callback {name} has none of the methods {', '.join(METHODS)}.")
        self._started = False

    def call(self, event: str, *arguments: Any) -> None:
        """Call the method ``event`` of each callback that has one.

        Raises:
            CallbackFailed: one of them raises.
        """
        if not self._methods[event]:
            return
        # the random numbers of training must not depend on what a callback draws after a checkpoint was taken
        keeps = event not in _WITHIN_STEPS
        before = _version(arguments[0])
        with kept_random_state(arguments[0].device) if keeps else nullcontext():
            for name, method in self._methods[event]:
                with _named(name, event):
                    method(*arguments)
                if (after := _version(arguments[0])) != before:
                    before, events = after, self.changes.setdefault(name, [])
                    events += [event] * (event not in events)

    def start(self, engine: Any) -> None:
        """Call ``on_start``, once."""
        if not self._started:
            self._started = True
            self.call("on_start", engine)

    @contextmanager
    def around_evaluation(self, engine: Any) -> Iterator[None]:
        """Context manager for an evaluation: the values that the optimizer has for it, then those of all callbacks, the
        first one outermost. Random state is restored at the end."""
        methods = self._methods[AROUND_EVALUATION]
        with ExitStack() as stack:
            if methods:
                stack.enter_context(kept_random_state(engine.device))
            stack.enter_context(evaluation_values(engine.optimizer))
            for name, method in methods:
                stack.enter_context(_guarded(name, method, engine))
            yield

    @property
    def stateful(self) -> dict[str, Any]:
        """Callbacks with state in checkpoints by name, and the task as ``TASK`` if it has some."""
        return {
            name: callback
            for name, callback in (*self.all.items(), (TASK, self._task))
            if all(callable(getattr(callback, method, None)) for method in _STATE)
        }

    def find(self, kind: type[Any]) -> Any:
        """Return the first callback of the class ``kind``; None if there is none."""
        return next((callback for callback in self.all.values() if isinstance(callback, kind)), None)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors by name and path, and all other values by callback, for JSON. All ranks call it.

        Raises:
            CallbackFailed: a value is neither a tensor nor a JSON value, or would be restored under another key.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for name, callback in self.stateful.items():
            with _named(name, "state_dict"):
                state: Any = callback.state_dict()
                require_text_keys(state)
                own = dict(nested_tensors(state))
                if divided := next((key for keys in own for key in keys if _SLASH in key), None):
                    raise ValueError(f"the key {divided!r} of a tensor has a slash, which separates nested keys")
                tensors |= {_SLASH.join((name, *keys)): tensor for keys, tensor in own.items()}
                values[name] = without_tensors(state, own)
                _require_json(values[name])
        return tensors, values

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> str:
        """Pass each callback its state in a checkpoint, and return a message on what does not match; empty if all
        does.

        Args:
            tensors, values: see ``state_dict``.
        """
        stateful = self.stateful
        for name, callback in stateful.items():
            if name not in values:
                continue
            state: dict[str, Any] = json.loads(json.dumps(values[name]))
            for path, tensor in tensors.items():
                of, *keys = path.split(_SLASH)
                if of == name:
                    set_element(state, tuple(keys), tensor)
            with _named(name, "load_state_dict"):
                callback.load_state_dict(state)
        lost = [name for name in values if name not in stateful]
        new = [name for name in stateful if name not in values]
        return "\n".join([
            *(f"The state of {called(name)} in the checkpoint is not used: the run has none." for name in lost),
            *(f"{_capitalised(called(name))} starts without state: the checkpoint has none of it." for name in new),
        ])  # fmt: skip


class _StateOfModule:
    """State of a task that is a module: without the tensors of the model."""

    def __init__(self, task: nn.Module, model: nn.Module | None) -> None:
        self._task, self._model = task, model or nn.Module()

    def state_dict(self) -> dict[str, Any]:
        saved = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        state = self._task.state_dict(keep_vars=True)
        return {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in state.items()
            if id(value) not in saved
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._task.load_state_dict(state, strict=False)


def callbacks_of(plan: RunPlan) -> list[Any]:
    """Construct the callbacks that the plan names.

    Raises:
        ConfigError: one cannot be found, or has no such arguments.
        CallbackFailed: a constructor raises.
    """
    callbacks: list[Any] = []
    for number, entry in enumerate(plan.callbacks):
        key, target = f"callbacks[{number}]", entry[TARGET]
        made = find_target(f"{key}.{TARGET}", target, plan.cluster.import_from)
        with _named(target, "its constructor"):
            callbacks.append(made(**require_arguments(key, target, made, class_arguments(entry))))
    return callbacks


def load_tensors(callbacks: CallbackSet, stored: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """Return tensors into which a checkpoint's state of the callbacks can be loaded: their own where they have one of
    that shape, so that shards keep their layout, otherwise new ones.

    Args:
        stored: shape and dtype of the tensors in the checkpoint, by the names of ``CallbackSet.state_dict``.
    """
    own, _ = callbacks.state_dict()
    return {
        name: own[name] if name in own and _fits(own[name], shape, dtype) else torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in stored.items()
        if name.partition(_SLASH)[0] in callbacks.stateful
    }


def called(name: str) -> str:
    """Return the name of a callback, or of the task, for messages."""
    return "the task" if name == TASK else f"callback {name}"


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _fits(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    # loading converts to the tensor's own dtype: a loss loaded into an integer would lose its fraction
    return tensor.shape == shape and (tensor.dtype == dtype or isinstance(tensor, DTensor))


def require_text_keys(state: object) -> None:
    """Raise TypeError if ``state`` has a key that is no text: JSON would return it as a text, without an error."""
    if isinstance(state, Mapping):
        for key, value in cast("Mapping[object, object]", state).items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is a {type(key).__name__}, and would be restored as a text: use str")
            require_text_keys(value)
    elif isinstance(state, list | tuple):
        for value in cast("Sequence[object]", state):
            require_text_keys(value)


def _require_json(values: Mapping[str, Any], above: str = "") -> None:
    """Raise CallbackFailed, which names the key, if JSON cannot hold a value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _require_json(cast("Mapping[str, Any]", value), f"{above}{key}{_SLASH}")
            continue
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise CallbackFailed(
                f"the value of {above}{key} cannot be saved: {value!r}, of type {type(value).__name__}.\n"
                "  A state is nested dicts, with texts as keys, of tensors, texts, finite numbers, true, false, None, "
                "and lists of these without tensors:\n  use list(...) for a set, float(...) for a number of NumPy."
            ) from None


def nested_tensors(state: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Tensor]]:
    """Yield the tensors in nested dicts with their keys; not those in lists."""
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield (*above, key), value
        elif isinstance(value, Mapping):
            yield from nested_tensors(cast("Mapping[str, Any]", value), (*above, key))


def without_tensors(state: Mapping[str, Any], left_out: Container[Keys], above: Keys = ()) -> dict[str, Any]:
    """Return nested dicts without the tensors with these keys."""
    return {
        key: without_tensors(cast("Mapping[str, Any]", value), left_out, (*above, key))
        if isinstance(value, Mapping)
        else value
        for key, value in state.items()
        if (*above, key) not in left_out
    }


def _version(engine: Any) -> list[Any]:
    """Return numbers that change when a parameter is changed in place, a learning rate is set, or a parameter is
    frozen. A change through ``parameter.data`` is not seen."""
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    return [
        *(parameter._version for parameter in engine.model.parameters()),
        *(rate._version if isinstance(rate, Tensor) else rate for rate in rates),
        len(engine.parallel.frozen),
    ]


@contextmanager
def _named(name: str, event: str) -> Iterator[None]:
    """Raise CallbackFailed, which names the callback, for an exception of the body, also for one that would end this
    process without a message (SystemExit)."""
    try:
        yield
    except (ConfigError, SiteError, NotFinite):
        raise  # it names the key, the place or the reason
    except LauncherError as error:
        raise CallbackFailed(f"{_capitalised(called(name))} failed in {event}: {error}") from error
    except BaseException as error:
        raise CallbackFailed(
            f"{_capitalised(called(name))} failed in {event}: {type(error).__name__}: {error}\n{users_frames(error)}"
        ) from error


@contextmanager
def _guarded(name: str, method: Callable[[Any], AbstractContextManager[object]], engine: Any) -> Iterator[None]:
    """Context manager of one callback, in which only its own exceptions are those of the callback."""
    with _named(name, AROUND_EVALUATION):
        manager = method(engine)
        if not isinstance(manager, AbstractContextManager):
            raise CallbackFailed(
                f"it returned {_kind(manager)}, and must return a context manager: decorate it with "
                "@contextlib.contextmanager and let it yield once."
            )
        manager.__enter__()
    try:
        yield
    finally:
        with _named(name, AROUND_EVALUATION):
            manager.__exit__(None, None, None)


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
