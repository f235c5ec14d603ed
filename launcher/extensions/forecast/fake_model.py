"""Models on fake tensors, stand-ins for parts of torch that do not run on them, and the log of their allocations."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves, tree_map

from launcher.config.schema import Compress, Parameters, Sync
from launcher.errors import LauncherError
from launcher.extensions.forecast.repeated_blocks import IrregularModel
from launcher.plan.host import free_host_bytes
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Collective, reduces
from launcher.task import Task, build_model
from launcher.train.data import packing
from launcher.train.engine import build
from launcher.train.parallel import ddp
from launcher.train.parallel.base import Parallel, trained

# fraction of the free host memory that a model may take whose construction needs real values
BUILT_SHARE = 0.5


# errors of a model or loss that cannot run without values
NEEDS_VALUES = DataDependentOutputException | DynamicOutputShapeException
NARROW = (torch.bfloat16, torch.float16)
# operators that autocast of CUDA computes in fp32 (PyTorch, aten/src/ATen/autocast_mode.h: AT_FORALL_FP32), and those
# to which it passes dtype=torch.float32 (AT_FORALL_FP32_SET_OPT_DTYPE)
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp norm.Scalar norm.ScalarOpt_dim
"""
_FP32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList
"""


class NotPredictable(Exception):
    """Memory cannot be predicted; the message is the reason, for the plan's note."""


def model_without_memory(plan: RunPlan, task: Task, fake: FakeTensorMode, device: torch.device) -> nn.Module:
    """Return the task's model on fake tensors.

    Raises:
        NotPredictable: its construction needs values, and the model is too large to be built with them.
    """
    try:
        with patch.object(torch.utils, "swap_tensors", set_data), fake, device:
            model = build_model(task, plan.train.seed)
    except LauncherError:
        raise
    except Exception as error:
        needed = 4 * ((plan.task.parameters or 0) + plan.task.frozen_parameters)
        if needed > BUILT_SHARE * free_host_bytes():
            raise NotPredictable(
                f"model() cannot be built without values ({problem_text(error)}), and with them it takes "
                f"{needed / 2**30:.1f} GB here"
            ) from None
        model = build_model(task, plan.train.seed)
    with fake:
        _convert(model, device)
    return model


def set_data(old: Tensor, new: Tensor) -> None:
    """Stand in for ``torch.utils.swap_tensors``, which nn.Module.to() calls for fake parameters and which refuses them,
    because their mode holds weak references to them."""
    old.data = new.data


