"""FSDP2 and HSDP: parameters, gradients and optimizer state in shards.

torch's ``fully_shard`` gathers, frees and reduces a unit, through the collectives of ``collectives.py``. This module
applies the sync policy: it sets which of these take place in which micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from launcher.config.schema import Device, StrategyKind, Sync
from launcher.errors import TaskError
from launcher.plan.run_plan import RunPlan
from launcher.plan.sync_policy import Layout, reduces, reduces_over_all
from launcher.train.parallel.base import Parallel, local, trained
from launcher.train.parallel.collectives import Gather, Scatter, UnitCollective
from launcher.train.parallel.deferred_init import InitialShards
from launcher.train.parallel.lost_writes import LostWrites
from launcher.train.parallel.mixed_precision import groups_of, matmul_parameters, narrow
from launcher.train.parallel.replaced_parameters import ReplacedParameters
from launcher.train.parallel.shard_units import Uses, direct_use, is_direct_use, owned, refuse_direct_use
from launcher.train.parallel.unit_order import UnitOrder
from launcher.train.precision import DTYPES, NARROW_DTYPES
from launcher.train.world import patience


class Fsdp(Parallel):
    """Strategy for FSDP over all ranks, and for HSDP: replicated shard groups of ``plan.strategy.shard_size`` ranks.

    Gradients are summed, not averaged: the engine divides by the window's items anyway.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        plan: RunPlan,
        device: torch.device,
        initial: InitialShards | None,
    ) -> None:
        strategy, world_size = plan.strategy, plan.batch.world_size
        # a view that is changed in place, of which torch warns for each view, ends in an error with a message of ours
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        replaced = ReplacedParameters(model, strategy.kind)
        mesh = mesh_of(device, world_size, strategy.shard_size)
        _wait_for_hangs(mesh, plan.train.hang_timeout)
        self._shard_group = mesh["shard"].get_group()
        self._replica_group = mesh["replicate"].get_group() if strategy.shard_size < world_size else None
        self._shard_size, self._device = strategy.shard_size, device
        self._kind, self._replicated = strategy.kind, strategy.kind is StrategyKind.hsdp
        # autocast does the rest of the mixed precision, as under every strategy: see mixed_precision.py
        reduce_dtype = DTYPES.get(plan.precision.reduce_dtype, torch.float32)
        precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        dtype = DTYPES.get(plan.precision.kind)
        formats = {p.dtype for p in model.parameters() if p.requires_grad}
        if len(formats) > 1:  # only with precision.parameters=keep
            raise TaskError(
                f"model: its trained parameters have several dtypes ({', '.join(sorted(map(str, formats)))}), which "
                f"strategy={strategy.kind.value} cannot shard together.\n"
                "  Use precision.parameters=fp32, or strategy=ddp."
            )
        narrowed = {p: place for p, place in matmul_parameters(model).items() if dtype and p.dtype == torch.float32}
        formats_of = dict.fromkeys(narrowed, dtype or torch.float32)
        layout = _layout(model, units, formats_of, reduce_dtype, strategy.shard_size, world_size)
        places = set(narrowed.values())
        del narrowed, formats_of  # they hold the parameters that the shards replace
        super().__init__(model, plan, device, layout)
        if initial is not None:
            initial.take(model)
        offload = CPUOffloadPolicy() if strategy.cpu_offload else OffloadPolicy()
        for module in (*units, model):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        if initial is not None:
            model.to_empty(device="cpu" if strategy.cpu_offload else device)
            initial.fill(model)
        self._parameters = trained(model)  # the shards
        replaced.hand_over(model)
        if strategy.cpu_offload:
            for module in model.modules():  # only parameters are kept in host memory
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(device))
        refuse_direct_use(model, strategy.kind)
        self._modules = [module for module in (model, *units) if isinstance(module, FSDPModule)]
        # an inspection may trace a plan for GPUs on a machine without any
        on_cpu = device.type == "cpu" and plan.cluster.device is Device.cpu
        self._order = UnitOrder(model, self._modules, strategy.kind, self._shard_group)
        stalled = self._order.stalled if on_cpu else None
        self._gather, self._scatter = Gather(self.meter, stalled), Scatter(self.meter, self.local_norm, stalled)
        for module in self._modules:
            narrow(module, places, dtype or torch.float32, reduce_dtype, None if plan.train.compile else self._widen)
        self._uses = Uses(self._modules, self._order)
        self._writes = LostWrites(self._modules, model, strategy.kind)
        self.observers = [self._order, self._writes]
        for number, module in enumerate(self._modules):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(UnitCollective(self._gather, number))  # pyright: ignore[reportArgumentType]
            module.set_custom_reduce_scatter(UnitCollective(self._scatter, number))  # pyright: ignore[reportArgumentType]
            if self._replicated:
                module.set_all_reduce_hook(self._scatter.reduced_between_replicas)
        self._keeps = strategy.sync is Sync.gather_once
        same_format = reduce_dtype == torch.float32 and all(p.dtype == torch.float32 for p in model.parameters())
        # parts are summed in `gradients()` instead of in the backward pass only if the sum is the final gradient: not
        # if it is converted, copied or sent to other replicas
        self._may_defer = on_cpu and same_format and not self._replicated
        if on_cpu:
            self._prefetch_in_forward()
        self._settings: tuple[bool, ...] | None = None

    def _prefetch_in_forward(self) -> None:
        """Gather each unit during the forward pass of the one before, in the order of definition. If the forward pass
        has another order, a unit is gathered early and waits. On a GPU, streams overlap this without help."""
        outer = [self.module, *_outermost(self.module)]
        for module, following in itertools.pairwise(outer):
            module.set_modules_to_forward_prefetch([following])

    def _synchronised(self, sync: Sync, *, first: bool, last: bool) -> AbstractContextManager[object]:
        keeps = sync is Sync.gather_once
        self._uses.begin(in_loss=True)
        over_all = reduces_over_all(sync, last=last)
        self._set(
            reduce=reduces(sync, last=last),
            all_reduce=over_all,
            reshard_after_forward=not keeps,
            reshard_after_backward=last or not keeps,
        )
        self._scatter.defers = self._may_defer and last and sync is not Sync.every
        self._scatter.then_all_reduces = self._replicated and over_all
        if self._replicated and not first:
            self._widen_sums()
        if keeps and first:
            self._gather_all()
        self._gather_root()
        return nullcontext()

    def _set(
        self, *, reduce: bool, all_reduce: bool, reshard_after_forward: bool, reshard_after_backward: bool
    ) -> None:
        settings = (reduce, all_reduce, reshard_after_forward, reshard_after_backward)
        if settings == self._settings:  # each call below walks through the whole model
            return
        self._settings = settings
        root = self._modules[0]
        root.set_requires_gradient_sync(reduce)
        root.set_requires_all_reduce(all_reduce)
        root.set_reshard_after_forward(reshard_after_forward)
        root.set_reshard_after_forward(False, recurse=False)  # gathered once: its backward directly follows
        root.set_reshard_after_backward(reshard_after_backward)

    def _widen_sums(self) -> None:
        """Let torch add up in fp32 the sums that wait for their all-reduce between replicas."""
        for group in self._groups():
            partial = group._partial_reduce_output
            if partial is not None and partial.dtype in NARROW_DTYPES:
                with group.device_handle.stream(group.comm_ctx.reduce_scatter_stream):
                    group._partial_reduce_output = partial.float()

    def _gather_all(self) -> None:
        for module in self._modules:
            module.unshard(async_op=True)

    def _gather_root(self) -> None:
        """Gather the parameters that are in no unit, which the root's forward pass would do next. A loss can then use
        them directly, and call other methods of the model than its forward pass."""
        self._root_state()._lazy_init()  # otherwise the first unit that is called would take itself for the root
        for group in groups_of(self._modules[0]):
            group.unshard()
            group.wait_for_unshard()

    def _root_state(self) -> Any:
        return self._modules[0]._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]

    def _widen(self, parameter: Any, dtype: torch.dtype) -> Tensor:
        """Gather a parameter that was gathered as ``dtype`` again, in its own dtype, and return the whole of it. The
        meter's layout is updated, since the parameter is gathered in this way from now on."""
        shard = parameter._sharded_param_data.to(parameter.device)
        whole = torch.empty(shard.numel() * self._shard_size, dtype=shard.dtype, device=shard.device)
        more = (shard.dtype.itemsize - dtype.itemsize) * whole.numel()
        if self._shard_size == 1:
            whole.copy_(shard)
        elif (work := self._gather(whole, shard, self._shard_group, covers=more)) is not None:
            work.wait()
        layout = self.meter.layout
        root = any(parameter is each for group in groups_of(self._modules[0]) for each in group.fsdp_params)
        self.meter.layout = dataclasses.replace(
            layout,
            root_bytes=layout.root_bytes + (more if root else 0),
            unit_bytes=layout.unit_bytes + (0 if root else more),
        )
        if dist.get_rank() == 0:
            info = parameter._module_info
            names = {module: name for name, module in self.module.named_modules()}
            print(
                f"{names.get(info.module, '')}.{info.param_name} is gathered in fp32: the model uses it outside of "
                "autocast's matrix products.",
                flush=True,
            )
        return whole

    def partial_gradients(self) -> list[Tensor | None]:
        gathered = [getattr(each, "_unsharded_param", None) for each in self._fsdp_parameters()]
        wide = [each.unsharded_accumulated_grad for each in self._fsdp_parameters()]
        return [*super().partial_gradients(), *(None if leaf is None else leaf.grad for leaf in gathered), *wide]

    def leaves(self) -> list[Tensor]:
        gathered = (getattr(each, "_unsharded_param", None) for each in self._fsdp_parameters())
        return [*super().leaves(), *(leaf for leaf in gathered if leaf is not None)]

    def _groups(self) -> list[Any]:
        return [group for module in self._modules for group in groups_of(module)]

    def _fsdp_parameters(self) -> list[Any]:
        return [each for group in self._groups() for each in group.fsdp_params]

    @contextmanager
    def backward(self, loss: Tensor, items: Callable[[], float] | None = None) -> Iterator[None]:  # noqa: ARG002
        self._uses.before_backward()
        try:
            yield
        except RuntimeError as error:
            if is_direct_use(error):
                raise TaskError(direct_use("a parameter", self._kind)) from error
            raise
        # torch queues this callback, which ends the backward pass, only if the loss depends on a unit's or the root's
        # output
        if not self._uses.completed:
            self._root_state()._root_post_backward_final_callback()

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        self._uses.begin(in_loss=True)
        self._set(reduce=False, all_reduce=False, reshard_after_forward=False, reshard_after_backward=False)
        try:
            for module in self._modules:
                module.unshard()
            self._order.counts = False
            yield
        finally:  # the passes may have run out of memory at any point
            self._order.counts = True
            self._uses.begin(in_loss=False)
            _reset(self._modules)
            self._drop_gradients()
            for module in self._modules:
                module.reshard()

    def _drop_gradients(self) -> None:
        """Drop the gradients of unsynchronised passes. torch offers this only together with a reset of everything."""
        for parameter in self._fsdp_parameters():
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # it has been gathered at least once
                parameter.unsharded_param.grad = None

    def bytes_to_gather(self) -> int:
        layout = self.meter.layout
        sizes = [sum(each._orig_size.numel() for each in group.fsdp_params) for group in self._groups()]
        whole = layout.unit_bytes + layout.root_bytes
        return whole + whole * max(sizes) // sum(sizes)  # a unit is copied out of the buffer in which it arrives

    def begin_window(self) -> None:
        self._reshard()
        self._order.begin_window()
        self._writes.begin_window(last=self.last_window)
        self._drop_gradients()
        super().begin_window()

    def abandon(self) -> None:
        _reset(self._modules)  # the window gathers all parameters again
        super().abandon()

    def end_step(self) -> None:
        self._writes.require_same_shards()

    def _reshard(self) -> None:
        """Free parameters that a pass outside of micro-batches has gathered: they are outdated after the next step."""
        for group in self._groups():
            group.wait_for_unshard()  # a unit may have been gathered early, and then not used
            if group.is_unsharded:
                group.reshard()

    def set_mode(self, part: nn.Module, training: bool) -> None:
        self._reshard()
        with WholeParameters(self._device):
            super().set_mode(part, training)

    def gradients(self) -> list[Tensor]:
        self._reshard()
        self._scatter.finish()
        return [local(gradient) for gradient in super().gradients()]

    def replica_group(self) -> dist.ProcessGroup | None:
        return self._replica_group

    def total_norm(self, gradients: list[Tensor]) -> Tensor:
        own = super().total_norm(gradients)
        if self._shard_size == 1:
            return own
        squared = own.double().square().reshape(1).to(self._device)  # NCCL needs it on the GPU
        with self.meter.waiting():
            dist.all_reduce(squared, group=self._shard_group)
        return squared.sqrt()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        self._uses.begin(in_loss=False)
        self._set(reduce=False, all_reduce=False, reshard_after_forward=not self._keeps, reshard_after_backward=True)
        try:
            self._gather_root()
            if self._keeps:  # the loss may use parameters of units, as in training
                self._gather_all()
            yield
            self._reshard()
        except Exception:  # in a forward pass that is tried, for example with other sizes
            _reset(self._modules)
            raise
        self._writes.require_none()


