"""Shapes of Llama models: sizes by name, configurations of transformers in and out, parameters and FLOPs by arithmetic.

The module does not import torch or transformers.
"""

# pyright: basic

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from launcher.errors import TaskError, did_you_mean

# scaling of the rotary frequencies of Llama 3.1 ("llama3" in transformers' modeling_rope_utils)
_SCALING_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SCALING_KEYS = tuple(_SCALING_3_1)[1:]
_LLAMA_3 = {
    "vocab": 128_256, "positions": 131_072, "theta": 500_000.0, "eps": 1e-5, "head_dim": 128, "kv_heads": 8,
    "scaling": _SCALING_3_1,
}  # fmt: skip
_SMALL = {"vocab": 32_000, "positions": 4096, "theta": 10_000.0, "eps": 1e-5, "tied": True}
# 1b: meta-llama/Llama-3.2-1B; 3b: Llama-3.2-3B; 8b and 70b: Llama-3.1-8B and Llama-3.1-70B (config.json of each)
SIZES: dict[str, dict[str, Any]] = {
    "15m": {**_SMALL, "width": 288, "depth": 6, "heads": 6, "kv_heads": 6, "head_dim": 48, "ffn": 768},
    "60m": {**_SMALL, "width": 512, "depth": 14, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 1536},
    "160m": {**_SMALL, "width": 768, "depth": 18, "heads": 12, "kv_heads": 4, "head_dim": 64, "ffn": 2560},
    "400m": {**_SMALL, "width": 1024, "depth": 28, "heads": 16, "kv_heads": 8, "head_dim": 64, "ffn": 3456},
    "1b": {
        **_LLAMA_3, "width": 2048, "depth": 16, "heads": 32, "head_dim": 64, "ffn": 8192, "tied": True,
        "scaling": {**_SCALING_3_1, "factor": 32.0},
    },
    "3b": {
        **_LLAMA_3, "width": 3072, "depth": 28, "heads": 24, "ffn": 8192, "tied": True,
        "scaling": {**_SCALING_3_1, "factor": 32.0},
    },
    "8b": {**_LLAMA_3, "width": 4096, "depth": 32, "heads": 32, "ffn": 14_336},
    "70b": {**_LLAMA_3, "width": 8192, "depth": 80, "heads": 64, "ffn": 28_672},
}  # fmt: skip
# values of transformers' LlamaConfig for keys that a config.json leaves out
_CONFIG_DEFAULTS = {
    "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
}  # fmt: skip
# special tokens of a LlamaConfig, each a number, a list of numbers or None
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# keys of a config.json that an export replaces by others
_REPLACED = ("rope_parameters", "dtype", "torch_dtype")
# settings of a LlamaConfig that change the function and are not implemented, with the only value that is
_REQUIRED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}


