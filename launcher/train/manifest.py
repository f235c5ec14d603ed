"""What a checkpoint's files must be: sizes and checksums, written before the checkpoint is committed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.errors import WrongCheckpoint
from launcher.paths import STATE, read_json, write_json

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
    """What the files must be, or why that is not known.

    Raises:
        WrongCheckpoint: a newer launcher wrote it, or this user may not read it: no older one is the answer to that.
    """
    try:
        fields: dict[str, Any] | None = read_json(directory / NAME)
        if fields is None:
            return f"it has no {NAME}, which every checkpoint of a launcher's has: it was copied in part, or is none"
        if fields.get("format", 1) > FORMAT:
            raise WrongCheckpoint(_too_new(directory, fields["format"]))
        return {name: (int(file["bytes"]), int(file["crc32"])) for name, file in fields["files"].items()}
    except PermissionError as error:
        raise WrongCheckpoint(_closed(directory, NAME, error)) from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its {NAME} cannot be read: {type(error).__name__}: {error}"


def _too_new(directory: Path, found: int) -> str:
    try:
        state: dict[str, Any] = read_json(directory / STATE) or {}
        version = state["origin"]["launcher_version"]
    except (OSError, ValueError, TypeError, LookupError):
        version = "a newer version"
    return (
        f"{directory} has format {found}, and this launcher ({metadata.version('launcher')}) reads up to {FORMAT}: it "
        f"was written by launcher {version}.\n  Resume the run with that one."
    )


def _closed(directory: Path, name: str, error: OSError) -> str:
    return (
        f"{directory / name} cannot be read: {error.strerror}.\n"
        "  Have its owner open it (chmod -R u+rX), or resume as the user who wrote it."
    )


def problems(directory: Path, files: Mapping[str, tuple[int, int]]) -> list[str]:
    """Which of ``files`` are not what they must be.

    Raises:
        WrongCheckpoint: this user may not read one of them.
    """
    found: list[str] = []
    for name, wanted in files.items():
        try:
            size = (directory / name).stat().st_size
            if size != wanted[0]:
                found.append(f"{name} has {size:,} bytes instead of {wanted[0]:,}")
            elif _checksum(directory / name) != wanted:
                found.append(f"the content of {name} has changed")
        except PermissionError as error:
            raise WrongCheckpoint(_closed(directory, name, error)) from None
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
    return found


def _checksum(file: Path) -> tuple[int, int]:
    size = crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
