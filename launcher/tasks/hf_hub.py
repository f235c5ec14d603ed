"""Names of models on the Hugging Face hub, which may be in the local cache only, and need a network otherwise.

The module does not import huggingface_hub at module level.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.errors import TaskError

_WITHIN_S = 10


def require_on_hub(
    key: str,
    name: str,
    files: Sequence[str],
    *,
    missing: str = "",
    revision: str | None = None,
    other_key: str | None = None,
) -> None:
    """Raise TaskError unless the hub has a repository ``name``, or the local cache has one of its ``files``.

    The hub is asked once: transformers asks for each of several files and repeats it for about a minute.

    Args:
        key: config key that has the value ``name``.
        missing: start of the message.
        revision: commit, branch or tag; None: main.
        other_key: key that may name another place; default: ``key``.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    path = Path(name)
    hint = f"Name a directory that save_pretrained wrote, or a name on the hub, with {other_key or key}=."
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise TaskError(f"{key}={name}: {missing}no such directory.\n  {hint}") from None
    if "/" in name and path.parent.is_dir():
        raise TaskError(f"{key}={name}: {missing}{path.parent} has no directory {path.name}.\n  {hint}")
    if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
        return
    try:
        HfApi().model_info(name, revision=revision, timeout=_WITHIN_S)
    except Exception as error:  # of the network, the hub, and HF_HUB_OFFLINE, which have no common type
        raise TaskError(
            f"{key}={name}: {missing}there is no such file or directory, nor is it in the cache; as a name on the hub: "
            f"{first_line(error)}\n  {hint}"
        ) from None


def cached_commit(name: str, revision: str | None) -> str | None:
    """Return the commit of the configuration that was read last for a name on the hub; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(file).parent.name if isinstance(file, str) else None


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