@dataclass(frozen=True)
class LlamaShape:
    """Shape of a Llama model.

    Attributes:
        width: width of the residual stream.
        depth: number of decoder layers.
        heads: attention heads; ``kv_heads`` of them have keys and values of their own.
        head_dim: width of a head, even.
        ffn: width of the MLP's hidden layer.
        positions: longest sequence.
        theta: base of the rotary frequencies.
        eps: added to the mean square in each norm.
        tied: the head's matrix is the embedding's.
        scaling: scaling of the rotary frequencies as in Llama 3.1, by transformers' names; None: none.
        origin: configuration that the shape is from, whose other keys an export keeps.
    """

    width: int
    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    theta: float
    eps: float
    tied: bool = False
    scaling: dict[str, Any] | None = None
    origin: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @classmethod
    def resolve(cls, size: str | None, model: str | None, changes: dict[str, int | None]) -> Self:
        """Return the shape of a name in SIZES, or of a configuration.

        Args:
            size: name; default: 15m.
            model: directory with a config.json, or that file.
            changes: values that replace those of the shape, by attribute; None: no change.

        Raises:
            TaskError: both are given, there is no such size or configuration, the configuration is not of
                model_type llama, or the shape is impossible.
        """
        if model is not None and size is not None:
            raise TaskError(f"task.size={size} and task.model={model}: both name a shape.\n  Leave one of them out.")
        if model is not None:
            shape = cls._of_config(model, _read_config(model))
        elif size is not None and size not in SIZES:
            raise TaskError(f"task.size={size}: no such size.\n  {did_you_mean(size, SIZES)}Sizes: {', '.join(SIZES)}.")
        else:
            shape = cls(**SIZES[size or "15m"])
        return shape._changed({name: value for name, value in changes.items() if value is not None})

    @classmethod
    def _of_config(cls, model: str, config: dict[str, Any]) -> Self:
        _require_supported(model, config)
        given = {**_CONFIG_DEFAULTS, **{name: value for name, value in config.items() if value is not None}}
        heads = given["num_attention_heads"]
        theta, scaling = _rotary_settings(model, given)
        return cls(
            width=given["hidden_size"],
            depth=given["num_hidden_layers"],
            heads=heads,
            kv_heads=given.get("num_key_value_heads", heads),
            head_dim=given.get("head_dim", given["hidden_size"] // heads),
            ffn=given["intermediate_size"],
            vocab=given["vocab_size"],
            positions=given["max_position_embeddings"],
            theta=theta,
            eps=given["rms_norm_eps"],
            tied=given.get("tie_word_embeddings", False),
            scaling=scaling,
            origin=config,
        )

    def _changed(self, changes: dict[str, int]) -> Self:
        """Return the shape with ``changes``. Unless it is changed too, the width of a head follows the width."""
        for name, value in changes.items():
            if value < 1:
                raise TaskError(f"task.{name}={value}: must be at least 1.")
        shape = dataclasses.replace(self, **changes)
        if changes.keys() & {"width", "heads"}:
            if shape.width % shape.heads:
                raise TaskError(f"task.width={shape.width}: must be a multiple of the number of heads, {shape.heads}.")
            shape = dataclasses.replace(shape, head_dim=shape.width // shape.heads)
        if shape.heads % shape.kv_heads:
            raise TaskError(f"task.kv_heads={shape.kv_heads}: must divide the number of heads, {shape.heads}.")
        if shape.head_dim % 2:
            raise TaskError(f"task.width={shape.width}: a head is {shape.head_dim} wide, and must be even.")
        return shape

    def config(self, dtype: str, special: dict[str, int | None] | None = None) -> dict[str, Any]:
        """Return the configuration for transformers' LlamaForCausalLM.

        Args:
            dtype: of the parameters in the files, such as "float32".
            special: ids of special tokens by the names in SPECIAL_IDS, for those that ``origin`` does not name.
        """
        origin = {name: value for name, value in self.origin.items() if name not in _REPLACED}
        # null, because a missing one would be that of LlamaConfig's defaults
        known: dict[str, Any] = {} if origin else dict.fromkeys(SPECIAL_IDS)
        known |= {name: value for name, value in (special or {}).items() if value is not None}
        known |= {name: origin[name] for name in SPECIAL_IDS if name in origin}
        return {
            **origin,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "num_hidden_layers": self.depth,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rope_theta": self.theta,
            "rope_scaling": self.scaling,
            "rms_norm_eps": self.eps,
            "tie_word_embeddings": self.tied,
            **_REQUIRED,
            **{name: self._in_vocabulary(value) for name, value in known.items()},
            "torch_dtype": dtype,
        }

    def _in_vocabulary(self, ids: Any) -> Any:
        """Return the ids of a special token that ``vocab`` has, None if there is none: others cannot be loaded."""
        if isinstance(ids, list):
            return [each for each in ids if each < self.vocab] or None
        return ids if ids is not None and ids < self.vocab else None

    @property
    def layer_matrices(self) -> int:
        """Number of parameters in the matrices of one layer."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.ffn

    @property
    def embedding(self) -> int:
        """Number of parameters of the embedding, and of the head."""
        return self.vocab * self.width

    def counts(self) -> dict[str, int]:
        """Return the numbers of parameters by arithmetic; a test compares them to the model."""
        matrices, vectors = self.depth * self.layer_matrices, (2 * self.depth + 1) * self.width
        return {
            "parameters": matrices + vectors + self.embedding * (1 if self.tied else 2),
            "unit_parameters": matrices + 2 * self.depth * self.width,
            "vector_parameters": vectors,
            "batch_norms": 0,
            # a tied head is an embedding too, which is not gathered in the precision of matrix products
            "matmul_parameters": matrices + (0 if self.tied else self.embedding),
            "unit_matmul_parameters": matrices,
        }

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of a token, forward and backward: 6 for each parameter in a matrix that it is multiplied
        with (the head included, the embedding and norms not), and 12 * depth * heads * head_dim * seq_len for
        attention.

        Attention counts all pairs of positions, whatever the mask leaves out, and recomputation does not count:
        Chowdhery et al., "PaLM" (2022), appendix B.

        Args:
            seq_len: tokens in a row.
        """
        matrices = self.depth * self.layer_matrices + self.embedding
        return 6.0 * matrices + 12.0 * self.depth * self.heads * self.head_dim * seq_len


def _require_supported(model: str, config: dict[str, Any]) -> None:
    """Raise TaskError for an architecture, or a setting of it, that is not implemented."""
    kind = config.get("model_type")
    if kind != "llama":
        raise TaskError(
            f"task.model={model}: its model_type is {kind}, and task=llama trains llama only.\n"
            "  Use task=hf_causal_lm for other architectures."
        )
    for name, value in _REQUIRED.items():
        if config.get(name) not in (None, value):
            raise TaskError(
                f"task.model={model}: {name}={config[name]}, and task=llama has {value} only.\n"
                "  Use task=hf_causal_lm for this model."
            )


def _rotary_settings(model: str, config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling) of a LlamaShape."""
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling
    earlier, later = config.get("rope_scaling"), config.get("rope_parameters")
    if earlier and later and earlier != later:
        raise TaskError(
            f"task.model={model}: its rope_scaling and rope_parameters differ.\n  Remove one of them from config.json; "
            "transformers uses rope_scaling."
        )
    rope = earlier or later or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise TaskError(
            f"task.model={model}: rotary embeddings of the type {rope_type}, and task=llama has default and "
            "llama3 only.\n  Use task=hf_causal_lm for this model."
        )
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if rope_type == "default":
        return theta, None
    original = config.get("original_max_position_embeddings", config["max_position_embeddings"])
    scaling = {"original_max_position_embeddings": original, **rope}
    if missing := [name for name in _SCALING_KEYS if name not in scaling]:
        raise TaskError(f"task.model={model}: its rotary scaling lacks {', '.join(missing)}.")
    return theta, {"rope_type": "llama3", **{name: scaling[name] for name in _SCALING_KEYS}}


def _read_config(model: str) -> dict[str, Any]:
    path = Path(model)
    if not path.exists():
        raise TaskError(f"task.model={model}: no such file or directory.")
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"task.model={model}: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise TaskError(f"task.model={model}: {file.name} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise TaskError(f"task.model={model}: {file.name} is not a JSON object.")
    return config
