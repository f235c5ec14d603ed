"""Deferred initialisation, for models larger than a rank's memory: the construction is recorded without allocating, and
replayed one parameter at a time.

The replay runs the same operators on the same random numbers, so it gives the values of an ordinary build, bit for bit.
The idea is that of torchdistx's deferred_init; here values are tracked by storage, and overwritten values are skipped.
"""

from __future__ import annotations

import gc
import hashlib
from collections import defaultdict
from collections.abc import Callable, Set
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from launcher.train.data.randomness import random_state, restore_random_state
from launcher.train.parallel.init_recorder import (
    NotDeferrable,
    OperatorCall,
    PretendCpu,
    Recorder,
    StorageView,
    tensors_of,
)


def build_deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, Recipe]:
    """Run ``make()`` on the meta device; return its model and the recipe for the values of an ordinary build.

    Leaves the state of torch's generators unchanged: only the replay draws from them. Python's and numpy's generators
    advance as ``make`` draws. Tensors that ``make`` creates from values (``torch.tensor``, ``arange``, numpy, a
    checkpoint) stay real.

    Raises:
        NotDeferrable: with the reason. The state of all generators is restored, so that the caller can run ``make()``
            itself. Any exception of ``make`` is converted to this one: an error of its own recurs in an ordinary build.
    """
    cpu = torch.device("cpu")
    before, recorder = random_state(cpu), Recorder()
    try:
        original = nn.init._no_grad_trunc_normal_
        with patch.object(nn.init, original.__name__, recorder.trunc_normal(original)), PretendCpu(recorder), recorder:
            model = make()
        recorder.check()
        return model, _recipe(model, recorder)
    except Exception as error:
        restore_random_state(before, cpu)
        if isinstance(error, NotDeferrable):
            raise
        raise NotDeferrable(f"its construction needs values: {type(error).__name__}: {error}") from error
    finally:
        recorder.restore()


class Recipe:
    """Recorded construction of a model.

    Args:
        ties: for each parameter and buffer, in the model's order, all its names.
        agree: called by ``fill`` with each whole value, in the same order on all ranks with the same signature; may
            change the value in place.
    """

    agree: Callable[[Tensor], None] = staticmethod(lambda _: None)

    def __init__(
        self,
        calls: list[OperatorCall],
        sizes: dict[int, int],
        values: list[tuple[tuple[str, ...], StorageView | Tensor]],
    ) -> None:
        self._calls, self._sizes, self._values = calls, sizes, values
        self.ties = [names for names, _ in values]
        self._shortened = False

    def leave_out(self, names: Set[str]) -> None:
        """Do not compute the parameters and buffers ``names``: they get their values from elsewhere."""
        self._values = [(own, value) for own, value in self._values if not names >= {*own}]
        self._shortened = True

    def signature(self) -> str:
        """Return a hash of the recorded operators; ranks with equal hashes replay in the same order."""
        made = [(str(call.run), [(p.dtype, p.size) for p in call.fresh.values()]) for call in self._calls]
        real = [isinstance(value, Tensor) for _, value in self._values]
        return hashlib.blake2b(repr((made, self.ties, real)).encode(), digest_size=16).hexdigest()

    @torch.no_grad()
    def replay(self, receive: Callable[[tuple[str, ...], Tensor], None]) -> None:
        """Compute the values, and pass each to ``receive`` once it is final: all its names, and the whole tensor on
        the CPU.

        Draws from torch's generators as the construction would have, unless values were left out: nothing may draw
        between ``build_deferred`` and this. Can be called once. A tensor's memory is freed when ``receive`` returns,
        unless that keeps a reference.
        """
        real: dict[int, torch.UntypedStorage] = {}
        kept: defaultdict[int, list[tuple[tuple[str, ...], StorageView]]] = defaultdict(list)
        for names, value in self._values:
            if isinstance(value, Tensor):
                receive(names, value)
            else:
                kept[value.storage].append((names, value))

        order = _order(self._calls, set(kept))
        if self._shortened and not any(call.random and live for call, live in order):
            order = [(call, live) for call, live in order if live]  # no value depends on earlier random numbers
        last = {storage: i for i, (call, live) in enumerate(order) if live for storage in call.needs | call.writes}
        for storage in kept.keys() - last.keys():  # torch.empty: uninitialised in an ordinary build, too
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
                    receive(names, self._view(real, value))
                real.pop(storage, None)

    def _run(self, call: OperatorCall, real: dict[int, torch.UntypedStorage]) -> None:
        def value(leaf: Any) -> Any:
            return self._view(real, leaf) if isinstance(leaf, StorageView) else leaf

        before = torch.get_default_dtype()
        torch.set_default_dtype(call.default_dtype)
        try:
            results = tensors_of(call.run(*tree_map(value, call.args), **tree_map(value, call.kwargs)))
        finally:
            torch.set_default_dtype(before)
        for position, view in call.fresh.items():
            result = results[position]
            storage = result.untyped_storage()
            layout = (result.dtype, result.stride(), result.storage_offset(), storage.nbytes())
            if layout == (view.dtype, view.stride, view.offset, self._sizes[view.storage]):
                real[view.storage] = storage
            else:  # an operator's result may have other strides on the meta device
                self._view(real, view).copy_(result)

    def _view(self, real: dict[int, torch.UntypedStorage], view: StorageView) -> Tensor:
        if view.storage not in real:
            real[view.storage] = torch.UntypedStorage(self._sizes[view.storage], device="cpu")
        empty = torch.empty(0, dtype=view.dtype, device="cpu")
        return empty.set_(real[view.storage], view.offset, view.size, view.stride)


