"""The record: its names are those of the table in docs/reference/metrics.md."""

from __future__ import annotations

import re

from launcher.plan.sync_policy import Collective
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