def mesh_of(device: torch.device, world_size: int, shard_size: int) -> DeviceMesh:
    """Return the device mesh: dimension ``shard``, preceded by ``replicate`` if there are several shard groups. It is
    created once for each process group."""
    return _mesh(dist.group.WORLD, device.type, world_size, shard_size)


@functools.cache
def _mesh(world: dist.ProcessGroup | None, device: str, world_size: int, shard_size: int) -> DeviceMesh:  # noqa: ARG001
    if shard_size == world_size:
        return init_device_mesh(device, (world_size,), mesh_dim_names=("shard",))
    with warnings.catch_warnings():
        # torch splits the default group's gloo and NCCL parts with NCCL's options, of which gloo warns on each rank;
        # all that it then lacks is the timeout, which _wait_for_hangs sets
        warnings.filterwarnings("ignore", "Tried to pass options to ProcessGroupGloo::split", UserWarning)
        shape, names = (world_size // shard_size, shard_size), ("replicate", "shard")
        return _WithPythonWarnings.apply(lambda: init_device_mesh(device, shape, mesh_dim_names=names))  # pyright: ignore


class _WithPythonWarnings(torch.autograd.Function):
    """Call of a function in which warnings of torch's C++ code go to Python's ``warnings``.

    In calls of process groups they go to standard error, where no filter reaches them.
    """

    @staticmethod
    def forward(ctx: Any, call: Callable[[], DeviceMesh]) -> DeviceMesh:  # noqa: ARG004
        return call()


def _wait_for_hangs(mesh: DeviceMesh, hang_timeout_s: float | None) -> None:
    """Give the mesh's groups the timeout of the default group: with torch's own, they could fail before the launcher
    detects a hang."""
    waits = patience(hang_timeout_s)
    if waits is not None and dist.get_backend() != "fake":
        for group in mesh.get_all_groups():
            group.set_timeout(waits)


def _layout(
    model: nn.Module,
    units: Sequence[nn.Module],
    formats: Mapping[nn.Parameter, torch.dtype],
    reduce_dtype: torch.dtype,
    shard_size: int,
    world_size: int,
) -> Layout:
    """Return the payload bytes of units, root and gradients, including the padding by ``fully_shard`` of the first
    dimension to a multiple of the shard group's size.

    Args:
        formats: of the parameters that are gathered in another dtype than their own.
    """
    gathered: dict[bool, int] = {True: 0, False: 0}
    reduced = 0
    for module, parameters in owned(units, model):
        for parameter in parameters:
            numel = math.ceil(parameter.shape[0] / shard_size) * parameter.shape[1:].numel()  # of each shard
            dtype = formats.get(parameter, parameter.dtype)
            gathered[module is model] += shard_size * numel * dtype.itemsize
            if parameter.requires_grad:
                reduced += shard_size * numel * reduce_dtype.itemsize
    return Layout(
        shard_size=shard_size,
        replicas=world_size // shard_size,
        unit_bytes=gathered[False],
        root_bytes=gathered[True],
        gradient_bytes=reduced,
    )


def _outermost(module: nn.Module) -> list[FSDPModule]:
    """Return the units below ``module`` that are in no other unit, in the order of definition."""
    return [
        unit
        for child in module.children()
        for unit in ([child] if isinstance(child, FSDPModule) else _outermost(child))
    ]


def _reset(modules: Sequence[FSDPModule]) -> None:
    """Reset FSDP's state, which incomplete passes may have left inconsistent, for the next forward pass.

    Args:
        modules: the sharded modules, the root first.
    """
    if modules[0]._get_fsdp_state()._is_root is None:  # pyright: ignore[reportPrivateUsage]
        return  # no forward pass has run yet: torch initialises the state in the first one
    if hasattr(modules[0], "reset_iter_state"):  # since torch 2.13
        modules[0].reset_iter_state()
        return
    for module in modules:
        state: Any = module._get_fsdp_state()  # pyright: ignore[reportPrivateUsage]
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()
        for group in groups_of(module):
            group._training_state = TrainingState.IDLE
            group.finalize_backward()
            group.wait_for_unshard()
            if group.is_unsharded:
                group.reshard()


_tensor: Any = Tensor  # its properties are descriptors, which type checkers do not know
# on the shards themselves: they are the parameters, and have the whole one's shape
_ON_SHARDS: frozenset[Any] = frozenset({
    _tensor.requires_grad_, _tensor.size, _tensor.dim, _tensor.numel, _tensor.__hash__,
    _tensor.requires_grad.__get__, _tensor.requires_grad.__set__, _tensor.grad.__get__, _tensor.grad.__set__,
    _tensor.shape.__get__, _tensor.dtype.__get__, _tensor.device.__get__,
})  # fmt: skip


class WholeParameters(TorchFunctionMode):
    """Context in which functions of torch get the whole of each sharded parameter. What they write into it is written
    into the shards at the end. All ranks run the same functions in it.

    Args:
        device: that of the whole parameters.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._whole: dict[int, tuple[DTensor, nn.Parameter]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _ON_SHARDS:
            args, kwargs = tree_map_only(DTensor, self._gathered, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _gathered(self, shard: DTensor) -> Tensor:
        if id(shard) not in self._whole:
            whole = cast("DTensor", shard.detach().to(self._device)).full_tensor().clone()
            self._whole[id(shard)] = shard, nn.Parameter(whole, requires_grad=shard.requires_grad)
        return self._whole[id(shard)][1]

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        with torch.no_grad():
            for shard, whole in self._whole.values():
                # without communication: each rank has the whole
                placed = distribute_tensor(whole.detach(), shard.device_mesh, shard.placements, src_data_rank=None)
                own, written = shard.to_local(), placed.to_local()
                if not torch.equal(own, written.to(own.device)):
                    own.copy_(written)
        self._whole.clear()
