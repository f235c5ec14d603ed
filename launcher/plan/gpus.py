"""GPUs that jobs may be planned for: memory and peak FLOP/s as their data sheets state them.

Jobs have run on one of them, the H200 (docs/development/gpu.md); no other row has been compared with a GPU.
``cluster.gpu`` names one of them for a plan on a machine without it. ``throughput/mfu`` uses the same peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.schema import PrecisionKind
from launcher.errors import ConfigError, did_you_mean
from launcher.plan.float_format import format_class

# Memory that a rank's tensors cannot have, in bytes. The CUDA context with torch's kernels takes about half a gigabyte
# (PyTorch documentation, "CUDA semantics", memory management: it is not part of torch.cuda.memory_allocated).
CONTEXT_BYTES = 512 * 2**20
# A communicator has a buffer of NCCL_BUFFSIZE, 4 MiB, for sending and one for receiving in each of up to 32 channels
# (NCCL documentation, environment variables NCCL_BUFFSIZE and NCCL_MAX_NCHANNELS). HSDP has two communicators.
NCCL_BYTES = 2 * 2 * 32 * 4 * 2**20
# cuBLAS has a workspace for each handle and stream, from torch's allocator: of 32 MiB on Hopper, for the thread of the
# forward pass and that of the backward pass (PyTorch documentation, "CUDA semantics", cuBLAS workspaces)
CUBLAS_BYTES = 2 * 32 * 2**20
OVERHEAD_BYTES = CONTEXT_BYTES + NCCL_BYTES + CUBLAS_BYTES
# torch's allocator rounds each size up to a multiple of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
ALLOCATION_BYTES = 512


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU.

    Attributes:
        device_name: name that torch.cuda.get_device_name reports, without a leading "NVIDIA ".
        name: value of ``cluster.gpu``; None if it cannot be chosen there.
        memory_gb: gigabytes as the data sheet states them, taken as 10^9 bytes.
        fp32, tf32, bf16, fp16: dense peaks in TFLOP/s: fp32 outside of tensor cores; bf16 and fp16 accumulated in fp32;
            None if the device has no such units. Figures that a data sheet states with sparsity are halved.
        fp8: dense peak in float8 in TFLOP/s, accumulated in fp32; None if the device has no such units.
    """

    device_name: str
    name: str | None
    memory_gb: int
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float
    fp8: float | None = None

    @property
    def usable_bytes(self) -> int:
        """Return the memory that is left for a rank's tensors."""
        return self.memory_gb * 10**9 - OVERHEAD_BYTES

    def flops(self, precision: PrecisionKind, *, tf32: bool) -> float | None:
        """Return the peak FLOP/s in this precision; None if the device does not have it.

        Args:
            tf32: fp32 matrix products and convolutions run in TF32.
        """
        fp32 = self.tf32 or self.fp32 if tf32 else self.fp32
        added = format_class(precision)
        narrow = self.fp16 if added is None else getattr(self, added.units, None)
        tera = {PrecisionKind.fp32: fp32, PrecisionKind.bf16: self.bf16}.get(precision, narrow)
        return None if tera is None else tera * 1e12


