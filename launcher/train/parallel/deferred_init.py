"""A model larger than one rank's memory: its construction is recorded without any and replayed a parameter at a time.

The replay runs the same operators on the same random numbers, so that it gives the values of an ordinary build, bit for
bit. The idea is that of torchdistx's deferred_init; here values belong to storages, and what is overwritten goes.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

from launcher.train.parallel.init_recorder import Call, NotDeferrable, Place, PretendCpu, Recorder, tensors

__all__ = ["NotDeferrable", "Recipe", "build", "fill"]


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe]:
    """``make()`` on the meta device, and how to compute the values that it would have had.

    Draws nothing from torch's generators: the replay does. Python's and numpy's are drawn from as ``make`` does.
    What ``make`` made from values (``torch.tensor``, ``arange``, numpy, a checkpoint) stays real.

    Raises:
        NotDeferrable: with the reason. All generators are as they were, so that ``make()`` can follow. Whatever
            ``make`` raises comes as this, too: if the mistake is its own, an ordinary build meets it again.
    """
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy else None
    recorder = Recorder()
    try:
        original = nn.init._no_grad_trunc_normal_
        with patch.object(nn.init, original.__name__, recorder.trunc_normal(original)), PretendCpu(recorder), recorder:
            model = make()
        recorder.check()
        return model, _recipe(model, recorder)
    except Exception as error:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(numpys)
        if isinstance(error, NotDeferrable):
            raise
        raise NotDeferrable(f"its construction needs values: {type(error).__name__}: {error}") from error
    finally:
        recorder.restore()


class Recipe:
    """The recorded construction.

    Args:
        ties: the names of each parameter or buffer, in the model's order.
        agree: called by ``fill`` with each whole value, in an order that the signature fixes; may change it in place.
    """

    agree: Callable[[Tensor], None] = staticmethod(lambda _: None)

    def __init__(
        self, calls: list[Call], sizes: dict[int, int], values: list[tuple[tuple[str, ...], Place | Tensor]]
    ) -> None:
        self._calls, self._sizes, self._values = calls, sizes, values
        self.ties = [names for names, _ in values]

    def signature(self) -> str:
        """Return a hash of the recorded operators: ranks with the same one replay in the same order."""
        made = [(str(call.run), [(p.dtype, p.size) for p in call.fresh.values()]) for call in self._calls]
        real = [isinstance(value, Tensor) for _, value in self._values]
        return hashlib.blake2b(repr((made, self.ties, real)).encode(), digest_size=16).hexdigest()

    @torch.no_grad()
    def replay(self, place: Callable[[tuple[str, ...], Tensor], None]) -> None:
        """Computes the values and hands each over once, whole, on the CPU, with all its names, when it is final.

        Draws from torch's generators as the construction would have: nothing may draw between ``build`` and this.
        To be called once. The memory of ``place``'s tensor is freed when ``place`` returns, unless that keeps it.
        """
        real: dict[int, torch.UntypedStorage] = {}
        kept: defaultdict[int, list[tuple[tuple[str, ...], Place]]] = defaultdict(list)
        for names, value in self._values:
            if isinstance(value, Tensor):
                place(names, value)
            else:
                kept[value.storage].append((names, value))

        order = _order(self._calls, set(kept))
        last = {storage: i for i, (call, live) in enumerate(order) if live for storage in call.needs | call.writes}
        for storage in kept.keys() - last.keys():  # never initialised: torch.empty, in an ordinary build as well
            last[storage] = -1
        done: defaultdict[int, list[int]] = defaultdict(list)
        for storage, i in last.items():
            done[i].append(storage)

        for i in range(-1, len(order)):
            if i >= 0:
                call, live = order[i]
                self._run(call, real if live else {})
            for storage in done[i]:
                for names, value in kept[storage]:
                    place(names, self._view(real, value))
                real.pop(storage, None)

    def _run(self, call: Call, real: dict[int, torch.UntypedStorage]) -> None:
        def value(leaf: Any) -> Any:
            return self._view(real, leaf) if isinstance(leaf, Place) else leaf

        before = torch.get_default_dtype()
        torch.set_default_dtype(call.default_dtype)
        try:
            results = tensors(call.run(*tree_map(value, call.args), **tree_map(value, call.kwargs)))
        finally:
            torch.set_default_dtype(before)
        for position, place in call.fresh.items():
            result = results[position]
            storage = result.untyped_storage()
            found = (result.dtype, result.stride(), result.storage_offset(), storage.nbytes())
            if found == (place.dtype, place.stride, place.offset, self._sizes[place.storage]):
                real[place.storage] = storage
            else:  # an operator may lay out its result differently on meta
                self._view(real, place).copy_(result)

    def _view(self, real: dict[int, torch.UntypedStorage], place: Place) -> Tensor:
        if place.storage not in real:
            real[place.storage] = torch.UntypedStorage(self._sizes[place.storage], device="cpu")
        empty = torch.empty(0, dtype=place.dtype, device="cpu")
        return empty.set_(real[place.storage], place.offset, place.size, place.stride)


def _order(calls: list[Call], wanted: set[int]) -> list[tuple[Call, bool]]:
    """The calls to run, and whether on kept storages (True) or on scratch, for the random numbers' sake only.

    Random calls keep their order. Any other runs right after the random call that completes what it needs, so that a
    loop over all parameters does not keep them all; one that needs none runs right before the first that needs it.
    """
    live = [False] * len(calls)
    for i in reversed(range(len(calls))):
        call = calls[i]
        # how much a call draws may depend on what it reads
        live[i] = not wanted.isdisjoint(call.writes) or (call.random and bool(call.needs))
        if live[i]:
            wanted = (wanted - call.covers) | call.needs

    turn: dict[int, int] = {i: i for i, call in enumerate(calls) if call.random}
    waits_for: dict[int, set[int]] = {}
    writer: dict[int, int] = {}
    readers: defaultdict[int, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        if not live[i]:
            continue
        waits_for[i] = {writer[storage] for storage in call.needs | call.writes if storage in writer}
        waits_for[i].update(reader for storage in call.writes for reader in readers[storage])
        turns = [turn[j] for j in waits_for[i] if j in turn]
        if turns and not call.random:
            turn[i] = max(turns)
        for storage in call.needs - call.writes:
            readers[storage].append(i)
        for storage in call.writes:
            writer[storage], readers[storage] = i, []

    first_use: dict[int, int] = {}
    for i in reversed(waits_for):
        own = turn.setdefault(i, first_use.get(i, i))
        for j in waits_for[i]:
            first_use[j] = min(first_use.get(j, own), own)
    return [(calls[i], live[i]) for i in sorted(turn, key=lambda i: (turn[i], i))]


def _named(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Each parameter and buffer with all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in found.values()]


def _recipe(model: nn.Module, recorder: Recorder) -> Recipe:
    """Raises: NotDeferrable: a deferred tensor is kept where no one will give it its value."""
    named = _named(model)
    # autograd holds what a buffer is a view of
    known = {id(tensor) for _, buffer in named for tensor in (buffer, buffer._base)}
    if _strays(recorder, known):
        gc.collect()  # a cycle may have held them
    strays = _strays(recorder, known)
    if strays:
        owned = {
            id(value): f"{name}.{key}" for name, part in model.named_modules() for key, value in vars(part).items()
        }
        places = ", ".join(owned.get(id(stray), f"one of shape {tuple(stray.shape)}") for stray in strays[:8])
        raise NotDeferrable(f"it keeps tensors that are neither parameters nor buffers ({places}): register them")
    values = [(names, recorder.place(t) if t.is_meta else t.detach()) for names, t in named]
    sizes = {key: storage.nbytes() for key, storage in recorder.storages.items()}
    return Recipe(recorder.calls, sizes, values)


def _strays(recorder: Recorder, known: set[int]) -> list[Tensor]:
    alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    return [t for t in alive if t.is_meta and id(t) not in known and recorder.made(t)]


@torch.no_grad()
def fill(model: nn.Module, recipe: Recipe) -> None:
    """Give ``model`` its initial values, after ``fully_shard`` and ``model.to_empty(device=...)``.

    Of a sharded parameter each rank takes its own part. Ties that ``to_empty`` broke are made again: call this before
    an optimizer takes the parameters.

    Raises:
        ValueError: the model's parameters and buffers are not those of the recipe.
    """
    named = {name: tensor for names, tensor in _named(model) for name in names}
    expected = {name for names in recipe.ties for name in names}
    if named.keys() != expected:
        raise ValueError(f"not the names that were recorded: {', '.join(sorted(named.keys() ^ expected))}")
    for first, *others in recipe.ties:
        for name in others:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, named[first])

    def place(names: tuple[str, ...], value: Tensor) -> None:
        recipe.agree(value)
        _copy(named, names, value)

    recipe.replay(place)


def _copy(named: dict[str, Tensor], names: Iterable[str], value: Tensor) -> None:
    target = named[next(iter(names))]
    if isinstance(target, DTensor):
        target.to_local().copy_(_part(value, target))
    else:
        target.copy_(value)


def _part(value: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``value``: a view, of no rows where there are fewer rows than ranks."""
    for dim, placement in enumerate(like.placements):
        if type(placement) is Shard:
            pieces = value.chunk(like.device_mesh.size(dim), placement.dim)
            rank = like.device_mesh.get_local_rank(dim)
            value = pieces[rank] if rank < len(pieces) else value.narrow(placement.dim, 0, 0)
        elif not isinstance(placement, Replicate):
            raise ValueError(f"cannot fill a parameter placed as {placement}")
    return value
