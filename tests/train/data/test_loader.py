"""Handing micro-batches over: whatever a collate returns arrives as it was."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import _utils
from torch.utils.data._utils import signal_handling

from launcher.errors import DataError
from launcher.process import STOP_SIGNALS
from launcher.train.data import loader
from launcher.train.data.fingerprint import outline
from launcher.train.data.loader import BY_VALUE_BYTES, prefetch, to_device
from tests.helpers import make_plan, patience

CPU = torch.device("cpu")


class Pair(NamedTuple):
    inputs: torch.Tensor
    name: str


class Given(torch.utils.data.Dataset[tuple[Any, int]]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.items[index], index


ITEMS: list[Any] = [
    torch.arange(6).reshape(2, 3),
    torch.randn(3, 4, dtype=torch.bfloat16).t(),
    torch.zeros(0, 5),
    torch.tensor(2.5),
    torch.ones(BY_VALUE_BYTES),
    torch.eye(4).to_sparse(),
    {"a": [torch.tensor([True, False]), "text"], "b": Pair(torch.tensor([1j]), "x")},
    None,
    17,
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_everything_arrives_as_it_was_and_in_order(workers: int) -> None:
    plan = make_plan(f"train.loader_workers={workers}")
    order = [*range(len(ITEMS)), *range(len(ITEMS))]
    seen = list(prefetch(Given(ITEMS), plan, CPU, 0, order))
    assert [batch.samples for batch in seen] == order
    for batch in seen:
        assert outline(ITEMS[batch.samples]).exact == outline(batch.data).exact


def test_a_tensor_that_arrives_may_be_written_to() -> None:
    (batch,) = prefetch(Given(ITEMS), make_plan(), CPU, 0, [0])
    batch.data.add_(1)
    assert batch.data[0, 0] == 1


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_request_does_not_end_a_process_that_is_starting(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start = signal_handling._set_worker_signal_handlers

    def start_and_get_a_signal() -> None:
        start()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", start_and_get_a_signal)
    assert len(list(prefetch(Given(ITEMS), make_plan("train.loader_workers=1"), CPU, 0, [0, 1]))) == 2


@pytest.mark.parametrize("lock", ["torch's", "libc's"])
def test_a_process_that_does_not_start_is_replaced(
    lock: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulate a fork during which another thread held a lock: the process waits before its start-up has ended."""
    first = multiprocessing.Semaphore(1)

    def block_once(*arguments: Any) -> None:
        if first.acquire(block=False):
            signal.pause()
        blocked(*arguments)

    if lock == "libc's":  # that of exit handlers, which __cxa_finalize takes
        blocked = loader._LIBC.__cxa_finalize
        monkeypatch.setattr(loader, "_LIBC", SimpleNamespace(__cxa_finalize=block_once))
    else:
        blocked = signal_handling._set_worker_signal_handlers
        monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", block_once)
    monkeypatch.setattr(loader, "START_S", 5.0)
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    plan = make_plan("train.loader_workers=2")
    seen = list(prefetch(Given([*range(9)]), plan, CPU, 0, iter([*range(9)])))
    assert [(batch.data, batch.samples) for batch in seen] == [(number, number) for number in range(9)]
    assert capsys.readouterr().out.startswith("1 of 2 loader processes did not start within 5 s")
    for process in multiprocessing.active_children():  # torch before 2.13 does not wait for those that it terminates
        process.join(patience(10))
    assert not multiprocessing.active_children()


def test_processes_that_never_start_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", signal.pause)
    monkeypatch.setattr(loader, "START_S", 0.1)
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    with pytest.raises(DataError, match="Loader processes did not start, 3 times"):
        list(prefetch(Given(ITEMS), make_plan("train.loader_workers=1"), CPU, 0, [0]))


FORKS_BESIDE_THREADS = """
import gc, os, sys, threading, time
from launcher.train.data import loader

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(1e-4)  # lets other threads run, as the end of a tensor does

def start_threads():
    while True:
        threading.Thread(target=int).start()

threading.Thread(target=start_threads, daemon=True).start()
gc.set_threshold(1)
for _ in range(200):
    Garbage()
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
print("done", flush=True)
os._exit(0)
"""


