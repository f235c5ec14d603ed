"""Training and evaluation mode of a model, set by its own ``train`` and ``eval`` as every training loop sets them.

A module may override these: to keep BatchNorm layers in eval mode, to merge adapters into weights for an evaluation, or
to cache fused weights. Setting ``training`` alone would leave that out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # an inspection of a task does without
    from launcher.train.parallel.base import Parallel


def start_training(model: nn.Module) -> None:
    """Call ``model.train()``, and put the modules that the task had put into eval mode back into it.

    A model that is in eval mode itself, as ``from_pretrained`` returns it, is put into training mode as a whole.
    """
    before = [(part, part.training or not model.training) for part in model.modules()]
    model.train()
    _restore([(part, training and part.training) for part, training in before], lambda part, mode: part.train(mode))


class SavedModes:
    """Saved mode of each of a model's modules."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._modes = [(part, part.training) for part in parallel.module.modules()]

    def restore(self) -> None:
        """Put the model back into its mode, and then the modules that had another one into theirs. All ranks call it,
        between two windows."""
        model, training = self._modes[0]
        self._parallel.set_mode(model, training)
        _restore(self._modes, self._parallel.set_mode)


def _restore(modes: Sequence[tuple[nn.Module, bool]], set_mode: Callable[[nn.Module, bool], object]) -> None:
    """Put each module that is in another mode into that of ``modes``, outer modules first."""
    for part, training in modes:
        if part.training != training:
            set_mode(part, training)
            part.training = training
