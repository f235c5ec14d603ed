"""Makes terminal.svg and report.png from real runs: a training job, and a sweep with its report. Some minutes.

    python docs/assets/make_pictures.py --work build/pictures       # needs Chromium or Chrome, and Pillow

What an earlier call has left in --work is used again.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).resolve().parent
LAUNCH = (sys.executable, "-m", "launcher")
JOB = ("run.name=a",)
SWEEP = (
    "-m", "batch.accumulation=1,2,4,8", "cluster.workers_per_node=1,2", "batch.global_size=64", "train.steps=60",
    "run.calibrate_s=15", "sweep.name=study", "wandb.mode=disabled",
)  # fmt: skip
# one core for each worker, however many there are: a second thread would wait for the cores that others use
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COLUMNS, PROGRESS_LINES = 112, 3


def output_of(work: Path, name: str, *arguments: str, env: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return what a command prints; from the file ``name`` if it has run before. ``env``: added to the environment."""
    log = work / name
    if not log.exists():
        command = [*LAUNCH, *arguments]
        done = subprocess.run(
            command, cwd=work, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True
        )
        log.write_text(done.stdout)
    return log.read_text()


def draw_terminal(output: str, place: Path) -> None:
    """Write an SVG of a job's output, with its first progress lines only."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ launch train {' '.join(JOB)}", style="bold"))
    left = PROGRESS_LINES
    for line in output.strip().splitlines():
        if re.match(r"step \d+/|The \d+ steps take", line):
            left -= 1
            if left < 0:
                continue
        label = re.match(r"[A-Za-z&-]+( [a-z]+)*(?=  |: )", line)
        text = Text(line)
        if label:
            text.stylize("cyan", 0, label.end())
        console.print(text)
    console.print()
    svg = console.export_svg(title="launch train")
    place.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # an image loads no fonts


def photograph(page: Path, place: Path, height: int) -> None:
    """Write a picture of an HTML page's upper part, with 128 colours."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"make_pictures.py: needs one of {', '.join(BROWSERS)}.")
    with tempfile.TemporaryDirectory() as profile:
        shot = Path(profile) / "shot.png"
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size=1180,{height}", "--virtual-time-budget=20000", f"--screenshot={shot}", page.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        Image.open(shot).convert("RGB").quantize(128).save(place, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/pictures"), help="directory for the runs")
    parser.add_argument("--height", type=int, default=2000, help="pixels of the page that are shown")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    work: Path = given.work.resolve()
    draw_terminal(output_of(work, "train.log", "train", *JOB), HERE / "terminal.svg")
    output_of(work, "sweep.log", "train", *SWEEP, env=ONE_THREAD)
    output_of(work, "report.log", "report", "study")
    photograph(work / "runs" / "study" / "report.html", HERE / "report.png", given.height)


if __name__ == "__main__":
    main()
