"""Watches on the losses of the first micro-batches: gradients that they change, tensors beside the model's parameters
that they depend on, and collectives that they run.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from launcher.config.schema import StrategyKind
from launcher.errors import CollectiveInLoss, TaskError
from launcher.loss import Loss
from launcher.quantities import first_names
from launcher.train.data.loader import MicroBatch
from launcher.train.engine.build import EngineParts
from launcher.train.parallel.base import Parallel, times_written
from launcher.train.parallel.mixed_precision import Narrowed
from launcher.train.parallel.model_check import SCALED_GRADIENTS, SPARSE_GRADIENTS, refuse

_LOOKS_AT_GRADIENTS = 4  # micro-batches, of which some follow another one of their window
_LOOKS_AT_LEAVES = 2  # micro-batches: the second one shows which tensors are the same in each, and not made in it
_MAX_DEPTH = 4
_LARGER = 2.0**10  # an exact factor, for which a threshold shows
# a GAN's generator is trained through the discriminator, which another engine of this process trains
_TRAINED: weakref.WeakSet[Parallel] = weakref.WeakSet()
# methods of a process group through which values of single ranks arrive
_BRINGS = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "recv", "recv_anysource",
)  # fmt: skip
# methods that sum over the ranks, or send: they count only with a gradient
_SUMS = (
    "allreduce", "allreduce_coalesced", "reduce", "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "scatter", "gather", "send",
)  # fmt: skip
# nodes of torch's functional collectives: of torch 2.13, and of the versions before
_FUNCTIONAL = re.compile(r"c10d_functional\w*?_(all_gather|all_reduce|reduce_scatter|all_to_all|broadcast)\w*")
_EARLIER = re.compile(r"(AllGatherIntoTensor|ReduceScatterTensor|AllToAllSingle)")
_CHECKPOINT = "torch.utils.checkpoint"


class LossWatch:
    """Base class: a check of the first micro-batches of this process. Every method is optional.

    Attributes:
        finished: True once it needs no further micro-batch; the engine then drops it.
    """

    finished = False

    def before_loss(self, number: int, count: int) -> None:
        """Note what is there before the loss of the window's micro-batch ``number``, of ``count``, is computed."""

    def stop(self) -> None:
        """End what ``before_loss`` has started, also after an exception. It may be called several times."""

    def before_backward(self, losses: Sequence[Loss], micro: MicroBatch, count: int) -> None:
        """Check the losses of a micro-batch, of ``count``, before their backward pass."""

    def after_backward(self) -> None:
        """Check what the backward pass has done."""

    def after_micro_batch(self) -> None:
        """Check what the loop has done after the backward pass, before it requests the next micro-batch."""


