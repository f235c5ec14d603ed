"""Parameters that sharding replaces: what the user's code has attached to them, and what still refers to them.

``fully_shard`` makes new parameters. It would drop attributes and gradient hooks without a message, and a list of
parameters that a loss uses would hold the initial values.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError


class ReplacedParameters:
    """The parameters of ``model`` before it is sharded.

    Raises:
        TaskError: a parameter has a gradient hook, or cannot be sharded.
    """

    def __init__(self, model: nn.Module, kind: StrategyKind) -> None:
        self._kind = kind
        self._attributes: dict[str, dict[str, Any]] = {}
        self._old: list[tuple[str, weakref.ref[Tensor]]] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._require_shardable(name, parameter)
            if attributes := vars(parameter):
                self._attributes[name] = dict(attributes)
            self._old.append((name, weakref.ref(parameter)))

    def _require_shardable(self, name: str, parameter: nn.Parameter) -> None:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise TaskError(
                f"model(): {name} has a gradient hook, which strategy={self._kind.value} cannot keep: shards replace "
                "the parameter.\n  Have the forward pass do the same, for example multiply the weight by a mask, or "
                "use strategy=ddp."
            )
        if parameter.is_complex():
            raise TaskError(
                f"model(): {name} is complex, which strategy={self._kind.value} cannot shard.\n"
                "  Keep its real and imaginary part as one real parameter (torch.view_as_complex), or use strategy=ddp."
            )
        if not parameter.is_contiguous():
            raise TaskError(
                f"model(): {name} is not contiguous, which strategy={self._kind.value} cannot shard.\n"
                "  Make it of a contiguous tensor (nn.Parameter(tensor.contiguous())), or use strategy=ddp."
            )

    def hand_over(self, model: nn.Module) -> None:
        """Give the attributes to the parameters that ``model`` has now.

        Raises:
            TaskError: an attribute of an object still refers to a parameter that was replaced.
        """
        for name, parameter in model.named_parameters(remove_duplicate=False):
            for key, value in self._attributes.get(name, {}).items():
                vars(parameter).setdefault(key, value)
        if self._alive():
            gc.collect()  # a cycle may have held them
        places = _places({id(old): name for name, old in reversed(self._alive())})  # of several names the first
        if places:
            name, found = next(iter(sorted(places.items())))
            raise TaskError(
                f"model(): {', '.join(sorted(found))} also refers to the parameter {name}, which "
                f"strategy={self._kind.value} replaces by shards: it would keep the initial values.\n"
                "  Take the parameter from its module when it is used, or use strategy=ddp."
            )

    def _alive(self) -> list[tuple[str, Tensor]]:
        found = ((name, reference()) for name, reference in self._old)
        return [(name, parameter) for name, parameter in found if parameter is not None]


def _places(names: Mapping[int, str]) -> dict[str, set[str]]:
    """Return the attributes that refer to parameters, as ``Type.attribute``, by the first parameter in each.

    Looks at each object once: to ask for what refers to each parameter takes minutes for a thousand of them.

    Args:
        names: names of the parameters by ``id``.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for owner in gc.get_objects() if names else ():
        kind = type(owner)
        if not kind.__dictoffset__ or issubclass(kind, (type, ModuleType, Optimizer)):
            continue
        attributes = object.__getattribute__(owner, "__dict__")  # runs no code of the object
        for key, value in [*attributes.items()]:
            if (name := _first(value, names, depth=2)) is not None:
                # fully_shard has put this before the name of the module's class
                prefix = "FSDP" if issubclass(kind, FSDPModule) else ""
                found[names[name]].add(f"{kind.__name__.removeprefix(prefix)}.{key}")
    return found


def _first(value: Any, names: Mapping[int, str], *, depth: int) -> int | None:
    """Return the ``id`` of the first parameter that ``value`` is or contains, down to containers in it."""
    if id(value) in names:
        return id(value)
    if not depth or type(value) not in (list, tuple, set, dict):
        return None
    parts = value.values() if isinstance(value, dict) else value
    return next((found for part in [*parts] if (found := _first(part, names, depth=depth - 1)) is not None), None)
