"""Attention within the documents of packed rows, without a mask of [rows, length, length], on GPUs in bf16 or fp16.

torch's flash attention for sequences of unequal lengths takes the documents' bounds (``cu_seqlens``). It is part of
torch, needs no compiler (flex attention does), and works only on tensors in a half precision on GPUs of compute
capability 8.0 or more. Elsewhere rows of documents need a mask.

The bounds go through a model of transformers in place of its mask, which the model passes on to each layer if it has
four dimensions.
"""
# ruff: noqa: TID253 (imported only where torch is wanted)

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from launcher.train.data import packing

# name of the attention in transformers; without "sdpa" or "flash", which transformers looks for in names
NAME = "documents"
# kinds of models whose gradients a test compares: others might read the mask on its way to the layers
KINDS = (
    "gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
_WIDEST_HEAD = 256
_GROUPS_HEADS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # since torch 2.12


def use_documents(model: Any) -> None:
    """Let a model of transformers take bounds of documents, if it uses torch's attention and is one of ``KINDS``."""
    config = model.config.get_text_config()
    if config._attn_implementation == "sdpa" and config.model_type in KINDS:
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def mask_of(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return what a model of transformers takes as the attention mask of packed rows.

    Returns:
        int32 [1, 1, tokens of the longest document, documents + 1], bounds that are repeated without memory, where the
        kernel works; otherwise [rows, 1, length, length]: bool, or fp32 that eager attention adds to its scores.
    """
    attention = model.config.get_text_config()._attn_implementation
    if attention == NAME and packing.has_document_kernel(batch["input_ids"].device):
        return batch["bounds"].expand(1, 1, batch["longest"], -1)
    mask = packing.document_mask(batch["document_ids"])
    return torch.where(mask, 0.0, torch.finfo(torch.float32).min) if attention == "eager" else mask


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the result of attention [rows, length, heads, width], as functions of transformers' AttentionInterface do.

    Args:
        module: the attention layer.
        query, key, value: [rows, heads, length, width].
        attention_mask: as ``mask_of`` returns it, or as torch's scaled_dot_product_attention takes it.
        dropout: probability; the kernel has none.
        scaling: factor of the scores.
        others: further arguments of transformers' function.
    """
    if attention_mask is not None and attention_mask.dtype is torch.int32:
        longest, bounds = attention_mask.shape[2], attention_mask[0, 0, 0]
        rows, _, length, width = query.shape
        options: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        known = not dropout and (_GROUPS_HEADS or not options)
        if known and width == value.shape[-1] <= _WIDEST_HEAD and width % 8 == 0:
            kind = query.device.type
            # autocast leaves the products of rotary embeddings in fp32
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
            queries, keys, values = (each.transpose(1, 2).flatten(0, 1).to(dtype) for each in (query, key, value))
            result: Any = varlen.varlen_attn(
                queries, keys, values, bounds, bounds, longest, longest, scale=scaling, window_size=(-1, 0), **options
            )
            return result.unflatten(0, (rows, length)), None
        places = torch.arange(rows * length, device=bounds.device)
        documents = torch.bucketize(places, bounds, right=True).unflatten(0, (rows, length))
        attention_mask = packing.document_mask(documents)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others)
