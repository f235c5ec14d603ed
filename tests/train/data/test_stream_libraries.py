"""Streams of Hugging Face and of torchdata, divided and resumed."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pytest
import torch

from launcher.plan.data_shards import stream_info
from launcher.plan.windows import StreamInfo
from launcher.task import train_data
from tests.train.data.feeds import run_resumably
from tests.train.data.test_stream_shards import READS, Stateful, plan_of


@pytest.mark.parametrize("buffer", [2, 3])
def test_samples_in_a_shuffle_buffer_are_not_lost_on_a_resume(buffer: int) -> None:
    """Outlines of the samples that follow may agree by chance with those at another position of a small buffer."""
    import datasets

    whole = datasets.Dataset.from_dict({"x": list(range(48))})
    for seed in range(12):
        make = functools.partial(whole.to_iterable_dataset(num_shards=4).shuffle, seed=seed, buffer_size=buffer)
        run = functools.partial(run_resumably, plan_of(4, 1), lambda _, make=make: make(), collate=numbers_of)
        _, place, states = run(windows=2)
        assert run(place, states)[0] == run()[0][2:]


def numbers_of(rows: list[Any]) -> Any:
    return torch.tensor([row["x"] for row in rows])


@pytest.mark.parametrize("shuffled", [False, True])
def test_streams_of_hugging_face(shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets.distributed

    whole = datasets.Dataset.from_dict({"x": list(range(120))})

    def make(rank: int = 0) -> Any:  # noqa: ARG001
        stream = whole.to_iterable_dataset(num_shards=8).filter(lambda row: row["x"] % 10 < 9)
        stream = stream.map(lambda row: READS.append(row["x"]) or {"x": row["x"]}).with_format("torch")
        return stream.shuffle(seed=1, buffer_size=4) if shuffled else stream

    def collate(rows: list[Any]) -> Any:
        return torch.stack([row["x"] for row in rows])

    assert stream_info(make()) == StreamInfo(shards=8)
    assert stream_info(whole.to_iterable_dataset(num_shards=8).shuffle()).automatic
    filtered = operator.methodcaller("filter", lambda _, number: number > 9, with_indices=True)
    for operation in (operator.methodcaller("skip", 3), operator.methodcaller("take", 9), filtered):
        assert stream_info(operation(make())).problem
    assert stream_info(datasets.interleave_datasets([make(), make()])).problem
    assert stream_info(datasets.distributed.split_dataset_by_node(make(), 0, 2)).problem
    assert not stream_info(make().map(lambda rows: rows, batched=True)).automatic
    assert stream_info(datasets.concatenate_datasets([make(), make()])) == StreamInfo(shards=16)

    expected: list[list[int]] = []
    for epoch in range(2):
        parts = [make().shard(4, index) for index in range(4)]
        for part in parts:
            part.set_epoch(epoch)
        rows = [[int(row["x"]) for row in part] for part in parts]
        expected += [sorted(x for part in rows for x in part[at : at + 6]) for at in range(0, 27, 6)]
    for ranks, workers in ((1, 0), (2, 1), (1, 2), (3, 1)):
        assert run_resumably(plan_of(4, ranks, workers), make, collate=collate)[0] == expected
    _, place, states = run_resumably(plan_of(4, 4), make, windows=2, collate=collate)
    for ranks in (2, 1, 3):
        READS.clear()
        assert run_resumably(plan_of(4, ranks), make, place, states, collate=collate)[0] == expected[2:]
        again = len(READS) - (3 if ranks == 3 else 1) * (2 * 108 - 48)
        assert again <= 4 * ranks or shuffled


@pytest.mark.nightly  # needs torchdata, which the suite does not install
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_with_a_state_works_like_a_data_loader() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    task: Any = type("Task", (), {"train_data": lambda self: loaders.StatefulDataLoader(Stateful(), batch_size=4)})()  # noqa: ARG005
    notes: list[str] = []
    data = train_data(task, 0, notes)
    assert isinstance(data, Stateful)
    assert "returned a StatefulDataLoader" in notes[0]
