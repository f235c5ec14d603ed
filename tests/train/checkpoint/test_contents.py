"""Page-locked copies of a checkpoint's tensors, with the CUDA runtime stubbed: what they take, and what stays valid."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.train.checkpoint import contents
from launcher.train.checkpoint.contents import Staging

PAGE = 4096


class Runtime:
    """Page-locked memory of a process: that which is registered, and that which torch's own allocator would round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self.unmapped: list[int] = []  # when they were unregistered
        self.rounded = self.most = 0
        self.refuses = refuses
        self.error_pending = False  # CUDA keeps a refusal until a kernel is launched, which then fails
        self._empty = torch.empty
        calls = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch, "empty", self._allocate)
        monkeypatch.setattr(torch, "zeros", self._launch)
        monkeypatch.setattr(contents, "_is_on_device", lambda source: source.numel() > 0, raising=False)

    def _register(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        assert address % PAGE == 0
        if not self.refuses:
            self.registered[address] = size
            self.most = max(self.most, sum(self.registered.values()))
        self.error_pending = self.refuses != 0
        return self.refuses

    def _launch(self, *size: int, device: Any) -> Tensor:  # noqa: ARG002
        failed, self.error_pending = self.error_pending, False
        if failed:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return self._empty(*size)

    def _unregister(self, address: int) -> None:
        size = self.registered.pop(address)
        maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        if not any(int(start, 16) <= address and address + size <= int(end, 16) for start, end in maps):
            self.unmapped.append(address)

    def _allocate(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = self._empty(*size, **options)
        if pin_memory:
            self.rounded += 1 << (made.nbytes - 1).bit_length()
        return made


def state(extra: int = 0) -> dict[str, Any]:
    """Tensors just over a power of two, of several formats and shapes, one of them under two names."""
    tied = torch.randn(257, 1025)
    return {
        "model": {"embedding": tied, "head": tied, "scale": torch.tensor(3.0), "none": torch.empty(0)},
        "optimizer": {"moments": [torch.randn(1025, 1025, dtype=torch.float64), torch.randn(3, 5).bfloat16().T]},
        "buffers": {"mask": torch.tensor([True, False, True]), "count": torch.arange(70001 + extra)},
        "text": "as it is",
    }


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for entry in entries for tensor in flat(entry)]


def same(copied: dict[str, Any], wanted: dict[str, Any]) -> bool:
    pairs = zip(flat(copied), flat(wanted), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_page_locked_copies_take_no_more_memory_than_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, staged = Runtime(monkeypatch), Staging(torch.device("cuda"))
    first, second = state(), state()
    tensors = {tensor.data_ptr(): tensor for tensor in flat(first) if tensor.numel()}.values()
    true_size = sum(tensor.nbytes for tensor in tensors)
    copied = staged.copy(first)
    assert same(copied, first)
    assert copied["text"] == "as it is"
    taken = runtime.rounded + sum(runtime.registered.values())
    assert true_size <= taken <= true_size + 64 * len(tensors) + PAGE
    assert copied["model"]["embedding"] is copied["model"]["head"], "one copy of what is one tensor"
    places = [tensor.data_ptr() for tensor in flat(copied)]
    again = staged.copy(second)
    assert same(again, second)
    assert [tensor.data_ptr() for tensor in flat(again)] == places, "the next copy is made into the same memory"
    assert runtime.most == true_size


def test_other_tensors_take_other_memory_and_the_old_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unregistered before it is unmapped: later its address may belong to other memory."""
    runtime, staged = Runtime(monkeypatch), Staging(torch.device("cuda"))
    staged.copy(state())
    before = dict(runtime.registered)
    grown = state(extra=100_000)
    assert same(staged.copy(grown), grown)
    assert len(runtime.registered) == len(before)
    assert runtime.most == sum(runtime.registered.values()), "never both at once"
    apart = state()
    apart["model"]["head"] = apart["model"]["head"] + 1  # two names of one tensor no more
    assert same(staged.copy(apart), apart)
    staged.copy({"model": {"one": torch.ones(5)}})
    assert len(runtime.registered) == 1, "no longer needed"
    del staged
    gc.collect()
    assert not runtime.registered
    assert not runtime.unmapped


def test_where_the_driver_refuses_the_copies_are_as_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime, staged = Runtime(monkeypatch, refuses=304), Staging(torch.device("cuda"))
    wanted = state()
    assert same(staged.copy(wanted), wanted)
    assert "cannot be page-locked" in capsys.readouterr().out
    assert not runtime.error_pending, "the next kernel would fail"
    del staged
    gc.collect()
    assert not runtime.registered


def test_on_a_cpu_nothing_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    monkeypatch.setattr(contents, "_is_on_device", lambda source: source.is_cuda, raising=False)
    wanted = state()
    staged = Staging(torch.device("cpu"))
    assert same(staged.copy(wanted), wanted)
    assert not runtime.registered
    assert not runtime.rounded
