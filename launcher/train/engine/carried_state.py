"""Check of state that forward passes write and later ones read: it depends on how a window is divided into
micro-batches and over ranks, and a resume loses what no checkpoint has.

In the third window of a run, the first micro-batch runs twice in the same way, and again for each buffer or attribute
that has changed so far, with the value that the first pass has left in it. If the loss is another one, the loss reads
that state. If the value is another one afterwards, it depends on earlier values, as a counter does. A value that each
pass computes from its inputs alone is no state. A value that differs between the two equal passes, such as a time, is
not examined.
Random generators of the user's code are state if a further pass leaves them in another state, unlike one that each pass
seeds. A model and a task without such changes cost no pass. Attributes of optimizers and of callbacks that change
parameters are no part of a pass: they are state if they have changed, and code reads them. What code only collects or
logs is not named.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer
from torch.utils.data import Dataset

from launcher.errors import TaskError, WrongCheckpoint
from launcher.loss import Loss
from launcher.plan.sync_policy import SHARDED
from launcher.quantities import count, first_names
from launcher.train.callback_set import CallbackSet
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import EngineParts
from launcher.train.engine.loss_trial import SAME, forward_pass
from launcher.train.engine.modes import eval_flags
from launcher.train.engine.preserved_state import (
    FOREIGN,
    OF_TORCH,
    SavedAttributes,
    attributes_of,
    generator_state,
    is_iterator,
    is_users_module,
    packages_of,
)
from launcher.train.engine.read_names import names_read
from launcher.train.optimizers import members_of
from launcher.train.parallel.base import local

# window in which the check runs: two optimizer steps have been taken, so that averages of parameters differ from them
EXAMINED_WINDOW = 2
# limits of what is tried, of the elements of a container, and of those of all tensors of a place that are read
MAX_TRIED, MAX_ELEMENTS, MAX_READ = 8, 1000, 2**22
_SUMS = 3  # of _numbers_of for a tensor that was read
CONSTANT = 1e-5  # relative difference of a constant that rounding explains
GRADIENTS = "the parameters' .grad"
Digest = tuple[float, ...]


@dataclass(frozen=True)
class StatePlace:
    """Attribute or buffer that may hold state.

    Attributes:
        saved: checkpoints have it.
    """

    holder: Any
    attribute: str
    saved: bool = False

    def get(self) -> Any:
        return getattr(self.holder, self.attribute, None)

    def set(self, value: Any) -> None:
        held = self.get()
        if isinstance(held, nn.Parameter):
            held.data.copy_(value)
        elif isinstance(self.holder, nn.Module | ModuleType | type):
            setattr(self.holder, self.attribute, value)
        else:
            object.__setattr__(self.holder, self.attribute, value)


@dataclass(frozen=True)
class Found:
    """Result of one rank for one place.

    Attributes:
        evaluated: a pass in eval mode reads it.
        value: after the first pass.
    """

    read: bool
    carried: bool
    evaluated: bool
    value: Digest


class CarriedState:
    """State of model, task, optimizers and callbacks before the first window, to be compared with that of a later one.
    All ranks run the same passes."""

    def __init__(self, parts: EngineParts, schedule: object, callbacks: CallbackSet) -> None:
        self._parts, self._model, self._callbacks = parts, parts.parallel.module, callbacks
        self._known = {id(each): each for each in (*self._model.modules(), *self._model.parameters())}
        self._packages = packages_of([self._model, parts.owner])
        self._optimizers = members_of(parts.optimizer)
        beside = [*getattr(schedule, "lr_lambdas", ())]
        beside += [each for one in self._optimizers for each in vars(type(one)).values() if callable(each)]
        self._variables = self._variables_of([parts.owner, *parts.functions])
        self._variables_beside = {name: place for name, place in self._variables_of(beside).items()
                                  if name not in self._variables}  # fmt: skip
        used = [type(each) for each in (*self._model.modules(), parts.owner, *callbacks.all.values())]
        names = {each.__module__ for kind in used for each in kind.__mro__ if self._follows(each)}
        names |= {each.__module__ for one in self._optimizers for each in type(one).__mro__}
        names |= {getattr(each, "__module__", "torch") for each in (*parts.functions, *beside)}
        self._code = {name for name in names if name and name.partition(".")[0] not in FOREIGN}
        places = self._places() | self._beside()
        self._before = {name: self._digest(place.get()) for name, place in places.items()}
        self._drawn_from = {name: self._generators(place.get()) for name, place in places.items()}
        self._unused = [self._twin(one) for one in self._optimizers]
        self._after_first_step: dict[str, Digest] = {}

    def note_first_step(self) -> None:
        """Note which attributes the first step changes: caches, which a resume fills again, change later no more."""
        self._after_first_step = {name: self._digest(place.get()) for name, place in self._beside().items()}

    @torch.no_grad()
    def examine(self, run: Callable[[MicroBatch], list[Loss]], micro: MicroBatch, micro_batches: int) -> None:
        """Run the passes if something has changed, restore what they change, and print on rank 0 what is not as in one
        process, and what checkpoints do not have.

        Args:
            run: the forward pass of a copy of a micro-batch through the unwrapped model.
            micro_batches: number in the window of this rank.
        """
        world = self._parts.world
        kept = self._parts.preserve()
        places = self._places()
        changed = self._changed(places)
        drawn = self._on_any_rank(
            name
            for name, place in places.items()
            if not (place.saved or name in changed) and self._generators(place.get()) != self._drawn_from.get(name, [])
        )[:MAX_TRIED]
        iterators = self._on_any_rank(
            name
            for name, place in places.items()
            if is_iterator(place.get()) and (place.attribute in kept.names_read or isinstance(place.holder, CellType))
        )
        beside = self._on_any_rank(self._lost_beside())
        names = self._on_any_rank(changed)[:MAX_TRIED] + self._on_any_rank([GRADIENTS] * ("grad" in kept.names_read))
        if not (names or drawn or iterators or beside):
            return
        advanced = list[str]()
        try:
            found = self._found(run, micro, [(name, places.get(name)) for name in names], kept.undo)
            advanced = self._advanced(run, micro, {name: places.get(name) for name in drawn}) if drawn else []
        except Exception:  # training shows the error, unless it is due to the missing graph
            found = None
        finally:
            kept.undo()
        if found is None and self._parts.plan.strategy.kind in SHARDED:
            return  # see try_loss in loss_trial.py
        everyone = [each for each in world.of_all(found) if each is not None]
        divided, evaluated, lost = iterators if micro_batches * world.size > 1 else [], list[str](), [*iterators]
        reads = names_read(self._code) if names else None
        for number, name in enumerate(names if everyone else ()):
            ranks = [each[number] for each in everyone]
            differs = name == GRADIENTS or any(not _alike(each.value, ranks[0].value) for each in ranks)
            if micro_batches > 1 or differs:
                divided += [name] * any(each.read for each in ranks)
                evaluated += [name] * (any(each.evaluated for each in ranks) and name not in divided)
            if not any(each.carried for each in ranks) or name not in places or places[name].saved:
                continue
            if reads is None or any(each.read for each in ranks) or reads.covers(name, places[name].holder):
                lost.append(name)
        lost += beside + self._on_any_rank(advanced)
        if world.rank == 0:
            _print(divided, evaluated, lost, micro_batches, world.size)

    def _on_any_rank(self, names: Iterable[str]) -> list[str]:
        """Return the names of all ranks. All ranks call it, and must run the same passes, though one may have objects
        of its own, such as a logger."""
        return [*dict.fromkeys(itertools.chain.from_iterable(self._parts.world.of_all([*names])))]

    def _variables_of(self, roots: Sequence[object]) -> dict[str, StatePlace]:
        variables = SavedAttributes(self._model, *roots).variables
        return {name: StatePlace(*place) for name, place in variables.items() if id(place[0]) not in self._known}

    def _changed(self, places: Mapping[str, StatePlace]) -> list[str]:
        return [name for name, place in places.items() if self._digest(place.get()) != self._before.get(name)]

    def _beside(self) -> dict[str, StatePlace]:
        """Return by name the attributes of optimizers, and of callbacks without state in checkpoints, and variables of
        optimizers and schedules."""
        several = len(self._optimizers) > 1
        named: dict[str, Any] = {f"optimizer{[number] if several else ''}": one
                                 for number, one in enumerate(self._optimizers)}  # fmt: skip
        stateful = self._callbacks.stateful
        named |= {name: callback for name, callback in self._callbacks.all.items() if name not in stateful}
        return self._variables_beside | {
            f"{name}.{attribute}": StatePlace(one, attribute)
            for name, one in named.items()
            for attribute in attributes_of(one)
            if attribute not in ("state", "param_groups", "defaults", "step", "_opt_called")
        }

    def _lost_beside(self) -> list[str]:
        """Return the names of attributes that have changed, that code reads, and that checkpoints do not have."""
        places, idle = self._beside(), self._callbacks.all.keys() - self._callbacks.changes.keys()
        changed = [
            name
            for name in self._changed(places)
            if name.partition(".")[0] not in idle and not self._is_cache(name, places[name].get())
        ]
        reads = names_read(self._code) if changed else None
        lost = [name for name in changed if reads is None or reads.covers(name, places[name].holder)]
        for one, unused in zip(self._optimizers, self._unused, strict=True):
            if unused is None or not any(places[name].holder is one for name in lost):
                continue
            try:
                unused.load_state_dict(one.state_dict())
            except Exception:  # of the user's methods: the first checkpoint shows it
                continue
            lost = [
                name for name in lost
                if places[name].holder is not one
                or self._digest(getattr(unused, places[name].attribute, None)) != self._digest(places[name].get())
            ]  # fmt: skip
        return lost

    def _is_cache(self, name: str, value: object) -> bool:
        """Return whether a value is a flag, or only the first step has changed it and it is like no parameter, as
        copies of parameters are."""
        shapes = set[torch.Size]()
        if self._digest(value, shapes=shapes) == self._after_first_step.get(name):
            return shapes.isdisjoint(each.shape for p in self._model.parameters() for each in (p, local(p)))
        return isinstance(value, bool)

    def _twin(self, optimizer: Optimizer) -> Optimizer | None:
        """Return a copy of an optimizer with a ``state_dict`` of its own, for the same parameters; None: it cannot be
        copied, or checkpoints have no attributes of it."""
        if type(optimizer).state_dict is Optimizer.state_dict:
            return None
        twin = object.__new__(type(optimizer))
        memo: dict[int, Any] = {id(optimizer): twin, **{id(p): p for p in self._model.parameters()}}
        try:
            vars(twin).update(copy.deepcopy(vars(optimizer), memo))
        except Exception:  # of the user's objects
            return None
        return twin

    def _found(
        self,
        run: Callable[[MicroBatch], list[Loss]],
        micro: MicroBatch,
        places: Sequence[tuple[str, StatePlace | None]],
        undo: Callable[[], object],
    ) -> list[Found]:
        def losses() -> Digest:
            return tuple(float(loss.total) for loss in forward_pass(self._parts, run, micro))

        first = losses()
        values = [self._digest(place.get()) if place else () for _, place in places]
        held = [self._copied(place) for _, place in places]
        undo()
        repeats = _alike(first, losses())
        values_repeat = [place is not None and _alike(self._digest(place.get()), value)
                         for (_, place), value in zip(places, values, strict=True)]  # fmt: skip
        undo()
        found: list[Found] = []
        for (name, place), value, value_repeats, after in zip(places, values, values_repeat, held, strict=True):
            before, now = self._before.get(name, ()), place and place.get()
            written = name == GRADIENTS or self._digest(now) != value
            if isinstance(now, int | float) and len(before) == 1 and not written:
                after = type(now)(before[0])  # a number that other code changes
            if place is not None and after is not None:
                place.set(after)
            other = self._with_gradients(losses) if name == GRADIENTS else losses()
            differs = repeats and not _alike(first, other)
            carried = value_repeats and after is not None and not _alike(self._digest(place and place.get()), value)
            undo()
            evaluated = False
            if place is not None and place.attribute in getattr(place.holder, "_buffers", ()):  # alike on all ranks
                one = self._evaluated(losses)
                undo()
                place.set(after)
                other = self._evaluated(losses)
                evaluated = repeats and carried and not _alike(one, other)
                undo()
            found.append(Found(written and differs, carried or differs, evaluated, value))
        return found

    def _advanced(
        self, run: Callable[[MicroBatch], list[Loss]], micro: MicroBatch, places: dict[str, StatePlace | None]
    ) -> list[str]:
        """Return the names of those places whose random generators a second pass leaves in another state than the first
        one. The caller restores them."""
        states: list[list[list[str]]] = []
        for _ in range(2):
            forward_pass(self._parts, run, micro)
            states.append([self._generators(place and place.get()) for place in places.values()])
        return [name for name, one, other in zip(places, *states, strict=True) if one != other]

    def _evaluated(self, losses: Callable[[], Digest]) -> Digest:
        """Run ``losses`` in eval mode, without calling ``eval``; empty if they fail, as those of a model that returns
        predictions do."""
        try:
            with eval_flags(self._model.modules()):
                return losses()
        except Exception:  # of the user's loss
            return ()

    def _with_gradients(self, losses: Callable[[], Digest]) -> Digest:
        """Run ``losses`` while all trained parameters have a gradient."""
        before = [(p, p.grad) for p in self._model.parameters() if p.requires_grad]
        try:
            for parameter, _ in before:
                parameter.grad = torch.ones_like(parameter)
            return losses()
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient

    def _copied(self, place: StatePlace | None) -> Any:
        """Return a copy of the value, apart from parts of the model; None if it cannot be copied."""
        value = place and place.get()
        try:
            return copy.deepcopy(value, {key: each for key, each in self._known.items() if each is not value})
        except Exception:  # of the user's objects
            return None

    def _places(self) -> dict[str, StatePlace]:
        """Return all places by name: buffers of the model except those of BatchNorm, parameters that forward passes
        change, attributes of the model's parts and of the task, and variables that code names."""
        places: dict[str, StatePlace] = {**self._variables}
        task, changing = self._parts.owner, self._parts.changing.names
        for prefix, part in self._model.named_modules():
            above = f"model.{prefix}." if prefix else "model."
            if not isinstance(part, _BatchNorm):
                places |= {above + name: StatePlace(part, name, saved=True) for name in part._buffers}
            places |= {
                above + name: StatePlace(part, name, saved=True)
                for name in part._parameters
                if f"{prefix}.{name}".lstrip(".") in changing
            }
            saved = type(part).get_extra_state is not nn.Module.get_extra_state
            own = sorted(vars(part).keys() - OF_TORCH - {"training"})
            places |= {above + name: StatePlace(part, name, saved) for name in own}
        if task is not None and id(task) not in self._known:
            saved = callable(getattr(task, "state_dict", None))
            own, buffers = attributes_of(task), dict[str, Any]()
            if isinstance(task, nn.Module):
                kind, buffers = type(task), task._buffers
                own = {**buffers, **{name: own[name] for name in sorted(own.keys() - OF_TORCH - {"training"})}}
                saved = (kind.state_dict, kind.get_extra_state) != (nn.Module.state_dict, nn.Module.get_extra_state)
            places |= {
                f"task.{name}": StatePlace(task, name, saved or name in buffers)
                for name, held in own.items()
                if id(held) not in self._known
            }
        return places

    def _generators(self, value: Any) -> list[str]:
        """Return the states of the random generators in ``value``."""
        states: list[str] = []
        self._digest(value, states)
        return states

    def _digest(self, value: Any, states: list[str] | None = None, shapes: set[torch.Size] | None = None) -> Digest:
        """Return numbers that differ if numbers or tensors in ``value`` do.

        Args:
            states: receives those of random generators.
            shapes: receives those of tensors.
        """
        numbers: list[float] = []
        seen, room = dict[int, object](), MAX_READ
        waiting = deque([value])
        while waiting and len(seen) <= MAX_ELEMENTS:
            each = waiting.popleft()
            match each:
                case bool() | int() | float():
                    numbers.append(each)
                    continue
                case str() | bytes() | None | type() | ModuleType():
                    continue
            if id(each) in seen or (id(each) in self._known and each is not value):
                continue
            seen[id(each)] = each
            numpy: Any = sys.modules.get("numpy")
            match each:
                case Tensor():
                    if shapes is not None:
                        shapes.add(each.shape)
                    numbers += (found := _numbers_of(each, room))
                    room -= each.numel() if len(found) > 2 else 0
                case list() | tuple() | deque() | dict():
                    numbers.append(len(each))
                    if len(each) <= MAX_ELEMENTS:
                        waiting.extend(each.values() if isinstance(each, dict) else each)
                case nn.Module():
                    waiting.extend([*each.parameters(), *each.buffers()])
                    waiting.extend(vars(each)[name] for name in sorted(vars(each).keys() - OF_TORCH))
                case _ if numpy and isinstance(each, numpy.ndarray) and each.dtype.kind in "biuf":
                    copied = numpy.array(each, "float64") if each.size <= room else numpy.zeros(0)
                    numbers += [each.size, *_numbers_of(torch.from_numpy(copied), room)]
                    room -= copied.size
                case _ if (generator := generator_state(each)) is not None:
                    if states is not None:
                        _, state = generator
                        states.append(str(pickle.dumps(state.tolist() if isinstance(state, Tensor) else state)))
                case _ if self._follows(type(each)) and not isinstance(each, Dataset):
                    waiting.extend(attributes_of(each).values())
                case _:
                    pass
        return tuple(numbers)

    def _follows(self, kind: type) -> bool:
        return is_users_module(kind.__module__, self._packages)


