"""The record: the names of its metrics, what a full disk leaves of it, and its truncation to a checkpoint's step."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from launcher.errors import RecordFailed
from launcher.plan.sync_policy import Collective
from launcher.train.metrics import Record, epochs_done, peak_memory, truncate_record
from tests.helpers import ROOT, make_plan


def test_every_metric_is_in_the_table() -> None:
    table = [
        line
        for line in (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    rows = "\n".join(table)
    groups = "train|eval|batch|progress|comm|checkpoint|time|throughput|noise|amp|memory|straggler|predicted"
    written = {
        name
        for file in (*(ROOT / "launcher" / "train").rglob("*.py"), ROOT / "launcher" / "plan" / "run_plan.py")
        for name in re.findall(rf'"((?:{groups})/[a-z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert "noise/scale" in written, "the names are found"
    assert {name for name in written if f"`{name}`" not in rows} == set()
    kinds = next(line for line in table if "comm/KIND/" in line)
    assert [kind.value for kind in Collective if f"`{kind.value}`" not in kinds] == []


def test_memory_on_a_gpu_is_what_is_allocated_and_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.peak": 3, "reserved_bytes.all.peak": 5, "allocated_bytes.all.current": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    assert peak_memory(torch.device("cuda", 0)) == {"memory/peak_bytes": 3, "memory/reserved_bytes": 5}
    assert peak_memory(torch.device("cpu")).keys() == {"memory/peak_bytes"}


@pytest.mark.parametrize(
    ("policy", "window", "samples", "epochs"),
    [("drop", 29, 900, 10), ("drop", 1, 60, 60 / 100), ("exact", 39, 1000, 10), ("exact", 1, 60, 60 / 100)],
)
def test_whole_epochs_are_whole_numbers(policy: str, window: int, samples: int, epochs: float) -> None:
    """Of 100 samples, the last 10 are a short window, or dropped."""
    plan = make_plan("batch.global_size=30", f"batch.short_window={policy}", "cluster.workers_per_node=1", samples=100)
    result: Any = SimpleNamespace(window=window, epoch=0)
    assert epochs_done(samples, result, plan) == epochs


def test_numbers_that_tasks_return(tmp_path: Path) -> None:
    """A task's formula may return NumPy's scalars, or count more than 64 bits hold."""
    path = tmp_path / "metrics.jsonl"
    numbers = {"double": np.float64(1.5), "single": np.float32(0.5), "int": np.int64(3), "many": 2**70, "nan": math.nan}
    record = Record(path, wait_for_space=False)
    record.write(1, numbers)
    record.close()
    assert json.loads(path.read_bytes()) == {
        "step": 1, "double": 1.5, "single": 0.5, "int": 3.0, "many": 2.0**70, "nan": None,
    }  # fmt: skip


@pytest.mark.parametrize("newer", [b"", b'{"step": 1}\n' * 9])
def test_full_disk_of_a_superseded_attempt_does_not_change_the_new_record(
    newer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    record = Record(path, wait_for_space=False)
    record.write(1, {"train/loss": 1.0})
    old, new = tmp_path / "old", tmp_path / "new"
    old.hardlink_to(path)
    new.write_bytes(newer)
    new.replace(path)
    file = record._file  # pyright: ignore[reportPrivateUsage]

    class FullDisk:
        def write(self, line: bytes) -> int:
            file.write(line[:4])
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name: str) -> object:
            return getattr(file, name)

    monkeypatch.setattr(record, "_file", FullDisk())
    with file, pytest.raises(RecordFailed, match="No space left on device"):
        record.write(2, {"train/loss": 0.5})
    assert path.read_bytes() == newer
    assert [json.loads(line)["step"] for line in old.read_text().splitlines()] == [1]


def line(step: int) -> str:
    return json.dumps({"step": step, "train/loss": 1 / step, "note": "x" * (step % 7)}) + "\n"


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


TAILS = {
    "whole": b"",
    "torn": b'{"step": 13, "trai',
    "torn within a number": b'{"step": 1',
    "zeros": bytes(5000),
    "zeros and a line": bytes(300) + b"\n" + bytes(20),
    "garbled": b'\xff\xfe{"step": 4}\x00\n{"step":\n[3]\nnull\n"step"\n{"step": "3"}\n',
    "not JSON": b'{"step": 5, \n',
    "empty lines": b"\n\n\n",
}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("step", [0, 1, 5, 12, 99])
@pytest.mark.parametrize("every", [1, 3])
def test_what_is_kept_is_whole_and_not_later(tmp_path: Path, tail: str, step: int, every: int) -> None:
    record = tmp_path / "metrics.jsonl"
    lines = {each: line(each) for each in range(every, 13, every)}
    record.write_bytes("".join(lines.values()).encode() + TAILS[tail])
    truncate_record(record, step, None)
    assert record.read_text() == "".join(text for each, text in lines.items() if each <= step)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_step_itself_is_added_where_it_is_missing(tmp_path: Path) -> None:
    record, last = tmp_path / "metrics.jsonl", json.loads(line(4))
    truncate_record(record, 4, last)
    assert steps(record) == [4], "of a record that is not there"
    record.write_text("")
    truncate_record(record, 4, last)
    assert steps(record) == [4]
    record.write_text(line(2) + line(3) + line(5))
    truncate_record(record, 4, last)
    assert steps(record) == [2, 3, 4]
    truncate_record(record, 4, last)
    assert steps(record) == [2, 3, 4], "once"


def test_whoever_has_the_old_one_open_writes_where_nobody_reads(tmp_path: Path) -> None:
    record = tmp_path / "metrics.jsonl"
    record.write_text(line(1) + line(2) + line(3))
    with record.open("a") as older:
        truncate_record(record, 2, None)
        older.write(line(4))
    assert steps(record) == [1, 2]


def test_a_file_system_that_refuses_leaves_the_record_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "metrics.jsonl"
    record.write_text("".join(map(line, range(1, 2000))))

    def without(*_: Any, **__: Any) -> int:
        raise OSError("not supported")

    before = record.read_bytes()
    monkeypatch.setattr(os, "fsync", without)
    with pytest.raises(OSError, match="not supported"):
        truncate_record(record, 700, None)
    assert record.read_bytes() == before
    assert len([*tmp_path.iterdir()]) == 1, "and nothing is left behind"
