"""Process of one cell of a sweep that runs beside others on this machine (``launcher.sweeps.local_cells``).

    python -m launcher.cli.cell RUN_DIR PARENT_PID [CORES]

It prints errors only. CORES: the numbers of its cores, such as 2,3; without any, it uses those of its parent.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from launcher.cli import status_or_error
from launcher.cli.train import run_here
from launcher.launch.agent import load_plan
from launcher.plan.clusters import Peers
from launcher.process import die_with_parent
from launcher.report import live
from launcher.rundir.paths import RunPaths


def main(run_dir: str, parent: str, cores: str = "") -> int:
    die_with_parent(int(parent), signal.SIGTERM)
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    return status_or_error(lambda: run_here(load_plan(RunPaths(Path(run_dir)).plan), Peers(), live.console(quiet=True)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