def _order(calls: list[OperatorCall], wanted: set[int]) -> list[tuple[OperatorCall, bool]]:
    """Return the calls to run, each with True if its result is used, or False if it only advances the random numbers.

    Random calls keep their order. Any other call runs right after the last random call that it depends on, so that a
    loop over all parameters does not keep all of them in memory; a call that depends on no random call runs right
    before the first call that uses it.
    """
    live = [False] * len(calls)
    for i in reversed(range(len(calls))):
        call = calls[i]
        # the number of random numbers that a call draws may depend on the values that it reads
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
    """Return each parameter and buffer, once, with all its names."""
    by_id: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        by_id.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in by_id.values()]


def _recipe(model: nn.Module, recorder: Recorder) -> Recipe:
    """Return the recipe for the values of ``model``.

    Raises:
        NotDeferrable: the model keeps a deferred tensor that is neither parameter nor buffer, and would get no value.
    """
    named = _named(model)
    # autograd keeps the base of a buffer that is a view
    registered = {id(tensor) for _, buffer in named for tensor in (buffer, buffer._base)}
    if _strays(recorder, registered):
        gc.collect()  # a cycle may have held them
    if strays := _strays(recorder, registered):
        owned = {
            id(value): f"{name}.{key}" for name, part in model.named_modules() for key, value in vars(part).items()
        }
        tensors = ", ".join(owned.get(id(stray), f"one of shape {tuple(stray.shape)}") for stray in strays[:8])
        raise NotDeferrable(f"it keeps tensors that are neither parameters nor buffers ({tensors}): register them")
    values = [(names, recorder.view_of(t) if t.is_meta else t.detach()) for names, t in named]
    sizes = {key: storage.nbytes() for key, storage in recorder.storages.items()}
    return Recipe(recorder.calls, sizes, values)


def _strays(recorder: Recorder, registered: set[int]) -> list[Tensor]:
    alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor)]
    return [t for t in alive if t.is_meta and id(t) not in registered and recorder.made(t)]


@torch.no_grad()
def fill(model: nn.Module, recipe: Recipe) -> None:
    """Give ``model`` its initial values, after ``fully_shard`` and ``model.to_empty(device=...)``.

    Each rank copies its own part of a sharded parameter. Ties that ``to_empty`` broke are restored, which replaces
    parameters: call this before the optimizer is constructed.

    Raises:
        ValueError: the names of the model's parameters and buffers are not those of the recipe.
    """
    named = {name: tensor for names, tensor in _named(model) for name in names}
    expected = {name for names in recipe.ties for name in names}
    if named.keys() != expected:
        raise ValueError(f"not the names that were recorded: {', '.join(sorted(named.keys() ^ expected))}")
    for first, *others in recipe.ties:
        for name in others:
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, named[first])

    def copy(names: tuple[str, ...], value: Tensor) -> None:
        recipe.agree(value)
        target = named[names[0]]
        if isinstance(target, DTensor):
            value, target = own_shard(value, target), target.to_local()
        target.copy_(value)

    recipe.replay(copy)


def own_shard(value: Tensor, of: DTensor) -> Tensor:
    """Return the view of the whole tensor ``value`` that this rank holds of ``of``; it may be empty.

    Sharding splits like ``torch.chunk``, whose last chunks are smaller or missing, one dimension of the mesh after the
    other (documentation of ``torch.distributed.tensor.Shard``).
    """
    mesh = of.device_mesh
    for dim, placement in enumerate(of.placements):
        if isinstance(placement, Shard):
            chunks, own = value.chunk(mesh.size(dim), placement.dim), mesh.get_local_rank(dim)
            value = chunks[own] if own < len(chunks) else value.narrow(placement.dim, 0, 0)
    return value
