"""State of the optimizers in a checkpoint: named tensors and plain values that any number of ranks can load.

torch's own functions for it drop what an optimizer's ``state_dict`` has beside state and groups, make texts of the keys
of nested dicts, and convert each tensor to the format of its parameter.

The layout is ``state`` (the entries of each parameter by name) and ``param_groups``. Two more keys exist if an
optimizer has values that are neither tensors nor plain: ``others``, these values pickled, with a mark in place of each
tensor; and ``parts``, the tensors, by parameter and number.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_with_path

from launcher.config.schema import LrScaling
from launcher.errors import TaskError, WrongCheckpoint
from launcher.quantities import count, first_names
from launcher.train.checkpoint.file_format import empty_value, entries_under, pickled, unpickled
from launcher.train.engine.engine import Engine
from launcher.train.optimizers import members_of
from launcher.train.schedules import PlanSchedule, base_rates

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
# start of the tuple that stands for a tensor; after it come the tensor's parameter, its number and its device
_MARK = "launcher.tensor"
# in place of a parameter's name, for a tensor that belongs to none
_NO_PARAMETER = "-"
_PLAIN = (bool, int, float, str, type(None))
# parts of names that torch adds for wrappers, and that no checkpoint has
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# options that choose an optimizer's implementation, not its results: the present machine's are kept
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# arguments that schedules other than the plan's may set at each step
_CYCLED = ("lr", "momentum", "betas")

State = dict[str, Any]


def class_names(engine: Engine) -> list[str]:
    """Return the names of the classes of the engine's optimizers."""
    return [type(member).__name__ for member in members_of(engine.optimizer)]


def optimizer_state(engine: Engine) -> State:
    """Return the state of the engine's optimizers. Its tensors are the optimizers' own.

    Raises:
        TaskError: it has a value that a checkpoint could not give back.
    """
    packed = _Packed(_named(engine))
    state, groups, others = dict[str, Any](), list[Any](), list[Any]()
    for member in members_of(engine.optimizer):
        own, place = member.state_dict(), type(member).__name__
        names = _names_of(engine, member)
        beside: dict[str, Any] = {key: packed.add(value, f"{place}: {key}") for key, value in own.items()
                                  if key not in (_STATE, _GROUPS)}  # fmt: skip
        rest: dict[str, Any] = {"beside": beside, _STATE: {}, _GROUPS: {}}
        for key, entries in own.get(_STATE, {}).items():
            name = names.get(key)
            if name is None:
                rest[_STATE][key] = packed.add(entries, f"{place}: state {key!r}")
                continue
            state[name] = {entry: _number(value) for entry, value in entries.items() if _is_plain(entry, value)}
            if complex_ := {entry: value for entry, value in entries.items() if entry not in state[name]}:
                rest[_STATE][key] = packed.add(complex_, f"{place}: state of {name}", name)
        for number, group in enumerate(own.get(_GROUPS, ())):
            plain = {name: _number(value) for name, value in group.items() if _is_plain(name, value, listed=True)}
            groups.append(plain | {_PARAMS: [names[index] for index in group[_PARAMS]]})
            if complex_ := {name: value for name, value in group.items() if name not in groups[-1]}:
                rest[_GROUPS][number] = packed.add(complex_, f"{place}: group {number}")
        others.append(rest)
    extra = {"others": pickled(others), "parts": packed.parts} if any(map(any, map(dict.values, others))) else {}
    return {_STATE: state, _GROUPS: groups, **extra}


