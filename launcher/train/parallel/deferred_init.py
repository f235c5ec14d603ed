"""Initial values of a sharded model: rank 0 builds the model, the other ranks build one whose tensors have no memory,
and each rank receives its shards of rank 0's values."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from launcher.heartbeat import HEARTBEAT
from launcher.process import shared_interval
from launcher.quantities import duration_text, number_text
from launcher.train.data.randomness import random_state, restore_random_state
from launcher.train.parallel.base import own_region
from launcher.train.parallel.replicas import share_values, structure_digest
from launcher.train.world import World

PROGRESS_EVERY_S = 30.0
_META, _CPU = torch.device("meta"), torch.device("cpu")
_EMPTY = {"empty", "empty_strided", "empty_permuted"}
_CONSTANT = {"zeros", "ones", "full", "eye"}
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class BuildProgress(TorchFunctionMode):
    """Context of a model's construction, with a heartbeat for each function of torch: initial values of billions of
    parameters take minutes, since they are drawn on the CPU one after another. Rank 0 prints how many there are."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._began = self._printed = time.monotonic()
        self._numbers, self._prints = 0, world.rank == 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        HEARTBEAT.again()
        result = func(*args, **(kwargs or {}))
        drawn = getattr(func, "__name__", "").endswith(("normal_", "uniform_"))
        if drawn and self._prints and isinstance(result, Tensor):
            self._numbers += result.numel()
            if (now := time.monotonic()) - self._printed > PROGRESS_EVERY_S:
                self._printed = now
                taken = duration_text(now - self._began)
                print(f"Building the model: {number_text(self._numbers)} initial values in {taken}.", flush=True)
        return result


def _await_rank_0(world: World) -> None:
    """Wait until rank 0 has built its model, publishing heartbeats. A collective would time out; if rank 0 hangs, its
    own missing heartbeats show it."""
    if dist.get_backend() == "fake":
        return
    store: Any = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        store.add("models/0", 1)
        return
    own = store.add(f"models/{world.rank}", 1)
    while store.add("models/0", 0) < own:
        HEARTBEAT.again()
        time.sleep(shared_interval(0.02, world.size))


