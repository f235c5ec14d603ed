"""Repeated blocks: traces of a shortened model, from which the trace of the whole one follows.

A transformer's blocks are alike, so a trace of all of them repeats itself. A shortened model keeps some blocks of each
run of equal ones; the others become stand-ins, which pass their input on and hold nothing. The model's own code, which
may iterate over its list, index it, or know its length, stays as it is.

The memory of the whole model follows event by event. A trace is the sequence of all allocations and frees in bytes.
With one block more, the same events appear again at each place where the trace repeats itself: in the forward pass, the
backward pass, the reductions and the optimizer step. These places are found by comparing two traces. Each further block
adds its events there, and the peak is that of the resulting sequence, whichever phase it falls into. Under one policy a
third trace, with two further blocks, must equal the sequence predicted for it, event by event.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from launcher.train.measure.flops import without_memory
from launcher.train.parallel.mixed_precision import in_backward

# Real blocks in the shortest trace. The first and last blocks differ from those between them: a unit is gathered while
# its neighbour runs, for example.
SHORTEST_BLOCKS = 3
CHECK_BLOCKS = 2  # further blocks in the longest trace


class IrregularModel(Exception):
    """The trace of the whole model does not follow from that of shortened ones; the message is the reason."""


@dataclass(frozen=True)
class BlockRun:
    """Consecutive equal blocks of a ModuleList or Sequential, by their names in the model."""

    names: tuple[str, ...]

    def left_out(self, real: int) -> tuple[str, ...]:
        """Return the blocks that become stand-ins if ``real`` blocks stay: all but the first ones and the last."""
        return self.names[real - 1 : -1]


@dataclass(frozen=True)
class BlockTrace:
    """Trace of a model: bytes of its allocations (positive) and frees (negative), and payload bytes of each kind
    of collective. Frees without an allocation between them are sorted, and so are allocations: this does not change the
    peak, and their order may be accidental, as in autocast's cache of weights.
    """

    events: list[int]
    payload: dict[Any, int]

    @classmethod
    def of(cls, events: Sequence[int], payload: Mapping[Any, int]) -> Self:
        runs = groupby(events, key=lambda size: size > 0)
        return cls([size for _, run in runs for size in sorted(run)], dict(payload))

    @property
    def peak(self) -> int:
        """Return the most bytes that exist at one time."""
        return max(accumulate(self.events), default=0)


def block_runs(model: nn.Module) -> list[BlockRun]:
    """Return the runs of equal blocks that are long enough to be shortened, outermost ones only.

    Blocks are equal if they have the same classes, parameters and buffers. ``BlockCalls`` compares what they do.
    """
    owners: dict[int, set[str]] = {}  # the modules that a parameter, a buffer or a module belongs to
    for name, module in model.named_modules(remove_duplicate=False):
        for part in (*module._parameters.values(), *module._buffers.values(), *module._modules.values()):
            owners.setdefault(id(part), set()).add(name)
    runs: list[BlockRun] = []

    def shared(block: nn.Module) -> bool:
        parts = [*block.modules(), *block.parameters(), *block.buffers()]
        return any(len(owners.get(id(part), ())) > 1 for part in parts)

    def visit(module: nn.Module, prefix: str) -> None:
        children = list(module.named_children())
        taken: set[str] = set()
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for names in _equal_runs([(name, child) for name, child in children if not shared(child)]):
                if len(names) > SHORTEST_BLOCKS + CHECK_BLOCKS:
                    runs.append(BlockRun(tuple(prefix + name for name in names)))
                    taken.update(names)
        for name, child in children:
            if name not in taken:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return runs


def _equal_runs(children: list[tuple[str, nn.Module]]) -> list[list[str]]:
    """Split the names of ``children`` into runs of equal neighbours."""
    return [[name for name, _ in run] for _, run in groupby(children, key=lambda child: _signature(child[1]))]


def _signature(block: nn.Module) -> list[tuple[Any, ...]]:
    """Return what must be equal in equal blocks."""
    found: list[tuple[Any, ...]] = []
    for name, module in block.named_modules():
        found.append((name, type(module)))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found.append((key, tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))
    return found


class StandIns:
    """A shortened copy of a model without memory.

    Args:
        model: the whole model, on fake tensors or the meta device.
        fake: mode of the copy's tensors.
        real: for each run, how many blocks stay.

    Attributes:
        model: the copy.
    """

    def __init__(self, model: nn.Module, fake: Any, device: torch.device, real: Mapping[BlockRun, int]) -> None:
        modules = dict(model.named_modules())
        interfaces = {run: _Interface() for run in real}
        replaced: dict[nn.Module, nn.Module] = {}
        for run, number in real.items():
            for name in run.left_out(number):
                replaced[modules[name]] = _stand_in(modules[name], interfaces[run])
        self.model = without_memory(model, fake, device, replaced)
        self.left_out = {name for run, number in real.items() for name in run.left_out(number)}
        for run, interface in interfaces.items():
            for name in run.names:
                if name not in self.left_out:
                    self.model.get_submodule(name).register_forward_hook(interface.record, with_kwargs=True)

    def named(self, names: Sequence[str]) -> list[nn.Module]:
        """Return the copies of the whole model's modules ``names``, without stand-ins and what was in them."""
        modules = dict(self.model.named_modules())
        return [modules[name] for name in names if name in modules and name not in self.left_out]


