"""Safetensors files: those of the library, split as Hugging Face does, and not accepted once changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launcher.errors import ExportFailed
from launcher.extensions.export.safetensors_file import (
    TensorEntry,
    split_into_files,
    verify_safetensors,
    write_safetensors,
)
from launcher.train.checkpoint.weights import DTYPE_NAMES

TENSORS = {
    **{f"of {name}": torch.arange(6).reshape(2, 3).to(dtype) for dtype, name in DTYPE_NAMES.items()},
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(12.0).reshape(3, 4).T,
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
}


def written(path: Path, tensors: dict[str, Tensor]) -> tuple[list[TensorEntry], dict[str, int]]:
    entries = [TensorEntry(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    return entries, write_safetensors(path, entries, {"format": "pt"}, lambda entry: tensors[entry.name])


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    entries, checksums = written(tmp_path / "file", TENSORS)
    verify_safetensors(tmp_path / "file", entries, checksums)
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert found[name].double().equal(value.double()) if not value.is_complex() else found[name].equal(value)


@pytest.mark.parametrize(
    ("position", "words"),
    [(-1, "is not what was written"), (12, "does not have the header|cannot be read back"), (2, "cannot be read back")],
)
def test_a_flipped_bit_is_found(position: int, words: str, tmp_path: Path) -> None:
    entries, checksums = written(tmp_path / "file", {"a": torch.arange(1000.0), "b": torch.ones(3)})
    data = bytearray((tmp_path / "file").read_bytes())
    data[position] ^= 4
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ExportFailed, match=words):
        verify_safetensors(tmp_path / "file", entries, checksums)


def test_a_file_that_ends_early_is_found(tmp_path: Path) -> None:
    entries, checksums = written(tmp_path / "file", {"a": torch.arange(1000.0)})
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-8])
    with pytest.raises(ExportFailed):
        verify_safetensors(tmp_path / "file", entries, checksums)


def test_files_are_filled_in_order() -> None:
    def sizes(limit: int, *numbers: int) -> list[list[int]]:
        entries = [TensorEntry(str(i), (number,), torch.uint8) for i, number in enumerate(numbers)]
        return [[entry.nbytes for entry in its] for its in split_into_files(entries, limit).values()]

    assert sizes(10, 5, 5, 1, 20, 3, 3) == [[5, 5], [1], [20], [3, 3]]
    assert sizes(100, 5, 5) == [[5, 5]]
    names = [*split_into_files([TensorEntry("a", (9,), torch.uint8), TensorEntry("b", (9,), torch.uint8)], 10)]
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
