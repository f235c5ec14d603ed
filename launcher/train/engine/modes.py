"""Training and evaluation mode of a model, set by its own ``train`` and ``eval`` as every training loop sets them.

A module may override these: to keep BatchNorm layers in eval mode, to merge adapters into weights for an evaluation, or
to cache fused weights. Setting ``training`` alone would leave that out. Passes that compare losses go without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:  # an inspection of a task does without
    from launcher.train.parallel.base import Parallel

_DROPOUTS = {
    getattr(place, name)
    for place in (functional, torch)
    for name in (
        "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout",
    )
    if hasattr(place, name)
}  # fmt: skip
_ATTENTION = functional.scaled_dot_product_attention
_ATTENTION_DROPOUT = 4  # position of dropout_p among the arguments


def start_training(model: nn.Module) -> None:
    """Call ``model.train()``, and put the modules that the task had put into eval mode back into it.

    A model that is in eval mode itself, as ``from_pretrained`` returns it, is put into training mode as a whole.
    """
    before = [(part, part.training or not model.training) for part in model.modules()]
    model.train()
    _restore([(part, training and part.training) for part, training in before], lambda part, mode: part.train(mode))


@contextmanager
def kept_modes(parallel: Parallel) -> Iterator[None]:
    """Put the model back into its mode after the body, unless that raises, and then the modules that had another one
    into theirs. All ranks call it, between two windows."""
    modes = [(part, part.training) for part in parallel.module.modules()]
    yield
    parallel.set_mode(*modes[0])
    _restore(modes, parallel.set_mode)


def _restore(modes: Sequence[tuple[nn.Module, bool]], set_mode: Callable[[nn.Module, bool], object]) -> None:
    """Put each module that is in another mode into that of ``modes``, outer modules first."""
    for part, training in modes:
        if part.training != training:
            set_mode(part, training)
            part.training = training


@contextmanager
def eval_flags(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager in which ``modules`` have the flag of eval mode, without a call of their ``eval``."""
    changed = [module for module in modules if module.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


@contextmanager
def without_dropout(model: nn.Module, *, functions: bool = True) -> Iterator[None]:
    """Disable dropout of modules and, with ``functions``, of torch's functions in forward and backward passes.

    The modules are switched separately because recomputation in backward runs in another thread, in which the functions
    are not intercepted.
    """
    inside = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention | nn.RNNBase)]
    rates = [module.dropout for module in inside]
    for module in inside:
        module.dropout = 0.0
    try:
        with (
            eval_flags(module for module in model.modules() if isinstance(module, _DropoutNd)),
            _NoDropout() if functions else nullcontext(),
        ):
            yield
    finally:
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
