"""Ranking as text and as JSON: both say the same, and nothing in a label becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich.console import Console

from launcher.cli.plan import ranking_json, ranking_tables
from launcher.plan.strategy_choice import Ranking, rank
from launcher.report.recorded_step import RecordedSteps
from tests.plan.test_strategy_choice import WORKERS, candidate

NONE = RecordedSteps(Path("/nowhere"))


def ranking() -> Ranking:
    cells = [
        candidate("every <b>[red]", f"{WORKERS}=4", "strategy.sync=every", "batch.accumulation=4", peak=900),
        candidate("boundary", f"{WORKERS}=4", "batch.accumulation=4", peak=900),
        candidate("large", f"{WORKERS}=4", peak=5_000_000, memory=1_000_000),
        candidate("unknown", f"{WORKERS}=1"),
    ]
    return rank(cells, [("x", "not so"), ("y", "not so")])


def test_the_table_has_the_best_cell_first() -> None:
    console = Console(width=200)
    with console.capture() as captured:
        for part in ranking_tables(ranking(), NONE):
            console.print(part, markup=False, highlight=False)
    text = captured.get()
    lines = [line for line in text.splitlines() if re.match(r" *\d ", line)]
    assert [line.split()[1] for line in lines] == ["unknown", "boundary", "every"]
    assert "every <b>[red]" in lines[2]
    assert "measured step" not in text
    (large,) = [line for line in text.splitlines() if line.startswith("large")]
    assert re.search(r"5\.00 MB +4\.08 MB +1\.00 MB", large)
    assert "x, y: not so" in text


def test_json_has_the_same() -> None:
    content = json.loads(ranking_json(ranking(), NONE))
    assert [cell["cell"] for cell in content["cells"]] == ["unknown", "boundary", "every <b>[red]", "large"]
    assert [cell["fits"] for cell in content["cells"]] == [None, True, True, False]
    assert content["cells"][-1]["missing_bytes"] == 4_080_000
    assert {cell["measured"] for cell in content["cells"]} == {None}
    assert content["impossible"] == [{"cells": ["x", "y"], "reason": "not so"}]
