"""Weights in a checkpoint or in safetensors files, read one tensor, or a part of one, at a time.

A read of a checkpoint needs memory for what it returns and, if that is in several pieces (shards) of the checkpoint,
for one of these pieces.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from launcher.errors import ConfigError, WrongCheckpoint
from launcher.plan.initial_weights import KEY, safetensors_files
from launcher.rundir.files import open_file
from launcher.train.checkpoint.file_format import Reader, unpickled

# one slice with start and stop for each dimension
Region = tuple[slice, ...]

# names of dtypes in the safetensors format
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


# what a damaged file may raise
READ_ERRORS = (
    OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError, SafetensorError, WrongCheckpoint
)  # fmt: skip


class StoredTensor(NamedTuple):
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class CheckpointWeights:
    """Tensors of a checkpoint, of any strategy and number of ranks.

    Args:
        directory: the checkpoint.
        prefix: start of the names that are meant; those of ``tensors`` lack it.

    Attributes:
        tensors: by name.
        others: names of values that are no tensors.
    """

    def __init__(self, directory: Path, prefix: str = "model.") -> None:
        self._prefix, self._reader, self._directory = prefix, Reader(directory), directory
        stored = self._reader.read_metadata()
        entries = {
            name.removeprefix(prefix): entry
            for name, entry in stored.state_dict_metadata.items()
            if name.startswith(prefix)
        }
        self._stored = {name: each for name, each in entries.items() if isinstance(each, TensorStorageMetadata)}
        self.tensors = {
            name: StoredTensor(tuple(each.size), each.properties.dtype) for name, each in self._stored.items()
        }
        self.others = [name for name in entries if name not in self.tensors]
        self._places = {(index.fqn, index.offset): info for index, info in stored.storage_data.items()}

    def read(self, name: str, region: Region | None = None) -> Any:
        """Return a tensor on the CPU, or a region of it; or the value of one of ``others``."""
        if name in self.others:
            return unpickled(self._load(MetadataIndex(self._prefix + name)))
        stored = self._stored[name]
        region = region or tuple(slice(0, size) for size in stored.size)
        sizes = torch.Size([part.stop - part.start for part in region])
        wanted = ChunkStorageMetadata(torch.Size([part.start for part in region]), sizes)
        result = torch.empty(sizes, dtype=stored.properties.dtype)
        for item in create_read_items_for_chunk_list(self._prefix + name, stored, [wanted]):
            piece = self._load(item.storage_index)[_slices(item.storage_offsets, item.lengths)]
            if item.lengths == sizes:
                return piece
            result[_slices(item.dest_offsets, item.lengths)] = piece
        return result

    def _load(self, index: MetadataIndex) -> Any:
        place = self._places[index.fqn, index.offset]
        with open_file(self._directory / place.relative_path) as file:
            part = self._reader._slice_file(file, place)  # pyright: ignore[reportPrivateUsage]
            return torch.load(part, map_location="cpu", weights_only=True)


def _slices(offsets: Sequence[int], lengths: Sequence[int]) -> Region:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


class SafetensorsWeights:
    """Tensors of a safetensors file, or of those in a directory.

    Raises:
        ConfigError: two files have a tensor of the same name.
        SafetensorError: a file is damaged.
    """

    def __init__(self, path: Path) -> None:
        dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        self.tensors: dict[str, StoredTensor] = {}
        self.others: list[str] = []
        self._files: dict[str, Path] = {}
        for place in safetensors_files(path, str(path)):
            with _opened(place) as file:
                for name in file.keys():  # noqa: SIM118 (the file is no mapping)
                    part = file.get_slice(name)
                    if name in self._files or part.get_dtype() not in dtypes:
                        no_dtype = f"has a dtype that torch does not have: {part.get_dtype()}"
                        problem = "is in two of its files" if name in self._files else no_dtype
                        raise ConfigError(KEY, path, f"{name} {problem}.")
                    self._files[name] = place
                    self.tensors[name] = StoredTensor(tuple(part.get_shape()), dtypes[part.get_dtype()])

    def read(self, name: str, region: Region | None = None) -> Tensor:
        shape, dtype = self.tensors[name]
        if region is not None and any(part.start == part.stop for part in region):
            return torch.empty([part.stop - part.start for part in region], dtype=dtype)
        # opened for each tensor: pages of an open file that were read count as this process's memory
        with _opened(self._files[name]) as file:
            return file.get_slice(name)[region] if region and shape else file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    with safe_open(path, framework="pt", device="cpu") as file:
        yield file


Weights = CheckpointWeights | SafetensorsWeights


def open_weights(path: Path) -> Weights:
    """Return the weights at ``path``: a checkpoint's, or those of safetensors files.

    Raises:
        ConfigError: they are damaged.
    """
    try:
        return CheckpointWeights(path) if (path / ".metadata").exists() else SafetensorsWeights(path)
    except READ_ERRORS as error:
        raise ConfigError(KEY, path, f"cannot be read, or is damaged: {type(error).__name__}: {error}.") from None
