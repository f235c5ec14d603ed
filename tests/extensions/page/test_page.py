"""The page of `launch report`: what it holds, that names stay text, that it is light, and what its plots show."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import plotly.graph_objects
import pytest

from launcher.extensions.page import compare
from launcher.extensions.page.page import library_name
from launcher.extensions.page.page import page as render_page
from launcher.extensions.page.report_command import compare_runs, launch_report
from launcher.rundir.files import write_json
from launcher.rundir.paths import RunPaths, find
from tests.infra.made_runs import cell, make_run, make_sweep, read_records, write_records

LINES = [
    "Speed over workers", "Scaling efficiency over workers", "Bytes on the wire over accumulation",
    "Measured speed-up over accumulation",
]  # fmt: skip


class Page(html.parser.HTMLParser):
    """Return the addresses that a browser would fetch, and the text and scripts that it would show and run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.linked: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = [str(value) for name, value in attrs if name in ("src", "href", "srcset", "data")]
        (self.linked if tag == "a" else self.fetched).extend(found)
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def figures(self) -> dict[str, dict[str, Any]]:
        """The plots by title, each validated by plotly."""
        found = re.search(r"^const FIGURES = (.*);$", self.scripts[1], re.MULTILINE)
        assert found
        figures = json.loads(found[1])
        for figure in figures:
            plotly.graph_objects.Figure(data=figure["data"], layout=figure["layout"])
        return {figure["title"]: figure for figure in figures}


