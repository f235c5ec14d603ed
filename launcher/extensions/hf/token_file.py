"""Files of tokens, .npy or .bin without a header, as a data set of rows.

The module does not import torch or NumPy at module level, because the command line uses it for the plan.
"""

# pyright: basic

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import DataError, TaskError

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_FILES = (".npy", ".bin")
# the check of a file before training reads this many blocks of this many tokens; the second number is even
_BLOCKS, _BLOCK_TOKENS = 1000, 1024


class TokenRows:
    """Data set of rows of a file: row i has the tokens [i*L, (i+1)*L], int32 [L + 1], the last one target only.

    The file is mapped into memory, by each process when it reads its first sample.

    Args:
        path: .npy or .bin file.
        seq_len: L.
        vocab: vocabulary size; ids must be below it.
        token_type: numbers in a .bin file: uint16 or uint32.
        rows: rows of the file that the samples are taken from.
        count: number of samples, spread evenly over ``rows``; None: all of them.
    """

    def __init__(
        self, path: Path, seq_len: int, vocab: int, token_type: str, rows: range, count: int | None = None
    ) -> None:
        self._path, self._seq_len, self._vocab, self._token_type = path, seq_len, vocab, token_type
        self._rows, self._count = rows, len(rows) if count is None else count
        self._tokens: Any = None

    @classmethod
    def of_file(cls, key: str, path: str, seq_len: int, vocab: int, token_type: str) -> TokenRows:
        """Return all rows of a file, after a check of tokens from all over it.

        Args:
            key: config key that names ``path``, for messages.
            path: .npy or .bin file.
            seq_len: tokens in a row.
            vocab: vocabulary size; ids must be below it.
            token_type: numbers in a .bin file: uint16 or uint32.

        Raises:
            TaskError: it cannot be read, holds other numbers, or has no whole row.
        """
        require_token_file(key, path)
        file = Path(path)
        if not file.is_file():
            problem = "is a directory" if file.is_dir() else "no such file"
            raise TaskError(f"{key}={path}: {problem}.\n  Name a {' or '.join(TOKEN_FILES)} file of tokens.")
        try:
            tokens = _mapped(file, token_type)
        except (ValueError, EOFError, OSError) as error:  # raised by numpy.load and numpy.memmap
            raise TaskError(f"{key}={path}: it cannot be read: {error}") from None
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TaskError(
                f"{key}={path}: it holds {tokens.dtype} of the shape {list(tokens.shape)}, and must be one sequence of "
                "integers."
            )
        count = (len(tokens) - 1) // seq_len
        if count < 1:
            raise TaskError(
                f"{key}={path}: it has {len(tokens)} tokens, and a row needs task.seq_len + 1 = {seq_len + 1}."
            )
        rows = cls(file, seq_len, vocab, token_type, range(count))
        rows._require_tokens(key, path)
        return rows

    def _require_tokens(self, key: str, path: str) -> None:
        """Raise TaskError if the sampled tokens are not the model's, or numbers of another type than ``token_type``."""
        sample = self.sampled_tokens()
        halves = sample[::2].any(), sample[1::2].any()
        if self._path.suffix == ".bin" and any(halves) and not all(halves):
            other = " or task.token_type=uint32" if self._token_type == "uint16" else ""
            raise TaskError(
                f"{key}={path}: read as {self._token_type}, every second number is 0, as in a file of wider numbers.\n"
                f"  Use a .npy file{other}, or write the tokens as {self._token_type}."
            )
        low, high = int(sample.min()), int(sample.max())
        if low < 0 or high >= self._vocab:
            raise TaskError(f"{key}={path}: {self._unknown(low if low < 0 else high)}")

    def _unknown(self, token: int) -> str:
        types = (
            " or task.token_type for the numbers of the file"
            if self._path.suffix == ".bin"
            else " or a larger task.vocab"
        )
        return (
            f"token {token} is not in the model's vocabulary of {self._vocab}.\n"
            f"  Use the model that the tokens are for,{types}."
        )

    def sampled_tokens(self) -> Any:
        """Return an array of tokens of the file: all, or those of 1,000 blocks from its start to its end."""
        import numpy

        tokens = _mapped(self._path, self._token_type)
        if len(tokens) <= _BLOCKS * _BLOCK_TOKENS:
            return numpy.asarray(tokens)
        last = len(tokens) - _BLOCK_TOKENS
        starts = [number * last // (_BLOCKS - 1) for number in range(_BLOCKS)]
        # from even places, so that the halves of a wider number are at even and odd places of the result
        blocks = [tokens[start + start % 2 : start + start % 2 + _BLOCK_TOKENS] for start in starts]
        return numpy.concatenate(blocks)

    def part(self, start: int, stop: int) -> TokenRows:
        """Return the rows from ``start`` to before ``stop``."""
        return TokenRows(self._path, self._seq_len, self._vocab, self._token_type, self._rows[start:stop])

    def spread(self, at_most: int | None) -> TokenRows:
        """Return at most so many of the rows, spread evenly from the first to the end; None: all."""
        count = len(self._rows) if at_most is None else min(len(self._rows), at_most)
        return TokenRows(self._path, self._seq_len, self._vocab, self._token_type, self._rows, count)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._count:
            raise IndexError(index)
        import numpy
        import torch

        if self._tokens is None:
            self._tokens = _mapped(self._path, self._token_type)
        start = self._rows[index * len(self._rows) // self._count] * self._seq_len
        row = self._tokens[start : start + self._seq_len + 1]
        low, high = int(row.min()), int(row.max())
        if low < 0 or high >= self._vocab:
            token = low if low < 0 else high
            raise DataError(f"{self._path}: between {start} and {start + self._seq_len}, {self._unknown(token)}")
        return torch.from_numpy(row.astype(numpy.int32))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tokens": None}  # a map of a file would be pickled as its contents


def require_token_file(key: str, path: str) -> None:
    """Raise TaskError unless the name of a file is that of a file of tokens.

    Args:
        key: config key that names ``path``, for the message.
        path: the file, which need not exist.
    """
    if Path(path).suffix not in TOKEN_FILES:
        raise TaskError(
            f"{key}={path}: not a file of tokens ({', '.join(TOKEN_FILES)}).\n"
            "  For text and examples, name a tokenizer: task.tokenizer=DIR."
        )


def _mapped(path: Path, token_type: str) -> Any:
    """Return the numbers of a file, mapped into memory."""
    import numpy

    if path.suffix == ".npy":
        return numpy.load(path, mmap_mode="r", allow_pickle=False)
    size, width = path.stat().st_size, numpy.dtype(token_type).itemsize
    if not size or size % width:
        raise ValueError(f"{size} bytes is not a multiple of the size of {token_type}")
    return numpy.memmap(path, dtype=token_type, mode="r")
