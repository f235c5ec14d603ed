"""Files of tokens: rows and their spread, and files that are refused before training."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest

from launcher.errors import DataError, TaskError
from launcher.extensions.hf.token_file import TokenRows

LENGTH, VOCAB = 16, 300


def write(path: Path, numbers: Any, dtype: str = "uint16") -> Path:
    values = numpy.asarray(numbers, dtype=dtype)
    if path.suffix == ".npy":
        numpy.save(path, values)
    else:
        values.tofile(path)
    return path


def rows_of(path: Path, token_type: str = "uint16", vocab: int = VOCAB) -> TokenRows:
    return TokenRows.of_file("task.data", str(path), LENGTH, vocab, token_type)


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_rows_are_the_tokens(name: str, tmp_path: Path) -> None:
    numbers = numpy.arange(1000) % VOCAB
    rows = rows_of(write(tmp_path / name, numbers))
    assert len(rows) == 62
    part = rows.part(10, 60)
    for index in (0, 49):
        start = LENGTH * (10 + index)
        assert part[index].tolist() == numbers[start : start + LENGTH + 1].tolist()
    with pytest.raises(IndexError):
        part[50]
    assert pickle.loads(pickle.dumps(part))[3].equal(part[3])
    assert len(pickle.dumps(part)) < 1000, "not the file's contents"


@pytest.mark.parametrize(("available", "count"), [(1023, 512), (512, 512), (100, 7), (5, 9)])
def test_samples_are_spread_over_all_rows(available: int, count: int, tmp_path: Path) -> None:
    rows = rows_of(write(tmp_path / "tokens.bin", numpy.arange(available * LENGTH + 1) // LENGTH), vocab=2000)
    chosen = [int(row[0]) for row in rows.spread(count)]
    assert len(chosen) == min(count, available)
    steps = [after - before for before, after in zip(chosen, [*chosen[1:], available], strict=True)]
    assert chosen[0] == 0
    assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize("count", [1000, 1_200_000], ids=["all of it", "blocks"])
@pytest.mark.parametrize(
    ("stored", "token_type", "message"),
    [
        ("<u4", "uint16", "read as uint16, every second number is 0.*\n  Use a .npy file or task.token_type=uint32"),
        (">u4", "uint16", "read as uint16, every second number is 0"),
        ("<i8", "uint16", "read as uint16, every second number is 0"),
        ("<i8", "uint32", "read as uint32, every second number is 0.*\n  Use a .npy file, or write the tokens as"),
        ("<u2", "uint32", r"token \d+ is not in the model's vocabulary of 300.*\n.*task.token_type"),
    ],
)
def test_numbers_of_another_type_are_refused(
    stored: str, token_type: str, message: str, count: int, tmp_path: Path
) -> None:
    file = write(tmp_path / "tokens.bin", numpy.arange(count) % VOCAB, stored)
    with pytest.raises(TaskError, match=f"task.data=.*tokens.bin: {message}"):
        rows_of(file, token_type)


@pytest.mark.parametrize("place", [0, 700_801, -1])
def test_a_token_that_the_model_does_not_know(place: int, tmp_path: Path) -> None:
    """Refused before training where the file is sampled, and always when it is read."""
    numbers = numpy.arange(1_200_000) % VOCAB
    numbers[place] = VOCAB
    file = write(tmp_path / "tokens.npy", numbers)
    if place == 700_801:
        rows = rows_of(file)
        with pytest.raises(DataError, match="between 700800 and 700816, token 300 is not in the model's vocabulary"):
            rows[place // LENGTH]
    else:
        with pytest.raises(TaskError, match=r"task.data=.*: token 300 is not in the model's vocabulary of 300"):
            rows_of(file)


def test_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "broken.npy").write_bytes(b"no array")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "folder.npy").mkdir()
    write(tmp_path / "short.bin", [1, 2, 3])
    numpy.save(tmp_path / "floats.npy", numpy.zeros(100))
    numpy.save(tmp_path / "negative.npy", numpy.arange(100) - 1)
    for name, message in {
        "none.npy": "no such file",
        "folder.npy": "is a directory",
        "text.txt": r"not a file of tokens \(.npy, .bin\)",
        "odd.bin": "it cannot be read: 3 bytes is not a multiple of the size of uint16",
        "broken.npy": "it cannot be read",
        "empty.npy": "it cannot be read",
        "short.bin": r"it has 3 tokens, and a row needs task.seq_len \+ 1 = 17",
        "floats.npy": r"it holds float64 of the shape \[100\]",
        "negative.npy": "token -1 is not in the model's vocabulary",
    }.items():
        with pytest.raises(TaskError, match=rf"task.data=.*{name}: {message}"):
            rows_of(tmp_path / name)
