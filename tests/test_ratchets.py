"""Ratchets on the size of the project: each figure of ratchets.json may only fall.

    python -m tests.test_ratchets        # lower the figures that have fallen; refuses to raise one

A commit that must raise a figure edits ratchets.json by hand and says why.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from launcher.config.schema import known_keys
from tests.helpers import ROOT, torchrun
from tests.test_imports import MODULES, own_imports

FILE = Path(__file__).with_name("ratchets.json")
WORKER = Path(__file__).with_name("step_profile_worker.py")


def lines_of_packages() -> dict[str, int]:
    """Return the lines of each package of the launcher, of its root modules, of all, and of the tests."""
    lines = Counter[str]()
    for path in (ROOT / "launcher").rglob("*.py"):
        count = len(path.read_text().splitlines())
        package = path.relative_to(ROOT).parts[:-1]
        lines["launcher"] += count
        lines["launcher (its own modules)" if len(package) == 1 else "launcher." + package[1]] += count
    lines["tests"] = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return dict(sorted(lines.items()))


def modules_of_worker() -> int:
    """Return the number of modules that launcher.train.worker imports, directly or through others. The package itself
    imports its public names on first use only."""
    reached, waiting = set[str](), ["launcher.train.worker"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += own_imports(module) - {"launcher"}
    return len(reached)


def most_files_with_one_key() -> int:
    """Return in how many modules of the launcher the most widely named config key occurs, by its last word."""
    words = {key.rpartition(".")[2] for key in known_keys() if "_" in key.rpartition(".")[2]}
    files = Counter[str]()
    for path in MODULES.values():
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        files.update(words & names)
    return max(files.values())


def small_modules_with_one_importer() -> int:
    """Return the number of modules under 120 lines that one other module imports: each is a part of it."""
    importers = Counter(name for module in MODULES for name in own_imports(module) - {module})
    lines = {name: len(path.read_text().splitlines()) for name, path in MODULES.items() if path.stem != "__init__"}
    return sum(count < 120 and importers[name] == 1 for name, count in lines.items())


def static_figures() -> dict[str, Any]:
    return {
        "lines": lines_of_packages(),
        "modules that train.worker imports": modules_of_worker(),
        "modules that name one config key": most_files_with_one_key(),
        "modules under 120 lines with one importer": small_modules_with_one_importer(),
    }


def step_figures() -> dict[str, int]:
    """Return what one step of plain DDP enters: two ranks, four micro-batches."""
    output = torchrun(WORKER, [], 2, ROOT)
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def risen(figures: Any, limits: Any, name: str = "") -> list[str]:
    """Return the figures above their limits; a package without a limit is above it."""
    if isinstance(figures, dict):
        return [text for key, each in figures.items() for text in risen(each, limits.get(key, 0), f"{name} {key}")]
    return [f"{name.strip()}: {figures}, at most {limits}"] if figures > limits else []


def test_no_figure_rises() -> None:
    assert risen(static_figures(), json.loads(FILE.read_text())) == []


def test_a_step_enters_no_more_than_before() -> None:
    assert risen(step_figures(), json.loads(FILE.read_text())["one step of DDP"]) == []


def main() -> None:
    figures = {**static_figures(), "one step of DDP": step_figures()}
    if FILE.exists() and (higher := risen(figures, json.loads(FILE.read_text()))):
        sys.exit("\n".join(("A ratchet may only fall:", *higher)))
    FILE.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