def state_to_load(engine: Engine, directory: Path, stored: Metadata, classes: Sequence[str]) -> State:
    """Return what a checkpoint's state of the optimizers is loaded into: its names, with tensors as the optimizers have
    them now.

    Args:
        stored: metadata of the checkpoint.
        classes: those of the optimizers that were saved.

    Raises:
        WrongCheckpoint: the checkpoint has state that the optimizers have no place for; or only a part of a parameter's
            state, so that a changed option needs more of it.
    """
    fresh, parameters = optimizer_state(engine), _named(engine)
    same = list(classes) == class_names(engine)
    found: State = {_STATE: {}, _GROUPS: [dict(group) for group in fresh[_GROUPS]]}
    left: list[str] = []
    for (kind, *path), entry in entries_under(stored, "optimizer"):
        if kind == _GROUPS:
            own = found[_GROUPS][path[0]].get(path[1])
            found[_GROUPS][path[0]].setdefault(path[1], _empty(entry, None, own))
        else:
            parameter = parameters.get(str(path[0])) if path else None
            own = fresh[_STATE].get(path[0], {}).get(path[1]) if kind == _STATE else None
            set_element(found, (kind, *path), _empty(entry, parameter, own))
            if kind == _STATE and (parameter is None or (own is None and not same)):
                left.append(".".join(map(str, path)))
    if left:
        raise WrongCheckpoint(
            f"{directory} has optimizer state that this run's optimizer does not have: {first_names(sorted(left), 4)}."
            "\n  Use the same optimizer and groups, or start a new run."
        )
    for name, entries in found[_STATE].items():
        expected = fresh[_STATE].get(name, {})
        found[_STATE][name] = {entry: entries[entry] for entry in {**expected, **entries} if entry in entries}
        if lacking := [entry for entry in expected if entry not in entries]:
            raise WrongCheckpoint(
                f"{directory} has no {lacking[0]} of {name}, which the optimizer needs as it is configured now.\n"
                "  Leave out the change of optimizer.* that needs it, or start a new run."
            )
    return found


def load_optimizers(engine: Engine, loaded: State) -> None:
    """Restore what ``state_to_load`` returned, after it was filled from the checkpoint."""
    groups = iter(loaded[_GROUPS])
    others = unpickled(loaded["others"]) if "others" in loaded else None
    for number, member in enumerate(members_of(engine.optimizer)):
        rest: dict[str, Any] = {"beside": {}, _STATE: {}, _GROUPS: {}} if others is None else others[number]
        rest = _unpacked(rest, loaded.get("parts", {}))
        names = _names_of(engine, member)
        own = member.state_dict()
        state = {key: dict(loaded[_STATE][name]) for key, name in names.items() if name in loaded[_STATE]}
        for key, entries in rest[_STATE].items():
            state[key] = state.get(key, {}) | entries if key in names else entries
        own_groups = [
            {**next(groups), **rest[_GROUPS].get(index, {}), _PARAMS: group[_PARAMS]}
            for index, group in enumerate(own.get(_GROUPS, ()))
        ]
        whole = {_STATE: state, _GROUPS: own_groups}
        # load_state_dict of a class may need entries that an earlier version did not save
        member.load_state_dict(own | {key: value for key, value in whole.items() if key in own} | rest["beside"])
        for key, parameter in enumerate(p for group in member.param_groups for p in group[_PARAMS]):
            _keep_formats(member.state.get(parameter), state.get(key, {}))


def _keep_formats(entries: Any, loaded: Mapping[Any, Any]) -> None:
    """Undo what torch's ``load_state_dict`` does to a parameter's state: it converts each tensor to the parameter's
    format, integers too, and builds new containers and texts."""
    for entry, value in loaded.items() if isinstance(entries, dict) else ():
        now: Any = entries.get(entry)
        if not isinstance(value, Tensor):
            if entry in entries:
                entries[entry] = value
        elif isinstance(now, Tensor) and type(now) is type(value) and now.dtype != value.dtype:
            entries[entry] = value.to(now.device)


