"""Study of the number of workers and of accumulation: all combinations at one global batch, then the report.

    python jobs/sweep.py                                            # on this machine, one after the other
    python jobs/sweep.py cluster=slurm cluster.nodes=2 train.steps=200 task._target_=my_tasks.MyTask

Accepts every key of `launch train`. The same command again resumes unfinished cells and rewrites the page.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from launcher import sweep
from launcher.errors import UserError
from launcher.extensions.page.report_command import write_report
from launcher.runs.status import Run, RunState

OVER = {"batch.accumulation": [1, 2, 4, 8], "cluster.workers_per_node": [1, 2]}
FIXED = ["batch.global_size=64", "train.steps=30"]


def states(runs: Sequence[Run]) -> str:
    return ", ".join(f"{number} {state.value}" for state, number in Counter(run.state for run in runs).items())


def watch(runs: Sequence[Run]) -> None:
    print(states(runs), flush=True)


def main(overrides: list[str]) -> int:
    study = sweep(OVER, [*FIXED, *overrides], watch=watch)
    cells = study.cells()
    for cell in cells:
        loss = "" if cell.loss is None else f"loss {cell.loss:.4f}"
        print(f"{cell.cell}: {cell.state.value} {loss} {cell.detail}".rstrip())
    print(f"{states(cells)}; the page: {write_report(study.dir)}")
    return int(any(cell.state not in (RunState.done, RunState.impossible) for cell in cells))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"jobs/sweep.py: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
