"""Packing: documents in one row do not see each other, and loss and gradient are those of each document alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_mask

from launcher.errors import DataError
from launcher.train.data.packing import Packing, document_bounds, document_mask, document_mask_mod

VOCABULARY, WIDTH, ROW = 11, 16, 24


class Attention(nn.Module):
    """A transformer block of two heads, with learned positions; ``mask``: None for one document, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(ROW, WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Tensor | None) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(x + mixed.transpose(1, 2).flatten(2))


def documents(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def apart(model: nn.Module, texts: list[Tensor]) -> tuple[Tensor, int]:
    """Loss and items of each document alone, without its last token's target."""
    total, items = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        if len(text) > 1:
            logits = model(text[None, :-1], torch.arange(len(text) - 1)[None], None)
            total = total + functional.cross_entropy(logits[0], text[1:], reduction="sum")
            items += len(text) - 1
    return total, items


def packed(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, int]:
    logits = model(batch["input_ids"], batch["position_ids"], document_mask(batch["document_ids"]))
    total = functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return total, batch["items"]


@given(lengths=st.lists(st.integers(0, 60), max_size=12), own_rows=st.booleans())
def test_the_tokens_of_a_batch_follow_from_the_lengths(lengths: list[int], own_rows: bool) -> None:
    packing = Packing(ROW, split=True, own_rows=own_rows)
    batch = packing(documents(*lengths))
    assert packing.micro_batch_tokens([float(length) for length in lengths]) == batch["input_ids"].numel()


@pytest.mark.parametrize("lengths", [(24, 5, 9, 1, 17, 3, 8, 2), (3,), (1,), (12, 12, 12), (0, 4, 24)])
def test_loss_and_gradient_are_those_of_each_document_alone(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, texts = Attention().double(), documents(*lengths)
    gradients: list[list[Tensor]] = []
    results: list[tuple[Tensor, int]] = []
    for total, items in (apart(model, texts), packed(model, Packing(ROW)(texts))):
        model.zero_grad()
        (total + 0 * sum(p.sum() for p in model.parameters())).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        results.append((total.detach(), items))
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_a_document_does_not_see_its_neighbours() -> None:
    """Other tokens in one document change no logits of another, also not of what fills the row."""
    model, texts = Attention().double(), documents(9, 7, 4)
    batch = Packing(ROW)(texts)
    mask = document_mask(batch["document_ids"])
    before = model(batch["input_ids"], batch["position_ids"], mask)
    changed = torch.where(batch["document_ids"] == 1, (batch["input_ids"] + 1) % VOCABULARY, batch["input_ids"])
    same = (model(changed, batch["position_ids"], mask) == before).all(-1)
    assert torch.equal(same, batch["document_ids"] != 1)
    assert before.isfinite().all()


def test_every_kind_of_mask_is_the_same() -> None:
    document_ids = Packing(ROW)(documents(9, 7, 4, 20, 11))["document_ids"]
    rows = len(document_ids)
    flex = create_mask(document_mask_mod(document_ids), rows, 1, ROW, ROW, device="cpu")
    assert torch.equal(flex, document_mask(document_ids))
    bounds = document_bounds(document_ids).tolist()
    assert [bounds[0], bounds[-1]] == [0, rows * ROW]
    blocks = torch.block_diag(*(torch.ones(b - a, b - a).tril() for a, b in itertools.pairwise(bounds)))
    whole = torch.block_diag(*document_mask(document_ids)[:, 0].float())
    assert torch.equal(blocks, whole)


@given(lengths=st.lists(st.integers(0, 60), max_size=20), row=st.integers(1, 30))
def test_no_token_and_no_target_is_lost(lengths: list[int], row: int) -> None:
    texts, start = list[Tensor](), 0
    for length in lengths:
        texts.append(torch.arange(start, start + length))
        start += length + 1  # so that no token follows another one by chance
    batch = Packing(row, split=True, pad_id=-7)(texts)
    used = batch["document_ids"] >= 0
    assert sorted(batch["input_ids"][used].tolist()) == torch.cat([*texts, torch.empty(0)]).tolist()
    assert batch["input_ids"][~used].eq(-7).all()
    predicts = batch["targets"] != -100
    assert batch["items"] == int(predicts.sum()) == sum(max(0, length - 1) for length in lengths)
    assert torch.equal(batch["targets"][predicts], batch["input_ids"][predicts] + 1)
    assert batch["input_ids"].shape == (len(used), row)
    least = -(-sum(lengths) // row)
    assert len(used) <= max(1, 2 * least + 1), "rows are filled"


def test_samples_may_be_mappings_and_lists() -> None:
    plain = Packing(6)([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    for collate, samples in (
        (Packing(6), [{"input_ids": [1, 2, 3], "label": 0}, {"input_ids": [4, 5], "label": 1}]),
        (Packing(6, tokens=lambda text: [*text]), [b"\x01\x02\x03", b"\x04\x05"]),
    ):
        batch = collate(samples)
        assert all(torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value)) for name, value in plain.items())
    assert plain["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0]]
    assert plain["targets"].tolist() == [[2, 3, -100, 5, -100, -100]]
    assert plain["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert plain["document_ids"].tolist() == [[0, 0, 0, 1, 1, -1]]


def test_what_cannot_be_packed_is_one_message() -> None:
    with pytest.raises(DataError, match=r"Packing\(length=3\): a document has 4 tokens.\n.*split=True"):
        Packing(3)([[1, 2, 3, 4]])
    with pytest.raises(DataError, match=r"shape \[1, 2\], and must be one sequence"):
        Packing(3)([[[1, 2]]])
    with pytest.raises(DataError, match=r"length=0"):
        Packing(0)


def test_labels_are_the_targets_so_that_a_prompt_is_left_out() -> None:
    """A sample has a label for each token; -100 marks tokens to leave out, as in Hugging Face's fine-tuning data."""
    samples = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([5, 6])},
        {"input_ids": [7, 8]},
    ]
    batch = Packing(8)(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert batch["targets"].tolist() == [[-100, 3, 4, -100, 6, -100, 8, -100]]
    assert batch["items"] == 4
    assert Packing(2, split=True)(samples[:1])["targets"].tolist() == [[-100, 3], [4, -100]]
    # a function of the user's own decides alone
    own = Packing(8, tokens=lambda sample: sample["input_ids"])(samples[:1])
    assert own["targets"].tolist() == [[2, 3, 4, -100, -100, -100, -100, -100]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"attention_mask": [1, 1, 0]}, "the attention_mask of a sample has zeros"),
        ({"labels": [2, 3]}, "the labels of a sample have the shape [2], and its 3 tokens need one each"),
    ],
)
def test_padding_and_labels_of_another_length_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as raised:
        Packing(8)([{"input_ids": [1, 2, 0], **columns}])
    assert message in str(raised.value)
