"""Packing: documents of any length joined to rows of one length, with attention and positions that end at a document's
bounds, so that the loss is that of each document alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from launcher.errors import DataError

# target of a position without a token to predict; torch's cross_entropy ignores it by default
NO_TARGET = -100
# document of a row's unused positions
NO_DOCUMENT = -1


class Packing:
    """Collate function that packs documents into rows: the longest first, each into the first row that has room for it.

    A micro-batch's samples are packed together, so a micro-batch has as many rows as its documents fill. The batch is a
    dict of int64 tensors [rows, length], and a number:

    - ``input_ids``: the tokens; ``pad_id`` where a row is not filled.
    - ``targets``: the token that follows in the same document; -100 at a document's end and where a row is not filled.
      If samples are mappings with ``labels``, the label of that token, so that -100 there leaves it out.
    - ``position_ids``: position in the document, from 0.
    - ``document_ids``: number of the document in its row, from 0; -1 where the row is not filled.
    - ``items``: number of targets.

    Args:
        length: tokens per row.
        tokens: sample -> its tokens, a tensor or a sequence of numbers. Default: the sample itself, or its
            ``input_ids`` if it is a mapping; ``labels`` are used only then.
        pad_id: token of unused positions.
        split: cut longer documents into pieces, each of which starts at position 0 without what precedes it. No target
            is lost. By default a longer document is an error.
        own_rows: do not pack: each document has a row of its own, and rows are as long as the longest document.

    Raises:
        DataError: ``length`` is below 1; or, when it is called, a document has more tokens and ``split`` is false, or
            its ``labels`` or ``attention_mask`` cannot be used.
    """

    def __init__(
        self,
        length: int,
        tokens: Callable[[Any], Any] | None = None,
        *,
        pad_id: int = 0,
        split: bool = False,
        own_rows: bool = False,
    ) -> None:
        if length < 1:
            raise DataError(f"Packing(length={length}): a row must have at least 1 token.")
        self.length, self.pad_id, self.split, self.own_rows = length, pad_id, split, own_rows
        self._tokens, self._labels = (tokens, None) if tokens else (_tokens_of, _labels_of)

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        pieces = [*self._pieces(samples)]
        rows, length = self._rows([len(tokens) for tokens, _ in pieces])
        return self._batch([[pieces[number] for number in row] for row in rows], length)

    def micro_batch_tokens(self, lengths: Sequence[float]) -> int:
        """Return the tokens of the batch of documents of these lengths, unused positions included."""
        whole = [int(length) for length in lengths]
        sizes = [min(self.length, size - start) for size in whole for start in range(0, size, self.length)]
        rows, length = self._rows(sizes)
        return len(rows) * length

    def _rows(self, sizes: Sequence[int]) -> tuple[list[list[int]], int]:
        """Return the rows of pieces of these sizes, as their indices, and the tokens in a row."""
        if self.own_rows:
            return [[number] for number in range(len(sizes))] or [[]], max(sizes, default=0)
        rows: list[list[int]] = []
        room: list[int] = []
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):  # stable
            size = sizes[number]
            row = next((number for number, free in enumerate(room) if free >= size), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(self.length)
            rows[row].append(number)
            room[row] -= size
        return rows or [[]], self.length

    def _pieces(self, samples: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tokens, targets) of each document, or of its pieces."""
        for sample in samples:
            tokens = torch.as_tensor(self._tokens(sample)).long()
            if tokens.ndim != 1:
                raise DataError(
                    f"Packing: the tokens of a sample have the shape {list(tokens.shape)}, and must be one sequence.\n"
                    "  Give Packing a function tokens(sample) that returns them."
                )
            if len(tokens) > self.length and not self.split:
                raise DataError(
                    f"Packing(length={self.length}): a document has {len(tokens)} tokens.\n"
                    "  Use longer rows, cut documents in the dataset, or use split=True."
                )
            labels = tokens if self._labels is None else self._labels(sample, tokens)
            targets = torch.cat([labels[1:], tokens.new_full((min(1, len(tokens)),), NO_TARGET)])
            for start in range(0, len(tokens), self.length):
                yield tokens[start : start + self.length], targets[start : start + self.length]

    def _batch(self, rows: list[list[tuple[Tensor, Tensor]]], length: int) -> dict[str, Any]:
        shape = len(rows), length
        input_ids, targets = torch.full(shape, self.pad_id), torch.full(shape, NO_TARGET)
        position_ids, document_ids = torch.zeros(shape, dtype=torch.long), torch.full(shape, NO_DOCUMENT)
        for number, row in enumerate(rows):
            start = 0
            for document, (tokens, following) in enumerate(row):
                place = slice(start, start + len(tokens))
                input_ids[number, place], targets[number, place] = tokens, following
                position_ids[number, place] = torch.arange(len(tokens))
                document_ids[number, place] = document
                start = place.stop
        return {
            "input_ids": input_ids,
            "targets": targets,
            "position_ids": position_ids,
            "document_ids": document_ids,
            "items": int((targets != NO_TARGET).sum()),
        }


def _tokens_of(sample: Any) -> Any:
    return cast("Mapping[str, Any]", sample)["input_ids"] if isinstance(sample, Mapping) else sample


def _labels_of(sample: Any, tokens: Tensor) -> Tensor:
    """Return the ``labels`` of a sample that has them, one for each token; otherwise its tokens.

    Raises:
        DataError: there are not as many labels as tokens, or the sample's ``attention_mask`` says that it is padded.
    """
    columns = cast("Mapping[str, Any]", sample) if isinstance(sample, Mapping) else {}
    mask, labels = columns.get("attention_mask"), columns.get("labels")
    if mask is not None and not torch.as_tensor(mask).all():
        raise DataError(
            "Packing: the attention_mask of a sample has zeros: padding would be packed like text.\n"
            "  Tokenize without padding, or give Packing a function tokens(sample) that cuts it off."
        )
    if labels is None:
        return tokens
    values = torch.as_tensor(labels).long()
    if values.shape != tokens.shape:
        raise DataError(
            f"Packing: the labels of a sample have the shape {list(values.shape)}, and its {len(tokens)} tokens need "
            "one each.\n  Without labels the tokens are used: remove the column, or give Packing a function "
            "tokens(sample)."
        )
    return values


def document_mask(document_ids: Tensor) -> Tensor:
    """Return the causal attention mask within documents, for torch's scaled_dot_product_attention.

    Args:
        document_ids: [rows, length], of a batch of ``Packing``.

    Returns:
        Bool [rows, 1, length, length], true where a query (third dimension) sees a key (last one). An unused position
        sees unused ones only.
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril()


def document_mask_mod(document_ids: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the same mask as a function for ``create_block_mask`` of torch.nn.attention.flex_attention."""

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    return mask_mod


def document_bounds(document_ids: Tensor) -> Tensor:
    """Return the first positions of all documents, and the end, in the rows laid end to end: ``cu_seqlens`` of kernels
    for attention over sequences of unequal lengths. A row's unused end counts as a document.

    Returns:
        int32 [documents + 1]
    """
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    firsts = starts.flatten().nonzero().flatten()
    return torch.cat([firsts, firsts.new_tensor([document_ids.numel()])]).to(torch.int32)


def has_document_kernel(device: torch.device) -> bool:
    """Return whether attention on ``device`` can take the bounds of documents instead of a mask: torch's flash
    attention for sequences of unequal lengths, under autocast in bf16 or fp16."""
    return (
        device.type == "cuda"
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") in (torch.bfloat16, torch.float16)
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
