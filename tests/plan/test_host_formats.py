"""Number formats that a CPU computes natively, without torch: never another answer than oneDNN's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.config.schema import Device, PrecisionKind
from launcher.plan import host

LIMITS = (
    "SSE41", "AVX2", "avx2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
    "AVX512_CORE_FP16", "AVX512_CORE_AMX", "ALL", "nonsense",
)  # fmt: skip
NARROW = (PrecisionKind.bf16, PrecisionKind.fp16)


# oneDNN reads its environment once, and a fork has what its parent has read: this process must not have used it
IN_TORCH = """
import json, os, sys, torch
from launcher.config.schema import PrecisionKind
from launcher.train.precision import is_native
for env in json.loads(sys.argv[1]):
    if not os.fork():
        os.environ.update(env)
        print(*(int(is_native(PrecisionKind(kind), torch.device("cpu"))) for kind in ("bf16", "fp16")), flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_quick_answer_is_that_of_torch() -> None:
    names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    envs = [{}, *({name: limit} for name in names for limit in LIMITS)]
    clean = {key: value for key, value in os.environ.items() if not key.endswith("_MAX_CPU_ISA")}
    command = [sys.executable, "-c", IN_TORCH, json.dumps(envs)]
    lines = subprocess.run(command, env=clean, check=True, capture_output=True, text=True).stdout.splitlines()
    for env, line in zip(envs, lines, strict=True):
        for kind, answer in zip(NARROW, line.split(), strict=True):
            assert host.computes(kind, Device.cpu, env) in (bool(int(answer)), None), (env, kind)
    assert host.computes(PrecisionKind.bf16, Device.cpu, {}) is not None or not host.has_units(PrecisionKind.bf16)


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
    found = host.cpu_flags(cpuinfo)
    monkeypatch.setattr(host, "cpu_flags", lambda: found)
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    env = {"ONEDNN_MAX_CPU_ISA": limit} if limit else {}
    assert tuple(host.computes(kind, Device.cpu, env) for kind in NARROW) == answers


@pytest.mark.parametrize(("says", "answer"), [("9.0\n9.0\n", True), ("7.5\n", False), ("8.0\n7.5\n", None), ("", None)])
def test_gpus(says: str, answer: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    host.gpus_have.cache_clear()
    assert host.computes(PrecisionKind.bf16, Device.cuda, {}) is answer
    assert host.computes(PrecisionKind.fp16, Device.cuda, {}) is True
    host.gpus_have.cache_clear()


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("notify", ["bell", "https://hooks.slack.com/services/T/B/x"], ["bell", "https://hooks.slack.com/..."]),
        ("task.webhook", "https://example.org/a?b", "https://example.org/..."),
        ("task.note", "see https://hooks.slack.com/services/T/B/x", "see https://hooks.slack.com/..."),
        ("task", {"api_key": "k", "a": {"password": "p"}}, {"api_key": "***", "a": {"password": "***"}}),
        ("task", {"token": "t", "hf_token": "t"}, {"token": "***", "hf_token": "***"}),
        ("callbacks", [{"_target_": "a.Webhook", "url": "https://h/p"}], [{"_target_": "a.Webhook", "url": "https://h/..."}]),
        ("task", {"url": "https://host/data.tar", "pad_token": "<pad>", "tokens": 4, "token": None}, None),
        ("task", {"password_from": "NAME", "secret": "", "monkey": "m", "tokenizer": "t"}, None),
        ("mlflow.tracking_uri", "https://u:p@host/x?token=3", "https://***@host/x?token=***"),
    ],
)  # fmt: skip
def test_every_output_leaves_out_the_same_secrets(key: str, value: object, shown: object) -> None:
    assert host.without_secrets(value, key) == (value if shown is None else shown)
