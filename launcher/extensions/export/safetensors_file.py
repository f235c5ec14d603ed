"""Safetensors files, written one tensor at a time and read back.

The library's own writer takes all tensors of a file at once. The format (https://github.com/huggingface/safetensors) is
a header in JSON, preceded by its length, and then the bytes of the tensors.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from launcher.errors import ExportFailed, UserError
from launcher.plan.initial_weights import INDEX, ONE_FILE, SUFFIX
from launcher.rundir.files import write_json
from launcher.train.checkpoint.weights import DTYPE_NAMES

_CHUNK = 1 << 22  # bytes
_ALIGNMENT = 8  # of the first tensor in a file; the header is filled with spaces


class TensorEntry(NamedTuple):
    """Tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def split_into_files(entries: Sequence[TensorEntry], limit: int, stem: str = "") -> dict[str, list[TensorEntry]]:
    """Return the tensors of each file by Hugging Face's name of it, filled in order up to ``limit`` bytes of tensors; a
    larger tensor has a file of its own.

    Args:
        stem: name without suffix of the only file of all tensors. Default: as many files as needed, of a whole model.
    """
    if stem:
        return {f"{stem}{SUFFIX}": list(entries)}
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    start = ONE_FILE.removesuffix(SUFFIX)
    return {f"{start}-{i:05d}-of-{len(shards):05d}{SUFFIX}": shard for i, shard in enumerate(shards, 1)}


def write_index(directory: Path, files: Mapping[str, Sequence[TensorEntry]]) -> None:
    """Write the index that says which of several files has which tensor."""
    weight_map = {entry.name: file for file, entries in files.items() for entry in entries}
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def write_safetensors(
    path: Path, entries: Iterable[TensorEntry], metadata: Mapping[str, str], read: Callable[[TensorEntry], Tensor]
) -> dict[str, int]:
    """Write one file, flush it to the disk, and return the CRC-32 of each tensor's bytes.

    Args:
        metadata: strings in the header.
        read: called once for each entry; returns the tensor on the CPU. At most one is held.

    Raises:
        OSError: the disk refuses.
    """
    ordered = _ordered(entries)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in ordered:
        start, end = end, end + entry.nbytes
        header[entry.name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    checksums: dict[str, int] = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            octets = _octets(read(entry))
            checksums[entry.name] = zlib.crc32(octets)
            file.write(octets)
            del octets  # before the next tensor is read
        file.flush()
        os.fsync(file.fileno())
    return checksums


def _ordered(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors in the order in which a file has them: those with larger elements first, so that every tensor
    is aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def _octets(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def verify_safetensors(path: Path, entries: Iterable[TensorEntry], checksums: Mapping[str, int]) -> None:
    """Read a file back: its header with the safetensors library, and the bytes of each tensor.

    Raises:
        ExportFailed: they are not those that were written.
        OSError: the file cannot be read.
    """
    ordered = _ordered(entries)
    try:
        with safe_open(path, framework="pt") as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
    except SafetensorError as error:
        raise ExportFailed(f"{path.name} cannot be read back: {error}.") from None
    if found != {entry.name: (entry.shape, DTYPE_NAMES[entry.dtype]) for entry in ordered}:
        raise ExportFailed(f"{path.name} does not have the header that was written: the disk has changed it.")
    with path.open("rb", buffering=0) as file:
        # read from the disk, not from the memory that still has what was written
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        for entry in ordered:
            crc, left = 0, entry.nbytes
            while left and (chunk := file.read(min(left, _CHUNK))):
                crc, left = zlib.crc32(chunk, crc), left - len(chunk)
            if left or crc != checksums[entry.name]:
                raise ExportFailed(
                    f"{path.name}: {entry.name} is not what was written: the disk has changed it.\n"
                    "  Check the disk, or export to another one."
                )


def require_known_dtypes(entries: Iterable[TensorEntry]) -> None:
    """Raise UserError for a tensor whose dtype the format does not have."""
    for entry in entries:
        if entry.dtype not in DTYPE_NAMES:
            raise UserError(f"{entry.name} is in {entry.dtype}, which the safetensors format does not have.")
