"""Files: durable writes, typed values out of JSON, and reading what another process still writes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import secrets
import time
import types
import typing
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

_STALE_TRIES = 5
_WRITTEN_WITHIN_S = 1.0


def clear_torn(directory: Path) -> None:
    """Delete what ``write_text`` was writing in ``directory`` when its process was killed. That of another host, and of
    a process that lives, stays; so does what is new: containers on several hosts may have one name."""
    for path in directory.glob(".*"):
        found = re.fullmatch(rf"\..+\.{re.escape(os.uname().nodename)}\.(\d+)\.[0-9a-f]{{8}}", path.name)
        if found and not Path("/proc", found[1]).exists():
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _WRITTEN_WITHIN_S:
                    path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write ``path`` so that a reader sees the old text or the new one, never a part, whatever dies in between."""
    # hosts that share the disk may write it at the same time, and have processes of one number
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Have on the disk what was made, renamed and removed in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in ``path``, or None while the file is not there."""
    for tries_left in reversed(range(_STALE_TRIES)):
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except OSError as error:
            # NFS: another host has put a new file in its place since it was opened, and that one is to be read
            if error.errno != errno.ESTALE or not tries_left:
                raise
    raise AssertionError


def build(kind: Any, value: Any) -> Any:
    """``value`` out of JSON as ``kind``: a dataclass, an Enum, a tuple, a union with None, or a plain value. A field
    with a default may be missing: an earlier version did not know it."""
    if dataclasses.is_dataclass(kind):
        hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
        given = [f for f in dataclasses.fields(kind) if f.name in value or f.default is missing]
        return kind(**{f.name: build(hints[f.name], value[f.name]) for f in given})  # pyright: ignore
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else build(next(a for a in args if a is not types.NoneType), value)
    if origin is tuple:
        return tuple(build(args[0], item) for item in value)
    return value


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log; nothing where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    except OSError:
        return []


class Tail:
    """The whole lines that a growing file has gained since the last look.

    Where another file has taken its place, or it was cut short, ``lines`` begins again with its first one, and
    ``replaced`` counts that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = 0
        self._offset = 0
        self._file: tuple[int, int] | None = None

    def lines(self, *, over: bool = False) -> list[str]:
        """New lines without their ends; none while the file is not there. A last line without an end waits for it,
        unless it is ``over``: nobody writes to the file any more."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                known, self._file = self._file, (found.st_dev, found.st_ino)
                if known is not None and (known != self._file or found.st_size < self._offset):
                    self.replaced += 1
                    self._offset = 0
                file.seek(self._offset)
                new = file.read()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # NFS: replaced while it was being read
                raise
            return []
        whole = new if over else new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()
