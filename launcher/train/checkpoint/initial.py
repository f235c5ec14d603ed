"""Initial parameters and buffers of a run from other weights (``checkpoint.init_from``), read shard by shard.

A run that has a checkpoint of its own resumes from that, and does not read these weights again. Values are converted to
the dtype of the parameter. Buffers that the model's state_dict leaves out keep their values. Names are compared without
what torch.compile adds to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.errors import ConfigError, UserError, WrongCheckpoint, did_you_mean
from launcher.plan.initial_weights import KEY, InitialWeights
from launcher.plan.run_plan import RunPlan
from launcher.quantities import first_lines
from launcher.rundir.paths import MANIFEST
from launcher.train.checkpoint.file_format import damages
from launcher.train.checkpoint.weights import READ_ERRORS, StoredTensor, Weights, open_weights
from launcher.train.parallel.base import local, own_region
from launcher.train.world import World

_MAX_SHOWN = 4
# a module's own state, which torch names so
_EXTRA_STATE = "_extra_state"
# part of the names in a module that torch.compile wraps
_COMPILED = "_orig_mod."


def initial_values(plan: RunPlan, world: World) -> InitialValues | None:
    """Return the weights that a run starts with; None if the model's own are used, or if the run has a checkpoint to
    resume from. All ranks call it.

    Raises:
        ConfigError: the ranks have different weights. On all ranks.
    """
    _require_same_source(plan.initial, world)
    if plan.initial is None:
        return None
    saved = plan.checkpoint.enabled and world.rank == 0 and bool(plan.paths.committed_checkpoints())
    return None if world.of_rank_0(saved) else InitialValues(plan.initial, world)


def _require_same_source(source: InitialWeights | None, world: World) -> None:
    """Raise ConfigError unless all ranks start with the same weights: in a loop of the user's own, each rank has
    looked for them by itself."""
    first, *others = world.of_all(source)
    for rank, other in enumerate(others, 1):
        if (first and first.digest) != (other and other.digest):
            texts = [f"{each.text}, digest {each.digest}" if each else "none" for each in (first, other)]
            raise ConfigError(
                KEY, first.path if first else "null",
                f"the ranks have different weights: rank 0 {texts[0]}; rank {rank} {texts[1]}.",
                "Name one checkpoint (.../checkpoints/step_000100) or file, which is the same on all hosts.",
            )  # fmt: skip


class InitialValues:
    """Weights that replace the values of a model. All ranks call its methods.

    Args:
        source: as the run was planned.
    """

    def __init__(self, source: InitialWeights, world: World) -> None:
        self._source, self._world = source, world
        self._weights: Weights | None = None

    def check(self, model: nn.Module) -> set[str]:
        """Check that the weights are intact and fit the model, which may be on the meta device.

        Returns:
            Names of the parameters and buffers that ``fill`` will replace.

        Raises:
            ConfigError: they have changed since the run was planned, are damaged, or do not fit. On all ranks.
        """
        path = Path(self._source.path)
        problem: str | None = None
        try:
            if self._world.local_rank == 0:
                self._source.require_unchanged()
        except UserError as error:
            problem = str(error)
        self._raise_first(problem)
        if (path / MANIFEST).exists():
            try:
                found = damages(self._world, path)
            except WrongCheckpoint as error:  # of another format, or not readable; on all ranks
                raise ConfigError(KEY, path, str(error)) from None
            if found:
                raise ConfigError(KEY, path, f"is damaged: {'; '.join(found)}.", "Use other weights.")
        try:
            self._weights = open_weights(path)
            require_fit(model, self._source, self._weights)
        except UserError as error:
            problem = str(error)
        self._raise_first(problem)
        if self._world.rank == 0:
            print(f"Initial parameters: those of {self._source.text}.", flush=True)
        targets = {id(target) for _, target in model_state(model).named}
        return {name for name, tensor in own_tensors(model).items() if id(tensor) in targets}

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Replace the values of ``model``, which may be sharded: each rank reads its part of each tensor.

        Raises:
            ConfigError: the weights cannot be read, a value is too large for the parameter's dtype, or names of one
                tied parameter have different values. On all ranks.
        """
        assert self._weights is not None
        tensors, others = map(_by_plain_name, (self._weights.tensors, self._weights.others))
        state = model_state(model)
        problem: str | None = None
        try:
            for names, target in state.named:
                problem = problem or self._fill(target, [tensors[name] for name in names if name in tensors])
            for name in state.extra:
                if (stored := (tensors | others).get(plain_name(name))) is not None:
                    problem = problem or self._load_extra(model, name, self._weights.read(stored))
        except READ_ERRORS as error:
            problem = f"{KEY}={self._source.path}: cannot be read: {type(error).__name__}: {error}."
        self._raise_first(problem)

    def _load_extra(self, model: nn.Module, name: str, value: Any) -> str | None:
        """Give a module its extra state. Return a message if it does not take that."""
        try:
            model.load_state_dict({name: value}, strict=False)
        except Exception as error:  # of the user's set_extra_state
            return (
                f"{KEY}={self._source.path}: the model does not take the {name} that is there: {type(error).__name__}: "
                f"{str(error).rstrip('.')}.\n  Use weights of the same model, or let set_extra_state() take this, too."
            )
        return None

    def _fill(self, target: Tensor, names: Sequence[str]) -> str | None:
        """Replace the values of one parameter or buffer. Return a message if its names have different ones, or if they
        are too large."""
        assert self._weights is not None
        region = own_region(target) if isinstance(target, DTensor) else None
        value, own = self._weights.read(names[0], region), local(target).detach()
        converted = value.to(own.dtype)
        if overflows(value, converted):
            return (
                f"{KEY}={self._source.path}: {names[0]} is in {value.dtype} there, and has values that are infinite in "
                f"the model's {own.dtype}.\n  Use another dtype for it in model(), such as bfloat16."
            )
        own.copy_(converted)
        for name in names[1:]:
            if not torch.equal(value, self._weights.read(name, region)):
                return (
                    f"{KEY}={self._source.path}: {names[0]} and {name} are one parameter of the model, and two with "
                    "different values there.\n  Use weights of a model that ties them, too, or do not tie them."
                )
        return None

    def _raise_first(self, problem: str | None) -> None:
        """Raise the problem of the first rank that has one, on all ranks."""
        for rank, text in enumerate(self._world.of_all(problem)):
            if text is not None:
                raise UserError(f"{text}\n  On rank {rank}." if rank else text)


