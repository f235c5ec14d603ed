"""Parameters that sharding replaces: what the user's code has attached to them, and what still refers to them.

``fully_shard`` makes new parameters. It would drop attributes and gradient hooks without a message, and a list of
parameters that a loss uses, or a tensor that shares their memory, would hold the initial values.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.train.parallel.deferred_init import InitialShards

_Span = tuple[int, int]  # bytes of a tensor in its storage


class ReplacedParameters:
    """The parameters of ``model`` before it is sharded.

    Raises:
        TaskError: a parameter has a gradient hook, or cannot be sharded.
    """

    def __init__(self, model: nn.Module, kind: StrategyKind) -> None:
        self._kind = kind
        self._attributes: dict[str, dict[str, Any]] = {}
        self._old: list[tuple[str, weakref.ref[Tensor]]] = []
        self._memory = [(name, StorageWeakRef(p.untyped_storage()), _span(p)) for name, p in model.named_parameters()]
        self._require_own_memory(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._require_shardable(name, parameter)
            if attributes := vars(parameter):
                self._attributes[name] = dict(attributes)
            self._old.append((name, weakref.ref(parameter)))

    def _require_shardable(self, name: str, parameter: nn.Parameter) -> None:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            what, remedy = "has a gradient hook", "Have the forward pass do the same: multiply the weight by a mask"
        elif parameter.is_complex():
            what, remedy = "is complex", "Keep its parts as one real parameter (torch.view_as_complex)"
        elif not parameter.is_contiguous():
            what, remedy = "is not contiguous", "Make it of a contiguous tensor (nn.Parameter(tensor.contiguous()))"
        else:
            return
        raise TaskError(
            f"model: {name} {what}, which strategy={self._kind.value} cannot shard.\n  {remedy}, or use strategy=ddp."
        )

    def _require_own_memory(self, model: nn.Module) -> None:
        """Raise TaskError if a parameter shares memory with another one or with a buffer: shards would be separate."""
        by_storage: defaultdict[int, list[tuple[_Span, str, bool]]] = defaultdict(list)
        for trained, tensors in ((True, model.named_parameters()), (False, model.named_buffers())):
            for name, tensor in tensors:
                if tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor):
                    by_storage[tensor.untyped_storage()._cdata].append((_span(tensor), name, trained))
        for spans in by_storage.values():
            for (one, name, trained), (other, second, also) in itertools.pairwise(sorted(spans)):
                if other[0] < one[1] and (trained or also):
                    raise TaskError(
                        f"model: {name} and {second} share memory without being one parameter, and "
                        f"strategy={self._kind.value} would separate them.\n  Tie parameters by assigning the "
                        "parameter itself (head.weight = embedding.weight), compute what follows from one in the "
                        "forward pass, or use strategy=ddp."
                    )

    def hand_over(self, model: nn.Module) -> None:
        """Give the attributes to the parameters that ``model`` has now.

        Raises:
            TaskError: an attribute of an object still refers to a parameter that was replaced.
        """
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for key, value in self._attributes.get(name, {}).items():
                vars(parameter).setdefault(key, value)
        if self._alive() or not all(storage.expired() for _, storage, _ in self._memory):
            gc.collect()  # a cycle may have held them
        kept = {storage.cdata: (span, name) for name, storage, span in reversed(self._memory) if not storage.expired()}
        # of several names the first
        places = _places({id(old): name for name, old in reversed(self._alive())}, kept)
        if places:
            name, found = next(iter(sorted(places.items())))
            raise TaskError(
                f"model: {', '.join(sorted(found))} also refers to the parameter {name} or its memory, which "
                f"strategy={self._kind.value} replaces by shards: it would keep the initial values.\n"
                "  Take the parameter from its module when it is used, or use strategy=ddp."
            )

    def _alive(self) -> list[tuple[str, Tensor]]:
        found = ((name, reference()) for name, reference in self._old)
        return [(name, parameter) for name, parameter in found if parameter is not None]


def _span(tensor: Tensor) -> _Span:
    """Return the first byte of ``tensor`` in its storage, and the one after its last."""
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + (last + 1) * tensor.itemsize if tensor.numel() else first


def _places(names: Mapping[int, str], memory: Mapping[int, tuple[_Span, str]]) -> dict[str, set[str]]:
    """Return the attributes that refer to parameters, as ``Type.attribute``, by the first parameter in each.

    Looks at each object once: to ask for what refers to each parameter takes minutes for a thousand of them.

    Args:
        names: names of the parameters by ``id``.
        memory: bytes and name of each parameter by the identity of its storage.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for owner in gc.get_objects() if names or memory else ():
        kind = type(owner)
        if not kind.__dictoffset__ or issubclass(kind, (type, ModuleType, Optimizer, InitialShards)):
            continue
        try:
            attributes = object.__getattribute__(owner, "__dict__")  # runs no code of the object
        except AttributeError:  # an extension's object, such as a library of cffi
            continue
        for key, value in [*attributes.items()]:
            if (reference := _first(value, names, memory, depth=2)) is not None:
                name, within = reference
                # fully_shard has put this before the name of the module's class
                prefix = "FSDP" if issubclass(kind, FSDPModule) else ""
                found[name].add(f"{kind.__name__.removeprefix(prefix)}.{within if key == '_buffers' else key}")
    return found


def _first(
    value: Any, names: Mapping[int, str], memory: Mapping[int, tuple[_Span, str]], *, depth: int
) -> tuple[str, Any] | None:
    """Return the first parameter that ``value`` is, contains or shares memory with, down to containers in it, and the
    key of the element that does."""
    if id(value) in names:
        return names[id(value)], ""
    if memory and type(value) in (Tensor, nn.Parameter, nn.Buffer) and (name := _sharing(value, memory)) is not None:
        return name, ""
    if not depth or type(value) not in (list, tuple, set, dict):
        return None
    for key, part in [*value.items()] if isinstance(value, dict) else enumerate([*value]):
        if (found := _first(part, names, memory, depth=depth - 1)) is not None:
            return found[0], key
    return None


def _sharing(tensor: Tensor, memory: Mapping[int, tuple[_Span, str]]) -> str | None:
    """Return the parameter whose memory ``tensor`` shares."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    (first, end), name = memory.get(tensor.untyped_storage()._cdata, ((0, 0), None))
    start, stop = _span(tensor)
    return name if start < end and first < stop else None
