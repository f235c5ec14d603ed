"""The record: the names of its metrics, and what a full disk leaves of it."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from launcher.errors import RecordFailed
from launcher.plan.sync_policy import Collective
from launcher.train.metrics import Record
from tests.helpers import ROOT


def test_every_metric_is_in_the_table() -> None:
    table = [
        line
        for line in (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    rows = "\n".join(table)
    groups = "train|eval|batch|progress|comm|checkpoint|time|throughput|noise|amp|memory|straggler"
    written = {
        name
        for file in (ROOT / "launcher" / "train").rglob("*.py")
        for name in re.findall(rf'"((?:{groups})/[a-z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert "noise/scale" in written, "the names are found"
    assert {name for name in written if f"`{name}`" not in rows} == set()
    kinds = next(line for line in table if "comm/KIND/" in line)
    assert [kind.value for kind in Collective if f"`{kind.value}`" not in kinds] == []


@pytest.mark.parametrize("newer", [b"", b'{"step": 1}\n' * 9])
def test_full_disk_of_a_superseded_attempt_does_not_change_the_new_record(
    newer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    record = Record(path, waits=False)
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
