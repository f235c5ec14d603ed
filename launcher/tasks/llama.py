"""Task of next-token prediction with a Llama in plain PyTorch, from random values or with the weights of transformers.

The module does not import torch at module level, so that a plan can be made from ``facts`` in a tenth of a second.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.errors import DataError, TaskError
from launcher.loss import Loss
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.tasks.llama_shape import LlamaShape

if TYPE_CHECKING:
    from torch import Tensor, nn

DEFAULT_SEQ_LEN = 1024
# target of a position at which nothing is predicted, as in launcher.train.data.packing
IGNORED = -100
_FILES = (".npy", ".bin")
# smallest vocabulary of the bytes of a text
_BYTES = 256


class Llama:
    """Pretraining or further training of a Llama. An item is a predicted token; a sample is a row of ``seq_len``
    tokens, or an example of ``data`` if there is a tokenizer.

    Args:
        size: shape by name: 15m (the default), 60m, 160m, 400m, 1b, 3b, 8b, 70b.
        model: shape of a Llama of transformers: a directory with a config.json, or that file. Its weights are read with
            checkpoint.init_from.
        width, depth, heads, kv_heads, ffn, vocab: values that replace those of the shape.
        seq_len: tokens in a row. Default: 1,024, or the length of the model's sequences if that is less.
        data: tokens, a .npy file or a .bin file without a header; with ``tokenizer``, examples as for
            task=hf_causal_lm. Default: the bytes of this Python's standard library.
        eos: token that ends each document in a file of tokens: documents do not see each other, and their positions
            start at 0. "none": each row is one text.
        token_type: numbers in a .bin file. Default: uint16, or uint32 if the vocabulary is larger.
        eval_data: data of the evaluation; default: a part of ``data``.
        held_out: share of ``data`` for the evaluation: the end of a file of tokens; 0: none.
        eval_samples: number of rows of an evaluation, spread evenly over the held-out tokens; None: all.
        tokenizer: directory or hub name of a tokenizer of transformers.
        text: with ``tokenizer``: column of the text, as for task=hf_causal_lm.
        unusable: with ``tokenizer``: examples that are empty or too long: ``error``, or ``skip``.
        dtype: format of the parameters that ``model`` makes. bf16 has an effect with precision.parameters=keep only.
    """

    def __init__(
        self,
        size: str | None = None,
        model: str | None = None,
        width: int | None = None,
        depth: int | None = None,
        heads: int | None = None,
        kv_heads: int | None = None,
        ffn: int | None = None,
        vocab: int | None = None,
        seq_len: int | None = None,
        data: str | None = None,
        eos: int | Literal["none"] | None = None,
        token_type: Literal["uint16", "uint32"] | None = None,
        eval_data: str | None = None,
        held_out: float = 0.05,
        eval_samples: int | None = 512,
        tokenizer: str | None = None,
        text: str | None = None,
        unusable: Literal["error", "skip"] = "error",
        dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        changes = {"width": width, "depth": depth, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": vocab}
        self.shape = LlamaShape.of(size, model, changes)
        longest = self.shape.positions
        self.seq_len = min(DEFAULT_SEQ_LEN, longest) if seq_len is None else seq_len
        if not 2 <= self.seq_len <= longest:
            raise TaskError(
                f"task.seq_len={seq_len}: must be at least 2 and at most {longest}, the length of the "
                "model's sequences."
            )
        if dtype not in ("fp32", "bf16"):
            raise TaskError(f"task.dtype={dtype}: must be fp32 or bf16.")
        if eval_samples is not None and eval_samples < 1:
            raise TaskError(f"task.eval_samples={eval_samples}: must be at least 1.")
        if not 0 <= held_out < 1:
            raise TaskError(f"task.held_out={held_out}: must be at least 0 and below 1.")
        self._dtype, self._eval_samples = dtype, eval_samples
        self._data, self._eval_data, self._held_out = data, eval_data, held_out
        self.notes: list[str] = []  # which the plan shows
        if model is not None and Path(model).is_dir() and next(Path(model).glob("*.safetensors"), None) is not None:
            self.notes.append(
                f"task.model={model} gives the shape; its weights are used with checkpoint.init_from={model}."
            )
        self._tokenizer, self._text, self._unusable = tokenizer, text, unusable
        if tokenizer is not None and data is None:
            raise TaskError("task.tokenizer without task.data: there is no text.\n  Name it with task.data=PATH.")
        if data is None:
            self._require_bytes()
        self.eos = self._checked_eos(eos)
        self._token_type = self._checked_token_type(token_type)

    @cached_property
    def _texts(self) -> Any:
        """Examples for the tokenizer; None without one. Not made by the constructor, for the sake of the plan."""
        if self._tokenizer is None:
            return None
        from launcher.tasks.hf_causal_lm import TextsForModel

        texts = TextsForModel(
            str(self._data), self._tokenizer, self.seq_len, self._eval_data, self._held_out, text=self._text,
            unusable=self._unusable,
        )  # fmt: skip
        if (words := len(texts.tokenizer)) > self.shape.vocab:
            raise TaskError(
                f"task.tokenizer={self._tokenizer}: it has {words} tokens, and the model only {self.shape.vocab}.\n"
                f"  Use task.vocab={words}, or the model's own tokenizer."
            )
        return texts

    def _require_bytes(self) -> None:
        if self.shape.vocab < _BYTES:
            raise TaskError(f"task.vocab={self.shape.vocab}: must be at least {_BYTES} for the bytes of a text.")
        if self._eval_data is not None:
            raise TaskError("task.eval_data without task.data: the bytes of the standard library have their own.")

    def _checked_eos(self, eos: int | Literal["none"] | None) -> int | None:
        """Return the token that ends documents in the rows; None if each row is one text."""
        of_tokens = self._data is not None and self._tokenizer is None
        if of_tokens and eos is None:
            raise TaskError(
                f"task.data={self._data}: task.eos is not set.\n"
                "  Name the token that ends each document, such as task.eos=128001; task.eos=none joins all documents "
                "to one text."
            )
        if not of_tokens and eos is not None:
            raise TaskError(f"task.eos={eos}: only a file of tokens needs it.\n  Leave it out.")
        if eos is None or eos == "none":
            return None
        if not isinstance(eos, int) or not 0 <= eos < self.shape.vocab:
            raise TaskError(f"task.eos={eos}: must be none, or a token from 0 to {self.shape.vocab - 1}.")
        return eos

    def _checked_token_type(self, token_type: str | None) -> str:
        if token_type not in (None, "uint16", "uint32"):
            raise TaskError(f"task.token_type={token_type}: must be uint16 or uint32.")
        return token_type or ("uint16" if self.shape.vocab <= 2**16 else "uint32")

    @cached_property
    def _bytes(self) -> BytesGPT:
        return BytesGPT(seq_len=self.seq_len, eval_samples=self._eval_samples)

    @cached_property
    def _rows(self) -> tuple[TokenRows, TokenRows | None]:
        """Return (training, held-out) rows of a file of tokens."""
        if self._eval_data is not None:
            held_out = self._file("task.eval_data", self._eval_data)
            return self._file("task.data", str(self._data)), held_out.spread(self._eval_samples)
        rows = self._file("task.data", str(self._data))
        if not self._held_out:
            return rows, None
        count = max(1, round(len(rows) * self._held_out))
        if count >= len(rows):
            raise TaskError(
                f"task.held_out={self._held_out}: the {len(rows)} rows of task.data={self._data} cannot be divided.\n"
                "  Use shorter rows (task.seq_len), task.eval_data=PATH for held-out data, or task.held_out=0 for none."
            )
        return rows.part(0, len(rows) - count), rows.part(len(rows) - count, len(rows)).spread(self._eval_samples)

    def _file(self, key: str, path: str) -> TokenRows:
        return TokenRows.of_file(key, path, self.seq_len, self.shape.vocab, self._token_type)

    def facts(self) -> dict[str, int] | None:
        """Return numbers of samples and parameters by arithmetic; None if the model or the data must be inspected."""
        if self._tokenizer is not None or self._dtype != "fp32" or (self._data is not None and self._rows[1] is None):
            return None
        samples = self._bytes.facts()["samples"] if self._data is None else len(self._rows[0])
        return {"samples": samples, **self.shape.counts()}

    def model(self) -> nn.Module:
        import torch

        from launcher.tasks.llama_model import LlamaModel

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self._dtype == "bf16" else torch.float32)
        try:
            return LlamaModel(self.shape)
        finally:
            torch.set_default_dtype(before)

    def train_data(self) -> Any:
        if self._texts is not None:
            return self._with_notes(self._texts.train_data())
        return self._bytes.train_data() if self._data is None else self._rows[0]

    def eval_data(self) -> Any:
        if self._texts is not None:
            return self._with_notes(self._texts.eval_data())
        return self._bytes.eval_data() if self._data is None else self._rows[1]

    def _with_notes(self, data: Any) -> Any:
        self.notes += [note for note in self._texts.notes if note not in self.notes]
        return data

    @property
    def tokenizer(self) -> Any:
        """Tokenizer, which an export saves; None if there is none."""
        return None if self._texts is None else self._texts.tokenizer

    def collate(self, samples: list[Any]) -> Any:
        if self._texts is not None:
            return self._texts.collate(samples)
        import torch

        return torch.stack(samples)

    def shard_units(self, model: Any) -> list[nn.Module]:
        return list(model.model.layers)

    def flops_per_sample(self) -> float:
        """Return the FLOPs of a row of ``seq_len`` tokens, with the formula of ``LlamaShape.flops_per_token``."""
        return self.seq_len * self.shape.flops_per_token(self.seq_len)

    def loss(self, model: Any, batch: Any) -> Loss:
        """Return the cross-entropy in nats, summed over the predicted tokens.

        Args:
            batch: tokens [rows, seq_len + 1], of which the last one is target only; or a batch of ``Packing``.
        """
        if isinstance(batch, dict):
            inputs = (batch["input_ids"], batch["targets"], batch["position_ids"], batch["document_ids"])
            return Loss(model(*inputs), items=batch["items"])
        tokens = batch.long()
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.eos is None:
            return Loss(model(inputs, targets), items=targets.numel())
        ends = inputs == self.eos
        targets = targets.masked_fill(ends, IGNORED)
        return Loss(model(inputs, targets, *document_places(ends)), items=(targets != IGNORED).sum())


def document_places(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return (positions in the document from 0, number of the document in its row from 0) of each token.

    Args:
        ends: bool [rows, length], true at the last token of a document.
    """
    import torch

    document_ids = ends.cumsum(1) - ends.long()
    index = torch.arange(ends.shape[1], device=ends.device)
    after_end = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    starts = torch.where(after_end, index, 0).cummax(1).values
    return index - starts, document_ids


