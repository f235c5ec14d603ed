"""Hardware that is found on a machine, and the part of a shell's environment that a job receives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import Device, PrecisionKind
from launcher.errors import ConfigError
from launcher.plan import host
from launcher.plan.host import Partition, Site, free_host_bytes, visible_gpus
from launcher.plan.placement import compiler_notes, device_notes, solve_cluster


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4), ("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("0,-1,1", 1), ("7", 0), ("3,9,1", 1), ("MIG-a,MIG-b", 1),
        ("NoDevFiles", 0), ("void", 0), ("none", 0), ("all", 0), ("GPU-8f6d2c1e-0a,1", 2), ("GPU-node1", 0),
        ("0,void,1", 1), ("0,0", 0),
    ],
)  # fmt: skip
def test_visible_gpus(tmp_path: Path, visible: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(env, tmp_path, "2.13.0+cu130") == expected
    assert visible_gpus(env, tmp_path, "2.13.0+cpu") == 0, "a CPU build of torch sees no GPU"


def test_gpus_that_torch_cannot_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(site: Site, *overrides: str) -> list[str]:
        cluster = compose(overrides).cluster
        return device_notes(cluster, solve_cluster(cluster, site, "run"), site)

    monkeypatch.setattr(host, "visible_gpus", lambda _, torch_version=None: 0 if torch_version is None else 2)
    monkeypatch.setattr(host.importlib.metadata, "version", lambda _: "2.13.0+cpu")
    here = Site.here()
    (note,) = notes(here)
    assert "torch 2.13.0+cpu is a build for CPUs, with 2 GPUs here" in note
    assert notes(here, "cluster.device=cpu") == []
    with pytest.raises(ConfigError, match=r"this machine has 0 usable GPUs.*torch 2\.13\.0\+cpu is a build for CPUs"):
        notes(here, "cluster.device=cuda")
    partition = Partition(
        name="gpu", nodes=1, max_nodes=None, shapes=((8, 4),), gres=("gpu:4",), limit_s=None, default_s=None
    )
    (note,) = notes(Site.of(partition), "cluster=slurm")
    assert "a build for CPUs, with 4 GPUs on a node of partition gpu" in note
    monkeypatch.setattr(host.importlib.metadata, "version", lambda _: "2.13.0+cu130")
    (note,) = notes(Site.here())
    assert "torch 2.13.0+cu130 finds no GPU on this machine" in note


def test_gpus_without_device_nodes_are_counted_by_torch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[dict[str, str]] = []
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(host.subprocess, "run", lambda *_, env, **__: runs.append(env) or SimpleNamespace(stdout="2\n"))
    for _ in range(2):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path, "2.11.0+cu130") == 2
    assert runs == [{"CUDA_VISIBLE_DEVICES": "0,1"}]


def test_what_compiling_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, missing = {"PATH": str(tmp_path)}, host.missing_for_compiling
    both = f"no C++ compiler (g++) and no Python.h in {tmp_path}"
    assert missing(Device.cpu, env, str(tmp_path)) == both
    monkeypatch.setattr(host.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    (note,) = compiler_notes(compose([]).cluster, Device.cpu, "train.compile")
    assert note.startswith(f"train.compile builds kernels, and this machine has {both}. Install them")
    assert compiler_notes(compose([]).cluster, Device.cpu, "") == []
    assert compiler_notes(compose(["cluster=slurm"]).cluster, Device.cuda, "train.compile") == []
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "Python.h").touch()
    (tmp_path / "clang").touch(mode=0o755)
    env["CPATH"] = f"/nowhere:{tmp_path}/headers"
    assert missing(Device.cpu, env) == "no C++ compiler (g++)"
    assert missing(Device.cuda, env) == "", "Triton takes clang, too"
    assert missing(Device.cuda, env | {"CC": "icx"}) == "no C compiler (CC=icx)"


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
    envs = [{}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, {"DNNL_MAX_CPU_ISA": "AVX512_CORE_BF16"}]
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
        ([*AVX512, "avx512_bf16"], "AVX512_CORE_BF16", (None, False)),  # only torch can tell
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


@pytest.mark.parametrize(
    ("own", "groups", "free"),
    [
        ("/job/step", {"job": ("800", 500, 100), "job/step": ("max", 300, 0)}, 400),
        ("/job/step", {"job": ("800", 500, 100), "job/step": ("600", 450, 50)}, 200),
        ("/job/step", {"job": ("max", 500, 100), "job/step": ("max", 300, 0)}, 1024),
        ("/", {"": ("600", 100, 0)}, 500),  # in a container
        ("/job/step", {"": ("600", 100, 0)}, 500),  # in a container that sees the host's name of its cgroup
        ("/job", {"job": ("600", 700, 0)}, 0),  # lowered below what is in use
        ("/job", {}, 1024),
    ],
)
def test_free_memory_is_the_least_of_host_and_cgroups(
    own: str, groups: dict[str, tuple[str, int, int]], free: int, tmp_path: Path
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:  1 kB\nHugePages_Total:  0\n")
    (proc / "self" / "cgroup").write_text(f"4:memory:/other\n0::{own}\n")
    for name, (limit, used, cached) in groups.items():
        (cgroups / name).mkdir(parents=True, exist_ok=True)
        (cgroups / name / "memory.max").write_text(f"{limit}\n")
        (cgroups / name / "memory.current").write_text(f"{used}\n")
        (cgroups / name / "memory.stat").write_text(f"anon 7\ninactive_file {cached}\n")
    assert free_host_bytes(proc, cgroups) == free