def test_a_fork_does_not_wait_for_threads_that_wait_for_it() -> None:
    """Collect garbage at each fork while other threads register themselves with Python."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS_BESIDE_THREADS], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.stdout == "done\n", done.stderr


def test_a_failing_dataset_says_where() -> None:
    """In the step's own process Python says it; from a loader process the message has type, words and place."""
    with pytest.raises(IndexError, match="list index out of range"):
        list(prefetch(Given(ITEMS), make_plan("train.loader_workers=0"), CPU, 0, [100]))
    with pytest.raises(DataError) as caught:
        list(prefetch(Given(ITEMS), make_plan("train.loader_workers=1"), CPU, 0, [100]))
    first, _, where, code = str(caught.value).splitlines()[:4]
    assert first == "IndexError: list index out of range"
    assert where.startswith(f'  File "{__file__}", line ')
    assert where.endswith("in __getitem__")
    assert "self.items[index]" in code


def test_a_failing_stream_says_where() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield torch.zeros(1), 1
            raise KeyError("speaker")

    batches = prefetch(Stream(), make_plan("train.loader_workers=1"), CPU, 0)
    assert next(batches).samples == 1
    with pytest.raises(DataError, match=r"^KeyError: 'speaker'(.|\n)*in __iter__"):
        next(batches)


META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: torch.Tensor
    edges: list[torch.Tensor]
    name: str = "graph"
    degree: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", torch.ones(3))


class Encoding(UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding: a mapping that moves itself, and takes no ``non_blocking``."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Ragged:
    """Moves itself in place, and returns nothing."""

    def __init__(self) -> None:
        self.values = torch.ones(4)

    def to(self, device: torch.device, non_blocking: bool) -> None:
        self.values = self.values.to(device, non_blocking=non_blocking)


class Plain(UserDict[str, Any]): ...


class Fields(dict[str, Any]):
    note = ""


class Rows(list[Any]): ...


def whole(tensor: torch.Tensor) -> Any:
    """Every container that a collate function may return, each with ``tensor`` in it."""
    fields = Fields(a=tensor)
    fields.note = "kept"
    return {
        "list": [tensor, "text", None, 3],
        "named tuple": Pair(tensor, "x"),
        "dataclass": Graph(tensor, [tensor]),
        "defaultdict": defaultdict(list, a=[tensor]),
        "ordered": OrderedDict(b=tensor, a=(tensor,)),
        "user dict": Plain(a=Graph(tensor, [])),
        "fields": fields,
        "rows": Rows([tensor, (tensor,)]),
        "deque": deque([tensor]),
        "shape": torch.Size([2, 3]),
        "class": Graph,
    }


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for each in value.values() for t in tensors_of(each)]
    if isinstance(value, list | tuple | deque):
        return [t for each in value for t in tensors_of(each)]
    if isinstance(value, Graph):
        return tensors_of([value.nodes, value.edges, value.degree])
    return []


def test_every_container_is_moved_and_keeps_its_type() -> None:
    before = whole(torch.ones(2))
    moved = to_device(before, META)
    assert len(tensors_of(moved)) == len(tensors_of(before)) == 14
    assert all(tensor.device == META for tensor in tensors_of(moved))
    assert all(tensor.device == CPU for tensor in tensors_of(before))
    assert {key: type(value) for key, value in moved.items()} == {key: type(value) for key, value in before.items()}
    assert moved["list"][1:] == ["text", None, 3]
    assert moved["named tuple"].name == "x"
    assert moved["defaultdict"]["missing"] == []
    assert list(moved["ordered"]) == ["b", "a"]
    assert moved["fields"].note == "kept"
    assert moved["dataclass"].name == "graph"
    assert moved["class"] is Graph


def test_objects_move_themselves() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    moved = to_device([Encoding({"ids": torch.ones(2)}, "fast"), Ragged(), packed], META)
    assert (type(moved[0]), moved[0].encodings, moved[0]["ids"].device) == (Encoding, "fast", META)
    assert moved[1].values.device == META
    assert (type(moved[2]), moved[2].data.device) == (type(packed), META)


def test_pinning_reaches_what_torch_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    before = whole(torch.ones(2))
    pinned_item: Any = _utils.pin_memory.pin_memory(loader._Pinned((before, 3)))
    data, samples = pinned_item
    assert samples == 3
    assert len(pinned) == len(tensors_of(before))
    assert type(data["dataclass"]) is Graph
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # made by the loader, such as DALI's
    copied = loader._Pinned((before, 3)).pin_memory()[0]["dataclass"].nodes
    assert copied.equal(before["dataclass"].nodes)
    assert copied.data_ptr() != before["dataclass"].nodes.data_ptr(), "which may be used for the next batch"
    assert len(pinned) == len(tensors_of(before))
