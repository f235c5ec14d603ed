"""Files of a checkpoint: a manifest with checksums, and tensors that torch writes and that are read without executing
pickled code.

torch's serializer is C++ that calls back into Python for each write, and converts an exception there to another one
without its errno. So a write never raises here: data after the first error is dropped, and the error is raised when the
file is closed.
"""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

import launcher
from launcher.errors import TaskError, UserError, WrongCheckpoint
from launcher.rundir.files import Unreadable, open_file, read_json, write_json
from launcher.rundir.paths import MANIFEST
from launcher.train.world import ALONE, World

# starts of the keys of a rank's own state
RANDOM_KEY, STRATEGY_KEY, STREAM_KEY = "random_rank", "strategy_rank", "stream_rank"
# raised by an incompatible change to this module, contents.checkpoint_tensors or save.take_snapshot
CHECKPOINT_FORMAT = 2
_CHUNK = 1 << 22
_FROM_A_COPY = "Restore the checkpoint from a copy; or move its directory away, so that an older one is used."

Files = dict[str, tuple[int, int]]  # (size in bytes, CRC-32) by name


def checksums(files: Iterable[Path]) -> Files:
    """Return size and CRC-32 of each file, by name."""
    return {file.name: _checksum(file) for file in files}


def write_manifest(directory: Path, files: Mapping[str, tuple[int, int]]) -> None:
    """Write the manifest of ``files`` into ``directory``."""
    listed = {name: {"bytes": size, "crc32": crc} for name, (size, crc) in sorted(files.items())}
    write_json(
        directory / MANIFEST, {"format": CHECKPOINT_FORMAT, "launcher_version": launcher.__version__, "files": listed}
    )


def read_manifest(directory: Path) -> Files | str:
    """Return the files listed in the manifest; if it is missing or damaged, a message that says so.

    Raises:
        WrongCheckpoint: another launcher wrote it, or this user may not read it. Falling back to an older checkpoint
            would be wrong then.
    """
    try:
        fields: dict[str, Any] | None = read_json(directory / MANIFEST)
        if fields is None:
            return f"it has no {MANIFEST}: it was copied in part, or is not a checkpoint of a launcher"
        if (found := fields.get("format")) != CHECKPOINT_FORMAT:
            raise WrongCheckpoint(
                f"{directory} has format {found}, and this launcher ({launcher.__version__}) reads format "
                f"{CHECKPOINT_FORMAT}.\n  Resume or export it with the launcher that wrote it "
                f"({fields.get('launcher_version', 'an older one')}); checkpoint.init_from takes exported weights."
            )
        files = {name: (int(file["bytes"]), int(file["crc32"])) for name, file in fields["files"].items()}
        if outside := [name for name in files if not _is_plain(name)]:
            return f"its {MANIFEST} names {outside[0]}, which is not in its directory"
        return files
    except PermissionError as error:
        raise WrongCheckpoint(_unreadable(directory, MANIFEST, error)) from None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its {MANIFEST} cannot be read: {type(error).__name__}: {error}"


def _is_plain(name: str) -> bool:
    """Return True for a file's name, False for a path to another directory."""
    return Path(name).name == name != ".."


def _unreadable(directory: Path, name: str, error: OSError) -> str:
    return (
        f"{directory / name} cannot be read: {error.strerror}.\n"
        "  Ask its owner to make it readable (chmod -R u+rX), or resume as the user who wrote it."
    )


def problems(directory: Path, files: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a message for each of ``files`` whose size or checksum is wrong.

    Raises:
        WrongCheckpoint: this user may not read one of them.
    """
    messages: list[str] = []
    for name, expected in files.items():
        try:
            size = (directory / name).stat().st_size
            if size != expected[0]:
                messages.append(f"{name} has {size:,} bytes instead of {expected[0]:,}")
            elif _checksum(directory / name) != expected:
                messages.append(f"the content of {name} has changed")
        except PermissionError as error:
            raise WrongCheckpoint(_unreadable(directory, name, error)) from None
        except OSError as error:
            messages.append(f"{name}: {error.strerror}")
        except Unreadable:
            messages.append(f"{name} is no regular file")
    return messages


def _checksum(file: Path) -> tuple[int, int]:
    size = crc = 0
    with open_file(file) as stream:
        while chunk := stream.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


_COPY_AHEAD = 10_000_000  # bytes copied from the GPU while others are written: torch's default


class Writer(dcp.FileSystemWriter):
    """Writer of one rank's share into ``directory``. ``staged``: the tensors are in host memory already."""

    def __init__(self, directory: Path, *, staged: bool) -> None:
        # host tensors need no copying ahead, for which torch would initialise the first GPU in its own thread
        super().__init__(directory, per_thread_copy_ahead=0 if staged else _COPY_AHEAD)
        self.fs = self.files = _CheckedFiles()


class _CheckedFiles(FileSystem):
    """File system that records the files that were ``written``, and the first ``error`` of the disk."""

    def __init__(self) -> None:
        self.written: Files = {}
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
        """Flush the file. Like the methods below, it raises the OSError of an earlier write."""
        if self._error is not None:
            raise self._error
        self._file.flush()

    def fileno(self) -> int:
        """Return the file descriptor, for fsync."""
        self.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; closing it twice is no error, as for any file."""
        if not self._file.closed:
            self.flush()
            self._file.close()


# all globals that torch's .metadata refers to, other than dtypes
_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties",
        "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}  # fmt: skip


class Reader(dcp.FileSystemReader):
    """Reader of the regular files in a checkpoint's directory, whatever its ``.metadata`` names."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = _RegularFiles()
        self.refusal: WrongCheckpoint | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """Unpickle ``.metadata`` with only the globals that torch writes.

        Raises:
            WrongCheckpoint: it refers to another global or another directory, or is damaged.
        """
        index = Path(self.path) / ".metadata"
        try:
            with open_file(index) as file:
                metadata: Metadata = _Unpickler(file).load()
            places = (info.relative_path for info in metadata.storage_data.values())
            if outside := next((place for place in places if not _is_plain(place)), None):
                raise Unreadable(f"it names {outside}, which is not in its directory")
            assert metadata.storage_meta is not None
        except OSError:
            raise
        except Exception as error:  # any object may have been pickled
            problem = str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
            self.refusal = WrongCheckpoint(f"{index} cannot be read: {problem}.\n  {_FROM_A_COPY}")
            raise self.refusal from None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _RegularFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:  # noqa: ARG002
        with open_file(Path(path)) as file:
            yield cast("io.IOBase", file)


def read_values(state: dict[str, Any], directory: Path, *, no_dist: bool = False) -> None:
    """Replace the values in ``state`` by those of a checkpoint, tensors in place. All ranks call it, unless
    ``no_dist``.

    Raises:
        WrongCheckpoint: on all ranks, if one of them cannot read a value.
    """
    reader = Reader(directory)
    try:
        dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=no_dist)
    except dcp.CheckpointException as error:  # no subclass of Exception
        if reader.refusal is not None:  # torch 2.11 replaces it by "metadata is None"
            raise reader.refusal from None
        failures = [failure for failure, _ in error.failures.values()]
        causes = dict.fromkeys(f"{type(each).__name__}: {str(each).partition(chr(10))[0]}" for each in failures)
        raise WrongCheckpoint(f"{directory} cannot be read: {'; '.join(causes)}\n  {_FROM_A_COPY}") from None


