"""Dropout switched off, so that two computations of one gradient can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    getattr(place, name)
    for place in (functional, torch)
    for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    )
    if hasattr(place, name)
}  # fmt: skip
_ATTENTION = functional.scaled_dot_product_attention
_ATTENTION_DROPOUT = 4  # its place among the arguments


def dropout_modules(model: nn.Module) -> list[str]:
    """Names of the modules that drop something now."""
    found: list[str] = []
    for name, module in model.named_modules():
        plain = isinstance(module, _DropoutNd) and module.p > 0
        inside = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        if (plain or inside) and module.training:
            found.append(name)
    return found


@contextmanager
def without_dropout(model: nn.Module, *, functions: bool = True) -> Iterator[None]:
    """Around forward and backward passes: no dropout, of modules and (``functions``) of torch's functions.

    The modules are switched by themselves too, because a recomputation in backward runs in a thread of its own, where
    the functions are as they always are.
    """
    off = [module for module in model.modules() if isinstance(module, _DropoutNd) and module.training]
    inside = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention | nn.RNNBase)]
    rates = [module.dropout for module in inside]
    for module in off:
        module.training = False
    for module in inside:
        module.dropout = 0.0
    try:
        if functions:
            with _NoDropout():
                yield
        else:
            yield
    finally:
        for module in off:
            module.training = True
        for module, rate in zip(inside, rates, strict=True):
            module.dropout = rate


class _NoDropout(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is _ATTENTION:
            args = (*args[:_ATTENTION_DROPOUT], *((0.0,) if len(args) > _ATTENTION_DROPOUT else ()), *args[5:])
            kwargs = kwargs | ({"dropout_p": 0.0} if "dropout_p" in kwargs else {})
        return func(*args, **kwargs)