class GradientWatch(LossWatch):
    """Watch on gradients that the loss, the loop or a parameter's hook changes, and on parameters that a backward pass
    or the first forward pass alone writes.

    A loss that calls ``backward()`` adds gradients which the window divides by its items once more; one that calls
    ``zero_grad()`` loses those of earlier micro-batches. A parameter's hook sees the gradient of one micro-batch,
    divided by C: it may multiply it, but a threshold is another one than for the mean. A hook after the accumulation
    sees the sum so far. An optimizer that steps within the backward pass, in a hook, steps with a part of the window's
    sum. A forward pass that initialises parameters from its first batch sees one micro-batch.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parallel, self._left, self._tells = parts.parallel, _LOOKS_AT_GRADIENTS, parts.world.rank == 0
        # FSDP has parameters of its own; and to read an attribute of one that it has gathered counts as a use
        replicated = parts.plan.strategy.kind in (StrategyKind.single, StrategyKind.ddp)
        self._parameters = [*parts.parallel.module.named_parameters()] if replicated else []
        self._gradients: list[tuple[Tensor | None, int]] = []
        self._written: dict[str, int] = {}
        self._first: set[str] = set()  # parameters that the first forward pass has written
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []  # of parameters, and a copy without the watch
        self._hooked: dict[str, str] = {}  # what a hook does, by the parameter
        self._ranks = parts.world.size

    def before_loss(self, number: int, count: int) -> None:
        """Note gradients and parameters before the loss of the window's micro-batch ``number`` is computed."""
        self._several = count * self._ranks > 1
        self._number, self._gradients, self._written = number, self._now(), self._parallel.written()

    def before_backward(self, losses: Sequence[Loss], micro: MicroBatch, count: int) -> None:  # noqa: ARG002
        """Check that the loss has left the gradients alone, and name parameters that only the first of several
        micro-batches has written.

        Raises:
            TaskError: it has changed them.
        """
        if not self._same():
            raise TaskError(
                "The loss changes the gradients of the model's parameters: it calls backward() or zero_grad() itself."
                "\n  Return all terms as one total, which the launcher runs backward. For gradients of inputs use "
                "torch.autograd.grad(total, inputs),\n  which leaves those of the parameters alone."
            )
        self._watch_hooks()
        before_loss, self._written = self._written, self._parallel.written()
        written = {name for name, times in before_loss.items() if self._written.get(name, times) != times}
        if self._left == _LOOKS_AT_GRADIENTS:
            self._first = written
        once = self._first - written
        if once and self._left == _LOOKS_AT_GRADIENTS - 1 and self._number > 1 and self._tells:
            print(
                f"{first_names(sorted(once))}: written by the first forward pass, from one micro-batch, and not by the "
                "second. If the values depend on the batch,\n  the result depends on how a window is divided: set them "
                "in model(), or use batch.accumulation=1 on one rank.",
                flush=True,
            )

    def after_backward(self) -> None:
        """Check that the backward pass has left the parameters alone.

        Raises:
            TaskError: it has written some.
        """
        self.stop()
        self._left -= 1
        self.finished = not self._left
        self._gradients = self._now()
        now = self._parallel.written()
        if names := [name for name, times in self._written.items() if now.get(name, times) != times]:
            raise TaskError(
                f"{first_names(names)}: written within the backward pass, by a hook that steps an optimizer or changes "
                "the value.\n  There the gradient is a part of the window's sum, not yet its mean. Return such "
                "optimizers from optimizer(model), in a list;\n  and change values in a hook of the optimizer "
                "(register_step_pre_hook), once for each step, or in a callback's on_step."
            )
        for name, what in self._hooked.items():
            raise TaskError(
                f"{name}: a gradient hook {what}. It sees the gradient of one micro-batch, not the mean of the window."
                "\n  Change gradients in a hook of the optimizer (register_step_pre_hook), which sees the mean, once "
                "for each step;\n  or use train.clip_norm."
            )

    def after_micro_batch(self) -> None:
        """Check that the loop has left the gradients alone since ``engine.backward``.

        Raises:
            TaskError: it has changed them.
        """
        if self._gradients and not self._same():  # none are noted before a window that starts again
            raise TaskError(
                "The loop changes the gradients of the model's parameters after engine.backward(): it calls backward() "
                "or zero_grad() itself.\n  Pass all terms to one engine.backward(), as one total or a list of Loss; "
                "engine.step() sets gradients to zero."
            )

    def stop(self) -> None:
        for hooks, before in self._hooks:
            hooks.update((key, hook) for key, hook in before.items() if key in hooks)
        self._hooks = []

    def _watch_hooks(self) -> None:
        for name, parameter in self._parameters:
            for accumulated, hooks in enumerate((parameter._backward_hooks, parameter._post_accumulate_grad_hooks)):
                if hooks:
                    self._hooks.append((hooks, {**hooks}))
                    watch = self._watched_after if accumulated else self._watched
                    hooks.update({
                        key: functools.partial(watch, name, hook) for key, hook in hooks.items()
                        if not getattr(hook, "__module__", "").startswith("launcher.")
                    })  # fmt: skip

    def _watched(self, name: str, hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor | None:
        """Run a hook, and note if it does not multiply a larger gradient in the same way."""
        if gradient.layout != torch.strided:
            return hook(gradient)
        before, larger = gradient._version, gradient * _LARGER  # a hook may write what it is given
        found = hook(gradient)
        if found is None and gradient._version == before:  # it only looks, and a second time would count
            return None
        result, again = gradient if found is None else found, hook(larger)
        if not torch.allclose(larger if again is None else again, result * _LARGER, rtol=1e-3, equal_nan=True):
            self._hooked[name] = "clamps the gradient, or changes it in another way than by a factor"
        return found

    def _watched_after(self, name: str, hook: Callable[[Tensor], None], parameter: Tensor) -> None:
        before = parameter.grad.clone() if self._several and parameter.grad is not None else None
        hook(parameter)
        if before is not None and (parameter.grad is None or not torch.equal(before, parameter.grad)):
            self._hooked[name] = "(register_post_accumulate_grad_hook) changes the sum of the window so far"

    def _same(self) -> bool:
        """Return whether the gradients are those noted last, which are let go: their memory may be freed."""
        before, self._gradients = self._gradients, []
        return all(a is b and m == n for (a, m), (b, n) in zip(before, self._now(), strict=True))

    def _now(self) -> list[tuple[Tensor | None, int]]:
        return [(each, 0 if each is None else times_written(each)) for each in self._parallel.partial_gradients()]


class ForeignLeaves(LossWatch):
    """Watch on trainable tensors that the loss depends on and that are no parameters of the model.

    Examples are learned weights of losses, or a criterion with parameters, kept in the task: no optimizer has them, no
    rank shares their gradients, and no checkpoint holds them. Inputs may require a gradient, as for a gradient penalty:
    they are other tensors in each micro-batch.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts, self._left = parts, _LOOKS_AT_LEAVES
        self._before: list[weakref.ref[Tensor]] = []
        _TRAINED.add(parts.parallel)

    def before_backward(self, losses: Sequence[Loss], micro: MicroBatch, count: int) -> None:
        """Look at the leaves that the losses of a micro-batch depend on, except through its data.

        Raises:
            TaskError: the gradient of a parameter is sparse, or no sum over micro-batches; or a leaf is trainable, is
                the same in several micro-batches, and is no parameter of the model. In a loop of the user's own, which
                may train it itself, a line is printed instead.
        """
        self._left -= 1
        self.finished = not self._left
        require_dense_gradients(losses, self._parts.parallel.module, count * self._parts.world.size)
        own = {id(leaf) for parallel in _TRAINED for leaf in parallel.leaves()}
        own |= {id(leaf) for leaf in leaves_of([part for part in tree_leaves(micro.data) if isinstance(part, Tensor)])}
        leaves = leaves_of([loss.total for loss in losses])
        found = [leaf for leaf in leaves if id(leaf) not in own and not isinstance(leaf, Narrowed)]
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
        self.finished = True
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
    for node in _nodes_of([loss.total for loss in losses]):
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
    return found + [node.variable for node in _nodes_of(totals) if hasattr(node, "variable")]


def _nodes_of(totals: Sequence[Tensor]) -> Iterator[Any]:
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


@dataclass(frozen=True)
class _Call:
    """A collective that the user's code has run.

    Args:
        place: file and line of the user's code.
        brings: floating-point values of single other ranks have arrived.
        function: class of the ``torch.autograd.Function`` that ran it; None outside of one.
    """

    method: str
    place: str
    brings: bool
    function: type | None


class LossCollectives(LossWatch):
    """Watch for collectives of the user's own loss in the first micro-batch of a window of several, until ``stop``.

    A loss that contains samples of other ranks has another gradient there than in one big batch: each rank sees the
    other ranks' current micro-batch in place of the whole window, and no weighting of sums can repair that.

    A collective counts if

    - its gradient is part of the loss: it ran in a ``torch.autograd.Function`` whose node is in the loss's graph, such
      as those of torch.distributed.nn.functional, or it is one of torch's functional collectives with gradient; or
    - it brings floating-point values of single other ranks (a gather, not a sum), with or without gradient.

    A sum over the ranks without gradient, such as an all-reduce of a count, is not reported: it may only be logged.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] | None = None

    def before_loss(self, number: int, count: int) -> None:  # noqa: ARG002
        """Record the collectives that this thread runs from now on."""
        if count == 1:
            return
        self._calls, self._thread = [], threading.get_ident()
        if not _recording:
            for name in (*_BRINGS, *_SUMS):
                if name in vars(dist.ProcessGroup):
                    _originals[name] = vars(dist.ProcessGroup)[name]  # getattr would lose that it is a method
                    setattr(dist.ProcessGroup, name, _recorded(name, getattr(dist.ProcessGroup, name)))
        _recording.append(self)

    def stop(self) -> None:
        """Stop recording, if it has been started."""
        if self in _recording:
            _recording.remove(self)
            if not _recording:
                for name, method in _originals.items():
                    setattr(dist.ProcessGroup, name, method)
                _originals.clear()

    def record(self, method: str, arguments: Sequence[Any]) -> None:
        """Record a call of ``method`` of a process group, unless it is the launcher's own, or BatchNorm's."""
        if threading.get_ident() != self._thread or self._calls is None:
            return
        place, function = _origin(sys._getframe(2))
        if place is not None:
            floats = any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(arguments))
            self._calls.append(_Call(method, place, method in _BRINGS and floats, function))

    def before_backward(self, losses: Sequence[Loss], micro: MicroBatch, count: int) -> None:  # noqa: ARG002
        """Raise CollectiveInLoss if the loss contains what other ranks have computed."""
        self.stop()
        if count == 1:
            return
        self.finished = True
        calls, self._calls = self._calls or [], None
        nodes, functional = set[type | None](), list[str]()
        for node in _nodes_of([loss.total for loss in losses]):
            if (owner := getattr(type(node), "_forward_cls", None)) is not None:
                nodes.add(owner)
            if match := _FUNCTIONAL.search(name := node.name()) or _EARLIER.search(name):
                functional.append(match[1])
        found = [f"{call.method.strip('_')} in {call.place}" for call in calls if call.brings or call.function in nodes]
        if found or functional:
            names = ", ".join(dict.fromkeys([*found, *functional]))
            raise CollectiveInLoss(
                f"The loss of a micro-batch depends on what other ranks have computed ({names}), and a window has "
                f"{count} micro-batches: its gradient would be another one than that of one big batch. Nothing "
                "was applied.\n"
                "  Give the task outputs(model, batch) and window_loss(outputs) in place of loss: the launcher gathers "
                "the rows of all ranks and micro-batches, exactly. Or use batch.accumulation=1. If the result is only "
                "logged, return sums, Loss(metrics={name: (sum, count)}), which the launcher adds up over the ranks, "
                "or, in a loop of your own, gather it after engine.backward()."
            )


_recording: list[LossCollectives] = []  # of several engines, their windows may be open at the same time
_originals: dict[str, Any] = {}


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        for watch in _recording:
            watch.record(name, args)
        return method(*args, **kwargs)

    return call


def _origin(frame: FrameType | None) -> tuple[str | None, type | None]:
    """Return file and line of the user's code that runs in ``frame``, None for the launcher's own code and BatchNorm;
    and the innermost class of ``torch.autograd.Function`` on the stack, if there is one."""
    place: str | None = None
    function: type | None = None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        passes = module.partition(".")[0] in ("torch", "contextlib") or frame.f_code.co_name == "__torch_function__"
        if place is None and not passes:
            if module.startswith("launcher."):
                return None, None
            place = f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        if isinstance(frame.f_locals.get("self"), _BatchNorm):
            return None, None
        if function is None and module == "torch.autograd.function" and frame.f_code.co_name == "apply":
            applied = frame.f_locals.get("cls")
            if applied is not None and applied.__module__ != _CHECKPOINT:
                function = applied
        frame = frame.f_back
    return place, function
