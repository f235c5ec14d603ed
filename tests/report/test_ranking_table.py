"""Ranking as text, JSON and page: all of them say the same, and nothing in a label becomes markup."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

from rich.console import Console

from launcher.plan.ranking import Ranking, rank
from launcher.report.ranking_page import frontier_plots, ranking_page
from launcher.report.ranking_table import ranking_json, ranking_tables
from tests.plan.test_ranking import WORKERS, candidate


def ranking() -> Ranking:
    cells = [
        candidate("fast <b>[red]", 0.5, f"{WORKERS}=4", peak=900, error=0.2, memory=1000),
        candidate("close", 0.55, f"{WORKERS}=4", peak=900, error=0.2),
        candidate("cheap", 1.5, f"{WORKERS}=1", peak=900, error=0.01),
        candidate("large", 0.1, f"{WORKERS}=4", peak=5_000_000, memory=1_000_000),
        candidate("untimed", None, f"{WORKERS}=2", peak=800),
    ]
    return rank(cells, [("x", "not so"), ("y", "not so")])


def shown(ranking: Ranking) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for part in ranking_tables(ranking):
            console.print(part, markup=False, highlight=False)
    return captured.get()


def test_the_table_names_the_leading_cells_and_the_frontier() -> None:
    text = shown(ranking())
    lines = {line.split()[1]: line for line in text.splitlines() if re.match(r" *\d ", line)}
    assert [line.rstrip().endswith("*") for line in lines.values()] == [True, False, True]
    assert "Fastest: #1, fast <b>[red]. #1 and #2 cannot be told apart: their intervals overlap." in text
    assert "Fewest worker-hours: #3, cheap." in text
    assert "Without a predicted step time: 1 cell." in text
    (large,) = [line for line in text.splitlines() if line.startswith("large")]
    assert re.search(r"5\.00 MB +4\.08 MB +1\.00 MB", large)
    assert "x, y: not so" in text


def test_json_has_the_same() -> None:
    content = json.loads(ranking_json(ranking()))
    assert content["by_time"] == ["fast <b>[red]", "close", "cheap"]
    assert content["by_gpu_hours"][0] == "cheap"
    assert content["frontier"] == ["fast <b>[red]", "cheap"]
    cells = {cell["cell"]: cell for cell in content["cells"]}
    assert {name: cell["fits"] for name, cell in cells.items()} == dict.fromkeys(cells, True) | {"large": False}
    assert [name for name, cell in cells.items() if cell["as_fast_as_the_first"]] == ["fast <b>[red]", "close"]
    assert cells["large"]["missing_bytes"] == 4_080_000
    assert cells["untimed"]["step"] is None
    assert content["impossible"] == [{"cells": ["x", "y"], "reason": "not so"}]


def test_the_page_stands_alone_and_shows_texts_as_texts() -> None:
    made = ranking()
    text = ranking_page(made, "title </script><i>", datetime(2026, 1, 2, tzinfo=UTC))
    assert "<i>" not in text
    assert "fast &lt;b&gt;[red]" in text
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", text)
    (plot,) = frontier_plots(made)
    line, points = plot.data
    assert line["x"] == [each.gpu_hours for each in made.frontier]
    assert points["y"] == [0.5, 0.55, 1.5]
    assert frontier_plots(rank([candidate("a", None)])) == []


def test_nothing_timed_is_a_table_without_empty_columns() -> None:
    text = shown(rank([candidate("a", None), candidate("b", None)]))
    assert "frontier" not in text
    assert "GPU-hours" not in text
    assert "Without a predicted step time: 2 cells." in text
