"""Number formats that this machine computes natively, found without torch: `launch plan` must answer quickly."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from launcher.config import Device, PrecisionKind

# oneDNN's instruction sets, in its order; ONEDNN_MAX_CPU_ISA names the highest that it may use
_ISAS = (
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
    "AVX10_1_512", "AVX512_CORE_FP16", "AVX10_1_512_AMX", "AVX512_CORE_AMX", "AVX10_1_512_AMX_FP16",
    "AVX512_CORE_AMX_FP16",
)  # fmt: skip
# flags of CPUs with arithmetic units for a format, the one that is enough for oneDNN first, and the set that it needs
_UNITS = {
    PrecisionKind.bf16: (("avx512_bf16", "amx_bf16", "avx_ne_convert"), "AVX512_CORE_BF16"),
    PrecisionKind.fp16: (("avx512_fp16", "amx_fp16", "avx_ne_convert"), "AVX512_CORE_FP16"),
}
NARROW = tuple(_UNITS)
_AVX512_CORE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}


def computes(kind: PrecisionKind, device: Device, env: Mapping[str, str]) -> bool | None:
    """Return whether this machine computes in ``kind`` without emulation; None if only torch can tell.

    Args:
        kind: a format narrower than fp32.
        device: cpu or cuda.
        env: the workers' environment: oneDNN reads from it which instructions it may use.
    """
    if device is Device.cuda:
        return True if kind is PrecisionKind.fp16 else _gpus_compute_bf16()
    if platform.machine() != "x86_64":
        return None
    return _cpu_computes(kind, cpu_flags(), env)


def _cpu_computes(kind: PrecisionKind, flags: frozenset[str], env: Mapping[str, str]) -> bool | None:
    """oneDNN's answer where flags and environment determine it, restricted to CPUs that have units for the format."""
    units, needed = _UNITS[kind]
    if not flags & set(units):
        return False
    limit = (env.get("ONEDNN_MAX_CPU_ISA") or env.get("DNNL_MAX_CPU_ISA") or "").upper()
    if limit in _ISAS[: _ISAS.index("AVX2_VNNI") + 1]:
        return False
    sufficient = units[0] in flags and flags >= _AVX512_CORE
    if sufficient and (limit in ("", "ALL", "DEFAULT") or limit in _ISAS[_ISAS.index(needed) :]):
        return True
    return None


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the first core's flags; the kernel lists only those that it lets programs use."""
    with cpuinfo.open(encoding="utf-8") as lines:
        flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


@cache
def _gpus_compute_bf16() -> bool | None:
    """torch's rule (compute capability of at least 8.0), if it has one answer for all GPUs of this machine."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        native = {float(capability) >= 8.0 for capability in answer.split()}
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return native.pop() if len(native) == 1 else None


def has_units(kind: PrecisionKind) -> bool:
    """Return whether this x86 CPU has arithmetic units for ``kind``."""
    return bool(cpu_flags() & set(_UNITS[kind][0]))


def reason(kind: PrecisionKind, device: str) -> str:
    """Return why ``precision=auto`` became ``kind``."""
    return f"auto: {device} computes bf16 natively" if kind is PrecisionKind.bf16 else f"auto: {device} emulates bf16"


def warning(kind: PrecisionKind, device: str, factor: float) -> str:
    """Return the warning about an emulated format. ``factor``: its time for a matrix product, in that of fp32."""
    return (
        f"precision={kind.value}: {device} emulates it: a matrix product takes {factor:.1f} times as long as in fp32. "
        "precision=auto takes what is computed natively."
    )
