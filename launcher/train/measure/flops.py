"""Model FLOPs of a sample, and how many a device could do: throughput/flops_per_s and throughput/mfu.

A sample's FLOPs are those of the forward and backward passes of the task's own model and loss, on its first samples as
its own collate puts them together: two for each multiplication and addition of every matrix product, convolution and
attention (torch.utils.flop_counter), nothing for elementwise operations. An attention over T positions of width d
counts 4 T^2 d forward and 8 T^2 d backward, with a causal mask too. For a transformer of N parameters in its matrices
and L layers that is the usual 6 N T + 12 L d T^2 (Chowdhery et al., "PaLM", 2022, appendix B). What a backward pass
computes a second time (activation checkpointing, flash attention's scores) does not count: these are the FLOPs of the
model, not of the hardware.

Everything runs on tensors without memory, in the process that looks at the task (probe.py).
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
from launcher.task import Loss, Task, first_batch

# several samples, as a BatchNorm refuses one
SAMPLES, LIMIT_S = 4, 30.0

# Dense peaks in TFLOP/s by the exact name that torch.cuda.get_device_name reports, without a leading "NVIDIA ": fp32
# outside of tensor cores, TF32, bf16, fp16 (both summed in fp32); None where the device has no such units. Figures that
# a data sheet gives with sparsity are halved. Part numbers share a name only where their peaks are the same.
_PEAKS: Mapping[str, tuple[float, float | None, float | None, float | None]] = {
    # NVIDIA Tesla V100 GPU Accelerator data sheet (2020); V100S: its own
    "Tesla V100-SXM2-16GB": (15.7, None, None, 125),
    "Tesla V100-SXM2-32GB": (15.7, None, None, 125),
    "Tesla V100-PCIE-16GB": (14, None, None, 112),
    "Tesla V100-PCIE-32GB": (14, None, None, 112),
    "Tesla V100S-PCIE-32GB": (16.4, None, None, 130),
    # NVIDIA T4 Tensor Core GPU data sheet (2019)
    "Tesla T4": (8.1, None, None, 65),
    # NVIDIA A100 Tensor Core GPU data sheet (2021)
    "A100-SXM4-40GB": (19.5, 156, 312, 312),
    "A100-SXM4-80GB": (19.5, 156, 312, 312),
    "A100-PCIE-40GB": (19.5, 156, 312, 312),
    "A100 80GB PCIe": (19.5, 156, 312, 312),
    # NVIDIA A30, A40 and A10 Tensor Core GPU data sheets (2021)
    "A30": (10.3, 82, 165, 165),
    "A40": (37.4, 74.8, 149.7, 149.7),
    "A10": (31.2, 62.5, 125, 125),
    # NVIDIA A10G data sheet of AWS (2022)
    "A10G": (35, 35, 70, 70),
    # NVIDIA Ampere GA102 GPU Architecture white paper (2021), appendices A and B
    "RTX A6000": (38.7, 77.4, 154.8, 154.8),
    "GeForce RTX 3090": (35.6, 35.6, 71, 71),
    # NVIDIA L4, L40 and L40S data sheets (2023)
    "L4": (30.3, 60, 121, 121),
    "L40": (90.5, 90.5, 181.05, 181.05),
    "L40S": (91.6, 183, 362.05, 362.05),
    # NVIDIA Ada GPU Architecture white papers (2022, 2023)
    "GeForce RTX 4090": (82.6, 82.6, 165.2, 165.2),
    "RTX 6000 Ada Generation": (91.1, 182.1, 364.2, 364.2),
    # NVIDIA H100 Tensor Core GPU Architecture white paper (2023), table 2; NVL: H100 data sheet (2024)
    "H100 80GB HBM3": (66.9, 494.7, 989.4, 989.4),
    "H100 PCIe": (51.2, 378, 756, 756),
    "H100 NVL": (60, 417.5, 835.5, 835.5),
    # NVIDIA H200 Tensor Core GPU data sheet (2024); GH200 Grace Hopper Superchip data sheet (2024)
    "H200": (67, 494.5, 989.5, 989.5),
    "H200 NVL": (60, 417.5, 835.5, 835.5),
    "GH200 480GB": (67, 494.5, 989.5, 989.5),
    # NVIDIA Blackwell Architecture data sheet (2024), HGX B200 and GB200 per GPU
    "B200": (75, 1100, 2250, 2250),
    "GB200": (80, 1250, 2500, 2500),
    # NVIDIA RTX Blackwell GPU Architecture white paper (2025), appendix A
    "GeForce RTX 5090": (104.8, 104.8, 209.5, 209.5),
}


def peak_flops(device_name: str, precision: PrecisionKind, *, tf32: bool) -> float | None:
    """Return the FLOP/s that the device could do in this precision; None where no data sheet is known.

    Args:
        device_name: as torch.cuda.get_device_name has it. A part of a device (MIG) has another name, and no peak here.
        tf32: whether fp32 matrix products and convolutions run in TF32.
    """
    peaks = _PEAKS.get(device_name.removeprefix("NVIDIA "))
    if peaks is None:
        return None
    fp32, tensor_fp32, bf16, fp16 = peaks
    by_kind = {PrecisionKind.fp32: tensor_fp32 or fp32 if tf32 else fp32, PrecisionKind.bf16: bf16}
    tera = by_kind.get(precision, fp16)
    return None if tera is None else tera * 1e12


def flops_per_sample(task: Task, model: nn.Module, data: Any) -> float | None:
    """Return the model FLOPs of a sample, forward and backward; None where they cannot be counted.

    Args:
        task: may be changed by its own loss.
        model: as the task built it; a copy without memory is run.
        data: the task's training data, of which the first samples are read.
    """
    try:
        with _time_limit(LIMIT_S):
            batch, samples = first_batch(task, data, SAMPLES)
            return _count(task, model, batch, samples)
    except (Exception, SystemExit):  # a model may do what tensors without values cannot, and data may not be here
        return None


def _count(task: Task, model: nn.Module, batch: Any, samples: int) -> float | None:
    try:
        flops = _flops_of(task, model, batch, FakeTensorMode(allow_non_fake_inputs=True))
    except DynamicOutputShapeException:  # a mask picks a part of a tensor; how much is left only symbols can say
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
        flops = _flops_of(task, model, batch, fake)
    # a symbol where a matrix's size depends on values; nothing where all work is in kernels of the user's own
    return flops / samples if isinstance(flops, int) and flops > 0 else None


def _flops_of(task: Task, model: nn.Module, batch: Any, fake: FakeTensorMode) -> int:
    twin = _without_memory(model, fake).train()
    with fake, FlopCounterMode(display=False, custom_mapping=_MODEL_FLOPS) as counter:
        inputs = tree_map_only(Tensor, fake.from_tensor, batch)
        loss = task.loss(twin, inputs)
        total = loss.total if isinstance(loss, Loss) else loss
        total.backward()
    return counter.get_total_flops()


def _without_memory(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """Return a copy of ``model`` on the CPU whose tensors have no memory, wherever its own ones are."""
    copies: dict[int, Any] = {}

    def empty(tensor: Tensor) -> Tensor:
        with fake:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    for module in model.modules():
        for value in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(value, nn.Parameter):
                copies[id(value)] = nn.Parameter(empty(value), value.requires_grad)
            elif isinstance(value, Tensor):
                copies[id(value)] = empty(value)
    return copy.deepcopy(model, copies)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what runs longer: data that waits for something, a model of thousands of layers."""

    def over(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _recomputing() -> bool:
    """Return whether a backward pass is recomputing a part of the forward pass: only then does it record gradients."""
    return torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()


def _once(formula: Callable[..., int]) -> Callable[..., int]:
    """Return ``formula``, of torch's registry, with 0 for what is computed a second time."""

    def flops(*args: Any, **kwargs: Any) -> int:
        return 0 if _recomputing() else formula(*args, **kwargs)

    flops._get_raw = True  # pyright: ignore[reportFunctionMemberAccess]  # it takes tensors, as those of the registry do
    return flops


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> int:
    """Two products for each of the forward pass; torch's own formulas for GPUs add the scores' recomputation."""
    return 2 * sdpa_flop_count(query.shape, key.shape, value.shape)


_aten = torch.ops.aten
_MODEL_FLOPS: dict[Any, Any] = {
    **{operator: _once(cast("Callable[..., int]", formula)) for operator, formula in flop_registry.items()},
    # torch has no formula for the flash attention of CPUs
    _aten._scaled_dot_product_flash_attention_for_cpu: _once(_attention),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _once(_attention_backward),
}
