"""Tiny models, tokenizers and data of Hugging Face's formats, made without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = [
    "def area(width, height):\n    return width * height\n",
    "The window of a rank holds micro-batches; the boundary is its last one.",
    "class Point:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n",
    "A gradient is averaged over items, not over ranks.",
    "for number in range(10):\n    print(number)\n",
    "Short.",
    "An optimizer step follows each window, and no window is left out of the average of the gradient.",
    "import os\n\nprint(os.environ)\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def save_tokenizer(directory: Path, *, pad: bool = True, template: str | None = CHAT_TEMPLATE) -> Any:
    """Save a byte-level tokenizer with 320 tokens at most, and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|start|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(TEXTS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", pad_token="<|pad|>" if pad else None, chat_template=template
    )
    tokenizer.save_pretrained(directory)
    return tokenizer


def configuration(kind: str) -> Any:
    """Return the configuration of a model with two layers of width 32."""
    import transformers

    common = {"vocab_size": 352, "max_position_embeddings": 128, "eos_token_id": 0, "bos_token_id": None}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    match kind:
        case "llama":
            return transformers.LlamaConfig(**common, **sizes, num_key_value_heads=2)
        case "qwen":
            return transformers.Qwen2Config(**common, **sizes, num_key_value_heads=2, tie_word_embeddings=True)
        case "moe":
            return transformers.Qwen2MoeConfig(
                **common, **sizes, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=24, shared_expert_intermediate_size=24,
            )  # fmt: skip
        case "gpt2":
            return transformers.GPT2Config(
                vocab_size=352, n_positions=128, n_embd=32, n_layer=2, n_head=4, eos_token_id=0, bos_token_id=None,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            )  # fmt: skip
        case "bert":
            return transformers.BertConfig(
                **common, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=2
            )
    raise AssertionError(kind)


def save_model(directory: Path, kind: str, *, weights: bool = True, **tokenizer: Any) -> Path:
    """Save a model with random values of a fixed seed, or only its configuration, and its tokenizer."""
    import torch
    import transformers

    config = configuration(kind)
    auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    if weights:
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(directory)
    else:
        config.save_pretrained(directory)
    save_tokenizer(directory, **tokenizer)
    return directory


def save_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
