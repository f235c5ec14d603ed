"""Layers of a model that can be computed in float8."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from launcher.train.parallel.mixed_precision import class_before_format, matmul_parameters

# torch's float8 products need sizes that are multiples of this (torch._scaled_mm)
MULTIPLE = 16


def float8_layers(model: nn.Module, exclude: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the layers that can be computed in float8, by name.

    A layer must compute what nn.Linear does, with a weight that only linear and convolution layers use. The output head
    (``get_output_embeddings`` of the model or of a part of it) is not among them: its rounding errors reach the loss
    directly.

    Args:
        exclude: regular expressions of the names of layers that stay as they are.
    """
    multiplied, heads = matmul_parameters(model), _heads(model)
    found: dict[str, nn.Linear] = {}
    excluded: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if any(re.search(pattern, name) for pattern in exclude):
            excluded.add(module)
        plain = class_before_format(module)
        is_linear = issubclass(plain, nn.Linear) and plain.forward is nn.Linear.forward
        if not is_linear or "forward" in vars(module) or module in heads:
            continue
        weight = module._parameters.get("weight")  # not an attribute that a parametrization computes
        fits = weight is not None and weight in multiplied and not any(size % MULTIPLE for size in weight.shape)
        if fits and isinstance(module, nn.Linear) and module not in found.values():
            found[name] = module
    return {name: module for name, module in found.items() if module not in excluded}


def _heads(model: nn.Module) -> set[nn.Module]:
    heads: set[nn.Module] = set()
    for module in model.modules():
        method = getattr(module, "get_output_embeddings", None)
        try:
            head = method() if callable(method) else None
        except NotImplementedError:  # transformers: a model without a head
            head = None
        if isinstance(head, nn.Module):
            heads.update(head.modules())
    return heads
