"""What a checkpoint's files must be: sizes and checksums, written before the checkpoint is committed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from launcher.paths import read_json, write_json

NAME = "manifest.json"
# of a checkpoint: what its files are called and what is in them
FORMAT = 1
_CHUNK = 1 << 22

Files = dict[str, tuple[int, int]]  # by name: bytes, CRC-32


def checksums(files: Iterable[Path]) -> Files:
    return {file.name: _checksum(file) for file in files}


def write(directory: Path, files: Mapping[str, tuple[int, int]]) -> None:
    listed = {name: {"bytes": size, "crc32": crc} for name, (size, crc) in sorted(files.items())}
    write_json(directory / NAME, {"format": FORMAT, "files": listed})


def read(directory: Path) -> Files | str:
    """What the files must be, or why that is not known."""
    try:
        fields: dict[str, Any] | None = read_json(directory / NAME)
        if fields is None:
            return f"it has no {NAME}"
        return {name: (int(file["bytes"]), int(file["crc32"])) for name, file in fields["files"].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its {NAME} cannot be read: {type(error).__name__}: {error}"


def problems(directory: Path, files: Mapping[str, tuple[int, int]]) -> list[str]:
    """Which of ``files`` are not what they must be."""
    found: list[str] = []
    for name, wanted in files.items():
        try:
            size = (directory / name).stat().st_size
            if size != wanted[0]:
                found.append(f"{name} has {size:,} bytes instead of {wanted[0]:,}")
            elif _checksum(directory / name) != wanted:
                found.append(f"the content of {name} has changed")
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
    return found


def _checksum(file: Path) -> tuple[int, int]:
    size = crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
