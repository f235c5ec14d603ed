"""A checkpoint's files, written by torch: their checksums are taken on the way, and what the disk says is kept.

torch's serializer is C++ that calls back into Python for each write, and an error there comes out of it as another one,
without its errno. So a write never raises here: what follows the first error goes nowhere, and the error is raised when
the file is closed.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from launcher.train import manifest

_COPY_AHEAD = 10_000_000  # bytes on their way from the GPU while others are written: torch's default


class Writer(dcp.FileSystemWriter):
    """Writes one rank's share into ``directory``. ``staged``: the tensors are in host memory already."""

    def __init__(self, directory: Path, *, staged: bool) -> None:
        # what is on the host needs no copying ahead, for which torch would open the first GPU in a thread of its own
        super().__init__(directory, per_thread_copy_ahead=0 if staged else _COPY_AHEAD)
        self._disk = _Disk()
        self.fs = self._disk

    @property
    def written(self) -> manifest.Files:
        """The files of this rank so far."""
        return self._disk.written

    @property
    def error(self) -> OSError | None:
        """What the disk refused first."""
        return self._disk.error


class _Disk(FileSystem):
    def __init__(self) -> None:
        self.written: manifest.Files = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with Path(path).open(mode) as file:
                stream = _Stream(cast("BinaryIO", file))
                yield cast("io.IOBase", stream)
                stream.close()
        except OSError as error:
            self.error = self.error or error
            raise
        self.written[Path(path).name] = stream.size, stream.crc

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Stream:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None
        self.size = self.crc = 0

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
        self.size, self.crc = self.size + size, zlib.crc32(data, self.crc)
        return size

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Raises OSError: a write was refused. So do those below."""
        if self._error is not None:
            raise self._error
        self._file.flush()

    def fileno(self) -> int:
        """Asked for by fsync."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Once more is no error, as for any file."""
        if not self._file.closed:
            self.flush()
            self._file.close()