class LeftOut:
    """Frozen parameters that the ``state_dict`` of a model leaves out, such as those of a model with adapters.

    Attributes:
        parameters: this rank's part of each, by the name in ``constants_of``.
    """

    def __init__(self, module: nn.Module) -> None:
        frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        try:
            state: Mapping[str, Any] = _state_with_variables(module) if frozen else {}
        except Exception:  # of the user's method; see require_restorable
            state, frozen = {}, {}
        held = {_memory_of(value) for value in state.values()}
        self._frozen = {name: p for name, p in frozen.items() if name not in state and _memory_of(p) not in held}
        self._before = self._digests()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {f"model.{name}": local(parameter).detach() for name, parameter in self._frozen.items()}

    def require_unchanged(self) -> None:
        """Raise TaskError if training has changed one by more than rounding, as of adapters that are added to it and
        subtracted again: a resume would have its initial value."""
        now = self._digests()
        changed = [
            name
            for name, parameter in self._frozen.items()
            if _other_sums(now[name], self._before[name], max(CONSTANT, _rounding(parameter)))
        ]
        if changed:
            raise TaskError(
                f"Training changes {first_names(changed)}, which the model's state_dict() leaves out: a resume would "
                "have initial values.\n  Let state_dict() return them, or train without checkpoints: "
                "checkpoint.enabled=false."
            )

    def require_same(self, different: Sequence[str]) -> None:
        """Raise WrongCheckpoint if one has other values than in the saved run. ``different``: names of constants that
        have."""
        if names := [name for name in different if name.removeprefix("model.") in self._frozen]:
            raise WrongCheckpoint(
                f"Parameters have other values than in the saved run, and no checkpoint has them: {first_names(names)}."
                "\n  Make them alike at each start (with train.seed, or from a file), or let the model's state_dict() "
                "return them."
            )

    def _digests(self) -> dict[str, Digest]:
        return {name: _sums_of_sample(local(parameter.detach())) for name, parameter in self._frozen.items()}