class OptimizerOptions:
    """Arguments and groups of an engine's optimizer before a checkpoint is loaded into it.

    Args:
        groups: parameter groups of the fresh engine's state, with the names of their parameters.
        stored: metadata of the checkpoint.

    Raises:
        WrongCheckpoint: the checkpoint has another number of groups.
    """

    def __init__(self, engine: Engine, directory: Path, groups: Sequence[dict[str, Any]], stored: Metadata) -> None:
        self._engine, self._directory = engine, directory
        self._planned = [dict(group) for group in engine.optimizer.param_groups]
        self._rates = [_plain(rate) for rate in base_rates(engine.schedule)]
        self._members = [set(group["params"]) for group in groups]
        saved = len({path[1] for path, _ in entries_under(stored, "optimizer") if path[0] == _GROUPS})
        if saved != len(groups):
            raise WrongCheckpoint(
                f"{directory} has {count(saved, 'parameter group')}, and the optimizer has {len(groups)}.\n"
                "  Use the same groups, or start a new run."
            )

    @property
    def _forced(self) -> set[str]:
        """Names of the arguments that the user changed with --force."""
        plan = self._engine.plan
        forced = {name for group, _, name in (key.partition(".") for key in plan.forced) if group == "optimizer"}
        resized = "batch.global_size" in plan.forced and plan.optimizer.lr_scaling is not LrScaling.none
        if resized or forced & {"lr_scaling", "reference_batch"}:
            forced |= {"lr", "betas", "eps"}
        return forced

    def require_same_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Check that each parameter is in the group that it was in.

        Args:
            groups: those of the checkpoint, with the names of their parameters.

        Raises:
            WrongCheckpoint: parameters have moved.
        """
        before = {name: number for number, group in enumerate(groups) for name in group["params"]}
        now = {name: number for number, names in enumerate(self._members) for name in names}
        if moved := sorted(name for name in now if before.get(name, now[name]) != now[name]):
            raise WrongCheckpoint(
                f"{self._directory} has {count(len(moved), 'parameter')} in other groups of the optimizer: "
                f"{moved[0]} was in group {before[moved[0]]}, and is in group {now[moved[0]]}"
                f"{'' if len(moved) == 1 else f'; also {first_names(moved[1:])}'}.\n"
                "  Use the same groups in the same order, or start a new run."
            )

    def restore(self, *, scheduled: bool) -> None:
        """Keep the optimizer's arguments from the checkpoint, except for those that the user forced, and set the next
        step's learning rate by the plan's schedule, whose length may have changed. Print which arguments of the
        user's code are therefore not used.

        Args:
            scheduled: the plan's schedule set the run's learning rates; otherwise those of the checkpoint are kept.
        """
        groups, schedule, forced = self._engine.optimizer.param_groups, self._engine.schedule, self._forced
        for group, options in zip(groups, self._planned, strict=True):
            group.update({name: options[name] for name in _IMPLEMENTATION if name in group and name in options})
            changed = options.keys() - {"params", "initial_lr", *_IMPLEMENTATION} if "groups" in forced else forced
            group.update({name: options[name] for name in changed - {"lr"} if name in options})
        if forced & {"lr", "groups"}:
            schedule.base_lrs = [options["initial_lr"] for options in self._planned]
        if scheduled and isinstance(schedule, PlanSchedule):
            schedule.continue_at(self._engine.steps)
        if self._engine.world.rank == 0:
            for line in self._not_used():
                print(line, flush=True)

    def _not_used(self) -> list[str]:
        """Return a line for each argument whose value in the user's code is not that of the checkpoint."""
        engine, schedule = self._engine, self._engine.schedule
        own = isinstance(schedule, PlanSchedule)
        known = set[str]().union(*map(_arguments, members_of(engine.optimizer)))
        ignored = {"lr", *_IMPLEMENTATION, *(() if own else _CYCLED)}
        where = "in a callback's on_start" if engine.plan.task.target else "after engine.resume()"
        lines: list[str] = []
        for number, (group, options) in enumerate(zip(engine.optimizer.param_groups, self._planned, strict=True)):
            place = f"engine.optimizer.param_groups[{number}]"
            pairs = [
                (name, _plain(group[name]), _plain(options[name]), f'{place}["{name}"]')
                for name in sorted(known - ignored)
                if name in group and name in options
            ]
            rate = f"engine.schedule.base_lrs[{number}]" if own else f'{place}["lr"]'
            if rates := base_rates(schedule):
                pairs.append(("lr", _plain(rates[number]), self._rates[number], rate))
            lines += [
                f"{name}={saved!r} of the optimizer's group {number} is that of the checkpoint; {value!r} in the code "
                f"is not used. To change it, set {place} = {value!r} {where}."
                for name, saved, value, place in pairs
                if saved != value
            ]
        return lines


