"""Llama in plain PyTorch, with the parameter names of transformers' LlamaForCausalLM: the part of the task that needs
torch.

A norm's statistics, the rotary angles and the loss are computed in fp32, the matrix products in the precision of
autocast or of the parameters.
"""
# ruff: noqa: TID253 (imported only where torch is wanted)

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from launcher.tasks.llama_shape import LlamaShape
from launcher.train.data.packing import NO_TARGET, document_mask, document_mask_mod

# elements of the logits that exist at once: 512 MiB in fp32
CHUNK_ELEMENTS = 2**27
# factor of the logits' gradient in fp16, which would round small probabilities to zero; the gradient is at most 1
FP16_SCALE = 2.0**10
# standard deviation of initial values: initializer_range of transformers' LlamaConfig
INITIAL_STD = 0.02


class Projection(nn.Linear):
    """Linear layer without bias, with Llama's initial values."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class TokenEmbedding(nn.Embedding):
    """Embedding with Llama's initial values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class RmsNorm(nn.Module):
    """Division by the root mean square over the last dimension, computed in fp32, then by-element weights."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class RotaryAngles(nn.Module):
    """Cosines and sines of the rotary position embedding (Su et al., "RoFormer", 2021), as transformers lays them out:
    dimension i is rotated with dimension i + head_dim / 2."""

    inv_freq: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float) / shape.head_dim
        frequencies = 1.0 / (shape.theta**exponents)
        if shape.scaling is not None:
            frequencies = _scaled_as_llama_3_1(frequencies, shape.scaling)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    @torch.no_grad()
    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, fp32 [rows, 1, length, head_dim]. ``positions``: [rows, length]."""
        angles = positions[:, None, :, None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _scaled_as_llama_3_1(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Return the frequencies with long waves slowed down by ``factor``, short ones unchanged, and a linear transition
    between them (`apply_scaling` of the Llama 3.1 release, "llama3" in transformers)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)  # in the original length
    unchanged = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 - unchanged) * frequencies / scaling["factor"] + unchanged * frequencies


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cosines + turned * sines).to(x.dtype)  # computed in fp32, because the angles are


class GroupedAttention(nn.Module):
    """Causal attention in which groups of query heads share keys and values (Ainslie et al., "GQA", 2023)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = Projection(shape.width, shape.heads * shape.head_dim)
        self.k_proj = Projection(shape.width, shape.kv_heads * shape.head_dim)
        self.v_proj = Projection(shape.width, shape.kv_heads * shape.head_dim)
        self.o_proj = Projection(shape.heads * shape.head_dim, shape.width)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Any) -> Tensor:
        rows, length, _ = x.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (each(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for each in projections)
        mixed = _attend(_rotated(q, cosines, sines), _rotated(k, cosines, sines), v, mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Return causal attention.

    Args:
        q: [rows, heads, length, head_dim]; ``k`` and ``v`` have fewer heads.
        mask: result of ``attention_mask``.
    """
    if mask is not None and not isinstance(mask, Tensor):
        return _flex_attention()(q, k, v, block_mask=mask, enable_gqa=True)
    grouped = q.shape[1] != k.shape[1]
    if grouped and not (q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and mask is None):
        # of torch's kernels, only flash attention and cuDNN know groups; the others would store all scores
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        grouped = False
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex_attention() -> Callable[..., Any]:
    """Return flex_attention, always compiled: the eager version stores all scores."""
    if torch.compiler.is_compiling():
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention
    return _compiled_flex_attention()


def attention_mask(document_ids: Tensor) -> Any:
    """Return the mask within documents for all layers: for FlexAttention on a GPU, which skips blocks without a pair of
    one document; otherwise for scaled_dot_product_attention.

    Args:
        document_ids: [rows, length].
    """
    if not document_ids.is_cuda or isinstance(document_ids, FakeTensor):  # flex_attention cannot run without values
        return document_mask(document_ids)
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = document_ids.shape
    mask_mod = document_mask_mod(document_ids)
    return create_block_mask(mask_mod, rows, None, length, length, device=str(document_ids.device))


class GatedMlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = Projection(shape.width, shape.ffn)
        self.up_proj = Projection(shape.width, shape.ffn)
        self.down_proj = Projection(shape.ffn, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer: [rows, length, width] -> the same shape."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = GroupedAttention(shape)
        self.mlp = GatedMlp(shape)
        self.input_layernorm = RmsNorm(shape.width, shape.eps)
        self.post_attention_layernorm = RmsNorm(shape.width, shape.eps)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor, mask: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Llama without its head: tokens [rows, length] -> hidden states [rows, length, width]."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.depth))
        self.norm = RmsNorm(shape.width, shape.eps)
        self.rotary_emb = RotaryAngles(shape)

    def forward(self, tokens: Tensor, positions: Tensor | None, document_ids: Tensor | None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cosines, sines = self.rotary_emb(positions)
        mask = None if document_ids is None else attention_mask(document_ids)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cosines, sines, mask)
        return self.norm(x)


class LlamaModel(nn.Module):
    """Llama with its head.

    Attributes:
        shape: the shape.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        self.lm_head = Projection(shape.width, shape.vocab)
        self.chunk_loss = ChunkLoss()
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, which stays in bf16 with precision=float8."""
        return self.lm_head

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [rows, length, vocabulary]; or, with ``targets``, the cross-entropy in nats summed over
        them, for which the logits never exist as a whole.

        Args:
            tokens: int64 [rows, length].
            targets: int64 [rows, length]; -100 where nothing is predicted.
            positions: [rows, length], of each token in its document; default: rows are documents.
            document_ids: [rows, length], of the document that each token belongs to; default: rows are documents.
        """
        hidden = self.model(tokens, positions, document_ids)
        if targets is None:
            return self.lm_head(hidden)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        return linear_cross_entropy(hidden, self.lm_head.weight, targets, loss=self.chunk_loss)


class ChunkLoss(nn.Module):
    """Cross-entropy of a chunk of logits, with its gradient. A module, so that ``train.compile`` compiles it and fuses
    its passes over the logits."""

    def forward(self, logits: Tensor, targets: Tensor, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Return the loss summed over the targets, and its gradient with respect to the logits, in their dtype, times
        ``gradient_scale`` of it.

        Args:
            logits: [items, vocabulary].
            targets: int64 [items]; -100 where nothing is predicted.
            with_gradient: without it, the second result is None.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        logs = torch.log_softmax(logits, -1, dtype=wide)
        ignored, chosen = (targets == NO_TARGET)[:, None], targets.clamp(min=0)[:, None]
        loss = -logs.gather(-1, chosen).masked_fill(ignored, 0).sum()
        if not with_gradient:
            return loss, None
        if torch.compiler.is_compiling():
            is_chosen = torch.arange(logits.shape[-1], device=logits.device) == chosen
            gradient = (logs.exp() - is_chosen.to(wide)).masked_fill(ignored, 0)
        else:
            gradient = logs.exp_().scatter_add_(-1, chosen, torch.full_like(chosen, -1, dtype=wide))
            gradient.masked_fill_(ignored, 0)
        scale = gradient_scale(logits.dtype)
        return loss, (gradient if scale == 1 else gradient * scale).to(logits.dtype)


def gradient_scale(dtype: torch.dtype) -> float:
    """Return the factor of the gradient of logits of this dtype between ``ChunkLoss`` and the end of the loss."""
    return FP16_SCALE if dtype is torch.float16 else 1.0


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    loss: ChunkLoss | None = None,
) -> Tensor:
    """Return the sum of the cross-entropy of ``x @ weight.T``, one chunk of rows at a time.

    The gradients are computed with the loss, in the same pass over the chunks, so that the backward pass needs no
    logits; products are in the dtype of autocast, their sums in fp32.

    Args:
        x: [items, width].
        weight: [vocabulary, width].
        targets: int64 [items]; -100 where nothing is predicted.
        chunk: rows at a time; default: as many as have CHUNK_ELEMENTS logits.
        loss: of a chunk; may be compiled.

    Returns:
        Scalar in fp32, in fp64 if ``x`` is.
    """
    chunk = chunk or max(128, CHUNK_ELEMENTS // weight.shape[0] // 128 * 128)  # whole tiles of a GPU's products
    total: Any = _LinearCrossEntropy.apply(x, weight, targets, chunk, loss or ChunkLoss(), torch.is_grad_enabled())
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, loss: ChunkLoss, with_gradient: bool
    ) -> Tensor:
        device, wide = x.device.type, torch.promote_types(x.dtype, torch.float32)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        # autocast's own cache would keep this copy, without a gradient, for other uses in the micro-batch
        with torch.autocast(device, enabled=False):
            matrix = weight.to(dtype)
            total = x.new_zeros((), dtype=wide)
            needed = [with_gradient and each for each in ctx.needs_input_grad[:2]]
            scale = gradient_scale(dtype)
            # unscaled below, which fp16 has no room for
            grad_x = torch.empty_like(x, dtype=x.dtype if scale == 1 else wide) if needed[0] else None
            grad_weight = torch.zeros_like(matrix, dtype=wide) if needed[1] else None
            for start in range(0, len(x), chunk):
                rows = slice(start, start + chunk)
                part = x[rows].to(dtype)
                chunk_loss, grad_logits = loss(functional.linear(part, matrix), targets[rows], any(needed))
                total += chunk_loss
                if grad_x is not None:
                    grad_x[rows] = grad_logits @ matrix
                if grad_weight is not None:
                    _add_product(grad_weight, grad_logits.T, part)
                del grad_logits  # before the next chunk's are made
            for gradient in (grad_x, grad_weight):
                if gradient is not None and scale != 1:
                    gradient /= scale
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = (None if each is None else each * gradients[0] for each in ctx.saved_tensors)
        return *scaled, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, summed in its dtype although ``a`` and ``b`` may be narrower."""
    if a.is_cuda and a.dtype != total.dtype:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)
