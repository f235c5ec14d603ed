"""Cache of what takes long to find out for a plan: traces of a task and measurements of this machine.

An entry is found by its key and is valid while everything that it depends on is unchanged: files, directories,
environment variables, and the versions of launcher, torch and Python.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.rundir.files import object_from_json, write_text

READ_BYTES = 2**20  # larger files are compared by size and times instead of their content
MOST_ENTRIES = 1000


class ContentCache:
    """Store of JSON values on disk.

    Several processes may use it at the same time. If the directory cannot be written, nothing is stored.

    Args:
        directory: where the entries are; None: ``$XDG_CACHE_HOME/launcher`` or ``~/.cache/launcher``.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or user_cache()

    def get(self, key: Mapping[str, Any]) -> Any | None:
        """Return the value that was stored for an equal key; None if there is none, or if it is stale or damaged."""
        name, text = self._place(key), ""
        with suppress(OSError, UnicodeDecodeError):
            text = name.read_text(encoding="utf-8")
        digest, _, body = text.partition("\n")
        entry = object_from_json(body) if digest == _digest(body) else None
        if entry is None or entry["key"] != _canonical(key) or entry["versions"] != versions():
            return None
        if any(fingerprint(Path(path)) != found for path, found in entry["paths"].items()):
            return None
        if any(os.environ.get(variable) != found for variable, found in entry["variables"].items()):
            return None
        with suppress(OSError):
            os.utime(name)  # the entries that were not used for longest are removed first
        return entry["value"]

    def put(
        self,
        key: Mapping[str, Any],
        value: Any,
        depends_on: Iterable[Path],
        *,
        variables: Iterable[str] = (),
        since: float = math.inf,
    ) -> None:
        """Store ``value``, which must be JSON.

        Args:
            depends_on: files and directories, existing or not, that the value depends on. Of a directory, the names of
                its entries count.
            variables: names of environment variables that it depends on.
            since: time (``time.time()``) at which the value's computation started. Nothing is stored if a file has
                changed since then, because the value may have been computed from the file before.
        """
        paths = {str(path.absolute()): path for path in depends_on}
        if any(_changed_at(path) >= since for path in paths.values()):
            return
        body = json.dumps(
            {
                "key": _canonical(key),
                "versions": versions(),
                "paths": {name: fingerprint(path) for name, path in paths.items()},
                "variables": {name: os.environ.get(name) for name in variables},
                "value": value,
            }
        )
        with suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(self._place(key), f"{_digest(body)}\n{body}")
            self._remove_oldest()

    def _place(self, key: Mapping[str, Any]) -> Path:
        return self._directory / f"{_digest(_canonical(key))[:32]}.json"

    def _remove_oldest(self) -> None:
        entries = [*self._directory.glob("*.json")]
        if len(entries) > MOST_ENTRIES:
            for path in sorted(entries, key=_changed_at)[: len(entries) - MOST_ENTRIES]:
                path.unlink(missing_ok=True)


def fingerprint(path: Path) -> str | None:
    """Return a text that differs if the content of a file or the names in a directory differ; None without either."""
    try:
        if path.is_dir():
            return "names " + _digest("\0".join(sorted(entry.name for entry in path.iterdir())))
        status = path.stat()
        if status.st_size <= READ_BYTES and path.is_file():
            return "content " + hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):  # ValueError: a null character in the name
        return None
    return f"status {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


@functools.cache
def versions() -> str:
    """Return a text that differs for another version of Python, torch or launcher, whose sources may be edited."""
    root, found = Path(__file__).parents[1], [platform.python_version(), metadata.version("torch")]
    for path in sorted(root.rglob("*.py")):
        status = path.stat()
        found.append(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}")
    return _digest("\n".join(found))


def user_cache() -> Path:
    """Return the launcher's directory for what may be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():  # the XDG Base Directory Specification ignores relative paths
        base = Path(os.environ.get("HOME", "/nonexistent")) / ".cache"
    return Path(base) / "launcher"


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def _changed_at(path: Path) -> float:
    """Return when a file was last changed; -inf for directories, whose names only matter, and where there is none."""
    try:
        return -math.inf if path.is_dir() else path.stat().st_mtime
    except (OSError, ValueError):
        return -math.inf
