"""Trainable tensors that the loss depends on and that are no parameters of the model.

Learned weights of losses, proxies, or a criterion with parameters, kept in the task: the optimizer does not have them,
no rank shares their gradients, and no checkpoint holds them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from launcher.errors import TaskError
from launcher.loss import Loss
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import EngineParts
from launcher.train.engine.loss_terms import LossWatch
from launcher.train.parallel.base import Parallel
from launcher.train.parallel.mixed_precision import Narrowed
from launcher.train.parallel.model_check import SCALED_GRADIENTS, SPARSE_GRADIENTS, refuse

# the second one shows which tensors are the same in each micro-batch, and not made in it
LOOKS = 2
_MAX_DEPTH = 4
# a GAN's generator is trained through the discriminator, which another engine of this process trains
_TRAINED: weakref.WeakSet[Parallel] = weakref.WeakSet()


class ForeignLeaves(LossWatch):
    """Watch on the leaves of the first losses of this process.

    Inputs may require a gradient, as for a gradient penalty: they are other tensors in each micro-batch.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._left = parts, LOOKS
        self._before: list[weakref.ref[Tensor]] = []
        _TRAINED.add(parts.parallel)

    @property
    def over(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self._left

    def before_backward(self, losses: Sequence[Loss], micro: MicroBatch, count: int) -> None:
        """Look at the leaves that the losses of a micro-batch depend on, except through its data.

        Raises:
            TaskError: the gradient of a parameter is sparse, or no sum over micro-batches; or a leaf is trainable, is
                the same in several micro-batches, and is no parameter of the model. In a loop of the user's own, which
                may train it itself, a line is printed instead.
        """
        if not self._left:
            return
        self._left -= 1
        require_dense_gradients(losses, self._parts.parallel.module, count * self._parts.world.size)
        own = {id(leaf) for parallel in _TRAINED for leaf in parallel.leaves()}
        own |= {id(leaf) for leaf in leaves_of([part for part in tree_leaves(micro.data) if isinstance(part, Tensor)])}
        found = [
            leaf
            for leaf in leaves_of([loss.total for loss in losses])
            if id(leaf) not in own and not isinstance(leaf, Narrowed)
        ]
        before = {id(leaf) for reference in self._before if (leaf := reference()) is not None}
        self._before = [weakref.ref(leaf) for leaf in found]
        if again := [leaf for leaf in found if id(leaf) in before]:
            places = self._places(again)
            for leaf in again:
                if isinstance(leaf, nn.Parameter) or id(leaf) in places:
                    self._refuse(places.get(id(leaf)), leaf)

    def _refuse(self, place: str | None, leaf: Tensor) -> None:
        what = f"a tensor of shape {list(leaf.shape)}" if place is None else f"{place}, of shape {list(leaf.shape)},"
        if self._parts.owner is not None:
            raise TaskError(
                f"The loss depends on {what} that requires a gradient and is no parameter of the model.\n"
                "  It would be neither trained nor saved. Make it a parameter of what model() returns, such as a module"
                " that holds\n  the network and the criterion; or freeze it (requires_grad_(False)) if it is not to be "
                "trained."
            )
        self._left = 0
        if self._parts.world.rank == 0 and self._parts.world.size > 1:
            print(
                f"The loss depends on {what} that requires a gradient and is no parameter of engine.model: the engine "
                "does not\n  share its gradient between the ranks, nor train or save it.",
                flush=True,
            )

    def _places(self, leaves: Sequence[Tensor]) -> dict[int, str]:
        """Return where the leaves are held, by ``id``: attributes of the task and of the model, or globals."""
        wanted, places = {id(leaf) for leaf in leaves}, dict[int, str]()
        owner, seen = self._parts.owner, set[int]()
        roots: list[tuple[str, object]] = [("model", self._parts.parallel.module)]
        if owner is not None:
            roots.append((type(owner).__name__, owner))
            loss: Any = getattr(owner, "loss", None)
            held = getattr(loss, "__globals__", None) or getattr(getattr(loss, "__func__", None), "__globals__", {})
            roots += [(name, value) for name, value in held.items() if isinstance(value, Tensor | nn.Module)]
        for root, value in roots:
            for name, tensor in _tensors(root, value, seen, _MAX_DEPTH):
                if id(tensor) in wanted:
                    places.setdefault(id(tensor), name)
        return places


def require_dense_gradients(losses: Sequence[Loss], model: nn.Module, parts: int = 1) -> None:
    """Raise TaskError if the backward pass of a micro-batch's losses makes a sparse gradient of a parameter, or in a
    window of several ``parts`` one that the micro-batch's other samples scale."""
    for node in _nodes([loss.total for loss in losses]):
        found = None
        if getattr(node, "_saved_sparse", False) or getattr(node, "_saved_sparse_grad", False):  # embedding, gather
            found = SPARSE_GRADIENTS
        elif parts > 1 and getattr(node, "_saved_scale_grad_by_freq", False):
            found = SCALED_GRADIENTS
        if found is not None:
            for leaf in (following.variable for following, _ in node.next_functions if hasattr(following, "variable")):
                names = (name for name, parameter in model.named_parameters() if parameter is leaf)
                refuse([next(names, f"a parameter of shape {[*leaf.shape]}")], *found)


def leaves_of(totals: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that ``totals`` depend on and that require a gradient."""
    found = [total for total in totals if total.requires_grad and total.grad_fn is None]
    return found + [node.variable for node in _nodes(totals) if hasattr(node, "variable")]


def _nodes(totals: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph that ``totals`` depend on."""
    waiting: list[Any] = [total.grad_fn for total in totals]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)


def _tensors(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that ``value`` is or holds, with the names of their places."""
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    below = functools.partial(_tensors, seen=seen, depth=depth - 1)
    match value:
        case list() | tuple():
            for number, part in enumerate(value[:1000]):
                yield from below(f"{name}[{number}]", part)
        case dict():
            for key, part in [*value.items()][:1000]:
                yield from below(f"{name}[{key!r}]", part)
        case nn.Module():
            for path, module in value.named_modules(prefix=name):
                for key, part in {**module._parameters, **module._buffers, **_plain(module)}.items():
                    yield from below(f"{path}.{key}", part)
        case _:
            if hasattr(value, "__self__"):  # a bound method
                yield from below(name, value.__self__)
            for key, part in _plain(value).items():
                yield from below(f"{name}.{key}", part)
            names = getattr(getattr(value, "__code__", None), "co_freevars", ())
            for key, cell in zip(names, getattr(value, "__closure__", None) or (), strict=False):
                with suppress(ValueError):  # the variable is not set yet
                    yield from below(f"{name}.{key}", cell.cell_contents)


def _plain(value: object) -> dict[str, Any]:
    """Return the attributes that are not torch's own containers."""
    attributes: Any = getattr(value, "__dict__", {})
    return {name: held for name, held in attributes.items() if name not in ("_parameters", "_buffers", "_modules")}