def require_fit(model: nn.Module, source: InitialWeights, weights: Weights | None = None) -> None:
    """Check that names and shapes of the weights are those of the model's parameters and persistent buffers.

    Args:
        weights: opened already; None: they are opened here.

    Raises:
        ConfigError: they are not; the message has the nearest names.
    """
    weights = weights or open_weights(Path(source.path))
    state = model_state(model)
    problems = misfits(state, weights.tensors, weights.others)
    problem = "is in the model's state_dict, and is neither a parameter nor a buffer: its value would not be replaced"
    problems += first_lines([f"{name} {problem}" for name in state.others], _MAX_SHOWN)
    pairs = _pairs(state, weights.tensors)
    problems += first_lines([line for pair in pairs if (line := _unconvertible(*pair)) is not None], _MAX_SHOWN)
    if problems:
        raise ConfigError(
            KEY, source.path, "its weights do not fit the model:\n  " + "\n  ".join(problems),
            "Use weights of the same model, or let model() return the model that they are of.",
        )  # fmt: skip


def misfits(state: ModelState, tensors: Mapping[str, StoredTensor], others: Iterable[str] = ()) -> list[str]:
    """Return a line for each of the first names and shapes of stored tensors that are not those of a model.

    Args:
        others: stored names of values that are no tensors.
    """
    values = _by_plain_name(tensors)
    present = values | _by_plain_name(others)
    extra = {plain_name(name): required for name, required in state.extra.items()}
    known = {name for names, _ in state.named for name in names} | {*extra, *map(plain_name, state.others)}
    missing = [names[0] for names, _ in state.named if present.keys().isdisjoint(names)]
    missing += [name for name, required in extra.items() if required and name not in present]
    unexpected = [name for name in present if name not in known]
    lines = _with_nearest(missing, unexpected, "is not among them")
    lines += _with_nearest(unexpected, missing, "is not in the model")
    changed = [
        f"{names[0]} is a tensor on one side only"
        for names, _ in state.named
        if values.keys().isdisjoint(names) and names[0] not in missing
    ]
    changed += [
        f"{name} has the shape {list(there.shape)} there, and {list(tensor.shape)} in the model"
        for name, tensor, there in _pairs(state, tensors)
        if tuple(tensor.shape) != there.shape
    ]
    return lines + first_lines(changed, _MAX_SHOWN)


