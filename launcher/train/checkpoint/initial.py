"""Initial parameters and buffers of a run from other weights (``checkpoint.init_from``), read shard by shard.

A run that has a checkpoint of its own resumes from that, and does not read these weights again. Values are converted to
the dtype of the parameter. Buffers that the model's state_dict leaves out keep their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from launcher.errors import ConfigError, UserError, WrongCheckpoint, did_you_mean
from launcher.plan.initial_weights import KEY, InitialWeights
from launcher.plan.run_plan import RunPlan
from launcher.rundir.paths import MANIFEST
from launcher.train.checkpoint.load import damages
from launcher.train.checkpoint.weights import READ_ERRORS, Region, StoredTensor, Weights, open_weights
from launcher.train.parallel.base import local
from launcher.train.parallel.deferred_init import own_shard
from launcher.train.world import World

_MAX_SHOWN = 4


def initial_values(plan: RunPlan, world: World) -> InitialValues | None:
    """Return the weights that a run starts with; None if the model's own are used, or if the run has a checkpoint to
    resume from. All ranks call it."""
    if plan.initial is None:
        return None
    saved = plan.checkpoint.enabled and world.rank == 0 and bool(plan.paths.committed_checkpoints())
    return None if world.of_rank_0(saved) else InitialValues(plan.initial, world)


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
            except WrongCheckpoint as error:  # of a newer format, or not readable; on all ranks
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
        return {name for names, _ in _named(model) for name in names}

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Replace the values of ``model``, which may be sharded: each rank reads its part of each tensor.

        Raises:
            ConfigError: the weights cannot be read, or names of one tied parameter have different values. On all ranks.
        """
        assert self._weights is not None
        problem: str | None = None
        try:
            for names, target in _named(model):
                problem = problem or self._fill(target, [name for name in names if name in self._weights.tensors])
        except READ_ERRORS as error:
            problem = f"{KEY}={self._source.path}: cannot be read: {type(error).__name__}: {error}."
        self._raise_first(problem)

    def _fill(self, target: Tensor, names: Sequence[str]) -> str | None:
        """Replace the values of one parameter or buffer. Return a message if its names have different ones."""
        assert self._weights is not None
        region = region_of(target)
        value = self._weights.read(names[0], region)
        local(target).detach().copy_(value)
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
    problems = _misfits(_named(model), weights)
    if problems:
        raise ConfigError(
            KEY, source.path, "its weights do not fit the model:\n  " + "\n  ".join(problems),
            "Use weights of the same model, or let model() return the model that they are of.",
        )  # fmt: skip


def _misfits(named: Sequence[tuple[Sequence[str], Tensor]], weights: Weights) -> list[str]:
    """Return a line for each of the first differences of each kind."""
    stored = weights.tensors
    known = {name for names, _ in named for name in names}
    missing = [names[0] for names, _ in named if not any(name in stored for name in names)]
    unexpected = [name for name in stored if name not in known]
    lines = _with_nearest(missing, unexpected, "is not among them")
    lines += _with_nearest(unexpected, missing, "is not in the model")
    lines += _shortened([f"{name} is not a tensor, and cannot be read" for name in weights.others])
    pairs = [(name, tensor, stored[name]) for names, tensor in named for name in names if name in stored]
    return lines + _shortened([line for pair in pairs if (line := _misfit(*pair)) is not None])


def _with_nearest(names: Sequence[str], candidates: Sequence[str], problem: str) -> list[str]:
    lines: list[str] = []
    for name in names[:_MAX_SHOWN]:
        near = did_you_mean(name, candidates).removeprefix("did you mean ").removesuffix("? ")
        lines.append(f"{name} {problem}{f'; the nearest name is {near}' if near else ''}")
    return _shortened(lines, len(names))


def _shortened(lines: Sequence[str], total: int | None = None) -> list[str]:
    more = (len(lines) if total is None else total) - _MAX_SHOWN
    return [*lines[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _misfit(name: str, tensor: Tensor, stored: StoredTensor) -> str | None:
    if tuple(tensor.shape) != stored.shape:
        return f"{name} has the shape {list(stored.shape)} there, and {list(tensor.shape)} in the model"
    if not torch.can_cast(stored.dtype, tensor.dtype):
        return f"{name} is in {stored.dtype} there, which cannot be converted to the model's {tensor.dtype}"
    return None


def _named(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return each parameter and persistent buffer, once, with all its names."""
    return grouped(model.state_dict(keep_vars=True))


def grouped(state: Mapping[str, object]) -> list[tuple[list[str], Tensor]]:
    """Return each tensor of a ``state_dict(keep_vars=True)``, once, with all its names."""
    groups: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in _tensors_of(state.items()):
        groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(groups.values())


def _tensors_of(items: Iterable[tuple[str, object]]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in items if isinstance(value, Tensor)]


def region_of(target: Tensor) -> Region | None:
    """Return the region of a sharded tensor that this rank has; None for any other tensor."""
    if not isinstance(target, DTensor):
        return None
    whole = torch.empty(target.shape, device="meta")
    part = own_shard(whole, target)
    if not part.numel():
        return tuple(slice(0, size) for size in part.shape)
    at, region = int(part.storage_offset()), list[slice]()
    for stride, size in zip(whole.stride(), part.shape, strict=True):
        start, at = divmod(at, stride)
        region.append(slice(start, start + size))
    return tuple(region)
