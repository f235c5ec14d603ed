"""File helpers: durable writes, typed values from JSON, and reading files that another process is still writing."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import secrets
import stat
import time
import types
import typing
from collections.abc import Generator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

_STALE_TRIES = 5
_WRITTEN_WITHIN_S = 1.0
_FEW_BYTES, _END_BYTES = 2**13, 2**16
# most bytes of a file that is read as a whole: far more than any that this package writes
MOST_BYTES = 2**26
# most bytes of config.yaml
MOST_CONFIG = 2**22
# levels of nesting that YAML may have
_DEEPEST = 100


class Unreadable(ValueError):
    """File that cannot be what its name says, because it was damaged, replaced, or made by somebody else."""


def clear_torn(directory: Path) -> None:
    """Delete temporary files of ``write_text`` in ``directory`` whose process was killed.

    Files of other hosts, of live processes, and recent ones stay: containers on several hosts may have the same name.
    """
    for path in directory.glob(".*"):
        match = re.fullmatch(rf"\..+\.{re.escape(os.uname().nodename)}\.(\d+)\.[0-9a-f]{{8}}", path.name)
        with suppress(FileNotFoundError):
            written = path.stat().st_mtime
            if match and time.time() - written > _WRITTEN_WITHIN_S and not _has_run_since(int(match[1]), written):
                path.unlink()


def _has_run_since(pid: int, when: float) -> bool:
    """Return whether process ``pid`` exists and started before ``when``: another one may have its number since."""
    import psutil

    try:
        return psutil.Process(pid).create_time() <= when
    except psutil.NoSuchProcess:
        return False


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Context manager that yields the path of a new file, which replaces ``path`` unless the body fails."""
    # hosts that share the disk may write at the same time, and their process ids may be equal
    partial = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``path`` atomically: a reader sees the old text or the new one, whatever fails in between."""
    with replacing(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_line(text: str, descriptor: int = 1) -> None:
    """Write a line to standard output, or to another descriptor; nothing if that fails, such as on a full disk.

    Without a buffer: a buffered line would fail again later, at the latest when the process ends.
    """
    with suppress(OSError):
        os.write(descriptor, f"{text}\n".encode(errors="replace"))


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in the directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        Unreadable: it is something else: the writer of a FIFO may never come, and a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(f"{path}: is no regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Raises:
        Unreadable: it is no regular file, or has more than ``most`` bytes.
    """
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Unreadable(f"{path}: has more than {most:,} bytes, which none of these files needs")
    return content


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``, or None if the file does not exist.

    Raises:
        Unreadable: the file does not contain an object.
    """
    for tries_left in reversed(range(_STALE_TRIES)):
        try:
            value: object = json.loads(read_bytes(path))
            if isinstance(value, dict):
                return typing.cast("dict[str, Any]", value)
            raise Unreadable(f"{path}: contains no JSON object")
        except Unreadable:
            raise
        except ValueError as error:
            raise Unreadable(f"{path}: is not JSON: {error}") from None
        except RecursionError:
            raise Unreadable(f"{path}: is nested too deeply") from None
        except FileNotFoundError:
            return None
        except OSError as error:
            # NFS: another host replaced the file after it was opened; read the new one
            if error.errno != errno.ESTALE or not tries_left:
                raise
    raise AssertionError


def read_config(path: Path) -> str:
    """Return the text of a run's config.yaml.

    Raises:
        Unreadable: it is no composed config.
    """
    text = read_bytes(path, MOST_CONFIG).decode(errors="replace")
    require_plain_yaml(text)
    return text


def require_plain_yaml(text: str) -> None:
    """Check that a YAML text has no alias, and is not nested too deeply for the C loader, which would crash.

    A few nested aliases stand for more values than any computer can write down.

    Raises:
        Unreadable: it is no composed config.
    """
    import yaml

    depth, parse = 0, typing.cast("Any", yaml).parse
    try:
        for event in parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            kind = type(event).__name__
            depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
            if kind == "AliasEvent" or depth > _DEEPEST:
                raise Unreadable(f"config.yaml: {'has an alias' if kind == 'AliasEvent' else 'is nested too deeply'}")
    except yaml.YAMLError as error:
        raise Unreadable(f"config.yaml: is not YAML: {' '.join(str(error).split())}") from None


def object_from_json(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in ``text``; None if it is anything else, such as a line that is not complete."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return typing.cast("dict[str, Any]", value) if isinstance(value, dict) else None


def value_from_json(kind: Any, value: Any, *, exact: bool = False) -> Any:
    """Convert a JSON ``value`` to ``kind``: a dataclass, an Enum, a tuple, a union with None, or a plain value.

    Args:
        exact: fields with a default may not be missing either.

    Raises:
        KeyError: a field is missing that may not be.
        TypeError: a value has another type than the field.
    """
    if dataclasses.is_dataclass(kind):
        _require(value, dict)
        missing, hints = dataclasses.MISSING, _hints(kind)
        names = [
            field.name
            for field in dataclasses.fields(kind)
            if exact or field.name in value or (field.default is missing and field.default_factory is missing)
        ]
        return kind(**{name: value_from_json(hints[name], value[name], exact=exact) for name in names})  # pyright: ignore
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        inner = [a for a in args if a is not types.NoneType]
        return value if value is None or len(inner) > 1 else value_from_json(inner[0], value, exact=exact)
    if origin is tuple:
        _require(value, list, tuple)
        return tuple(value_from_json(args[0], item, exact=exact) for item in value)
    if origin is dict:
        _require(value, dict)
        return {name: value_from_json(args[1], item, exact=exact) for name, item in value.items()}
    if kind in (str, int, float):
        _require(value, *((int, float) if kind is float else (kind,)))
    return value


def _require(value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise TypeError(f"{json.dumps(value, default=str)[:40]} is no {kinds[-1].__name__}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last ``count`` lines of a file of any size, from its last 64 KiB; none if it cannot be read."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            for read in (_FEW_BYTES, _END_BYTES):
                file.seek(max(0, size - read))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
                if len(lines) > count or size <= read:  # the first one may not be whole
                    break
            return lines[-count:]
    except (OSError, Unreadable):
        return []


class Tail:
    """Reader of the complete lines that a growing file has gained since the last call.

    If the file was replaced or truncated, ``lines`` starts again with its first line, and ``replaced`` is incremented.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replaced = 0
        self._offset = 0
        self._file: tuple[int, int] | None = None

    def lines(self, *, over: bool = False) -> list[str]:
        """Return new lines without their ends; none while the file does not exist.

        Args:
            over: nobody writes to the file any more, so an unterminated last line is returned too.
        """
        try:
            with open_file(self.path) as file:
                status = os.fstat(file.fileno())
                previous, self._file = self._file, (status.st_dev, status.st_ino)
                if previous is not None and (previous != self._file or status.st_size < self._offset):
                    self.replaced += 1
                    self._offset = 0
                file.seek(self._offset)
                new = file.read()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # ESTALE: NFS file replaced while being read
                raise
            return []
        complete = new if over else new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode("utf-8", errors="replace").splitlines()