def _stand_in(block: nn.Module, interface: _Interface) -> nn.Module:
    """Return a module with the class and the settings of ``block``, without its parts, that passes its input on."""
    made = copy.copy(block)
    for name, value in vars(block).items():
        if name in ("_parameters", "_buffers", "_modules") or (name.endswith("_hooks") and hasattr(value, "clear")):
            vars(made)[name] = type(value)()
    vars(made)["forward"] = interface.forward
    return made


class _Interface:
    """Interface of one run's blocks: which input each output resembles. ``BlockCalls`` has checked their calls."""

    def __init__(self) -> None:
        self._made: tuple[list[Any], Any, list[tuple[Any, ...]]] | None = None

    def record(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Forward hook of the real blocks."""
        if in_backward():  # recomputes a forward pass; nothing needs one of a stand-in
            return
        given, made = tree_flatten((args, kwargs))[0], tree_flatten(output)
        self._made = [_source(each, given) for each in made[0]], made[1], [_layout(each) for each in made[0]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Forward function of the stand-ins."""
        if self._made is None:
            raise IrregularModel("the model does not call its equal blocks in their order")
        given = tree_flatten((args, kwargs))[0]
        sources, shape, layouts = self._made
        outputs = [given[source] if isinstance(source, int) else None for source in sources]
        if [_layout(output) for output in outputs] != layouts:
            raise IrregularModel("the outputs of equal blocks differ in shape")
        return tree_unflatten(outputs, shape)


def _layout(value: Any) -> tuple[Any, ...]:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else ()


def _source(output: Any, given: list[Any]) -> int | None:
    """Return the index of the input that stands for ``output``: itself, or one of its shape and dtype."""
    if output is None:
        return None
    if isinstance(output, Tensor):
        same = [i for i, value in enumerate(given) if value is output]
        alike = [i for i, value in enumerate(given) if isinstance(value, Tensor) and _layout(value) == _layout(output)]
        if same or alike:
            return (same or alike)[0]
    raise IrregularModel("a block has an output unlike its inputs")


def extrapolate(
    runs: Mapping[BlockRun, int],
    shortest: BlockTrace,
    longer: Mapping[BlockRun, BlockTrace],
    longest: BlockTrace | None,
) -> BlockTrace:
    """Return the trace of the whole model.

    Args:
        runs: for each run, its blocks in ``shortest``.
        longer: for each run, the trace with one block of it more.
        longest: the trace with two blocks more of every run, to be compared with what is predicted for it.

    Raises:
        IrregularModel: ``longest`` is not what follows from the others.
    """
    differences = {run: difference(shortest.events, trace.events) for run, trace in longer.items()}

    def predict(more: Mapping[BlockRun, int]) -> BlockTrace:
        payload = dict(shortest.payload)
        for run, trace in longer.items():
            for kind, sent in trace.payload.items():
                payload[kind] += more[run] * (sent - shortest.payload[kind])
        return BlockTrace.of(_insert(shortest.events, [(differences[run], more[run]) for run in runs]), payload)

    if longest is not None and predict(dict.fromkeys(runs, CHECK_BLOCKS)) != longest:
        raise IrregularModel("a further block does not add the same events each time")
    return predict({run: len(run.names) - least for run, least in runs.items()})


@dataclass(frozen=True)
class TraceDifference:
    """TraceDifference between two traces, of which the second has one block more.

    Attributes:
        groups: place in the shorter trace, and the events that the longer one has there in addition.
        sizes: place of an event in the shorter trace, and by how many bytes it is larger in the longer one.
    """

    groups: list[tuple[int, list[int]]]
    sizes: list[tuple[int, int]]


def difference(shorter: list[int], longer: list[int]) -> TraceDifference:
    """Return what turns ``shorter`` into ``longer``. A group repeats the events right before it. A larger event is one
    for all blocks, such as the gathering of parameters that are in no unit."""
    found = TraceDifference([], [])
    i = j = 0
    while j < len(longer):
        if i < len(shorter) and shorter[i] == longer[j]:
            i, j = i + 1, j + 1
            continue
        size, agree = _repeated(shorter, i, longer, j)
        larger = i < len(shorter) and abs(longer[j]) > abs(shorter[i]) and longer[j] * shorter[i] > 0
        if larger and _agreement(shorter, i + 1, longer, j + 1) >= agree:
            found.sizes.append((i, longer[j] - shorter[i]))
            i, j = i + 1, j + 1
        elif size:
            found.groups.append((i, longer[j : j + size]))
            j += size
        else:
            raise IrregularModel("a further block does not repeat the events of the one before")
    if i < len(shorter):
        raise IrregularModel("a further block takes events away")
    return found


def _agreement(shorter: list[int], i: int, longer: list[int], j: int) -> int:
    """Return for how many events the traces agree from there."""
    pairs = zip(islice(shorter, i, None), islice(longer, j, None), strict=False)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(shorter) - i)


