"""Parameters that sharding replaces: what the user's code has attached to them, and what still refers to them.

``fully_shard`` makes new parameters. It would drop attributes and gradient hooks without a message, and a list of
parameters that a loss uses would hold the initial values.
"""

from __future__ import annotations

import gc
import weakref
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
        for name, old in self._alive():
            if places := sorted({place for part in _holders(old) for place in _attributes_with(part)}):
                raise TaskError(
                    f"model(): {', '.join(places)} also refers to the parameter {name}, which "
                    f"strategy={self._kind.value} replaces by shards: it would keep the initial values.\n"
                    "  Take the parameter from its module when it is used, or use strategy=ddp."
                )

    def _alive(self) -> list[tuple[str, Tensor]]:
        found = ((name, reference()) for name, reference in self._old)
        return [(name, parameter) for name, parameter in found if parameter is not None]


def _holders(parameter: Tensor) -> list[Any]:
    """Return ``parameter`` and the containers that it is in."""
    found: list[Any] = [parameter]
    for _ in range(2):  # a dict of lists, at most
        found += [
            each for part in found for each in gc.get_referrers(part)
            if isinstance(each, (list, tuple, set, dict)) and each is not found and not _is_in(each, found)
        ]  # fmt: skip
    return found


def _is_in(value: Any, values: list[Any]) -> bool:
    return any(each is value for each in values)


def _attributes_with(value: Any) -> list[str]:
    """Return the attributes of objects, as ``Type.name``, that are ``value``."""
    owners: list[Any] = []
    for referrer in gc.get_referrers(value):
        # an object refers to its attributes by a dict, which it may make only when it is asked for
        owners += gc.get_referrers(referrer) if isinstance(referrer, dict) else [referrer]
    found = set[str]()
    for owner in owners:
        if isinstance(owner, (type, Optimizer)) or not isinstance(getattr(owner, "__dict__", None), dict):
            continue
        if type(owner).__module__ == "builtins" or isinstance(owner, type(gc)):
            continue
        kind = type(owner).__name__.removeprefix("FSDP" if isinstance(owner, FSDPModule) else "")
        found |= {f"{kind}.{key}" for key, held in vars(owner).items() if held is value}
    return sorted(found)