def entries_under(stored: Metadata, key: str) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the metadata of each value in the part ``key`` of a checkpoint, after its path in the nested containers."""
    for name, entry in stored.state_dict_metadata.items():
        top, *path = (stored.planner_data or {}).get(name, (name,))
        if top == key:
            yield tuple(path), entry


def empty_values(stored: Metadata, key: str, device: torch.device) -> dict[str, Any]:
    """Return what the part ``key`` of a checkpoint is loaded into, where a fresh engine does not know names and shapes:
    its containers, with an empty tensor for each tensor, and a placeholder for other values."""
    values: dict[str, Any] = {}
    for path, entry in entries_under(stored, key):
        empty = empty_value(entry, device)
        if empty is None and isinstance(path[-1], int):  # torch takes a list without tensors for one value
            empty = torch.empty(0)
        set_element(values, path, empty)
    return values


def empty_value(entry: Any, device: torch.device | None = None) -> Tensor | None:
    """Return an empty tensor for the stored one with this metadata; None for another value."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):  # early releases of Python 3.11 pickle an Enum's member this way
            return _member
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint needs")


def _member(kind: Any, name: str) -> Enum:
    """Return ``kind.name`` if ``kind`` is an Enum; anything else could execute code."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f".metadata asks for {name} of {kind!r}, which no checkpoint needs")


def pickled(value: Any) -> bytes:
    """Return ``value`` serialized by torch.

    Raises:
        TypeError: it could not be read from a checkpoint again.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        unpickled(file.getvalue())
    except Exception as error:  # of torch, or of a method of the user's class
        why = (str(error).partition("WeightsUnpickler error: ")[2] or str(error)).strip().partition(". ")[0]
        raise TypeError(f"a {type(value).__name__} cannot be read from a checkpoint again ({why})") from error
    return file.getvalue()


def unpickled(content: bytes) -> Any:
    """Return what ``pickled`` was given, without executing code. Tensors of a GPU are on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


class SavePlanner(dcp.DefaultSavePlanner):
    """Save planner that refuses values that could not be read again."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        if write_item.type is WriteItemType.BYTE_IO:
            try:
                pickled(object)
            except TypeError as error:
                raise TaskError(
                    f"{write_item.index.fqn}: {error}; keep tensors, numbers, texts, lists and dicts of them"
                ) from None
        return super().transform_object(write_item, object)


class Planner(dcp.DefaultLoadPlanner):
    """Planner that reads values other than tensors (an optimizer's options) with ``weights_only=True``, so as numbers,
    strings and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)


def damages(world: World, directory: Path) -> list[str]:
    """Return what is wrong with a checkpoint's files: the same on all ranks, each of which checks a share of them.

    Raises:
        WrongCheckpoint: it has another format, or this user may not read it.
    """
    own: list[str] | WrongCheckpoint
    try:
        files = read_manifest(directory)
        share = {} if isinstance(files, str) else dict(list(files.items())[world.rank :: world.size])
        own = [files] if isinstance(files, str) else problems(directory, share)
    except WrongCheckpoint as error:  # returned first, so that all ranks raise it
        own = error
    results = world.of_all(own)
    for result in results:
        if isinstance(result, WrongCheckpoint):
            raise result
    found = list(dict.fromkeys(problem for result in results if isinstance(result, list) for problem in result))
    return [f"{len(found)} files are not as they were written", *found] if len(found) > 1 else found


def require_intact(directory: Path) -> None:
    """Raise UserError if a file of the checkpoint is missing or has changed since it was written."""
    if found := damages(ALONE, directory):
        raise UserError(
            f"{directory} is damaged: {'; '.join(found)}.\n  Use the checkpoint of another step, or restore it from a "
            "copy."
        )
