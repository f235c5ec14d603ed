"""Shard units: the parts of a model that are gathered and freed together, and their uses in a micro-batch.

``fully_shard`` reduces a unit's gradients, and frees its parameters, as soon as the backward pass has completed one
forward pass of the unit. That is too early in these cases:

- The unit ran more than once (a siamese network, a layer that several depths share): its gradients are complete when
  the backward pass has completed all its runs. They are reduced once, at the end of the backward pass.
- The unit is the root: a loss may use its parameters and methods outside of its forward pass. They are reduced at the
  end, too.
- The loss contains a gradient (``torch.autograd.grad``, as in a gradient penalty): that inner backward pass completes
  no gradient of a parameter, and with ``create_graph=True`` its graph uses the gathered parameters again. They stay
  gathered until the engine's own backward pass is complete.

A reentrant checkpoint runs the unit without gradient first, and with gradient in the backward pass: until then, its
gradients are not complete either.

All other cases are left to ``fully_shard``, which overlaps each reduction with the rest of the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.train.parallel.mixed_precision import groups_of, in_backward
from launcher.train.parallel.model_check import registered_again
from launcher.train.parallel.unit_order import UnitOrder

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_USED_DIRECTLY = ("got mixed torch.Tensor and DTensor", "storage of size 0", "its data is not allocated yet")
_MAX_DEPTH = 4  # of objects in the output of a unit


def find_units(model: nn.Module, named: Iterable[nn.Module] | None = None) -> list[nn.Module]:
    """Return the model's shard units, inner ones first; parameters in none of them belong to the root.

    Args:
        named: the result of the task's ``shard_units(model)``. Default: the elements of every outermost ModuleList (or
            Sequential, if the model has no ModuleList) whose class has parameters and occurs there more than once.

    Raises:
        TaskError: a unit is not part of the model, is the model itself, has no parameters or no forward of its own, has
            two parents, or shares a parameter with another unit or with the rest of the model.
    """
    units = _repeated_blocks(model) if named is None else list(named)
    names = _all_names(model)
    require_parts(model, units, "shard_units")
    for unit in units:
        if unit is model:
            raise TaskError(
                "shard_units(model): the model itself is among them: it is the root, and holds what is in no unit.\n"
                "  Leave it out."
            )
        if len(names[unit]) > 1:
            raise TaskError(
                f"shard_units(model): {' and '.join(names[unit][:2])} are one {type(unit).__name__} under two "
                "parents: a unit has one place in the model.\n"
                "  Leave it out, or name the module that holds both."
            )
        if isinstance(unit, CONTAINERS):
            raise TaskError(
                f"shard_units(model): {names[unit][0]} is a {type(unit).__name__}, which has no forward of its own.\n"
                "  Name its elements: list(model.blocks), not model.blocks."
            )
        if next(unit.parameters(), None) is None:
            raise TaskError(f"shard_units(model): {names[unit][0]} has no parameters to shard.\n  Leave it out.")
    places = {module: place for place, module in enumerate(names)}
    units = sorted(set(units), key=lambda unit: (-names[unit][0].count("."), places[unit]))
    _require_own_parameters(model, units, names)
    return units


def require_parts(model: nn.Module, parts: Iterable[object], function: str) -> None:
    """Raise TaskError unless all ``parts``, which the task's ``function`` has returned, are modules of ``model``."""
    known = {id(module) for module in model.modules()}
    for part in parts:
        if id(part) not in known:
            raise TaskError(
                f"{function}(model): {type(part).__name__} is not part of this model.\n"
                "  Return modules of the model that it is called with, such as list(model.blocks)."
            )


def owned(units: Sequence[nn.Module], root: nn.Module) -> list[tuple[nn.Module, list[nn.Parameter]]]:
    """Return each unit, in the order of ``units`` (inner ones first), and then the root, with the parameters that
    belong to no earlier one."""
    taken: set[nn.Parameter] = set()
    groups: list[tuple[nn.Module, list[nn.Parameter]]] = []
    for module in (*units, root):
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        taken.update(own)
        groups.append((module, own))
    return groups


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    lists = _outermost(model, nn.ModuleList) or _outermost(model, nn.Sequential)
    names = _all_names(model)
    blocks: list[nn.Module] = []
    for holder in lists:
        children = [child for child in _elements(holder) if next(child.parameters(), None) is not None]
        kinds = [type(child) for child in children]
        # a module with two parents cannot be a unit: it belongs to the root
        blocks += [child for child in children if kinds.count(type(child)) > 1 and len(names[child]) == 1]
    shared = _shared_parameters(blocks) | _parameters_outside(model, blocks)
    return [block for block in blocks if not any(parameter in shared for parameter in block.parameters())]


