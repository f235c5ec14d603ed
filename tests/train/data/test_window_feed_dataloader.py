"""A DataLoader as a task's data: what is used of it, and which ones are refused before anything is started.

The windows of one: test_ready_batches.py.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, get_worker_info

from launcher.errors import ConfigError, TaskError
from launcher.plan.task_inspection import describe_task
from launcher.task import eval_sets, first_batch, is_mapped, load_task, train_data
from tests.helpers import inspection_of
from tests.train.data.data_tasks import SAMPLES, TRAINED, Numbers

TASKS = "tests.train.data.data_tasks"
REFUSED = {
    "batches": "eval_data() returned a DataLoader with batch_size=None",
    "batch_sampler": "with a batch_sampler of its own (list)",
    "subset": "whose SubsetRandomSampler draws 40 of 80 samples",
    "weights": "whose WeightedRandomSampler draws with replacement",
    "collates": "eval_data() returned a DataLoader with another collate_fn than train_data()",
}


def test_the_plan_counts_samples_and_says_what_is_used() -> None:
    task = describe_task(inspection_of(f"{TASKS}.Loaded", "train.seed=7"))
    assert task.samples == TRAINED
    assert task.stream is not None
    assert (task.stream.ready, task.stream.batch_size) == (True, 4)
    trained_on, held_out = task.data_notes
    assert "train_data() returned a DataLoader: its batches are the micro-batches" in trained_on
    assert "eval_data() returned a DataLoader: its dataset and collate_fn are used. Its sampler" in held_out


def test_batches_are_used_and_of_held_out_data_the_dataset() -> None:
    task = load_task(f"{TASKS}.Loaded", {}, [], seed=7)
    train, held_out = train_data(task, 7), eval_sets(task, 7)[""]
    assert isinstance(train, DataLoader)
    assert len(held_out) == SAMPLES - TRAINED
    assert task.collate([held_out[0], held_out[1]]).shape == (2, 2)  # pyright: ignore[reportAttributeAccessIssue]
    assert first_batch(task, train, 3)[0].shape == (3, 2)


def test_a_collate_of_the_task_that_its_loader_does_not_call_is_refused() -> None:
    class Collating:
        collate_fn: Any = None

        def collate(self, samples: list[Any]) -> Any:
            return torch.stack(samples)

        def train_data(self) -> Any:
            return DataLoader(Numbers(), 4, collate_fn=self.collate_fn)

    task = cast("Any", Collating())
    with pytest.raises(TaskError, match=r"has another collate\(\)[\s\S]*collate_fn=self.collate"):
        train_data(task, 7)
    task.collate_fn = task.collate
    assert isinstance(train_data(task, 7), DataLoader)
    task.train_data = lambda: DataLoader(Numbers(), None)  # collates nothing
    assert isinstance(train_data(task, 7), DataLoader)


@pytest.mark.parametrize("how", REFUSED)
def test_what_is_not_its_dataset_is_refused(how: str) -> None:
    task = load_task(f"{TASKS}.LoadedInVain", {"how": how}, [], seed=7)
    train_data(task, 7)
    with pytest.raises(TaskError, match=re.escape(REFUSED[how])):
        eval_sets(task, 7)


@pytest.mark.parametrize("name", ["", "dev"])
def test_a_loader_of_held_out_data_draws_each_sample_once(name: str) -> None:
    task, loader = cast("Any", SimpleNamespace()), DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(40)))
    task.eval_data = lambda: {name: loader} if name else loader
    with pytest.raises(TaskError, match="Return the dataset itself, or a Subset of those that belong to it"):
        eval_sets(task, 7)


class TakesAnything:
    def __init__(self, width: int, **rest: int) -> None:
        del width, rest


def test_a_missing_parameter_is_named_where_any_other_is_taken() -> None:
    with pytest.raises(ConfigError, match=r"task.width: .* needs this argument"):
        load_task(f"{__name__}.TakesAnything", {"height": 1}, [])


@pytest.mark.parametrize("count", [2, 9])
def test_the_first_batch_is_the_same_of_every_kind_of_data(count: int) -> None:
    samples = [torch.tensor([float(number)]) for number in range(5)]

    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(samples)

        def __len__(self) -> int:
            return len(samples)

    for data, mapped in ((samples, True), (Stream(), False)):
        assert is_mapped(data) is mapped
        batch, size = first_batch(cast("Any", object()), data, count)
        assert size == min(count, 5)
        assert torch.equal(batch, torch.stack(samples[:count]))


def seed_generators(worker: int) -> None:
    seed = torch.initial_seed() % 2**32 + worker
    np.random.seed(seed)
    random.seed(seed)


BASE_SEED = 3


def seed_from_a_constant(worker: int) -> None:
    np.random.seed(BASE_SEED + worker)


def open_files(worker: int) -> None:
    del worker
    cast("Any", get_worker_info()).dataset.file = "handle"


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_init_fn_that_would_not_be_called_is_refused(stream: bool) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    def read(function: Any, workers: int) -> Any:
        data: Any = Stream() if stream else Numbers()
        task = cast("Any", SimpleNamespace())
        task.eval_data = lambda: DataLoader(data, 4, num_workers=workers, worker_init_fn=function)
        return eval_sets(task, 7)

    for function in (open_files, functools.partial(open_files)):
        with pytest.raises(TaskError, match=r"worker_init_fn=.*would not be called[\s\S]*leave worker_init_fn out"):
            read(function, 2)
    read(open_files, 0)  # nor would torch call it
    read(seed_generators, 2)
    read(seed_from_a_constant, 2)
    read(functools.partial(seed_generators), 2)
