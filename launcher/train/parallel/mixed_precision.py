"""Mixed precision of sharded models: FSDP gathers in bf16 or fp16 only the parameters that autocast rounds anyway.

A model then computes the same function under every strategy. ``fully_shard``'s own mixed precision gathers every
parameter of a unit in one narrow dtype and casts the unit's inputs, so that embeddings, norm weights, time steps and
residual streams lose precision that they keep under autocast alone.

Weights and biases that only linear and convolution layers use are gathered in the narrow dtype. It saves memory too:
for a weight gathered in fp32, autograd keeps autocast's narrow copy from forward to backward, for the whole model at
once. If a model uses such a parameter in another way (outside autocast, or in arithmetic that autocast leaves in fp32),
it is gathered in fp32 at that moment, and from then on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from launcher.plan.float_format import Settings, float_format

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


# gathers a parameter of torch's FSDP again, in its own dtype instead of the narrow one
GatherWide = Callable[[Any, torch.dtype], Tensor]

_MULTIPLIES = {
    kind.forward
    for kind in (
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
    )
}  # fmt: skip
# functions whose arguments autocast casts, on every device
_AUTOCAST = {
    functional.linear, torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
    torch.conv_transpose3d, torch.matmul, torch.mm, torch.bmm, torch.addmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm,
}  # fmt: skip
# accesses that depend on neither the values nor the dtype, in FSDP's code and in users' code
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in (
        "shape", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_leaf", "requires_grad",
        "grad", "grad_fn", "is_quantized", "is_nested",
    )),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_contiguous, Tensor.__len__,
    Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.is_floating_point,
    Tensor.is_inference, Tensor.untyped_storage, Tensor.data_ptr, Tensor.storage_offset, Tensor.__hash__,
}  # fmt: skip


class Narrowed(nn.Parameter):
    """A parameter gathered in a narrow dtype, for matrix products under autocast; any other use calls ``widen``."""

    widen: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _METADATA or (func in _AUTOCAST and _cast_by_autocast(args, kwargs)) or in_backward():
                return func(*args, **kwargs)
            if func is Tensor.to and not kwargs and args[1:] == (args[0].dtype,):
                return args[0].as_subclass(Tensor)  # the gathered values are those that the conversion would give
        args, kwargs = tree_map_only(cls, lambda parameter: parameter.widen(), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():  # avoids recursion if an argument was not widened
            return func(*args, **kwargs)


def _cast_by_autocast(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether autocast is enabled with the dtype of the narrow parameter among the arguments."""
    parameter = next(each for each in itertools.chain(args, kwargs.values()) if isinstance(each, Narrowed))
    device = parameter.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is parameter.dtype


def in_backward() -> bool:
    """Return whether autograd is running a backward pass, in which a forward pass is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def class_before_format(module: nn.Module) -> type[nn.Module]:
    """Return the class of a layer, or the one that it had before ``set_format`` changed it."""
    return getattr(type(module), "class_before_format", type(module))


def set_format(model: nn.Module, settings: Settings) -> None:
    """Let the model's layers compute in the format of an installed package if the precision is one, and otherwise as
    they did before.

    Raises:
        ConfigError: it can change no layer.
    """
    for module in model.modules():
        if class_before_format(module) is not type(module):
            module.__class__ = class_before_format(module)
    if (added := float_format(settings)) is not None:
        added.convert(model)


def matmul_parameters(model: nn.Module) -> dict[nn.Parameter, tuple[nn.Module, str]]:
    """Return the parameters that only linear and convolution layers use, each with one such layer and its name
    there."""
    used: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    others: set[nn.Parameter] = set()
    for module in model.modules():
        # torch's attention uses the weights of its output layer directly, without calling the layer
        own = isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
        forward = getattr(class_before_format(module), "forward", None)  # TorchScript's classes have none
        for name, parameter in module.named_parameters(recurse=False):
            if forward in _MULTIPLIES and name in ("weight", "bias") and not own:
                used.setdefault(parameter, (module, name))  # torch's FSDP knows a tied one by its first place
            else:
                others.add(parameter)
    return {p: place for p, place in used.items() if p not in others}


def narrow(
    module: FSDPModule,
    places: set[tuple[nn.Module, str]],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    gather: GatherWide | None,
) -> None:
    """Let ``module``'s own group gather the parameters at ``places`` as ``dtype``, and all others in their own dtype.

    Args:
        reduce_dtype: dtype in which gradients are summed between ranks.
        gather: gathers a parameter of the group in its own dtype and returns it; called on all ranks when one is used
            outside of autocast's matrix products. None: such uses are not detected.
    """
    for group in groups_of(module):
        narrowed = {p for p in group.fsdp_params if (p._module_info.module, p._module_info.param_name) in places}
        group._init_mp_dtypes = functools.partial(_set_formats, group, narrowed, dtype, reduce_dtype)
        for parameter in narrowed:
            _gather_narrow(parameter, narrowed, dtype, gather)


def _set_formats(group: Any, narrowed: set[Any], dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    """Replace ``_init_mp_dtypes`` of torch, which has one dtype for all parameters of a group."""
    for parameter in group.fsdp_params:
        parameter.orig_dtype = parameter.sharded_param.dtype
        parameter.param_dtype = dtype if parameter in narrowed else None
        parameter.reduce_dtype = torch.float32  # the dtype in which gradients are accumulated
    trained = [p.orig_dtype for p in group.fsdp_params if p.sharded_param.requires_grad]
    group._orig_dtype = trained[0] if trained else None
    group._reduce_dtype = reduce_dtype if trained else None


def _gather_narrow(parameter: Any, narrowed: set[Any], dtype: torch.dtype, gather: GatherWide | None) -> None:
    """Wrap ``init_unsharded_param`` of torch, which creates the gathered parameter at the first gather.

    torch requires all gradients of a group to have one dtype, so a narrow one is added to an fp32 sum at once.
    """
    of_torch = parameter.init_unsharded_param

    def init() -> None:
        fresh = not hasattr(parameter, "_unsharded_param")
        of_torch()
        if not fresh or parameter not in narrowed:
            return
        made = parameter._unsharded_param
        if gather is not None and type(made) is nn.Parameter:  # not a fake tensor
            made = parameter._unsharded_param = torch.Tensor._make_subclass(Narrowed, made.detach(), made.requires_grad)
            made.widen = widen
        trained = made.requires_grad
        made.requires_grad_(True)  # needed to register the hook, also for a parameter that is trained only later
        made.register_post_accumulate_grad_hook(accumulate)
        made.requires_grad_(trained)

    def accumulate(made: Tensor) -> None:
        gradient, made.grad = made.grad, None
        if gradient is None:
            return
        if parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_accumulated_grad = gradient.to(torch.float32)
        else:
            parameter.unsharded_accumulated_grad += gradient

    def widen() -> Tensor:
        if parameter in narrowed and parameter.sharded_state.name == "UNSHARDED":
            assert gather is not None
            with torch.inference_mode(False), torch.no_grad():
                whole = gather(parameter, dtype)
            narrowed.discard(parameter)
            parameter.param_dtype = None
            parameter.all_gather_outputs = [whole]  # autograd keeps the narrow one as long as it needs it
            del parameter._unsharded_param
            parameter.init_unsharded_param()
            parameter._setattr_on_modules(parameter._unsharded_param)
        return parameter._unsharded_param

    parameter.init_unsharded_param = init


def groups_of(module: FSDPModule) -> Iterator[Any]:
    """Yield the parameter groups of a sharded module: a single one up to torch 2.11, a list since then."""
    state = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # pyright: ignore
    yield from (group for group in groups if group is not None)