def _state_with_variables(module: nn.Module) -> Mapping[str, Any]:
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:  # a method of the user's without that argument
        return module.state_dict()


def _memory_of(value: object) -> int:
    """Return a number that is alike for a parameter and for what a ``state_dict`` has in its place."""
    data = local(value) if isinstance(value, Tensor) else value
    if isinstance(data, Tensor) and type(data) in (Tensor, nn.Parameter) and data.layout is torch.strided:
        return data.untyped_storage()._cdata
    return id(value)


def _sums_of_sample(data: Tensor) -> Digest:
    """Return sums of at most ``MAX_READ`` elements of a tensor, from all parts of it; empty for a tensor of a special
    kind."""
    if type(data) not in (Tensor, nn.Parameter) or data.layout is not torch.strided or data.is_quantized:
        return ()
    values = torch.view_as_real(data) if data.is_complex() else data
    distance = max(1, math.ceil(values.numel() / MAX_READ))
    while math.gcd(distance, values.numel()) > 1 and distance > 1:  # or some columns would have no element in it
        distance += 1
    return tuple(_numbers_of(values.reshape(-1)[::distance], MAX_READ))


def _rounding(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _other_sums(now: Sequence[float], before: Sequence[float], tolerance: float) -> bool:
    """Return whether sums, the last of which is that of absolute values, differ by more than rounding."""
    return any(abs(a - b) > tolerance * max(now[-1], before[-1]) for a, b in zip(now, before, strict=True))


def constants_of(module: nn.Module, task: object, left_out: LeftOut) -> dict[str, Digest]:
    """Return by name numbers that differ if tensors do which a model or task has from its construction, and which no
    checkpoint has: attributes, buffers with ``persistent=False``, and parameters that ``state_dict`` leaves out."""
    numpy: Any = sys.modules.get("numpy")
    held = {
        f"model.{prefix}.{name}".replace("..", "."): value
        for prefix, part in module.named_modules()
        for names in ({**vars(part), **part._buffers},)
        for name, value in names.items()
        if name not in OF_TORCH and (name not in part._buffers or name in part._non_persistent_buffers_set)
    }
    if not isinstance(task, nn.Module):
        held |= {f"task.{name}": value for name, value in attributes_of(task).items()}
    of_parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    of_parameters -= {p.untyped_storage()._cdata for p in left_out.parameters.values()}
    held |= left_out.parameters
    found: dict[str, Digest] = {}
    for name, value in held.items():
        size = 0
        if numpy and isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
            size, value = value.size, torch.from_numpy(numpy.array(value.reshape(-1)[:MAX_ELEMENTS], "float64"))
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized or value.is_nested:
            continue
        if not value.is_meta and value.untyped_storage()._cdata not in of_parameters:
            _, *sums = _numbers_of(value.reshape(-1)[:MAX_ELEMENTS], MAX_ELEMENTS)
            if len(sums) == _SUMS and all(map(math.isfinite, sums)):
                found[name] = (size or value.numel(), *sums)
    return found


def print_other_constants(before: Mapping[str, Sequence[float]], now: Mapping[str, Digest], left_out: LeftOut) -> None:
    """Print which constants are not those with which a checkpoint was saved. Rounding and another size are no
    difference: the processor, and the number of ranks, may have changed.

    Raises:
        WrongCheckpoint: one is a parameter.
    """
    names = [
        name
        for name, (size, *sums) in now.items()
        if name in before and before[name][0] == size and _other_sums(sums, before[name][1:], CONSTANT)
    ]
    left_out.require_same(names)
    if names:
        print(
            f"Other values than before this resume, and no checkpoint has them: {first_names(names)}.\n  Make them "
            "alike at each start (with train.seed, or from a file), or make them buffers that are saved.",
            flush=True,
        )


def _numbers_of(tensor: Tensor, most: int) -> list[float]:
    """Return the number of elements, and sums of them; of a tensor of more than ``most`` elements, its version; nothing
    of a tensor of a special kind."""
    data = local(tensor)
    if type(data) not in (Tensor, nn.Parameter) or data.is_meta or data.is_quantized or data.is_nested:
        return []
    if data.layout is not torch.strided or data.numel() > most or data.is_complex():
        return [data.numel(), 0 if data.is_inference() else data._version]
    values = data.detach().double().flatten()
    weighted = values * torch.linspace(0.5, 1.5, len(values), dtype=values.dtype, device=values.device)
    return [len(values), values.sum().item(), weighted.sum().item(), values.abs().sum().item()]


def _alike(one: Digest, other: Digest) -> bool:
    return len(one) == len(other) and all(
        a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=SAME)
        for a, b in zip(one, other, strict=True)
    )


def _print(
    divided: Sequence[str], evaluated: Sequence[str], lost: Sequence[str], micro_batches: int, ranks: int
) -> None:
    division = f"{count(micro_batches, 'micro-batch', 'micro-batches')} on {count(ranks, 'rank')}"
    for names, text in (
        (evaluated, "Evaluations read state that forward passes write: {names}.\n"
                    "  A step has {division}: each of them writes it, and rank 0's is kept. Training does not depend "
                    "on it. For the\n  same evaluation whatever the division, write it once for each step, alike on "
                    "all ranks, in a callback's on_step."),
        (divided, "The loss reads state that forward passes write: {names}.\n"
                  "  A step has {division}, and the result depends on that: `launch verify` measures by how much. "
                  "Write\n  such state once for each step, alike on all ranks, in a callback's on_step; or use "
                  "batch.accumulation=1."),
        (lost, "State that checkpoints do not have: {names}.\n"
               "  It changes in training, and has its initial value after a resume. Let state_dict() and "
               "load_state_dict(state)\n  of the task, the callback or the optimizer keep it, or make it a buffer of "
               "the model."),
    ):  # fmt: skip
        if names:
            print(text.format(names=first_names(names), division=division), flush=True)