def _elements(holder: nn.Module) -> list[nn.Module]:
    """Return the children of ``holder``; containers without a forward of their own are replaced by their elements."""
    return [
        element
        for child in holder.children()
        for element in (_elements(child) if isinstance(child, CONTAINERS) else [child])
    ]


def _outermost(module: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    if isinstance(module, kind):
        return [module]
    return [unit for child in module.children() for unit in _outermost(child, kind)]


def _all_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name or "the model itself")
    return names


def _shared_parameters(units: Sequence[nn.Module]) -> set[nn.Parameter]:
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    for unit in units:
        own = set(unit.parameters())
        shared |= own & seen
        seen |= own
    return shared


def _parameters_outside(model: nn.Module, units: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters of the modules that are in no unit."""
    inside = {module for unit in units for module in unit.modules()}
    others = (module for module in model.modules() if module not in inside)
    return {parameter for module in others for parameter in module.parameters(recurse=False)}


def _require_own_parameters(model: nn.Module, units: Sequence[nn.Module], names: dict[nn.Module, list[str]]) -> None:
    outside = _parameters_outside(model, units)
    holder: dict[nn.Parameter, nn.Module] = {}
    for unit in units:
        for name, parameter in unit.named_parameters():
            if parameter in outside:
                raise TaskError(
                    f"shard_units(model): {names[unit][0]} shares the parameter {name} with a module that is in no "
                    "unit: it cannot be sharded with both.\n  Leave the unit out, or name a module that holds both."
                )
            other = holder.setdefault(parameter, unit)
            if all(module is not other for module in unit.modules()):  # it is not an inner unit
                raise TaskError(
                    f"shard_units(model): {names[other][0]} and {names[unit][0]} share the parameter {name}: it cannot "
                    "be sharded with both.\n  Leave one of them out, or name the module that holds both."
                )


def refuse_direct_use(model: nn.Module, kind: StrategyKind) -> None:
    """Let a backward pass that reaches the shard of a parameter, instead of the gathered parameter, raise TaskError:
    each rank would add its own gradient to its shard, and the gradients of the others would be lost."""

    def refuse(name: str, gradient: Tensor) -> NoReturn:  # noqa: ARG001
        raise TaskError(direct_use(name, kind))

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(refuse, name))


def direct_use(what: str, kind: StrategyKind) -> str:
    """Return the message for a loss that uses a parameter of a shard unit outside of the unit's forward pass."""
    return (
        f"The loss uses {what} of a shard unit outside of the unit's forward pass, where strategy={kind.value} has "
        "only this rank's part of it.\n"
        "  Use it in the forward pass of the unit; or keep its module whole in each micro-batch: leave it out of the "
        "task's shard_units(model), or use strategy=ddp. For weight decay, use the optimizer's. A unit's output "
        "that is a view may not be changed in place either: write y = y + 1, not y += 1."
    )


def is_direct_use(error: BaseException) -> bool:
    """Return whether torch has raised ``error`` because a shard was used together with a whole tensor, or because a
    gathered parameter was used after it was freed."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _USED_DIRECTLY)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in ``value``: in containers, attributes and slots, and the variables of functions."""
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, str | bytes | int | float | complex | type | nn.Module | None):
        parts = [*value.values()] if isinstance(value, Mapping) else []
        parts += value if isinstance(value, list | tuple | set | frozenset) else []
        parts += getattr(value, "__dict__", {}).values()
        parts += [getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for cell in getattr(value, "__closure__", None) or ():
            with suppress(ValueError):  # the variable is not set yet
                parts.append(cell.cell_contents)
        for part in parts:
            yield from _tensors_in(part, depth - 1)


class Uses:
    """Tracker of the uses of all units of a model in a micro-batch.

    Args:
        modules: the sharded modules, the root first.
        order: counts the use of each unit.
    """

    def __init__(self, modules: Sequence[FSDPModule], order: UnitOrder) -> None:
        self._groups = [
            _Group(group, module, self, number) for number, module in enumerate(modules) for group in groups_of(module)
        ]
        self.root = modules[0]
        self.order = order
        self.in_loss = False  # a backward pass that starts now is an inner one, part of computing the loss
        self.held = False  # the micro-batch has had such a backward pass
        self.completed = True  # torch has completed all groups at the end of the backward pass

    def begin(self, *, in_loss: bool) -> None:
        """Reset the counters before a micro-batch or other passes.

        Args:
            in_loss: until ``before_backward`` is called, backward passes belong to the computation of the loss, such as
                a gradient penalty.
        """
        self.in_loss, self.held = in_loss, False
        for each in self._groups:
            each.forwards = each.waiting = each.depth = 0

    def before_backward(self) -> None:
        """Expect the backward pass that completes the micro-batch's gradients."""
        self.in_loss = self.completed = False
        if self.held:
            for each in self._groups:  # a forward pass after the inner backward pass may have freed the parameters
                each.gather()


class _Group:
    """Replacement for methods of a parameter group: three are called in each forward pass, the other when FSDP takes
    the gradients to be complete."""

    def __init__(self, group: Any, module: FSDPModule, uses: Uses, number: int) -> None:
        self._group, self._module, self._uses, self._number = group, module, uses, number
        self._register, self._complete = type(group)._register_post_backward_hook, group.post_backward
        self._forward, self._return = group.pre_forward, group.post_forward
        self.forwards = 0  # forward passes with gradient in this micro-batch
        self.depth = 0  # forward passes of the unit that run now: it may call itself
        self.waiting = 0  # forward passes without, which a reentrant checkpoint may repeat in the backward pass
        group.pre_forward, group.post_forward = self.pre_forward, self.post_forward
        group._register_post_backward_hook = self.register
        group.post_backward = self.complete

    def pre_forward(self, *args: Any) -> Any:
        """Count the call before the unit is gathered for it."""
        self._uses.order.called(self._number)
        self.depth += 1
        return self._forward(*args)

    def register(self, args: Any, kwargs: Any) -> Any:
        """Let autograd call this object's ``post_backward`` when the backward pass has completed the forward pass that
        starts now."""
        if torch.is_grad_enabled():
            self.forwards += 1
            self.waiting -= self.waiting > 0 and in_backward()
        else:
            self.waiting += 1
        return self._register(self, args, kwargs)

    def post_forward(self, module: Any, inputs: Any, output: Any) -> Any:
        """Expect the backward pass of tensors in objects, where torch does not look, before the parameters are freed.

        Raises:
            TaskError: the unit returns a parameter of its own, or has replaced it.
        """
        self.depth -= 1
        for parameter in self._group.fsdp_params:
            info = parameter._module_info
            if info.module._parameters.get(info.param_name) is not parameter._unsharded_param:
                module = next(name for name, each in self._uses.root.named_modules() if each is info.module)  # pyright: ignore
                raise registered_again([f"{module}.{info.param_name}".lstrip(".")])
        tensors = [output] if type(output) is Tensor else [*_tensors_in(output, _MAX_DEPTH)]
        if self._number:
            for tensor in tensors:
                if tensor.layout is torch.strided and (tensor.is_leaf or tensor._base is not None):
                    self._require_no_parameter(tensor)
        if torch.is_grad_enabled() and type(output) is not Tensor:
            known = {id(leaf) for leaf in tree_leaves(output)}
            for tensor in tensors:
                if tensor.requires_grad and id(tensor) not in known:
                    tensor.register_hook(self._module._get_fsdp_state()._pre_backward)  # pyright: ignore
        if self.depth > 0:  # the outer pass of a unit that calls itself still uses the parameters
            return output
        result = self._return(module, inputs, output)
        order, indices = self._group.comm_ctx.post_forward_order, self._group._post_forward_indices
        # torch would gather those before it again; and after an evaluation, which has no backward pass, its last one
        if (in_backward() or not self._uses.in_loss) and indices and order[-1] is self._group:
            order.pop()
            indices.pop()
        return result

    def _require_no_parameter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()._cdata
        for parameter in self._group.fsdp_params:
            if parameter._unsharded_param.untyped_storage()._cdata == storage:
                name = next(name for name, each in self._uses.root.named_modules() if each is self._module)  # pyright: ignore
                raise TaskError(
                    f"The shard unit {name} returns its parameter {parameter._module_info.param_name} or a view of it, "
                    "whose memory FSDP and HSDP free after the unit's forward pass.\n"
                    "  Return a copy (weight.clone()), leave the unit out of the task's shard_units(model), or use "
                    "strategy=ddp."
                )

    def post_backward(self) -> None:
        """Complete the gradients if no other use of the unit can add to them."""
        if self.forwards <= 1 and not self.waiting and not self._uses.held and self._number:
            self._reduce()

    def complete(self) -> None:
        """Complete the gradients at the end of a backward pass, where torch calls this for all groups."""
        self._uses.completed |= not self._uses.in_loss
        self._reduce()

    def _reduce(self) -> None:
        """Reduce the gradients and free the parameters."""
        if self._uses.in_loss:
            self._uses.held = True
        else:
            self.forwards = 0
            self._complete()

    def gather(self) -> None:
        """Gather the parameters, if they are not gathered already."""
        self._group.unshard()
        self._group.wait_for_unshard()