def _repeated(shorter: list[int], i: int, longer: list[int], j: int) -> tuple[int, int]:
    """Return the length of the group that was inserted at ``j`` of ``longer``, where the traces differ, and for how
    many events they agree after it: of the groups that repeat the events before them, the one after which the traces
    agree for longest. 0 if there is none."""
    best, agree = 0, 0
    for size in range(1, min(j, len(longer) - j) + 1):
        if longer[j - 1] == longer[j + size - 1] and longer[j : j + size] == longer[j - size : j]:
            same = _agreement(shorter, i, longer, j + size)
            if not best or same > agree:
                best, agree = size, same
    return best, agree


def _insert(events: list[int], differences: Sequence[tuple[TraceDifference, int]]) -> list[int]:
    """Return ``events`` with each difference inserted as often as its number says."""
    events = [*events]
    for found, times in differences:
        for place, more in found.sizes:
            events[place] += more * times
    places = sorted(
        ((place, group * times) for found, times in differences for place, group in found.groups),
        key=lambda each: each[0],
    )
    for (place, group), (other, next_group) in pairwise(places):
        if place == other and len({size > 0 for size in group + next_group}) > 1:  # their order matters
            raise IrregularModel("the events of different blocks cannot be told apart")
    whole: list[int] = []
    before = 0
    for place, group in places:
        whole += events[before:place]
        whole += group
        before = place
    return whole + events[before:]
