"""Task of next-token prediction with a Llama of the transformers package, from random values.

The module does not import torch or transformers at module level.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from launcher.errors import TaskError, did_you_mean
from launcher.extensions.hf.hf_causal_lm import IGNORED, CausalLM
from launcher.extensions.hf.hf_model import load_config
from launcher.extensions.hf.token_file import TokenRows, require_token_file
from launcher.tasks.bytes_gpt import VOCABULARY, BytesGPT

# key of the task -> attribute of transformers' LlamaConfig
_KEYS = {
    "width": "hidden_size", "depth": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "vocab": "vocab_size",
}  # fmt: skip
_SMALL = {"vocab_size": 32_000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}


def _llama_3(factor: float, **others: Any) -> dict[str, Any]:
    """Return values that the models of Llama 3 share, with the scaling of rotary frequencies by ``factor``."""
    rotary = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return {
        "vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_parameters": rotary,
        **others,
    }  # fmt: skip


# size -> (width, depth, heads, kv_heads, ffn), other values. 1b: meta-llama/Llama-3.2-1B; 3b: Llama-3.2-3B; 8b and 70b:
# Llama-3.1-8B and Llama-3.1-70B (config.json of each)
SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "15m": ((288, 6, 6, 6, 768), _SMALL),
    "60m": ((512, 14, 8, 4, 1536), _SMALL),
    "160m": ((768, 18, 12, 4, 2560), _SMALL),
    "400m": ((1024, 28, 16, 8, 3456), _SMALL),
    "1b": ((2048, 16, 32, 8, 8192), _llama_3(32.0, tie_word_embeddings=True)),
    "3b": ((3072, 28, 24, 8, 8192), _llama_3(32.0, tie_word_embeddings=True)),
    "8b": ((4096, 32, 32, 8, 14_336), _llama_3(8.0)),
    "70b": ((8192, 80, 64, 8, 28_672), _llama_3(8.0)),
}


class Llama(CausalLM):
    """Pretraining or further training of a Llama. An item is a predicted token; a sample is a row of ``seq_len``
    tokens, or an example of ``data`` if there is a tokenizer.

    Args:
        size: shape by name: 15m (the default), 60m, 160m, 400m, 1b, 3b, 8b, 70b.
        model: shape of a causal language model of transformers: a directory with a config.json, or that file. Its
            weights are read with checkpoint.init_from.
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
        if model is not None and size is not None:
            raise TaskError(f"task.size={size} and task.model={model}: both name a shape.\n  Leave one of them out.")
        values = zip(_KEYS, (width, depth, heads, kv_heads, ffn, vocab), strict=True)
        self._size, self._changes = size or "15m", {name: value for name, value in values if value is not None}
        self._dtype = "bfloat16" if dtype == "bf16" else "float32"
        super().__init__(
            "llama", model or "", data or "", tokenizer=tokenizer, seq_len=seq_len, eval_data=eval_data,
            held_out=held_out, lora=None, text=text, pack=True, unusable=unusable, examples=tokenizer is not None,
        )  # fmt: skip
        self._eval_samples = eval_samples
        self._require_data(eos, token_type)
        self.eos = None if eos == "none" else eos
        self._pack = tokenizer is not None or self.eos is not None
        self._token_type = token_type or ("uint16" if self._vocabulary <= 2**16 else "uint32")
        if model is None:  # those of a LlamaConfig without values are of Llama 2
            self._config.update({"bos_token_id": None, "eos_token_id": self.eos, "pad_token_id": None})
            if tokenizer is not None:
                self._config.update({name: getattr(self.tokenizer, name) for name in ("bos_token_id", "eos_token_id")})
        elif Path(model).is_dir():
            self.notes.append(
                f"task.model={model} gives the shape; its weights are used with checkpoint.init_from={model}."
            )

    def _load_config(self, revision: str | None) -> Any:
        """Return the configuration of ``size``, or of ``model``, with the keys that replace its values."""
        from transformers import LlamaConfig

        kind: Any = LlamaConfig
        if self._model:
            if not Path(self._model).exists():
                raise TaskError(f"task.model={self._model}: no such file or directory.")
            config = load_config(self._model, revision)
            kind, values = type(config), config.to_dict()
        elif self._size in SIZES:
            shape, others = SIZES[self._size]
            values = {**dict(zip(_KEYS.values(), shape, strict=False)), **others}
        else:
            hint = did_you_mean(self._size, SIZES)
            raise TaskError(f"task.size={self._size}: no such size.\n  {hint}Sizes: {', '.join(SIZES)}.")
        values |= {_KEYS[name]: value for name, value in self._changes.items()}
        self._require_shape(values)
        if self._changes.keys() & {"width", "heads"}:
            values.pop("head_dim", None)
        if "vocab" in self._changes and (values.get("pad_token_id") or 0) >= values["vocab_size"]:
            values["pad_token_id"] = None
        return kind(**values)

    def _require_shape(self, values: dict[str, Any]) -> None:
        """Raise TaskError if the keys that replace values of a shape do not fit."""
        for name, value in self._changes.items():
            if value < 1:
                raise TaskError(f"task.{name}={value}: must be at least 1.")
        width, heads = values.get("hidden_size", 0), values.get("num_attention_heads", 1)
        if not self._changes.keys() & {"width", "heads", "kv_heads"}:
            return
        if width % heads:
            raise TaskError(f"task.width={width}: must be a multiple of the number of heads, {heads}.")
        if heads % (kv_heads := values.get("num_key_value_heads") or heads):
            raise TaskError(f"task.kv_heads={kv_heads}: must divide the number of heads, {heads}.")
        if width // heads % 2:
            raise TaskError(f"task.width={width}: a head is {width // heads} wide, and must be even.")

    def _require_data(self, eos: int | Literal["none"] | None, token_type: str | None) -> None:
        """Raise TaskError if keys of the data do not go together, or have impossible values."""
        vocab = self._vocabulary
        if self._eval_samples is not None and self._eval_samples < 1:
            raise TaskError(f"task.eval_samples={self._eval_samples}: must be at least 1.")
        if self._tokenizer is not None and not self._data:
            raise TaskError("task.tokenizer needs examples in task.data.\n  Name them with task.data=PATH.")
        if self._tokenizer is None and self._text is not None:
            raise TaskError(f"task.text={self._text}: only examples for a tokenizer have columns.\n  Leave it out.")
        if self._eval_data is not None and not self._data:
            raise TaskError("task.eval_data without task.data: the bytes of the standard library have their own.")
        if not self._data and vocab < VOCABULARY:
            raise TaskError(f"task.vocab={vocab}: must be at least {VOCABULARY} for the bytes of a text.")
        if eos is not None and not self._token_files:
            raise TaskError(f"task.eos={eos}: only a file of tokens needs it.\n  Leave it out.")
        for key, path in self._token_files.items():
            require_token_file(key, path)
        if self._token_files and eos is None:
            raise TaskError(
                f"task.data={self._data}: task.eos is not set.\n"
                "  Name the token that ends each document, such as task.eos=128001; task.eos=none joins all documents "
                "to one text."
            )
        if eos not in (None, "none") and not (isinstance(eos, int) and 0 <= eos < vocab):
            raise TaskError(f"task.eos={eos}: must be none, or a token from 0 to {vocab - 1}.")
        if token_type is not None and not any(Path(path).suffix == ".bin" for path in self._token_files.values()):
            raise TaskError(
                f"task.token_type={token_type}: only a .bin file needs it; a .npy file names its own type.\n"
                "  Leave it out."
            )

    def model(self) -> Any:
        """Return the model with random values, and the settings of generation that belong to ``task.model``."""
        from transformers import GenerationConfig

        model: Any = super().model()
        start = Path(self._model)
        directory = start if start.is_dir() else start.parent
        if self._model and "vocab" not in self._changes and (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        return model

    @property
    def _vocabulary(self) -> int:
        return self._config.get_text_config().vocab_size

    @property
    def _token_files(self) -> dict[str, str]:
        """Files of tokens by the keys that name them; empty if the data are examples or bytes."""
        files = {"task.data": self._data, "task.eval_data": self._eval_data}
        return {key: path for key, path in files.items() if path and self._tokenizer is None}

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer, which an export saves; None if there is none."""
        return None if self._tokenizer is None else super().tokenizer

    @cached_property
    def _token_rows(self) -> tuple[Any, Any]:
        """Return (training, held-out) rows of a file of tokens, or of the bytes of the standard library."""
        if not self._token_files:
            text = BytesGPT(seq_len=self._seq_len, eval_samples=self._eval_samples)
            return text.train_data(), text.eval_data()
        files = {
            key: TokenRows.of_file(key, path, self._seq_len, self._vocabulary, self._token_type)
            for key, path in self._token_files.items()
        }
        rows, held_out = files["task.data"], files.get("task.eval_data")
        if self.eos is not None and self.eos not in (sample := rows.sampled_tokens()):
            self.notes.append(
                f"task.eos={self.eos} does not occur in the {len(sample):,} tokens of {self._data} that were checked: "
                "each row is read as one text."
            )
        if held_out is None and self._held_out:
            count = max(1, round(len(rows) * self._held_out))
            if count >= len(rows):
                raise TaskError(
                    f"task.held_out={self._held_out}: the {len(rows)} rows of task.data={self._data} cannot be "
                    "divided.\n  Use shorter rows (task.seq_len), task.eval_data=PATH for held-out data, or "
                    "task.held_out=0 for none."
                )
            rows, held_out = rows.part(0, len(rows) - count), rows.part(len(rows) - count, len(rows))
        return rows, None if held_out is None else held_out.spread(self._eval_samples)

    def tokens_per_sample(self) -> int | None:
        """Return the tokens of a row; None for texts of any length."""
        return self._seq_len if self._tokenizer is None else None

    def train_data(self) -> Any:
        return self._token_rows[0] if self._tokenizer is None else super().train_data()

    def eval_data(self) -> Any:
        return self._token_rows[1] if self._tokenizer is None else super().eval_data()

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        """Return a batch as that of ``Packing``, with bounds; without documents if each row is one text."""
        if self._tokenizer is not None:
            return super().collate(samples)
        import torch

        tokens = torch.stack(samples).long()
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if self.eos is None:
            return {"input_ids": inputs, "targets": targets, "items": targets.numel()}
        ends = inputs == self.eos
        targets, index = targets.masked_fill(ends, IGNORED), torch.arange(inputs.shape[1])
        starts = torch.where(torch.nn.functional.pad(ends[:, :-1], (1, 0)), index, 0).cummax(1).values
        return self._with_bounds(
            {
                "input_ids": inputs,
                "targets": targets,
                "position_ids": index - starts,
                "document_ids": ends.cumsum(1) - ends.long(),
                "items": int((targets != IGNORED).sum()),
            }
        )
