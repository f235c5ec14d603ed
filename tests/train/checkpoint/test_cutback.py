"""The record is cut back to a checkpoint's step, whatever state its end is in, and into a file of its own."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from launcher.train.checkpoint.resume import cut_back


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
def test_what_is_kept_is_whole_and_not_later(tmp_path: Path, tail: str, step: int) -> None:
    record = tmp_path / "metrics.jsonl"
    lines = [line(each) for each in range(1, 13)]
    record.write_bytes("".join(lines).encode() + TAILS[tail])
    cut_back(record, step, None)
    assert record.read_text() == "".join(lines[:step])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("seed", range(20))
def test_any_record_that_is_cut_anywhere(tmp_path: Path, seed: int) -> None:
    """Logged every few steps, cut in the middle of a line, some bytes of its end turned over."""
    generator = random.Random(seed)
    record, every = tmp_path / "metrics.jsonl", generator.randrange(1, 5)
    lines = [line(each).encode() for each in range(every, 400, every)]
    text = b"".join(lines)[: generator.randrange(sum(map(len, lines)))]
    whole = [json.loads(each)["step"] for each in text.split(b"\n")[:-1]]
    step = generator.randrange(420)
    wanted = [each for each in whole if each <= step]
    if wanted:  # what lies behind the lines that are kept may be anything
        begin = sum(len(each) for each in lines[: len(wanted)])
        text = text[:begin] + bytes(generator.choice(b'\x00\xff{"x') for _ in text[begin:])
    record.write_bytes(text)
    cut_back(record, step, None)
    assert steps(record) == wanted


def test_the_step_itself_is_added_where_it_is_missing(tmp_path: Path) -> None:
    record, last = tmp_path / "metrics.jsonl", json.loads(line(4))
    cut_back(record, 4, last)
    assert steps(record) == [4], "of a record that is not there"
    record.write_text("")
    cut_back(record, 4, last)
    assert steps(record) == [4]
    record.write_text(line(2) + line(3) + line(5))
    cut_back(record, 4, last)
    assert steps(record) == [2, 3, 4]
    cut_back(record, 4, last)
    assert steps(record) == [2, 3, 4], "once"


def test_whoever_has_the_old_one_open_writes_where_nobody_reads(tmp_path: Path) -> None:
    record = tmp_path / "metrics.jsonl"
    record.write_text(line(1) + line(2) + line(3))
    with record.open("a") as older:
        cut_back(record, 2, None)
        older.write(line(4))
    assert steps(record) == [1, 2]


def test_another_file_system_and_one_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "metrics.jsonl"
    record.write_text("".join(map(line, range(1, 2000))))

    def without(*_: Any, **__: Any) -> int:
        raise OSError("not supported")

    monkeypatch.setattr(os, "copy_file_range", without)
    cut_back(record, 1500, None)
    assert steps(record) == [*range(1, 1501)]
    before = record.read_bytes()
    monkeypatch.setattr(os, "fsync", without)
    with pytest.raises(OSError, match="not supported"):
        cut_back(record, 700, None)
    assert record.read_bytes() == before
    assert len([*tmp_path.iterdir()]) == 1, "and nothing is left behind"