def _pairs(state: ModelState, tensors: Mapping[str, StoredTensor]) -> list[tuple[str, Tensor, StoredTensor]]:
    stored = _by_plain_name(tensors)
    return [(name, own, tensors[stored[name]]) for names, own in state.named for name in names if name in stored]


def _with_nearest(names: Sequence[str], candidates: Sequence[str], problem: str) -> list[str]:
    lines = [f"{name} {problem}" for name in names]
    for number, name in enumerate(names[:_MAX_SHOWN]):
        if near := did_you_mean(name, candidates).removeprefix("did you mean ").removesuffix("? "):
            lines[number] += f"; the nearest name is {near}"
    return first_lines(lines, _MAX_SHOWN)


def _unconvertible(name: str, tensor: Tensor, stored: StoredTensor) -> str | None:
    narrows = not torch.can_cast(stored.dtype, tensor.dtype)
    if _is_integer(stored.dtype) and _is_integer(tensor.dtype):
        there, here = torch.iinfo(stored.dtype), torch.iinfo(tensor.dtype)
        narrows = here.max < there.max or here.min > there.min
    if narrows:
        return f"{name} is in {stored.dtype} there, which cannot be converted to the model's {tensor.dtype}"
    return None


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def overflows(value: Tensor, converted: Tensor) -> bool:
    """Return True if a finite number of ``value`` is not finite in ``converted``, its conversion to another dtype."""
    if value.dtype == converted.dtype or not converted.dtype.is_floating_point:
        return False
    readable = converted if converted.dtype.itemsize > 1 else converted.float()  # few operators know 8-bit formats
    bad = ~torch.isfinite(readable)
    if not bad.any():
        return False
    return bool(torch.isfinite(value if value.dtype.itemsize > 1 else value.float())[bad].any())


@dataclass(frozen=True)
class ModelState:
    """Contents of a model's state_dict.

    Attributes:
        named: each parameter and persistent buffer, once, with all its names, as ``plain_name`` gives them.
        extra: names of the values that modules return from ``get_extra_state``. False: it is None, and other weights
            may lack it.
        others: names of values of hooks that are none of these.
    """

    named: list[tuple[list[str], Tensor]]
    extra: dict[str, bool]
    others: list[str]


def model_state(model: nn.Module) -> ModelState:
    """Return what is in the state_dict of ``model``, in which a hook may have replaced a parameter by a copy."""
    own = own_tensors(model)
    known = {id(tensor) for tensor in own.values()}
    groups: dict[int, tuple[list[str], Tensor]] = {}
    extra, others = dict[str, bool](), list[str]()
    for name, value in model.state_dict(keep_vars=True).items():
        target = value if id(value) in known else own.get(name)
        if target is not None:
            groups.setdefault(id(target), ([], target))[0].append(plain_name(name))
        elif name.rpartition(".")[2] == _EXTRA_STATE:
            extra[name] = value is not None
        else:
            others.append(name)
    return ModelState(list(groups.values()), extra, others)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by all of their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def plain_name(name: str) -> str:
    """Return the name of a tensor in a model that is not compiled."""
    return name.replace(_COMPILED, "")


def _by_plain_name(names: Iterable[str]) -> dict[str, str]:
    return {plain_name(name): name for name in names}
