"""Balance and orders of one's own in whole jobs on two ranks: equal to one big batch, and resumed bit by bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.task import build_model
from launcher.train.data.randomness import Permutation
from launcher.train.data.sample_order import ArrangedData, indices_of
from tests.helpers import torchrun
from tests.train.data import order_tasks
from tests.train.data.order_tasks import SAMPLES, Plain, Texts, loss_sum, text_of

COMMON = (
    "batch.global_size=24", "batch.micro_size=3", "train.epochs=2", "schedule=constant", "run.calibrate_s=0",
    "optimizer=sgd", "optimizer.lr=0.3", "optimizer.momentum=0.9", "optimizer.weight_decay=0",
    "cluster.workers_per_node=2", "train.loader_workers=0",
)  # fmt: skip
CASES = [
    "Plain precision=fp32",
    "WithLengths precision=fp32 batch.balance=length",
    "WithLengths batch.balance=length",
    "WithLengths precision=fp32 batch.balance=length strategy=fsdp",
    "WithLengths precision=fp32 batch.balance=length stop=3",
    "WithLength precision=fp32 batch.balance=length",
    "WithLength precision=fp32 batch.balance=length train.loader_workers=1",
    "Packed precision=fp32",
    "Packed precision=fp32 batch.balance=length strategy=fsdp",
    "WeightedAndBalanced precision=fp32 batch.balance=length stop=2",
    "Streamed precision=fp32",
    "Streamed precision=fp32 stop=3 stop=6",
    "OrderOfRank",
    "LengthsOfRank batch.balance=length",
    "LengthIsText batch.balance=length",
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    place = tmp_path_factory.mktemp("order")
    worker = Path(__file__).parent / "data_worker.py"
    arguments = [order_tasks.__name__, json.dumps(COMMON), json.dumps(CASES)]
    return json.loads(torchrun(worker, arguments, 2, place).splitlines()[-1])


def orders_of(name: str) -> list[list[int]]:
    """The two epochs, as the case orders them."""
    if name == "Streamed":
        return [list(range(SAMPLES))] * 2
    task: Any = getattr(order_tasks, name)()
    if hasattr(task, "order"):
        return [indices_of(ArrangedData(Texts(), task.order), epoch, 0).tolist() for epoch in range(2)]
    return [Permutation(SAMPLES, 0, epoch).take(0, SAMPLES) for epoch in range(2)]


@functools.cache
def big_batches(orders: tuple[tuple[int, ...], ...]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of plain PyTorch in fp64, each window as one batch."""
    model = build_model(Plain(), 0).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    losses, norms = list[float](), list[float]()
    for order in orders:
        for first in range(0, len(order), 24):
            texts: list[Tensor] = [text_of(index) for index in order[first : first + 24]]
            total, items = loss_sum(model, nn.utils.rnn.pad_sequence(texts, batch_first=True))
            optimizer.zero_grad()
            (total / items).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            losses.append((total / items).item())
    return losses, norms


@pytest.mark.parametrize("case", CASES[:-3])
def test_a_job_is_that_of_one_big_batch(case: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    name, _, options = case.partition(" ")
    losses, norms = big_batches(tuple(map(tuple, orders_of(name))))
    records = seen[case][0]["records"]
    exact = "precision=fp32" in options
    assert [line["step"] for line in records] == list(range(1, len(losses) + 1))
    assert [line["train/loss"] for line in records] == pytest.approx(losses, rel=1e-5 if exact else 0.02)
    assert [line["train/grad_norm"] for line in records] == pytest.approx(norms, rel=1e-4 if exact else 0.1)
    assert records[-1]["progress/epoch"] == (1 if name == "Streamed" else 2)


def test_micro_batches_hold_less_padding(seen: dict[str, list[dict[str, Any]]]) -> None:
    def padding(case: str) -> float:
        batches = [lengths for rank in seen[case] for lengths in rank["seen"]]
        return 1 - sum(map(sum, batches)) / sum(len(lengths) * max(lengths) for lengths in batches)

    plain, balanced = padding(CASES[0]), padding(CASES[1])
    assert balanced < plain / 2
    records = seen[CASES[1]][0]["records"]
    assert all(line["balance/padding_fraction"] < plain / 2 for line in records)
    assert "balance/padding_fraction" not in seen[CASES[0]][0]["records"][0]


def test_a_stopped_job_resumes_bit_by_bit(seen: dict[str, list[dict[str, Any]]]) -> None:
    whole, resumed = (seen[case][0]["records"] for case in (CASES[1], CASES[4]))
    for key in ("train/loss", "train/grad_norm", "balance/padding_fraction", "progress/samples"):
        assert [line[key] for line in resumed] == [line[key] for line in whole]


def test_a_stream_resumes_bit_by_bit_and_reads_nothing_again(seen: dict[str, list[dict[str, Any]]]) -> None:
    whole, resumed = (seen[case] for case in ("Streamed precision=fp32", "Streamed precision=fp32 stop=3 stop=6"))
    for key in ("train/loss", "train/grad_norm"):
        assert [line[key] for line in resumed[0]["records"]] == [line[key] for line in whole[0]["records"]]
    for rank in range(2):
        again = resumed[rank]["reads"] - whole[rank]["reads"]
        assert again <= 2 * 6, "a block of both ranks that was read ahead at each stop; the past would be 96 samples"


def test_ranks_run_equally_many_micro_batches_of_alike_lengths(seen: dict[str, list[dict[str, Any]]]) -> None:
    one, two = (rank["seen"] for rank in seen[CASES[1]])
    assert len(one) == len(two) == 2 * (4 * 3 + 3), "3 full windows of 4 micro-batches, a short one of 3; 2 epochs"
    work = [sum(len(lengths) * max(lengths) for lengths in batches) for batches in (one, two)]
    assert max(work) / min(work) < 1.1


def test_lengths_are_read_once_by_the_ranks_together(seen: dict[str, list[dict[str, Any]]]) -> None:
    """Per rank: half of the samples for their lengths, then half of both epochs, and those that the ranks compare."""
    case = CASES[1].replace("WithLengths", "WithLength")
    with_method, without = ([rank["reads"] for rank in seen[each]] for each in (CASES[1], case))
    assert [b - a for a, b in zip(with_method, without, strict=True)] == [SAMPLES // 2] * 2


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (CASES[-3], "DataError: train_data() differs between ranks: 90 samples, order "),
        (CASES[-2], "DataError: train_data() differs between ranks: 90 samples, lengths "),
        (CASES[-1], "DataError: length(sample) returned a str for sample "),
    ],
)
def test_mistakes_are_one_message(case: str, message: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    assert all(rank["error"].startswith(message) for rank in seen[case])
