"""Model and dataset of ``bytes_gpt``: the part that needs torch."""
# ruff: noqa: TID253 (imported only where torch is wanted)

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


class ByteWindows(Dataset[Tensor]):
    """Dataset whose sample i is bytes [i*L, (i+1)*L] of all files concatenated: uint8 [L + 1], the last one target
    only.

    Args:
        files: read once, into memory that forked loader processes share.
        seq_len: L.
        at_most: keep this many samples, spread evenly; None: all.
    """

    def __init__(self, files: Sequence[Path], seq_len: int, at_most: int | None = None) -> None:
        self.seq_len = seq_len
        total = sum(path.stat().st_size for path in files)
        self.text = mmap.mmap(-1, total)
        for path in files:
            self.text.write(path.read_bytes())
        self.available = (total - 1) // seq_len
        self.length = self.available if at_most is None else min(self.available, at_most)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.available // self.length * self.seq_len
        return torch.frombuffer(bytearray(self.text[start : start + self.seq_len + 1]), dtype=torch.uint8)


class Block(nn.Module):
    """Pre-norm transformer block: [batch, time, width] -> the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)), dropout)
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + functional.dropout(self.down(hidden), dropout)


class GPT(nn.Module):
    """Causal transformer: bytes [batch, time] (int64) -> logits [batch, time, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, seq_len: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(seq_len, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # residual branches get smaller values, so that depth does not raise the variance
                scale = (2 * depth) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head, which stays in bf16 with a narrower format."""
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
