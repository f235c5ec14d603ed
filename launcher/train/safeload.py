"""Reading checkpoints without running what they say: torch's own reader and planner unpickle whatever is there."""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

# all that torch's own .metadata names, beside number formats
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
    """Reads ``.metadata``, which is a pickle, as far as it holds what torch writes.

    Raises:
        pickle.UnpicklingError: it names anything else.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        with (self.path / ".metadata").open("rb") as file:  # pyright: ignore
            metadata: Metadata = _Unpickler(file).load()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):  # so the first releases of Python 3.11 write a member of an Enum
            return _member
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which no checkpoint needs")


def _member(kind: Any, name: str) -> Enum:
    """``kind.name``, of an Enum only: anything else could be code."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind.__members__[name]
    raise pickle.UnpicklingError(f".metadata asks for {name} of {kind!r}, which no checkpoint needs")


class Planner(dcp.DefaultLoadPlanner):
    """What is no tensor (an optimizer's options) is read as numbers, strings and containers of them only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        harmless = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), harmless)
        harmless.seek(0)
        super().load_bytes(read_item, harmless)
