"""Hardware that is found on a machine, and the part of a shell's environment that a job receives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.plan import host
from launcher.plan.host import ALLOWED_ENV, allowed_env, batch_env, visible_gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,2", 2),
        ("0,-1,1", 1),
        ("7", 0),
        ("3,9,1", 1),
        ("MIG-a,MIG-b", 1),
        ("NoDevFiles", 0),
        ("void", 0),
        ("none", 0),
        ("all", 0),
        ("GPU-8f6d2c1e-0a,1", 2),
        ("GPU-node1", 0),
        ("0,void,1", 1),
    ],
)
def test_visible_gpus(tmp_path: Path, visible: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert visible_gpus(env, tmp_path, "2.13.0+cu130") == expected
    assert visible_gpus(env, tmp_path, "2.13.0+cpu") == 0, "a CPU build of torch sees no GPU"


def test_gpus_without_device_nodes_are_counted_by_torch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[dict[str, str]] = []
    (tmp_path / "dxg").touch()
    monkeypatch.setattr(host.subprocess, "run", lambda *_, env, **__: runs.append(env) or SimpleNamespace(stdout="2\n"))
    for _ in range(2):
        assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path, "2.11.0+cu130") == 2
    assert runs == [{"CUDA_VISIBLE_DEVICES": "0,1"}]


def test_the_environment_is_an_allow_list() -> None:
    shell = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "AWS_SECRET_ACCESS_KEY": "x",
        "WANDB_API_KEY": "y",
        "SLURM_JOB_ID": "1",
    }
    assert set(allowed_env(shell, ALLOWED_ENV)) == {"PATH", "NCCL_DEBUG"}
    assert set(allowed_env(shell, ("AWS_*",))) == {"AWS_SECRET_ACCESS_KEY"}


def test_slurm_stores_no_password() -> None:
    shell = {
        "http_proxy": "http://me:secret@proxy:3128",
        "https_proxy": "http://proxy:3128",
        "WANDB_BASE_URL": "https://wandb.here",
        "WANDB_API_KEY": "y",
        "MODULEPATH": "/modules",
    }
    assert set(batch_env(shell, ALLOWED_ENV)) == {"https_proxy", "WANDB_BASE_URL", "MODULEPATH"}
    assert set(batch_env(shell, (*ALLOWED_ENV, "http_proxy"))) == set(shell) - {"WANDB_API_KEY"}
    assert "WANDB_BASE_URL" not in batch_env({"WANDB_BASE_URL": "https://me:secret@wandb.here"}, ALLOWED_ENV)
