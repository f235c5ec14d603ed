"""Time for the agents of a Slurm job to meet, as the number of nodes grows.

    python jobs/bench_meeting.py --nodes 8,64,512      # makes its own clusters (root, slurm-wlm, munge, 16 GB)

Each job is submitted by `launch train cluster=slurm cluster.nodes=N cluster.workers_per_node=8` to a slurmctld with N
slurmd. Its tasks are stand-ins (tests/infra/stand_in.py): real agents that meet, get their ranks, report to node 0, and
leave without having started workers. All of them share this machine's cores, which a job's nodes do not: the times are
upper limits, and CPU time is shown beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.infra.slurm import what_is_missing
from tests.infra.stand_in import Meeting, submit
from tests.infra.virtual_nodes import virtual_cluster


@dataclass(frozen=True)
class Times:
    """Seconds of one job.

    ``tasks``: from submission until the last task runs; ``meet``: from the arrival of the last agent until all agents
    know their ranks; ``hear``: until node 0 has a report of each; ``read``: to read these reports; ``cpu_first``,
    ``cpu_other``: CPU time of the agents for the meeting, of node 0 and on average of the others.
    """

    tasks: float
    meet: float
    hear: float
    read: float
    cpu_first: float
    cpu_other: float


def measure(nodes: int) -> Times:
    with tempfile.TemporaryDirectory() as directory, virtual_cluster(nodes) as there:
        run = submit(there, Path(directory), nodes)
        submitted = json.loads((run / "events.jsonl").read_text().splitlines()[0])["at"]
        meetings = Meeting.of(run)
    first, *others = meetings
    arrived = max(meeting.arrived for meeting in meetings)
    return Times(
        tasks=max(meeting.started for meeting in meetings) - datetime.fromisoformat(submitted).timestamp(),
        meet=max(meeting.met for meeting in meetings) - arrived,
        hear=first.heard - arrived,
        read=first.read_s,
        cpu_first=first.cpu_s,
        cpu_other=sum(meeting.cpu_s for meeting in others) / len(others),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="8,64,512", help="sizes of the jobs, separated by commas, each above 1")
    sizes = [int(size) for size in parser.parse_args().nodes.split(",")]
    if missing := what_is_missing():
        sys.exit(f"a Slurm cluster needs {missing}")
    print("| nodes × 8 | tasks started | met | node 0 has heard all | read once | CPU of node 0 | of another node |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        it = measure(size)
        print(
            f"| {size} | {it.tasks:.1f} s | {it.meet:.2f} s | {it.hear:.2f} s | {it.read * 1000:.1f} ms | "
            f"{it.cpu_first * 1000:.0f} ms | {it.cpu_other * 1000:.1f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