def page_of(runs: Path, *words: str) -> Page:
    """Return the page that `launch report` writes."""
    place = runs.parent / "page.html"
    assert launch_report([str(runs), "--html", str(place), *words]) == 0
    return Page(place.read_text())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs over accumulation and workers."""
    root = tmp_path / "runs"
    for accumulation in (1, 2, 4):
        for workers in (1, 2):
            words = (f"batch.accumulation={accumulation}", f"cluster.workers_per_node={workers}")
            make_run(root, f"a{accumulation}w{workers}", *words, step_s=(0.2 + 0.01 * accumulation) / workers**0.8)
    return root


def test_the_page_is_light_and_shares_the_plot_library(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_of(runs)
    library = runs.parent / library_name()
    assert library_name() in capsys.readouterr().out
    assert (page.fetched, page.open, len(page.scripts)) == ([library_name()], [], 2)
    assert (runs.parent / "page.html").stat().st_size < 200_000
    assert f"need JavaScript and the file {library_name()}" in page.text
    assert "Plotly" in library.read_text()
    library.write_text("kept")
    page_of(runs)
    assert library.read_text() == "kept", "it is written once"


def test_a_standalone_page_is_one_file(runs: Path) -> None:
    page = page_of(runs, "--standalone")
    assert (page.fetched, page.open, len(page.scripts)) == ([], [], 2)
    assert "Plotly" in page.scripts[0]
    assert library_name() not in page.text
    assert not (runs.parent / library_name()).exists()


def test_the_answer_comes_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = page_of(runs)
    order = [page.text.index(text) for text in ("Fastest:", "Sync policy:", "Basis:", "Varied", "All runs")]
    assert order == sorted(order)
    assert "Fastest: " in capsys.readouterr().out


def test_plots_of_a_sweep_over_two_settings(runs: Path) -> None:
    figures = page_of(runs).figures
    heat = [f"{name} over accumulation and workers_per_node"
            for name in ("Step time", "Speed", "Held-out loss", "Worker-seconds")]  # fmt: skip
    assert [*figures] == [*heat, "Where the time of a step goes", *LINES, "Loss", "Worker-seconds to a loss"]
    (grid,) = figures[heat[0]]["data"]
    assert (grid["x"], grid["y"]) == (["1", "2", "4"], ["1", "2"])
    assert grid["z"][0] == pytest.approx([1003 * (0.2 + 0.01 * a) for a in (1, 2, 4)])
    best = [figures[title]["data"][0]["colorscale"] for title in heat[:2]]
    assert best[0][0][1] == best[1][1][1], "the lowest time and the highest speed"
    loss = figures["Loss"]
    for choice, _ in loss["choices"][1].values():
        assert [len(x) for x in choice["x"]] == [len(trace["y"]) for trace in loss["data"]]
    assert [*loss["choices"][0]] == ["training loss", "smoothed", "held-out loss"]
    for name in ("Where the time of a step goes", "Worker-seconds to a loss"):
        assert figures[name]["layout"]["yaxis"]["zeroline"] is False, "it would run through the first bar's label"


def test_heat_maps_need_two_settings_and_leave_missing_cells_empty(runs: Path) -> None:
    (runs / "a4w2/metrics.jsonl").unlink()
    for seed in (1, 2):
        make_run(runs, f"again{seed}", "batch.accumulation=1", f"train.seed={seed}", step_s=0.5 * seed, steps=20)
    figures = page_of(runs).figures
    heat = figures["Step time over accumulation and workers_per_node"]
    assert heat["data"][0]["z"][1][2] is None
    assert heat["data"][0]["z"][1][0] == pytest.approx(501.5), "the median of 121, 501 and 1003 ms"
    assert "median" in heat["caption"]
    make_run(runs, "other", "train.clip_norm=3")
    assert not [title for title in page_of(runs).figures if "and" in title and "over" in title]


def test_names_are_text_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wild = "[bold]</script><script>alert(1)</script>"
    root = tmp_path / "runs"
    make_run(root, "plain", "cluster.workers_per_node=2")
    make_sweep(root, cell("plain", f"task.word={wild}", "task.b=%{y}"), cell(None, f"task.c={wild}", problem=wild))
    assert launch_report([str(root)]) == 0
    assert "word=[bold]" in capsys.readouterr().out
    text = (root / "report.html").read_text()
    page = Page(text)
    assert len(page.scripts) == 2
    assert wild in page.text
    assert "<script>alert" not in text
    names = [trace["name"] for figure in page.figures.values() for trace in figure["data"] if "name" in trace]
    assert any("&lt;script&gt;" in name for name in names), "plotly takes markup"
    assert "<script>" not in json.dumps(page.figures)
    columns = text.count('<th scope="col">')
    assert f'<tr class="why"><td colspan="{columns}">' in text


def test_links_to_the_trackers(runs: Path) -> None:
    write_json(RunPaths(runs / "a1w1").tracker_status("wandb"), {"url": "https://wandb.ai/me/project/runs/abc"})
    assert page_of(runs).linked == ["https://wandb.ai/me/project/runs/abc"]


def test_many_runs_have_no_legends_and_short_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.extensions.page.plots._ALL_POINTS", 400)
    for seed in range(20):
        for workers in (1, 2):
            words = (f"train.seed={seed}", f"cluster.workers_per_node={workers}")
            make_run(tmp_path / "runs", f"r{seed}-{workers}", *words, steps=90 if seed == 0 else 2)
    figures = page_of(tmp_path / "runs").figures
    for title in ("Speed over workers", "Loss"):
        assert not figures[title]["layout"]["showlegend"]
    assert {len(trace["y"]) for trace in figures["Loss"]["data"]} >= {2, 46}


def test_plots_of_very_many_runs_show_those_of_the_lowest_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are compared over workers or accumulation stay together; tables, notes and the answer are of all."""
    for seed, loss in enumerate((3.0, 2.0, 1.0)):
        for workers in (1, 2):
            words = (f"train.seed={seed}", f"cluster.workers_per_node={workers}")
            verdict = "failed" if seed == 2 else "done"
            make_run(tmp_path / "runs", f"s{seed}-{workers}", *words, loss=loss + workers, verdict=verdict)
    assert "The plots show" not in page_of(tmp_path / "runs").text
    monkeypatch.setattr(compare, "MOST_DRAWN", 3)
    shown = page_of(tmp_path / "runs")
    assert "The plots show 3 of 6 runs" in shown.text
    assert all(f"s{seed}-{workers}" in shown.text for seed in range(3) for workers in (1, 2))
    # seed 2 has the lowest loss, but no finished run; of seed 0 there is room for one
    assert {trace["name"] for trace in shown.figures["Loss"]["data"]} == {"s1-1", "s1-2", "s0-1"}
    speed = shown.figures["Speed over workers"]["data"]
    assert [trace["x"] for trace in speed if trace["mode"] == "lines+markers"] == [[1], [1, 2]]


def test_the_page_goes_through_the_runs_a_fixed_number_of_times(tmp_path: Path) -> None:
    class Counted(tuple[Any, ...]):
        times = 0

        def __iter__(self) -> Iterator[Any]:
            self.times += 1
            return super().__iter__()

    times: list[int] = []
    for number in range(12):
        make_run(tmp_path, f"r{number}", f"train.seed={number}", steps=2)
        rows = compare_runs(find(tmp_path), title="runs")
        counted = Counted(rows.rows)
        render_page(dataclasses.replace(rows, rows=counted), [[]], datetime.now().astimezone(), standalone=False)
        times.append(counted.times)
    assert times[3] == times[-1]


def test_a_speedup_without_an_interval_is_not_drawn(runs: Path) -> None:
    for paths in find(runs):
        records = read_records(paths)
        write_records(paths, [{k: v for k, v in each.items() if "speedup_" not in k} for each in records])
    assert "Measured speed-up over accumulation" not in page_of(runs).figures