class InitialShards:
    """Values of rank 0's model, of which each rank gets its shards. All ranks call its methods."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._ties: list[tuple[str, ...]] = []
        self._values: list[Tensor] = []
        self.left_out = set[str]()  # names of tensors that get their values from elsewhere

    @staticmethod
    def complete(model: nn.Module, without: set[str]) -> bool:
        """Return whether all tensors of ``model`` have values, but those with names in ``without``."""
        return not any(tensor.is_meta for names, tensor in _named(model) if not without.issuperset(names))

    def take(self, model: nn.Module) -> None:
        """Keep the values of ``model``, which is about to be sharded."""
        named = _named(model)
        self._ties = [names for names, _ in named]
        self._values = [tensor.detach() for _, tensor in named] if self._world.rank == 0 else []

    @torch.no_grad()
    def fill(self, model: nn.Module) -> None:
        """Give ``model`` its values, after ``fully_shard`` and ``model.to_empty(device=...)``.

        Each rank copies its part of a sharded parameter. Ties that ``to_empty`` broke are restored, which replaces
        parameters: call this before the optimizer is constructed.
        """
        named = {name: tensor for names, tensor in _named(model) for name in names}
        self._values.reverse()
        for names in self._ties:
            target = named[names[0]]
            for name in names[1:]:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, target)
            value = self._values.pop() if self._values else torch.empty(target.shape, dtype=target.dtype)
            if self.left_out.issuperset(names):
                continue
            share_values([value], self._world)
            if isinstance(target, DTensor):
                value, target = value[own_region(target)], target.to_local()
            target.copy_(value)


def build_for_shards(
    make: Callable[[], nn.Module], world: World, *, values: bool = True
) -> tuple[nn.Module, InitialShards | None]:
    """Run ``make()`` on every rank; return its model, and the values of rank 0's unless the other models have values.

    Ranks with the same random state before have that of rank 0 afterwards. A constructor that needs the values of its
    tensors, or keeps some that are neither parameters nor buffers, runs in full on each rank.

    Args:
        values: rank 0's model has values, too; else only tensors that are made from given values have them.
    """
    before, full = random_state(_CPU), values and world.rank == 0
    model: nn.Module | None = None
    failure: Exception | None = None
    problem: str | None = None
    try:
        model = make() if full else _build_without_values(make)
        problem = _unsuitable(model, full)
    except _NeedsValues as error:
        problem = str(error)
    except Exception as error:  # of rank 0: raised once the others know; of another: recurs if it is the user's
        failure = error
        problem = f"its construction needs values: {type(error).__name__}: {error}".partition("\n")[0]
    seeds = hashlib.blake2b(b"".join(state.numpy().tobytes() for state in before.values())).hexdigest()
    _await_rank_0(world)
    everyone = world.of_all((problem, "" if model is None else structure_digest(model), seeds))
    problem = next((each[0] for each in everyone if each[0] is not None), None)
    if problem is None and len({structure for _, structure, _ in everyone}) > 1:
        problem = "its construction is not the same on all ranks"
    if problem is None and model is not None:
        if len({each[2] for each in everyone}) == 1:
            restore_random_state(world.of_rank_0(random_state(_CPU)), _CPU)
        return model, InitialShards(world)
    if full and failure is not None:
        raise failure
    print(f"Each rank builds the full model before it is sharded: {problem}", flush=True)
    if full and model is not None:
        return model, None
    del model, failure
    restore_random_state(before, _CPU)
    return make(), None


class _NeedsValues(Exception):
    """The model cannot be built without values, for the reason in the message."""


def _build_without_values(make: Callable[[], nn.Module]) -> nn.Module:
    with _WithoutValues() as mode:
        model = make()
    if mode.problem is not None:  # the constructor may have caught it
        raise mode.problem
    # autograd keeps the base of a buffer that is a view
    known = {id(each) for _, tensor in _named(model) for each in (tensor, tensor._base)}
    if mode.made_but(known):
        gc.collect()  # a cycle may have held them
    if strays := mode.made_but(known):
        owned = {
            id(value): f"{name}.{key}" for name, part in model.named_modules() for key, value in vars(part).items()
        }
        tensors = ", ".join(owned.get(id(stray), f"one of shape {tuple(stray.shape)}") for stray in strays[:8])
        raise _NeedsValues(f"it keeps tensors that are neither parameters nor buffers ({tensors}): register them")
    return model


class _WithoutValues(TorchDispatchMode):
    """Mode in which tensors that are created empty, constant or random are on the meta device, and so is what is
    computed from them. Tensors that are created from values are real, since attributes may keep them.

    Attributes:
        problem: first error of an operator that needs values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problem: Exception | None = None
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is reused

    def made_but(self, known: set[int]) -> list[Tensor]:
        """Return the tensors without values that still exist, but those with an id in ``known``."""
        alive = [value for value in gc.get_objects() if issubclass(type(value), Tensor) and id(value) not in known]
        strided = [tensor for tensor in alive if tensor.is_meta and tensor.layout == torch.strided]
        return [tensor for tensor in strided if tensor.untyped_storage()._cdata in self._storages]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags
        # torch.load creates a tensor without elements and then sets its storage: that one must stay real
        created = not inputs and (draws or name in _CONSTANT or (name in _EMPTY and 0 not in args[0]))
        try:
            if created or any(tensor.is_meta for tensor in inputs):
                if name != "set_":
                    self._require_no_write(func, args, kwargs)
                    args, kwargs = tree_map(_without_value, (args, kwargs))
                if created and kwargs.get("device") is None:
                    kwargs["device"] = _META
            elif draws:
                raise _NeedsValues(f"{func} draws random numbers for a tensor that is made from values")
            result = func(*args, **kwargs)
            for output in tree_leaves(result):
                if isinstance(output, Tensor) and output.is_meta and output.layout == torch.strided:
                    storage = output.untyped_storage()
                    self._storages.setdefault(storage._cdata, storage)
            return result
        except Exception as error:
            self.problem = self.problem or error
            raise

    @staticmethod
    def _require_no_write(func: Any, args: Any, kwargs: Any) -> None:
        """Raise _NeedsValues if the call writes what has no value into a tensor that has one."""
        for position, argument in enumerate(func._schema.arguments):
            target = args[position] if position < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(target):
                    if isinstance(tensor, Tensor) and not tensor.is_meta:
                        raise _NeedsValues(f"{func} writes into a tensor that is made from values")


def _without_value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Generator):
        return None
    return leaf.to(_META) if isinstance(leaf, Tensor) else _META if leaf == _CPU else leaf


def _unsuitable(model: nn.Module, full: bool) -> str | None:
    """Return why the values of ``model`` cannot be sent in shards."""
    for names, tensor in _named(model):
        if tensor.layout != torch.strided or tensor.is_quantized or type(tensor) not in _PLAIN:
            return f"{names[0]} is a {type(tensor).__name__} of layout {tensor.layout}"
        if full and tensor.is_meta:
            return "its constructor makes meta tensors itself"
    return None


def _named(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """Return each parameter and buffer, once, with all its names."""
    by_id: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        by_id.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in by_id.values()]
