"""Outcome of a run, for the callbacks that act on it after its workers have ended.

    python -m launcher.launch.run_outcome RUN_DIR PARENT_PID DEADLINE        standard input: summary.json

``launcher.launch.local.report_outcome`` starts this process, because the callbacks may be classes of the user's, which
the command line does not import. Messages are sent side by side, so that one that hangs delays no other.
DEADLINE is a time of ``time.monotonic``, after which messages are given up.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from launcher.errors import LauncherError
from launcher.plan.callback_plan import (
    BELL,
    OUTCOME,
    TARGET,
    class_arguments,
    installed_callback,
    may_report,
    name_of,
    notify_entries,
)
from launcher.plan.host import without_path
from launcher.plan.launch_plan import LaunchPlan
from launcher.plan.run_plan import RunPlan
from launcher.process import die_with_parent
from launcher.quantities import count
from launcher.rundir.files import write_line
from launcher.rundir.paths import RunPaths
from launcher.targets import find_target, require_arguments


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one start of a run.

    Attributes:
        run, dir: name and directory of the run.
        verdict: done; stopped: it can be resumed; failed; killed: it had no time to save; requeued: Slurm restarts it.
        steps: optimizer steps taken, if known.
        metrics: the numbers in summary.json.
        error: first error of a failed run; otherwise empty.
        host: the host that sends this.
    """

    run: str
    dir: str
    verdict: str
    steps: int | None
    metrics: dict[str, float]
    error: str
    host: str

    @classmethod
    def of(cls, plan: LaunchPlan, summary: Mapping[str, Any]) -> Outcome:
        numbers = {name: float(value) for name, value in summary.items() if "/" in name and _is_number(value)}
        failure = cast("dict[str, Any]", summary.get("failure") or {})
        return cls(
            run=plan.run.name, dir=plan.run.dir, verdict=summary["verdict"], steps=summary.get("steps"),
            metrics=numbers, error=str(failure.get("error", "")), host=socket.gethostname(),
        )  # fmt: skip

    @property
    def text(self) -> str:
        """Outcome in a few lines."""
        after = "" if self.steps is None else f" after {count(self.steps, 'step')}"
        losses = [f"{name} {self.metrics[name]:.4g}" for name in ("train/loss", "eval/loss") if name in self.metrics]
        lines = [f"Run {self.run}: {self.verdict}{after}{', ' if losses else ''}{', '.join(losses)}", self.error]
        return "\n".join([*filter(None, lines), f"{self.host}:{self.dir}"])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def main(run_dir: str, parent: str, deadline: str) -> None:
    die_with_parent(int(parent))
    paths = RunPaths(Path(run_dir))
    plan, recorded = LaunchPlan.load(paths.plan), RunPlan.of_record(paths)
    outcome = Outcome.of(plan, json.load(sys.stdin))
    sys.path[:0] = [place for place in plan.cluster.import_from if place not in sys.path]
    callbacks = () if recorded is None else recorded.callbacks
    words = [word for word in plan.notify if word != BELL]
    entries = [
        (f"notify={without_path(word)}", entry) for word, entry in zip(words, notify_entries(words), strict=True)
    ]
    entries += [
        (f"callbacks[{number}]", entry) for number, entry in enumerate(callbacks) if may_report(entry, outcome.verdict)
    ]
    search_path = plan.cluster.import_from
    sending: list[tuple[str, threading.Thread]] = []
    own: list[tuple[str, dict[str, Any]]] = []
    for key, entry in entries:
        if installed_callback(entry) is not None:
            thread = threading.Thread(target=_report, args=(key, entry, outcome, search_path), daemon=True)
            thread.start()
            sending.append((f"{name_of(entry)} ({key})", thread))
        else:
            own.append((key, entry))
    for key, entry in own:  # in turn, because they may share something
        _report(key, entry, outcome, search_path)
    for title, thread in sending:
        thread.join(max(0.0, float(deadline) - time.monotonic()))
        if thread.is_alive():
            write_line(f"{title} did not report that the run is {outcome.verdict}: no answer in time")


def _report(key: str, entry: dict[str, Any], outcome: Outcome, search_path: Sequence[str]) -> None:
    target = entry[TARGET]
    try:
        made = find_target(f"{key}.{TARGET}", target, search_path)
        if hasattr(made, OUTCOME):
            made(**require_arguments(key, target, made, class_arguments(entry))).on_outcome(outcome)
    except Exception as error:  # nothing that a callback does here may change how the run has ended
        kind = "" if isinstance(error, LauncherError) else f"{type(error).__name__}: "
        write_line(f"{name_of(entry)} ({key}) did not report that the run is {outcome.verdict}: {kind}{error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