# No entry stands for products with different peaks.
GPUS = (
    # NVIDIA Tesla V100 GPU Accelerator data sheet (2020); V100S: its own
    Gpu("Tesla V100-SXM2-16GB", "v100-16gb", 16, 15.7, None, None, 125),
    Gpu("Tesla V100-SXM2-32GB", "v100", 32, 15.7, None, None, 125),
    Gpu("Tesla V100-PCIE-16GB", None, 16, 14, None, None, 112),
    Gpu("Tesla V100-PCIE-32GB", None, 32, 14, None, None, 112),
    Gpu("Tesla V100S-PCIE-32GB", None, 32, 16.4, None, None, 130),
    # NVIDIA T4 Tensor Core GPU data sheet (2019)
    Gpu("Tesla T4", "t4", 16, 8.1, None, None, 65),
    # NVIDIA A100 Tensor Core GPU data sheet (2021)
    Gpu("A100-SXM4-40GB", "a100-40gb", 40, 19.5, 156, 312, 312),
    Gpu("A100-SXM4-80GB", "a100", 80, 19.5, 156, 312, 312),
    Gpu("A100-PCIE-40GB", None, 40, 19.5, 156, 312, 312),
    Gpu("A100 80GB PCIe", "a100-pcie", 80, 19.5, 156, 312, 312),
    # NVIDIA A800 data sheets (2022): an A100 with slower NVLink
    Gpu("A800-SXM4-40GB", None, 40, 19.5, 156, 312, 312),
    Gpu("A800-SXM4-80GB", "a800", 80, 19.5, 156, 312, 312),
    Gpu("A800 80GB PCIe", "a800-pcie", 80, 19.5, 156, 312, 312),
    # LEONARDO: A Pan-European Pre-Exascale Supercomputer (2023), section on the custom A100 of 124 multiprocessors
    Gpu("A100-SXM-64GB", "a100-64gb", 64, 22.4, 179, 358, 358),
    # NVIDIA A30, A40 and A10 Tensor Core GPU data sheets (2021)
    Gpu("A30", "a30", 24, 10.3, 82, 165, 165),
    Gpu("A40", "a40", 48, 37.4, 74.8, 149.7, 149.7),
    Gpu("A10", "a10", 24, 31.2, 62.5, 125, 125),
    # NVIDIA A10G data sheet of AWS (2022)
    Gpu("A10G", "a10g", 24, 35, 35, 70, 70),
    # NVIDIA Ampere GA102 GPU Architecture white paper (2021), appendices A and B
    Gpu("RTX A6000", "a6000", 48, 38.7, 77.4, 154.8, 154.8),
    Gpu("GeForce RTX 3090", "rtx3090", 24, 35.6, 35.6, 71, 71),
    # NVIDIA L4, L40 and L40S data sheets (2023)
    Gpu("L4", "l4", 24, 30.3, 60, 121, 121, fp8=242.5),
    Gpu("L40", "l40", 48, 90.5, 90.5, 181.05, 181.05, fp8=362),
    Gpu("L40S", "l40s", 48, 91.6, 183, 362.05, 362.05, fp8=733),
    # NVIDIA Ada GPU Architecture white papers (2022, 2023)
    Gpu("GeForce RTX 4090", "rtx4090", 24, 82.6, 82.6, 165.2, 165.2, fp8=330.3),
    Gpu("RTX 6000 Ada Generation", "rtx6000ada", 48, 91.1, 182.1, 364.2, 364.2, fp8=728.5),
    # NVIDIA H100 Tensor Core GPU Architecture white paper (2023), table 2; NVL: H100 data sheet (2024)
    Gpu("H100 80GB HBM3", "h100", 80, 66.9, 494.7, 989.4, 989.4, fp8=1978.9),
    Gpu("H100 PCIe", "h100-pcie", 80, 51.2, 378, 756, 756, fp8=1513),
    Gpu("H100 NVL", "h100-nvl", 94, 60, 417.5, 835.5, 835.5, fp8=1670.5),
    # NVIDIA H800 and H20 data sheets (2023): an H100 with slower NVLink; one with fewer units
    Gpu("H800", "h800", 80, 66.9, 494.7, 989.4, 989.4, fp8=1978.9),
    Gpu("H800 PCIe", "h800-pcie", 80, 51.2, 378, 756, 756, fp8=1513),
    Gpu("H20", "h20", 96, 44, 74, 148, 148, fp8=296),
    # NVIDIA H200 Tensor Core GPU data sheet (2024); GH200 Grace Hopper Superchip data sheet (2024)
    Gpu("H200", "h200", 141, 67, 494.5, 989.5, 989.5, fp8=1979),
    Gpu("H200 NVL", "h200-nvl", 141, 60, 417.5, 835.5, 835.5, fp8=1670.5),
    # torch's name of a GH200 has the memory of its CPU, except with HBM3e
    Gpu("GH200 480GB", "gh200", 96, 67, 494.5, 989.5, 989.5, fp8=1979),
    Gpu("GH200 120GB", None, 96, 67, 494.5, 989.5, 989.5, fp8=1979),
    Gpu("GH200 144G HBM3e", "gh200-144gb", 144, 67, 494.5, 989.5, 989.5, fp8=1979),
    # NVIDIA Blackwell Architecture data sheet (2024), HGX B200 and GB200 per GPU
    Gpu("B200", "b200", 180, 75, 1100, 2250, 2250, fp8=4500),
    Gpu("GB200", "gb200", 186, 80, 1250, 2500, 2500, fp8=5000),
    # NVIDIA RTX Blackwell GPU Architecture white paper (2025), appendix A
    Gpu("GeForce RTX 5090", "rtx5090", 32, 104.8, 104.8, 209.5, 209.5, fp8=419),
    # NVIDIA RTX PRO Blackwell GPU Architecture white paper (2025). Server Edition: data sheet (2025), which states fp32
    # and four petaFLOP/s with sparsity in FP4, an eighth of which are dense ones in bf16
    Gpu("RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000", 96, 126, 251.9, 503.8, 503.8, fp8=1007.6),
    Gpu("RTX PRO 6000 Blackwell Server Edition", "rtxpro6000-server", 96, 120, 250, 500, 500, fp8=1000),
)
BY_NAME = {gpu.name: gpu for gpu in GPUS if gpu.name is not None}
BY_DEVICE_NAME = {gpu.device_name: gpu for gpu in GPUS}


def find_gpu(name: str) -> Gpu:
    """Return the GPU that ``cluster.gpu`` names.

    Raises:
        ConfigError: the table has no such GPU.
    """
    gpu = BY_NAME.get(name.lower())
    if gpu is None:
        closest = did_you_mean(name, BY_NAME).capitalize()
        raise ConfigError(
            "cluster.gpu", name, "is not in the launcher's table of GPUs.", f"{closest}Allowed: {', '.join(BY_NAME)}."
        )
    return gpu