class TokenRows:
    """Data set whose sample i is the tokens [i*L, (i+1)*L] of a file: int32 [L + 1], the last one target only.

    The file is mapped into memory, by each process when it reads its first sample.

    Args:
        path: .npy or .bin file.
        seq_len: L.
        vocab: smallest number that is no token.
        token_type: numbers in a .bin file.
        first, count, stride: rows of the file that are samples.
    """

    def __init__(
        self, path: Path, seq_len: int, vocab: int, token_type: str, first: int, count: int, stride: int = 1
    ) -> None:
        self._path, self._seq_len, self._vocab, self._token_type = path, seq_len, vocab, token_type
        self._first, self._count, self._stride = first, count, stride
        self._tokens: Any = None

    @classmethod
    def of_file(cls, key: str, path: str, seq_len: int, vocab: int, token_type: str) -> TokenRows:
        """Return all rows of a file.

        Args:
            key: config key that names ``path``, for messages.

        Raises:
            TaskError: it cannot be read, holds other numbers, or has no whole row.
        """
        file = Path(path)
        if not file.is_file():
            problem = "is a directory" if file.is_dir() else "no such file"
            raise TaskError(f"{key}={path}: {problem}.\n  Name a {' or '.join(_FILES)} file of tokens.")
        if file.suffix not in _FILES:
            raise TaskError(
                f"{key}={path}: not a file of tokens ({', '.join(_FILES)}).\n"
                "  For text and examples, name a tokenizer: task.tokenizer=DIR."
            )
        try:
            tokens = _mapped(file, token_type)
        except (ValueError, EOFError, OSError) as error:  # of NumPy
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
        return cls(file, seq_len, vocab, token_type, 0, count)

    def part(self, start: int, stop: int) -> TokenRows:
        """Return the samples from ``start`` to before ``stop``."""
        return self._with(self._first + start * self._stride, stop - start, self._stride)

    def spread(self, at_most: int | None) -> TokenRows:
        """Return at most so many samples, spread evenly; None: all."""
        count = self._count if at_most is None else min(self._count, at_most)
        return self._with(self._first, count, self._stride * (self._count // count))

    def _with(self, first: int, count: int, stride: int) -> TokenRows:
        return TokenRows(self._path, self._seq_len, self._vocab, self._token_type, first, count, stride)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self._count:
            raise IndexError(index)
        import numpy
        import torch

        if self._tokens is None:
            self._tokens = _mapped(self._path, self._token_type)
        start = (self._first + index * self._stride) * self._seq_len
        row = self._tokens[start : start + self._seq_len + 1]
        low, high = int(row.min()), int(row.max())
        if low < 0 or high >= self._vocab:
            raise DataError(
                f"{self._path}: token {low if low < 0 else high} between {start} and {start + self._seq_len} is not in "
                f"the model's vocabulary of {self._vocab}.\n"
                "  Use the model that the tokens are for, or task.token_type for the numbers of a .bin file."
            )
        return torch.from_numpy(row.astype(numpy.int32))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_tokens": None}  # a map of a file would be pickled as its contents


def _mapped(path: Path, token_type: str) -> Any:
    """Return the numbers of a file, mapped into memory.

    Raises:
        ValueError: it is no file of numbers.
    """
    import numpy

    if path.suffix == ".npy":
        return numpy.load(path, mmap_mode="r", allow_pickle=False)
    size, width = path.stat().st_size, numpy.dtype(token_type).itemsize
    if not size or size % width:
        raise ValueError(f"{size} bytes are no whole number of {token_type}")
    return numpy.memmap(path, dtype=token_type, mode="r")
