"""Credentials that a job needs: W&B's key, and variables of messages and callbacks."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from launcher.config.choices import WandbMode
from launcher.config.schema import ClusterConfig, ClusterKind, Config
from launcher.errors import SiteError
from launcher.plan.callback_plan import notify_entries, require_environment, solve_callbacks
from launcher.plan.clusters import cluster_of


def require_credentials(config: Config, *, of_script: bool = False) -> None:
    """Check that W&B will find its key, and messages and callbacks the environment variables that they are to read.

    Args:
        of_script: the job is a script of `launch run`, for which only ``notify`` counts.

    Raises:
        ConfigError, SiteError: they will not.
    """
    env = job_environment(config.cluster, os.environ)
    if env is None:
        return
    if not of_script and "wandb" in config.trackers and config.wandb.mode is WandbMode.online:
        try:
            require_wandb_key(env)
        except SiteError as error:
            if _carries_all(config.cluster):
                raise
            remedy = "Name WANDB_API_KEY there, or add `export WANDB_API_KEY` to cluster.setup if login files set it."
            raise SiteError(f"{error}\n  cluster.sbatch.export restricts what the job gets. {remedy}") from None
    if not cluster_of(config.cluster.kind).typed_on_each_host:  # there only the first host reports
        entries = [("notify", entry) for entry in notify_entries(config.notify)]
        own = () if of_script else solve_callbacks(config.callbacks)
        entries += [(f"callbacks[{number}]", entry) for number, entry in enumerate(own)]
        require_environment(entries, env)


def job_environment(cluster: ClusterConfig, env: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the variables that the job's workers will have, as far as the submission determines them.

    A variable that ``cluster.setup`` exports has the text that is written there. ``HOME`` is kept: Slurm sets it.

    Args:
        env: variables of the shell in which the job is submitted.

    Returns:
        None if ``cluster.setup`` reads commands from a file, which may export any variable.
    """
    if cluster.kind != ClusterKind.slurm:
        return env
    # as sbatch reads the option: NONE, NIL, or names with or without a value; ALL adds the shell's
    carried = _export_option(cluster)
    job = {name: value for name, value in env.items() if _carries_all(cluster) or name in (*carried, "HOME")}
    job |= dict(word.split("=", 1) for word in carried if "=" in word)
    for text in cluster.setup:
        line = re.sub(r"""('[^']*'|"[^"]*")|(?<!\S)#.*""", r"\1", text)  # without a comment
        if re.search(r"(^|[;&|]|\bthen\b)\s*(source|\.|eval)\s", line):
            return None
        for command, names in re.findall(r"\b(export|unset)\s+([^;&|]*)", line):
            found = re.findall(r"(?:^|\s)([A-Za-z_]\w*)(?:=[\"']?([^\s\"']*))?", names)
            if command == "unset" or names.startswith("-n"):
                job = {name: value for name, value in job.items() if name not in dict(found)}
            else:
                job |= {name: value or job.get(name) or "set by cluster.setup" for name, value in found}
    return job


def _export_option(cluster: ClusterConfig) -> list[str]:
    return str(cluster.sbatch.get("export", "ALL")).split(",")


def _carries_all(cluster: ClusterConfig) -> bool:
    return "ALL" in map(str.upper, _export_option(cluster))  # sbatch compares without case


def require_wandb_key(env: Mapping[str, str]) -> None:
    """Check that wandb.mode=online has a key, in ``env`` or in .netrc for the server's host. Raises SiteError."""
    if env.get("WANDB_API_KEY") or env.get("WANDB_IDENTITY_TOKEN_FILE"):
        return
    host = urlsplit(env.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(env.get("NETRC") or Path(env.get("HOME", "~")).expanduser() / ".netrc")
    try:
        key = netrc.netrc(file).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        key = None
    if key is None:
        raise SiteError(
            f"wandb.mode=online: there is no key for {host}, neither in WANDB_API_KEY nor in {file}.\n"
            "  Run `wandb login`, or use wandb.mode=offline and `wandb sync` later."
        )
