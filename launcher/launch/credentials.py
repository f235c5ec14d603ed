"""Credentials that a job needs: W&B's key, and variables of messages and callbacks."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from launcher.config.choices import WandbMode
from launcher.config.schema import Config
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
    if not of_script and "wandb" in config.trackers and config.wandb.mode is WandbMode.online:
        require_wandb_key(os.environ)
    if not cluster_of(config.cluster.kind).typed_on_each_host:  # there only the first host reports
        entries = [("notify", entry) for entry in notify_entries(config.notify)]
        own = () if of_script else solve_callbacks(config.callbacks)
        entries += [(f"callbacks[{number}]", entry) for number, entry in enumerate(own)]
        require_environment(entries, os.environ)


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
