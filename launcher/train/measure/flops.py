"""Model FLOPs of a sample, and peak FLOP/s of the device: for throughput/flops_per_s and throughput/mfu.

A sample's FLOPs are counted in the forward and backward passes of the task's own model and loss, on its first samples,
collated as in training: two for each multiply-add of every matrix product, convolution and attention
(torch.utils.flop_counter), none for elementwise operations. An attention over T positions of width d counts 4 T^2 d
forward and 8 T^2 d backward, with a causal mask too. For a transformer with N parameters in its matrices and L layers
this is the usual 6 N T + 12 L d T^2 (Chowdhery et al., "PaLM", 2022, appendix B). Recomputation in the backward pass
(activation checkpointing, flash attention's scores) does not count: these are the FLOPs of the model, not of the
hardware.

Everything runs on tensors without memory, in the process that inspects the task (task_probe.py).
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from launcher.config.schema import PrecisionKind
from launcher.loss import loss_of_batch
from launcher.plan.gpus import BY_DEVICE_NAME
from launcher.task import Task, first_batch
from launcher.train.context import ContextSource

# several samples, because BatchNorm may refuse one
SAMPLES, LIMIT_S = 4, 30.0


def peak_flops(device_name: str, precision: PrecisionKind, *, tf32: bool) -> float | None:
    """Return the device's peak FLOP/s in this precision; None if the table of GPUs does not have it.

    Args:
        device_name: result of torch.cuda.get_device_name. A MIG instance has another name, and no peak here.
        tf32: fp32 matrix products and convolutions run in TF32.
    """
    gpu = BY_DEVICE_NAME.get(device_name.removeprefix("NVIDIA "))
    return None if gpu is None else gpu.flops(precision, tf32=tf32)


def flops_per_sample(task: Task, model: nn.Module, data: Any) -> float | None:
    """Return the model FLOPs of a sample, forward and backward; None if they cannot be counted.

    Args:
        task: the task; its loss is called, and may change it.
        model: the task's model; a copy without memory is run.
        data: the task's training data; its first samples are read.
    """
    try:
        with time_limit(LIMIT_S), ContextSource(torch.device("cpu"), seed=0).active():
            batch, samples = first_batch(task, data, SAMPLES)
            return _count(task, model, batch, samples)
    except (Exception, SystemExit):  # a model may need tensors with values, and the data may not be on this machine
        return None


def run_without_memory(task: Task, model: nn.Module, data: Any, prepare: Callable[[nn.Module], None]) -> bool:
    """Run the model and the loss on the first sample; return whether that was possible.

    Args:
        prepare: called with the copy without memory that is run.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with time_limit(LIMIT_S), ContextSource(torch.device("cpu"), seed=0).active():
            batch, _ = first_batch(task, data, 1)
            twin = without_memory(model, fake)
            prepare(twin)
            with fake:
                loss_of_batch(task, twin, tree_map_only(Tensor, fake.from_tensor, batch))
    except (Exception, SystemExit):  # as in flops_per_sample
        return False
    return True


def _count(task: Task, model: nn.Module, batch: Any, samples: int) -> float | None:
    try:
        flops = _flops_of(task, model, batch, FakeTensorMode(allow_non_fake_inputs=True))
    except DynamicOutputShapeException:  # a result's size depends on values (a boolean mask): use a symbol for it
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        flops = _flops_of(task, model, batch, fake)
    # not an int if the size of a matrix is a symbol; 0 if all work is done by custom kernels
    return flops / samples if isinstance(flops, int) and flops > 0 else None


def _flops_of(task: Task, model: nn.Module, batch: Any, fake: FakeTensorMode) -> int:
    twin = without_memory(model, fake).train()
    with fake, FlopCounterMode(display=False, custom_mapping=_MODEL_FLOPS) as counter:
        inputs = tree_map_only(Tensor, fake.from_tensor, batch)
        loss = loss_of_batch(task, twin, inputs)
        terms: Any = loss if isinstance(loss, list | tuple) else [loss]
        torch.stack([getattr(term, "total", term) for term in terms]).sum().backward()
    return counter.get_total_flops()


def without_memory(
    model: nn.Module,
    fake: FakeTensorMode,
    device: torch.device | str = "cpu",
    replaced: Mapping[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """Return a copy of ``model`` with fake tensors on ``device``, which use no memory, whatever the device of
    ``model``.

    Args:
        replaced: modules that the copy has others for, which are not copied.
    """
    copies: dict[int, Any] = {id(module): other for module, other in (replaced or {}).items()}

    def empty(tensor: Tensor) -> Tensor:
        with fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def visit(module: nn.Module) -> None:
        for value in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if id(value) in copies:
                continue
            if isinstance(value, nn.Parameter):
                copies[id(value)] = copied = nn.Parameter(empty(value), value.requires_grad)
                vars(copied).update({name: mark for name, mark in vars(value).items() if name not in vars(copied)})
            elif isinstance(value, Tensor):
                copies[id(value)] = empty(value)
        for child in module.children():
            if id(child) not in copies:
                visit(child)

    visit(model)
    return copy.deepcopy(model, copies)


@contextmanager
def time_limit(seconds: float, *, cpu: bool = False) -> Iterator[None]:
    """Raise TimeoutError in a body that runs longer: data that waits for something, or a model of thousands of
    layers.

    Args:
        cpu: the limit is one of this process's CPU time, which does not depend on the load of the host.
    """
    timer, number = (signal.ITIMER_PROF, signal.SIGPROF) if cpu else (signal.ITIMER_REAL, signal.SIGALRM)

    def over(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(number, over)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


def _once(formula: Callable[..., int]) -> Callable[..., int]:
    """Return ``formula``, from torch's registry, changed to return 0 for recomputation: only then are gradients enabled
    in a backward pass."""

    def flops(*args: Any, **kwargs: Any) -> int:
        recomputing = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        return 0 if recomputing else formula(*args, **kwargs)

    flops._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]  # it takes tensors, like those in the registry
    return flops


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Return two products for each one of the forward pass; torch's own formulas for GPUs add the recomputation of the
    scores."""
    return 2 * sdpa_flop_count(query.shape, key.shape, value.shape)


_aten = torch.ops.aten
_MODEL_FLOPS: dict[Any, Any] = {
    **{operator: _once(cast("Callable[..., int]", formula)) for operator, formula in flop_registry.items()},
    # torch has no formula for the flash attention of CPUs
    _aten._scaled_dot_product_flash_attention_for_cpu: _once(_attention),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _once(_attention_backward),
}
