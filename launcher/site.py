"""What this machine has, and what of the user's environment a job may see. No torch: it answers before any import."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import SiteError

# What a worker inherits. Everything else of the submitter's shell stays there: a job must not depend on it by
# accident, and no secret travels unasked. W&B's key reaches the mirror process alone.
ALLOWED_ENV = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TERM", "TMPDIR", "XDG_*",
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "PYTHONWARNINGS", "VIRTUAL_ENV", "CONDA_*",
    "LD_LIBRARY_PATH", "LD_PRELOAD",
    "CUDA_*", "NVIDIA_*", "NCCL_*", "GLOO_*", "TORCH_*", "PYTORCH_*", "TORCHINDUCTOR_*", "TRITON_*", "CUBLAS_*",
    "OMP_*", "MKL_*", "KMP_*", "GOMP_*", "OPENBLAS_*", "HF_HOME", "HF_DATASETS_*", "HF_HUB_OFFLINE",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "CC", "CXX",
)  # fmt: skip
WANDB_ENV = ("WANDB_*", "NETRC")


@dataclass(frozen=True, kw_only=True)
class Site:
    """``gpus``: CUDA devices this process may use; ``cores``: CPU cores it may use; ``cwd``: the working directory."""

    gpus: int
    cores: int
    cwd: str

    @classmethod
    def here(cls) -> Site:
        return cls(gpus=visible_gpus(os.environ), cores=len(os.sched_getaffinity(0)), cwd=str(Path.cwd()))


def visible_gpus(env: Mapping[str, str], dev: Path = Path("/dev"), torch_version: str | None = None) -> int:
    """CUDA devices that torch will see: the driver's device nodes, less what CUDA_VISIBLE_DEVICES hides.

    A CPU build of torch sees none, whatever the machine has.

    Raises:
        SiteError: torch is not installed.
    """
    if torch_version is None:
        try:
            torch_version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            raise SiteError(
                "torch is not installed in this Python.\n  Install it: pip install 'torch>=2.11'."
            ) from None
    if torch_version.endswith("+cpu"):
        return 0
    present = sum(1 for node in dev.glob("nvidia[0-9]*") if node.name.removeprefix("nvidia").isdecimal())
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return present
    names = [name.strip() for name in listed.split(",")]
    if names and names[0].startswith("MIG-"):  # a slice of a device has no node of its own
        return len(names)
    usable = 0
    for name in names:
        if name in ("", "-1") or (name.isdecimal() and int(name) >= present):
            break  # CUDA ignores everything after the first name it does not know
        usable += 1
    return min(usable, present)


def allowed_env(env: Mapping[str, str], patterns: tuple[str, ...]) -> dict[str, str]:
    """The part of ``env`` whose names match ``patterns`` (exact, or with a trailing *)."""
    return {name: env[name] for name in env if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
