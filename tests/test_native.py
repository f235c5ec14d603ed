"""Number formats that a CPU computes natively, without torch: never another answer than oneDNN's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher import native
from launcher.config import Device, PrecisionKind

LIMITS = (
    "", "SSE41", "AVX2", "avx2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
    "AVX512_CORE_FP16", "AVX512_CORE_AMX", "ALL", "nonsense",
)  # fmt: skip
NARROW = (PrecisionKind.bf16, PrecisionKind.fp16)


def in_torch(env: dict[str, str]) -> tuple[bool, ...]:
    """torch's answers in a forked process: oneDNN reads its environment once."""
    import torch

    from launcher.train.number_formats import is_native

    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.environ.update(env)
        os.write(writer, bytes(is_native(kind, torch.device("cpu")) for kind in NARROW))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        return tuple(map(bool, answers.read()))


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_quick_answer_is_that_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(other, raising=False)
    for limit in LIMITS:
        env = {name: limit} if limit else {}
        for kind, answer in zip(NARROW, in_torch(env), strict=True):
            assert native.computes(kind, Device.cpu, env) in (answer, None), (name, limit, kind)
    assert native.computes(PrecisionKind.bf16, Device.cpu, {}) is not None or not native.has_units(PrecisionKind.bf16)


AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@pytest.mark.parametrize(
    ("flags", "limit", "answers"),
    [
        (["avx", "avx2", "fma"], "", (False, False)),
        (AVX512, "", (False, False)),  # oneDNN has bf16 there, in four times the time of fp32
        ([*AVX512, "avx512_bf16"], "", (True, False)),
        ([*AVX512, "avx512_bf16", "avx512_fp16", "amx_bf16"], "", (True, True)),
        ([*AVX512, "avx512_bf16", "avx512_fp16"], "avx2", (False, False)),
        ([*AVX512, "avx512_bf16", "avx512_fp16"], "AVX512_CORE_BF16", (True, None)),
        ([*AVX512, "avx512_bf16", "avx512_fp16"], "AVX512_CORE", (None, None)),
        (["avx2", "avx_ne_convert"], "", (None, None)),
    ],
)
def test_cpus(
    flags: list[str], limit: str, answers: tuple[bool | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {' '.join(flags)}\nbugs\t\t: none\nflags : other\n")
    found = native.cpu_flags(cpuinfo)
    monkeypatch.setattr(native, "cpu_flags", lambda: found)
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    env = {"ONEDNN_MAX_CPU_ISA": limit} if limit else {}
    assert tuple(native.computes(kind, Device.cpu, env) for kind in NARROW) == answers


@pytest.mark.parametrize(("says", "answer"), [("9.0\n9.0\n", True), ("7.5\n", False), ("8.0\n7.5\n", None), ("", None)])
def test_gpus(says: str, answer: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    native._gpus_compute_bf16.cache_clear()  # pyright: ignore[reportPrivateUsage]
    assert native.computes(PrecisionKind.bf16, Device.cuda, {}) is answer
    assert native.computes(PrecisionKind.fp16, Device.cuda, {}) is True
    native._gpus_compute_bf16.cache_clear()  # pyright: ignore[reportPrivateUsage]