def _convert(model: nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers that are real or on the meta device, such as those of an assigned state dict, by
    fake tensors. Tied ones stay tied."""
    replacements: dict[int, Tensor] = {}

    def replaced(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            replacements[id(tensor)] = empty
        return replacements[id(tensor)]

    def is_real(tensor: Tensor) -> bool:
        return not (isinstance(tensor, FakeTensor) and tensor.device.type == device.type)

    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and is_real(parameter):
                setattr(module, name, replaced(parameter))  # also updates the list of parameters in an nn.LSTM
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and is_real(buffer):
                module._buffers[name] = replaced(buffer)


def problem_text(error: Exception) -> str:
    """Return why a trace failed, for the plan's note."""
    if isinstance(error, NotPredictable | IrregularModel):
        return str(error)
    if isinstance(error, DataDependentOutputException):
        return "the model or its loss asks a tensor for its value (.item(), bool(), ...)"
    if isinstance(error, DynamicOutputShapeException):
        return "the size of a tensor in the model or its loss depends on values (a boolean mask, nonzero(), ...)"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def buildable_without_memory(whole: nn.Module) -> Iterator[None]:
    """Return a context in which strategies are built around a model on fake tensors. Nothing is compiled.

    Args:
        whole: the whole model, of which the one that is wrapped may be a shortened copy.
    """
    with (
        patch.object(torch.utils, "swap_tensors", set_data),
        patch.object(_fsdp_param, "_chunk_with_empty", OwnChunk),
        patch.object(ddp, "Ddp", functools.partial(Replica, whole=whole)),
        patch.object(build, "compile_forward", lambda _: None),
        patch.object(nn.Module, "compile", lambda _: None),
    ):
        yield


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Return a context in which autocast of the CPU computes in fp32 what autocast of CUDA does, and in which packed
    rows have no mask.

    A GPU's job is traced on the CPU if this machine has no GPU. Autocast of the CPU leaves softmax and norms, whose
    results are kept for the backward pass, in bf16.
    """
    own, wide = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU), {"dtype": torch.float32}

    def widened(operator: Any, *, to_dtype: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(own):
                if not to_dtype:
                    return operator(*tree_map(_wider, args), **tree_map(_wider, kwargs))
                is_chosen = any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
                return operator(*args, **kwargs, **({} if is_chosen or args[0].dtype not in NARROW else wide))

        return run

    with (
        torch.library._scoped_library("aten", "IMPL") as library,
        patch.object(packing, "has_document_kernel", lambda device: torch.is_autocast_enabled(device.type)),
    ):
        for names, to_dtype in ((_FP32, False), (_FP32_RESULT, True)):
            for name in names.split():
                packet, _, overload = name.partition(".")
                if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
                    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
                    library.impl(name, widened(operator, to_dtype=to_dtype), "AutocastCPU")
        yield


def _wider(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in NARROW else value


class Replica(Parallel):
    """Stand-in for DDP, whose buckets need tensors with values. Each parameter has a bucket of its own: their sum is
    the same.

    DDP lays its buckets out again after the first synchronised backward pass, one after the other. Within a window the
    largest one then exists twice for a moment; between windows gradients are zero and need not move.

    Args:
        whole: the whole model, from which the size of DDP's largest bucket follows.
    """

    def __init__(self, model: nn.Module, plan: RunPlan, device: torch.device, *, whole: nn.Module, **_: Any) -> None:
        super().__init__(model, plan, device)
        fp32 = plan.precision.parameters is Parameters.fp32
        sizes = [p.numel() * (max(4, p.itemsize) if fp32 else p.itemsize) for p in trained(whole)]
        self._largest = min(sum(sizes), max(round(plan.strategy.bucket_mb * 2**20), *sizes, 0))
        self._lays_out = not (plan.strategy.static_graph or plan.strategy.find_unused_parameters)
        self._reduced = False
        self.buckets: dict[Tensor, Tensor] = {parameter: torch.zeros_like(parameter) for parameter in self._parameters}
        self._narrow = torch.bfloat16 if plan.strategy.compress is Compress.bf16 else None
        self._reduces = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._reduce)

    def _synchronised(self, sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:
        self._reduces = reduces(sync, last=last)
        if self._reduced and self._lays_out:
            self._lays_out = False
            if first:
                return nullcontext()
            torch.empty(self._largest, dtype=torch.uint8, device=self._parameters[0].device)
        return nullcontext()

    def _reduce(self, parameter: Tensor) -> None:
        bucket = self.buckets[parameter]
        if self._reduces and parameter.grad is not None:
            if parameter.grad is not bucket:
                bucket.copy_(parameter.grad)
                parameter.grad = bucket
            sent = bucket.to(self._narrow or bucket.dtype)
            self.meter.count(Collective.all_reduce, sent.nbytes)
            self._reduced = True

    def _zero_gradients(self) -> None:
        torch._foreach_zero_([p.grad for p in self._parameters if p.grad is not None])


class OwnChunk:
    """Stand-in for torch's list of a parameter's parts on all ranks: only this rank's part is made, because their
    number may be in the thousands."""

    def __init__(self, whole: Tensor, parts: int, dim: int) -> None:
        self._whole, self._parts, self._dim = whole, parts, dim

    def __getitem__(self, rank: int) -> Tensor:
        length = self._whole.size(self._dim)
        each = -(-length // self._parts)
        if rank * each >= length:
            return self._whole.new_empty(0) if rank else self._whole.narrow(self._dim, 0, 0)
        return self._whole.narrow(self._dim, rank * each, min(each, length - rank * each))


# DTensor's derivation of a result's shape: it runs the operator on tensors of the whole size, once for each shape in a
# process, on fake tensors in a real job too
_DERIVE = "_propagate_tensor_meta_non_cached"
_is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)


class AllocationLog(TorchDispatchMode):
    """Mode that records each allocation and each free of storages on one kind of device.

    torch's MemTracker also classifies memory by use, for which it hooks each parameter and each module, and fails for
    frozen parameters. Only the sum is needed here.

    Args:
        rounding: bytes of which an allocation has a multiple.

    Attributes:
        events: bytes of each allocation (positive) and each free (negative), in order.
    """

    def __init__(self, device: torch.device, rounding: int = 1) -> None:
        super().__init__()
        self._rounding = rounding
        self._type = device.type
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self.events: list[int] = []
        self._resize = torch.UntypedStorage.resize_
        self._derive = getattr(ShardingPropagator, _DERIVE)
        self._paused = False

    def add(self, tree: Any) -> None:
        """Count every tensor in ``tree``."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.device.type == self._type:
                for storage in get_untyped_storages(leaf):
                    self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), -(-storage.size() // self._rounding) * self._rounding
        reference, before = self._storages.get(key, (None, 0))
        if reference is None:
            reference = weakref.ref(storage, functools.partial(self._forget, key))
        self._storages[key] = reference, size
        self._record(size - before)

    def _forget(self, key: int, _: Any) -> None:
        self._record(-self._storages.pop(key)[1])

    def _record(self, size: int) -> None:
        if size:
            self.events.append(size)

    def __enter__(self) -> AllocationLog:
        def resize(storage: torch.UntypedStorage, size: int) -> None:  # FSDP frees and gathers units by this
            self._resize(storage, size)
            if id(storage) in self._storages:
                self._count(storage)

        def derive(*args: Any) -> Any:  # a method: it takes the propagator
            self._paused = True
            try:
                return self._derive(*args)
            finally:
                self._paused = False

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        setattr(ShardingPropagator, _DERIVE, derive)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize
        setattr(ShardingPropagator, _DERIVE, self._derive)
        super().__exit__(*error)  # pyright: ignore[reportArgumentType]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(_is_wrapper, types)):
            return NotImplemented  # the class, such as DTensor, then calls the operator on the tensors inside
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls; takes a tenth of the time
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self.add(result)
        return result