def _arguments(optimizer: Optimizer) -> set[str]:
    """Return the arguments of an optimizer's class. Other entries of a group are what its steps have counted."""
    return optimizer.defaults.keys() & inspect.signature(type(optimizer)).parameters.keys()


def _plain(value: object) -> object:
    """Return a value that can be compared: numbers for tensors, tuples for lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model with their names in checkpoints."""
    for name, parameter in module.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


def _named(engine: Engine) -> dict[str, nn.Parameter]:
    return dict(named_parameters(engine.parallel.module))


def _names_of(engine: Engine, member: Optimizer) -> dict[Any, str]:
    """Return the names of the parameters of one optimizer by their numbers in its ``state_dict``."""
    names = {parameter: name for name, parameter in _named(engine).items()}
    return dict(enumerate(names[parameter] for group in member.param_groups for parameter in group[_PARAMS]))


def _number(value: Any) -> Any:
    """Return a number of NumPy as Python's, which a checkpoint gives back."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


def _is_plain(entry: Any, value: Any, *, listed: bool = False) -> bool:
    """Return whether an entry is stored under its name. ``listed``: lists and tuples of plain values are, too."""
    value = _number(value)
    if listed and type(value) in (list, tuple):
        return isinstance(entry, str) and all(type(each) in _PLAIN for each in value)
    return isinstance(entry, str) and (isinstance(value, Tensor) or type(value) in _PLAIN)


def _empty(entry: object, parameter: Tensor | None, own: object) -> Any:
    """Return a tensor for a stored one, or None for another value.

    Args:
        entry: its metadata.
        parameter: the parameter that it belongs to, whose layout it has if it has the shape.
        own: what the fresh optimizer has in its place.
    """
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(own, Tensor) and own.shape == entry.size:
        return own
    if isinstance(parameter, DTensor) and parameter.shape == entry.size:
        return torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)
    return empty_value(entry, parameter.device if parameter is not None and entry.size else None)


class _Packed:
    """Values in which each tensor is replaced by a mark. ``parts``: the tensors, by parameter and number."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parts: dict[str, dict[str, Tensor]] = {}
        self._parameters, self._numbers = parameters, itertools.count()

    def add(self, value: Any, place: str, parameter: str | None = None) -> Any:
        """Return ``value`` with marks. ``place``: its name in messages. ``parameter``: name of the one it belongs to.

        Raises:
            TaskError: a part of it could not be restored.
        """

        def mark(_: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return _number(leaf)
            of = self._parameters.get(parameter or "")
            if isinstance(leaf, DTensor) and (of is None or of.shape != leaf.shape):
                raise _not_restorable(place, "it has a sharded tensor of another shape than its parameter's")
            number = str(next(self._numbers))
            self.parts.setdefault(parameter or _NO_PARAMETER, {})[number] = leaf
            return _MARK, parameter or _NO_PARAMETER, number, leaf.device.type

        marked = tree_map_with_path(mark, value)
        try:
            pickled(marked)
        except TypeError as error:
            raise _not_restorable(place, str(error).partition("\n")[0]) from error
        return marked


def _not_restorable(place: str, why: str) -> TaskError:
    return TaskError(
        f"The state of the optimizer cannot be restored from a checkpoint ({place}): {why}.\n"
        "  Keep tensors, numbers, texts, and lists, tuples and dicts of them in it only; or train without checkpoints: "
        "checkpoint.enabled=false."
    )


def _unpacked(value: Any, parts: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Return what ``_Packed.add`` was given, with the tensors ``parts``."""
    if type(value) is tuple and value[:1] == (_MARK,):
        _, parameter, number, device = value
        tensor = parts[parameter][number]
        return tensor if isinstance(tensor, DTensor) or tensor.device.type == device else _moved(tensor, device)
    if isinstance(value, dict):
        for key in value:
            value[key] = _unpacked(value[key], parts)
        return value
    if type(value) in (list, tuple):
        return type(value)(_unpacked(each, parts) for each in value)
    return value


def _moved(tensor: Tensor, device: str) -> Tensor:
    return tensor.to(device) if device != "cuda" or torch.cuda.is_available() else tensor
