"""Writes the outputs of commands into the pages, behind <!-- output: launch plan; from "Plan:" to "files" -->.

python docs/outputs.py            # all but the outputs of `launch train`
python docs/outputs.py --all      # these too: minutes, and figures of this machine
python docs/outputs.py --check    # exit status 1 if a page is not up to date; without those of `launch train`
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parent
_MARKED = re.compile(
    r'<!-- output: (?P<command>[^;>]+?)(?:; from "(?P<first>.*?)" to "(?P<last>.*?)")? -->\n\n'
    r"```text\n[\s\S]*?^```$",
    re.MULTILINE,
)


def is_measured(command: str) -> bool:
    """Return whether a command's output has figures of a machine, which no other run repeats."""
    return command.startswith("launch train")


@cache
def output_of(command: str, place: str) -> str:
    """Return what a command prints, run in the directory ``place``."""
    program, *arguments = shlex.split(command)
    assert program == "launch", command
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments], cwd=place, env=env, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.stdout


def lines_between(text: str, first: str | None, last: str | None) -> str:
    """Return the lines from the first one that starts with ``first`` to the next that starts with ``last``, with the
    indented lines that continue it."""
    lines = text.rstrip().splitlines()
    if first is not None and last is not None:
        start = next(number for number, line in enumerate(lines) if line.startswith(first))
        end = next(number for number, line in enumerate(lines) if number >= start and line.startswith(last)) + 1
        while end < len(lines) and lines[end].startswith(" "):
            end += 1
        lines = lines[start:end]
    return "\n".join(line.rstrip() for line in lines)


def updated(page: str, chosen: Callable[[str], bool], place: str) -> str:
    """Return a page with the outputs of the chosen commands."""

    def block(found: re.Match[str]) -> str:
        if not chosen(found["command"]):
            return found[0]
        text = lines_between(output_of(found["command"], place), found["first"], found["last"])
        return f"{found[0].partition(chr(10))[0]}\n\n```text\n{text}\n```"

    return _MARKED.sub(block, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also the outputs of `launch train`")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is not up to date")
    given = parser.parse_args()
    stale: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        for page in sorted(DOCS.rglob("*.md")):
            text = page.read_text(encoding="utf-8")
            new = updated(text, lambda command: given.all or not is_measured(command), place)
            if new != text and given.check:
                stale.append(str(page.relative_to(DOCS)))
            elif new != text:
                page.write_text(new, encoding="utf-8")
    if stale:
        print(f"not up to date: {', '.join(stale)}")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
