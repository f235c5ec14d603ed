"""Uses of shard units in a micro-batch, and when their gradients are complete.

``fully_shard`` reduces a unit's gradients, and frees its parameters, as soon as a backward pass has left one forward
pass of the unit. That is too early in two cases:

- The unit ran more than once (a siamese network, a layer that several depths share): its gradients are complete when
  the backward pass has left all of them. They are reduced once, at the end of the backward pass.
- The loss holds a gradient (``torch.autograd.grad``, as in a gradient penalty): that inner backward pass completes no
  gradient of a parameter, and the graph that it leaves with ``create_graph=True`` computes with the gathered parameters
  once more. They stay gathered until the engine's own backward pass is over.

In all other cases it is left to ``fully_shard``, so that each reduction runs beside the rest of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from launcher.train.narrow import groups_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Uses:
    """Uses of all units of a model.

    Args:
        modules: the sharded modules, the root first.
    """

    def __init__(self, modules: Sequence[FSDPModule]) -> None:
        self._groups = [_Group(group, self) for module in modules for group in groups_of(module)]
        self.in_loss = False  # whether a backward pass that starts now is one inside the loss
        self.held = False  # whether the micro-batch has had one

    def begin(self, *, in_loss: bool) -> None:
        """Start a micro-batch, or other passes. ``in_loss``: until ``before_backward``, a backward pass is one inside
        the loss."""
        self.in_loss, self.held = in_loss, False
        for each in self._groups:
            each.forwards = 0

    def before_backward(self) -> None:
        """Expect the backward pass that completes the micro-batch's gradients."""
        self.in_loss = False
        if self.held:
            for each in self._groups:  # a forward pass after the inner backward pass may have freed them
                each.gather()


class _Group:
    """Takes the place of two methods of a parameter group: one is called in each forward pass, the other where its
    gradients seem to be complete."""

    def __init__(self, group: Any, uses: Uses) -> None:
        self._group, self._uses = group, uses
        self._register, self._complete = type(group)._register_post_backward_hook, group.post_backward
        self.forwards = 0  # of this micro-batch, with gradient
        group._register_post_backward_hook = self.register
        group.post_backward = self.complete

    def register(self, args: Any, kwargs: Any) -> Any:
        """Let autograd call this object's ``post_backward`` where a backward pass leaves the forward pass ahead."""
        self.forwards += torch.is_grad_enabled()
        return self._register(self, args, kwargs)

    def post_backward(self) -> None:
        """Complete the gradients if no other use of the unit can add to them."""
        if self.forwards <= 1 and not self._uses.held:
            self.complete()

    def complete(self) -> None:
        """Reduce the gradients and free the parameters. Also called for all groups at the end of a backward pass."""
        if self._uses.in_loss:
            self._uses.held = True
        else:
            self.forwards = 0
            self._complete()

    def gather(self) -> None:
        """Gather the parameters, if they are not."""
        self._group.unshard()
        self._group.wait_for_unshard()
