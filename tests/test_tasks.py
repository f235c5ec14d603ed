"""The bundled task: what it says of itself without torch is what it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from launcher.errors import TaskError
from launcher.tasks.bytes_gpt import BytesGPT


@pytest.mark.parametrize("size", [{}, {"width": 24, "depth": 3, "heads": 2, "seq_len": 50}])
def test_facts_are_true(size: dict[str, int]) -> None:
    task = BytesGPT(**size)
    facts = task.facts()
    assert facts["parameters"] == sum(p.numel() for p in task.model().parameters())
    assert facts["samples"] == len(task.train_data())
    assert len(task.eval_data()) == 512


def test_samples_are_the_text(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"f{number:02}.py").write_text(f"file = {number}\n")
    task = BytesGPT(seq_len=16, corpus=str(tmp_path))
    train, held_out = task._files  # pyright: ignore
    assert len(train) + len(held_out) == 60
    assert held_out
    text = b"".join(path.read_bytes() for path, _ in train)
    data = task.train_data()
    for index in (0, 1, len(data) - 1):
        assert bytes(data[index].tolist()) == text[index * 16 : index * 16 + 17]


def test_the_untrained_loss_is_that_of_guessing() -> None:
    task = BytesGPT(width=32, depth=1, heads=1, seq_len=32)
    data = task.train_data()
    loss = task.loss(task.model(), torch.stack([data[i] for i in range(8)]))
    assert loss.items == 8 * 32
    assert loss.total.item() / loss.items == pytest.approx(5.55, abs=0.1)


def test_an_empty_corpus(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="too few"):
        BytesGPT(corpus=str(tmp_path)).facts()
