"""Task of next-token prediction with a Llama in plain PyTorch, from random values or with the weights of transformers.

The module does not import torch at module level, so that a plan can be made from ``facts`` in a tenth of a second.
"""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.errors import TaskError
from launcher.loss import Loss
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.tasks.llama_shape import SPECIAL_IDS, LlamaShape
from launcher.train.data.token_file import TOKEN_TYPES, TokenRows, require_token_file

if TYPE_CHECKING:
    from torch import Tensor, nn

DEFAULT_SEQ_LEN = 1024
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
        held_out: share of ``data`` for the evaluation: the end of a file of tokens; 0: none. Not used with
            ``eval_data``.
        eval_samples: number of rows of an evaluation, spread evenly over the held-out tokens; None: all. Not used with
            ``tokenizer``: train.eval_samples limits any evaluation.
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
        self.shape = LlamaShape.resolve(size, model, changes)
        self.seq_len = min(DEFAULT_SEQ_LEN, self.shape.positions) if seq_len is None else seq_len
        self._model, self._dtype = model, dtype
        self._data, self._eval_data, self._held_out = data, eval_data, held_out
        self._eval_samples = eval_samples
        self._tokenizer, self._text, self._unusable = tokenizer, text, unusable
        self.notes: list[str] = []  # which the plan shows
        self._source = self._source_of_data()
        self._require_values()
        self.eos = self._checked_eos(eos)
        self._token_type = self._checked_token_type(token_type)
        if model is not None and Path(model).is_dir() and next(Path(model).glob("*.safetensors"), None) is not None:
            self.notes.append(
                f"task.model={model} gives the shape; its weights are used with checkpoint.init_from={model}."
            )

    def _source_of_data(self) -> Literal["bytes", "tokens", "examples"]:
        """Return the kind of ``data``: bytes of the standard library, files of tokens, or examples for a tokenizer."""
        if self._tokenizer is not None:
            if self._data is None:
                raise TaskError("task.tokenizer needs examples in task.data.\n  Name them with task.data=PATH.")
            return "examples"
        if self._text is not None:
            raise TaskError(f"task.text={self._text}: only examples for a tokenizer have columns.\n  Leave it out.")
        if self._data is not None:
            require_token_file("task.data", self._data)
            if self._eval_data is not None:
                require_token_file("task.eval_data", self._eval_data)
            return "tokens"
        if self._eval_data is not None:
            raise TaskError("task.eval_data without task.data: the bytes of the standard library have their own.")
        if self.shape.vocab < _BYTES:
            raise TaskError(f"task.vocab={self.shape.vocab}: must be at least {_BYTES} for the bytes of a text.")
        return "bytes"

    def _require_values(self) -> None:
        longest = self.shape.positions
        if not 2 <= self.seq_len <= longest:
            raise TaskError(
                f"task.seq_len={self.seq_len}: must be at least 2 and at most {longest}, the length of the "
                "model's sequences."
            )
        if self._dtype not in ("fp32", "bf16"):
            raise TaskError(f"task.dtype={self._dtype}: must be fp32 or bf16.")
        if self._eval_samples is not None and self._eval_samples < 1:
            raise TaskError(f"task.eval_samples={self._eval_samples}: must be at least 1.")
        if not 0 <= self._held_out < 1:
            raise TaskError(f"task.held_out={self._held_out}: must be at least 0 and below 1.")

    def _checked_eos(self, eos: int | Literal["none"] | None) -> int | None:
        """Return the token that ends documents in the rows; None if each row is one text."""
        if self._source == "tokens" and eos is None:
            raise TaskError(
                f"task.data={self._data}: task.eos is not set.\n"
                "  Name the token that ends each document, such as task.eos=128001; task.eos=none joins all documents "
                "to one text."
            )
        if self._source != "tokens" and eos is not None:
            raise TaskError(f"task.eos={eos}: only a file of tokens needs it.\n  Leave it out.")
        if eos is None or eos == "none":
            return None
        if not isinstance(eos, int) or not 0 <= eos < self.shape.vocab:
            raise TaskError(f"task.eos={eos}: must be none, or a token from 0 to {self.shape.vocab - 1}.")
        return eos

    def _checked_token_type(self, token_type: str | None) -> str:
        if token_type not in (None, *TOKEN_TYPES):
            raise TaskError(f"task.token_type={token_type}: must be {' or '.join(TOKEN_TYPES)}.")
        files = [path for path in (self._data, self._eval_data) if path is not None and self._source == "tokens"]
        if token_type is not None and not any(Path(path).suffix == ".bin" for path in files):
            raise TaskError(
                f"task.token_type={token_type}: only a .bin file needs it; a .npy file names its own type.\n"
                "  Leave it out."
            )
        return token_type or ("uint16" if self.shape.vocab <= 2**16 else "uint32")

    @cached_property
    def _texts(self) -> Any:
        """Return the tokenised examples, or None without a tokenizer. Built on first use so that a plan need not load
        transformers."""
        if self._source != "examples":
            return None
        from launcher.tasks.hf_causal_lm import TextRows

        texts = TextRows(
            "llama", None, str(self._data), tokenizer=self._tokenizer, seq_len=self.seq_len, eval_data=self._eval_data,
            held_out=self._held_out, lora=None, text=self._text, pack=True, unusable=self._unusable,
        )  # fmt: skip
        if (tokenizer_size := len(texts.tokenizer)) > self.shape.vocab:
            raise TaskError(
                f"task.tokenizer={self._tokenizer}: it has {tokenizer_size} tokens, more than the model's vocabulary "
                f"of {self.shape.vocab}.\n  Use task.vocab={tokenizer_size}, or the model's own tokenizer."
            )
        return texts

    @cached_property
    def _bytes(self) -> BytesGPT:
        return BytesGPT(seq_len=self.seq_len, eval_samples=self._eval_samples)

    @cached_property
    def _rows(self) -> tuple[TokenRows, TokenRows | None]:
        """Return (training, held-out) rows of a file of tokens."""
        rows = self._rows_of_file("task.data", str(self._data))
        if self.eos is not None and self.eos not in (sample := rows.sampled_tokens()):
            self.notes.append(
                f"task.eos={self.eos} does not occur in the {len(sample):,} tokens of {self._data} that were checked: "
                "each row is read as one text."
            )
        if self._eval_data is not None:
            return rows, self._rows_of_file("task.eval_data", self._eval_data).spread(self._eval_samples)
        if not self._held_out:
            return rows, None
        count = max(1, round(len(rows) * self._held_out))
        if count >= len(rows):
            raise TaskError(
                f"task.held_out={self._held_out}: the {len(rows)} rows of task.data={self._data} cannot be divided.\n"
                "  Use shorter rows (task.seq_len), task.eval_data=PATH for held-out data, or task.held_out=0 for none."
            )
        return rows.part(0, len(rows) - count), rows.part(len(rows) - count, len(rows)).spread(self._eval_samples)

    def _rows_of_file(self, key: str, path: str) -> TokenRows:
        return TokenRows.of_file(key, path, self.seq_len, self.shape.vocab, self._token_type)

    def facts(self) -> dict[str, int] | None:
        """Return numbers of samples and parameters by arithmetic; None if the model or the data must be inspected."""
        if self._source == "examples" or self._dtype != "fp32":
            return None
        if self._source == "tokens" and self._rows[1] is None:
            return None
        samples = self._bytes.facts()["samples"] if self._source == "bytes" else len(self._rows[0])
        return {"samples": samples, **self.shape.counts()}

    def model(self) -> nn.Module:
        """Return a LlamaModel with initial values.

        Returns:
            Its parameters are in ``dtype``.
        """
        import torch

        from launcher.tasks.llama_model import LlamaModel

        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self._dtype == "bf16" else torch.float32)
        try:
            return LlamaModel(self.shape)
        finally:
            torch.set_default_dtype(before)

    def train_data(self) -> Any:
        """Return the training data.

        Returns:
            Data set of rows of ``seq_len`` + 1 tokens, or of tokenised examples.
        """
        if self._source == "examples":
            data = self._texts.train_data()
            self._collect_notes()
            return data
        return self._bytes.train_data() if self._source == "bytes" else self._rows[0]

    def eval_data(self) -> Any:
        """Return the held-out data.

        Returns:
            Data set of the same kind as ``train_data``; None with ``held_out=0``.
        """
        if self._source == "examples":
            data = self._texts.eval_data()
            self._collect_notes()
            return data
        return self._bytes.eval_data() if self._source == "bytes" else self._rows[1]

    def _collect_notes(self) -> None:
        self.notes += [note for note in self._texts.notes if note not in self.notes]

    @property
    def tokenizer(self) -> Any:
        """Tokenizer, which an export saves; None if there is none."""
        return None if self._texts is None else self._texts.tokenizer

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch.

        Args:
            samples: elements of ``train_data`` or ``eval_data``.

        Returns:
            Tokens [rows, seq_len + 1], or a batch of ``Packing`` if there is a tokenizer.
        """
        if self._texts is not None:
            return self._texts.collate(samples)
        import torch

        return torch.stack(samples)

    def shard_units(self, model: Any) -> list[nn.Module]:
        """Return the decoder layers.

        Args:
            model: result of ``model``.

        Returns:
            Modules that are gathered, and recomputed, as one.
        """
        return list(model.model.layers)

    def compile_units(self, model: Any) -> list[nn.Module]:
        """Return the decoder layers, which share one compilation, and the loss.

        Args:
            model: result of ``model``.

        Returns:
            Modules that are compiled one by one.
        """
        return [*model.model.layers, model.chunk_loss]

    def export_config(self, model: Any, directory: Path, dtype: Any) -> None:
        """Write the files with which transformers loads exported parameters: config.json, and the
        generation_config.json of ``task.model``.

        Args:
            model: result of ``model``, possibly on the meta device.
            directory: of the export.
            dtype: torch.dtype of the exported parameters.
        """
        special = {**dict.fromkeys(SPECIAL_IDS), "eos_token_id": self.eos}
        if self.tokenizer is not None:
            special = {name: getattr(self.tokenizer, name, None) for name in SPECIAL_IDS}
        config = model.shape.config(str(dtype).removeprefix("torch."), special)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self._model is None or self.shape.vocab != self.shape.origin.get("vocab_size"):
            return
        start = Path(self._model)
        generation = (start if start.is_dir() else start.parent) / "generation_config.json"
        if generation.is_file():
            shutil.copyfile(generation, directory / generation.name)

    def flops_per_sample(self) -> float:
        """Return the FLOPs of a row of ``seq_len`` tokens, with the formula of ``LlamaShape.flops_per_token``."""
        return self.seq_len * self.shape.flops_per_token(self.seq_len)

    def loss(self, model: Any, batch: Any) -> Loss:
        """Return the cross-entropy in nats, summed over the predicted tokens.

        Args:
            model: result of ``model``.
            batch: tokens [rows, seq_len + 1], of which the last one is target only; or a batch of ``Packing``.
        """
        from launcher.train.data.packing import NO_TARGET

        if isinstance(batch, dict):
            inputs = (batch["input_ids"], batch["targets"], batch["position_ids"], batch["document_ids"])
            return Loss(model(*inputs), items=batch["items"])
        tokens = batch.long()
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.eos is None:
            return Loss(model(inputs, targets), items=targets.numel())
        ends = inputs == self.eos
        targets = targets.masked_fill(ends, NO_TARGET)
        return Loss(model(inputs, targets, *document_places(ends)), items=(targets != NO_TARGET).sum())


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
