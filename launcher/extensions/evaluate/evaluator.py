"""Process of `launch eval`: opens a run and evaluates it.

Reads the arguments of ``open_run`` from standard input; writes the answer to the file named on the command line.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_USER, LauncherError, WrongCheckpoint
from launcher.process import die_with_parent, exit_at_once
from launcher.tracebacks import users_frames
from launcher.train.metrics import read_record
from launcher.train.opened_run import open_run


def evaluate(run: str, overrides: list[str], *, step: int | None, best: bool) -> dict[str, Any]:
    """Return the metrics, and those that the run has recorded at the checkpoint's step: none with other data."""
    opened = open_run(run, overrides, step=step, best=best)
    values = opened.evaluate()
    record = (read_record(opened.plan.paths.metrics, opened.step) if not overrides else None) or {}
    return {
        "step": opened.step,
        "checkpoint": str(opened.checkpoint),
        "metrics": _finite(values),
        "recorded": {name: record[name] for name in values if name in record},
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return evaluate(**request)
    except LauncherError as error:
        return {"error": str(error), "user": error.exit_status == EXIT_USER or isinstance(error, WrongCheckpoint)}
    except Exception as error:  # user code may raise anything
        name = Path(request["run"]).name
        return {"error": f"{name}: {type(error).__name__}: {error}\n{users_frames(error)}", "user": False}


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    warnings.formatwarning = lambda message, *_: f"launch eval: warning: {message}\n"
    Path(sys.argv[1]).write_text(json.dumps(_answer(json.load(sys.stdin))), encoding="utf-8")


if __name__ == "__main__":
    main()
    exit_at_once()  # threads that the task has started may never end
