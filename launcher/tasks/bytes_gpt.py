"""Byte-level GPT on the source text of this Python's standard library: tens of megabytes of real text.

The module does not import torch at module level, so that a plan can be made from ``facts`` in a tenth of a second.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import TaskError
from launcher.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn

    from launcher.tasks.bytes_model import ByteWindows


VOCABULARY = 256
HELD_OUT_SHARE = 20  # one file in twenty, chosen by a hash of its name


class BytesGPT:
    """Task of next-byte prediction. An item is a target byte; a sample has ``seq_len`` of them.

    Args:
        width: width of the residual stream; a multiple of ``heads``.
        depth: number of transformer blocks.
        heads: number of attention heads.
        seq_len: bytes per sample.
        dropout: probability, after attention and after each MLP.
        eval_samples: number of samples of an evaluation, spread evenly over the held-out text; None: all.
        corpus: directory whose ``*.py`` files are the text; default: the standard library of this Python.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 2,
        heads: int = 2,
        seq_len: int = 128,
        dropout: float = 0.0,
        eval_samples: int | None = 512,
        corpus: str | None = None,
    ) -> None:
        sizes = {"width": width, "depth": depth, "heads": heads, "seq_len": seq_len, "eval_samples": eval_samples}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise TaskError(f"task.{name}={value}: must be at least 1.")
        if width % heads:
            raise TaskError(f"task.width={width}: must be a multiple of task.heads={heads}.")
        self.width, self.depth, self.heads, self.seq_len = width, depth, heads, seq_len
        self.dropout, self.eval_samples = dropout, eval_samples
        self.corpus = Path(corpus or sysconfig.get_path("stdlib"))

    @cached_property
    def _files(self) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
        """Return (training, held-out) files with their sizes, in an order that does not depend on the file system."""
        train: list[tuple[Path, int]] = []
        held_out: list[tuple[Path, int]] = []
        skipped = {"site-packages", "dist-packages", "__pycache__"}
        for directory, folders, names in os.walk(self.corpus):
            folders[:] = sorted(set(folders) - skipped)
            for name in sorted(names):
                # strings, because `launch plan` calls this, and for these files pathlib takes longer than all the rest
                path = os.path.join(directory, name)  # noqa: PTH118
                if name.endswith(".py") and (size := os.stat(path).st_size):  # noqa: PTH116
                    relative = path[len(str(self.corpus)) :].lstrip(os.sep).replace(os.sep, "/")
                    digest = hashlib.blake2b(relative.encode(), digest_size=4).digest()
                    chosen = held_out if int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0 else train
                    chosen.append((Path(path), size))
        if not train or not held_out:
            raise TaskError(
                f"task.corpus={self.corpus}: {len(train)} training and {len(held_out)} held-out *.py files that are "
                f"not empty; each must be at least 1 (one file in {HELD_OUT_SHARE} or so is held out).\n"
                "  Use a directory with more Python files."
            )
        least = min(sum(size for _, size in files) for files in (train, held_out))
        if least <= self.seq_len:
            raise TaskError(
                f"task.seq_len={self.seq_len}: a sample is longer than the training or the held-out text of "
                f"task.corpus={self.corpus}.\n  Use at most {least - 1}, or a corpus with more text."
            )
        return train, held_out

    def tokens_per_sample(self) -> int:
        return self.seq_len

    def facts(self) -> dict[str, int]:
        """Return numbers of samples and parameters by arithmetic; a test compares them to ``model`` and
        ``train_data``."""
        d = self.width
        block = 4 * d + 3 * d * d + d * d + (4 * d * d + 4 * d) + (4 * d * d + d)
        parameters = VOCABULARY * d + self.seq_len * d + self.depth * block + 2 * d + VOCABULARY * d
        return {
            "samples": _samples(self._files[0], self.seq_len),
            "parameters": parameters,
            "unit_parameters": self.depth * block,
            "vector_parameters": self.depth * (4 * d + 4 * d + d) + 2 * d,
            "batch_norms": 0,
            "tokens_per_sample": self.seq_len,
            "matmul_parameters": self.depth * (block - 4 * d) + VOCABULARY * d,
            "unit_matmul_parameters": self.depth * (block - 4 * d),
        }

    def model(self) -> nn.Module:
        from launcher.tasks.bytes_model import GPT

        return GPT(VOCABULARY, self.width, self.depth, self.heads, self.seq_len, self.dropout)

    def train_data(self) -> ByteWindows:
        from launcher.tasks.bytes_model import ByteWindows

        return ByteWindows([path for path, _ in self._files[0]], self.seq_len)

    def eval_data(self) -> ByteWindows:
        from launcher.tasks.bytes_model import ByteWindows

        return ByteWindows([path for path, _ in self._files[1]], self.seq_len, at_most=self.eval_samples)

    def shard_units(self, model: Any) -> list[nn.Module]:
        return list(model.blocks)

    def loss(self, model: Any, batch: Tensor) -> Loss:
        """Return the cross-entropy in nats. ``batch``: uint8 [samples, seq_len + 1]."""
        from torch.nn import functional

        tokens = batch.long()
        logits = model(tokens[:, :-1])
        targets = tokens[:, 1:]
        total = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return Loss(total=total, items=targets.numel())

    def flops_per_sample(self) -> float:
        """Return 6 FLOPs per parameter and token, plus 12 * depth * width * seq_len^2 for attention (PaLM, appendix
        B)."""
        parameters = self.facts()["parameters"] - (VOCABULARY + self.seq_len) * self.width
        return 6.0 * parameters * self.seq_len + 12.0 * self.depth * self.width * self.seq_len**2


def _samples(files: list[tuple[Path, int]], seq_len: int) -> int:
    return (sum(size for _, size in files) - 1) // seq_len
