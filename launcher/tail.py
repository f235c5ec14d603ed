"""Reading files that another process is still writing."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
