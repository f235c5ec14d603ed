"""The page in a browser at three widths, light and dark: plots, layout, keyboard, and what axe-core finds."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launcher.extensions.page.report_command import launch_report
from tests.helpers import ROOT, patience
from tests.infra.made_runs import make_run

AXE = ROOT / "build/node_modules/axe-core/axe.min.js"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = {"phone": 390, "tablet": 820, "desktop": 1440}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome: make browser"),
    pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: make browser"),
]

# run in each frame: sort a table by keyboard, then report to the page around the frames
PROBE = """
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("load", async () => {
  const head = document.querySelectorAll("#runs thead th")[3];
  head.querySelector("button").focus();
  document.activeElement.click();
  const column = [...document.querySelectorAll("#runs tbody")].map((body) => body.rows[0].children[3].textContent);
  const found = await axe.run(document, { resultTypes: ["violations"] });
  parent.postMessage({
    errors, column, sorted: head.getAttribute("aria-sort"), dark: matchMedia("(prefers-color-scheme: dark)").matches,
    overflow: document.documentElement.scrollWidth - innerWidth,
    plots: document.querySelectorAll(".plot").length, drawn: document.querySelectorAll(".plot .plot-container").length,
    paper: getComputedStyle(document.querySelector(".card")).backgroundColor, name: NAME,
    missing: !!document.querySelector("#no-plots"),
    violations: found.violations.map(({ id, impact, nodes }) => [impact, id, ...nodes.map((node) => node.html)]),
  }, "*");
});
"""
COLLECT = """
const found = {};
addEventListener("message", ({ data }) => {
  found[data.name] = data;
  document.querySelector("#found").textContent = JSON.stringify(found);
});
"""


def in_browser(page: Path, *switches: str) -> dict[str, dict[str, Any]]:
    """Return what the probe finds in the page at each width."""
    assert BROWSER is not None
    text, frames = page.read_text(), ""
    for name, width in WIDTHS.items():
        probe = f"const NAME = '{name}';\n{PROBE}"
        framed = text.replace("<body>", f"<body><script>{AXE.read_text()}</script><script>{probe}</script>", 1)
        page.with_name(f"{name}.html").write_text(framed)
        frames += f'<iframe src="{name}.html" width="{width}" height="900"></iframe>'
    outer = page.with_name("outer.html")
    outer.write_text(f'<pre id="found"></pre><script>{COLLECT}</script>{frames}')
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1600,1000", "--virtual-time-budget=60000", *switches, "--dump-dom", outer.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=True)
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr
    found = json.loads(html.unescape(match[1]))
    assert found.keys() == WIDTHS.keys()
    return found


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A directory with a page of `launch report`."""
    for accumulation in (1, 2, 4):
        for workers in (1, 2):
            words = (f"batch.accumulation={accumulation}", f"cluster.workers_per_node={workers}")
            make_run(
                tmp_path / "runs", f"a{accumulation}w{workers}", *words, step_s=(0.2 + 0.01 * accumulation) / workers
            )
    make_run(tmp_path / "runs", "bad", "batch.accumulation=8", verdict="failed", steps=9)
    assert launch_report([str(tmp_path / "runs"), "--html", str(tmp_path / "report.html")]) == 0
    return tmp_path


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_works_for_everybody(dark: bool, pages: Path) -> None:
    for found in in_browser(
        pages / "report.html", *(["--blink-settings=preferredColorScheme=0"] if dark else [])
    ).values():
        assert found["dark"] is dark
        assert found["errors"] == found["violations"] == []
        assert found["plots"] == found["drawn"] > 0
        assert found["overflow"] <= 0, "the page itself does not scroll sideways"
        assert (found["sorted"], found["missing"]) == ("ascending", False)
        values = [float(value.split()[0].replace(",", "")) for value in found["column"] if value != "–"]
        assert values == sorted(values)


def test_the_page_says_which_file_is_missing(pages: Path) -> None:
    (library,) = pages.glob("plotly-*.min.js")
    library.unlink()
    for found in in_browser(pages / "report.html").values():
        assert (found["missing"], found["drawn"], found["sorted"]) == (True, 0, "ascending")
