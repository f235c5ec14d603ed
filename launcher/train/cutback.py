"""The record, cut back to a checkpoint's step: found from the end, so that its length costs no more than a copy."""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
from pathlib import Path
from typing import IO, Any, cast

# as launcher/train/telemetry.py writes them: the step comes first
_STEP = re.compile(rb'\{"step": ([0-9]+)[,}]')


def cut_back(path: Path, step: int, last: dict[str, Any] | None) -> None:
    """Put a new file under the record's name, with what of it is to be kept, on the disk when this returns.

    Kept is all up to the last whole line of ``step`` or of one before it. What lies behind is later, torn, or garbage
    that a machine left when it went down: up to a checkpoint the record was on the disk before that was committed.

    Args:
        last: the record of that very step, in case its line is missing.
    """
    for left in path.parent.glob(f".{path.name}.*"):  # by a start that was killed here
        left.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with partial.open("wb") as kept:
            newest = None
            if path.exists():
                with path.open("rb") as record:
                    end, newest = _end(record, step)
                    _copy(record, kept, end)
                kept.seek(end)
            if last is not None and (newest is None or newest < last["step"]):
                kept.write(f"{json.dumps(last)}\n".encode())
            kept.flush()
            os.fsync(kept.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def record_of(path: Path, step: int) -> dict[str, Any] | None:
    """Return the record of ``step``; None where there is no line for it."""
    if not path.exists():
        return None
    with path.open("rb") as record:
        end, newest = _end(record, step)
        if newest != step:
            return None
        record.seek(0)
        return json.loads(record.read(end).splitlines()[-1])


def _end(record: IO[bytes], step: int) -> tuple[int, int | None]:
    """Where the last line that is kept ends, and its step."""
    if not os.fstat(record.fileno()).st_size:  # which mmap refuses
        return 0, None
    with mmap.mmap(record.fileno(), 0, access=mmap.ACCESS_READ) as text:
        newline = text.rfind(b"\n")  # what follows the last one is torn
        while newline >= 0:
            begin = text.rfind(b"\n", 0, newline) + 1
            found = _STEP.match(text, begin, newline)
            if found is None or int(found[1]) <= step:
                own = _step_of(text[begin:newline])
                if own is not None and own <= step:
                    return newline + 1, own
            newline = begin - 1
    return 0, None


def _step_of(line: bytes) -> int | None:
    """None for what is no record."""
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    step: Any = cast("dict[str, Any]", record).get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """The first ``size`` bytes, by the operating system; on some file systems that costs nothing."""
    source.seek(0)
    at = 0
    while at < size:
        try:
            copied = os.copy_file_range(source.fileno(), target.fileno(), size - at, at, at)
        except OSError:  # between two file systems, or one that does not have it
            os.lseek(target.fileno(), at, os.SEEK_SET)
            copied = os.sendfile(target.fileno(), source.fileno(), at, size - at)
        if not copied:
            raise OSError(f"{source.name} has become shorter while it was copied")
        at += copied
