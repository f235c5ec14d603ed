"""Submission of a job to Slurm from Python, waiting for its end.

    python jobs/slurm.py cluster.nodes=2 train.steps=50

Accepts every key of `launch train`. Ctrl-C ends only the waiting: the job continues.
"""

from __future__ import annotations

import sys

from launcher import submit
from launcher.errors import UserError
from launcher.runs.status import Run, RunState


def main(overrides: list[str]) -> int:
    job = submit(["cluster=slurm", *overrides])
    print(f"{job.name}: submitted as Slurm job {job.look().job}")

    shown = ""

    def watch(run: Run) -> None:
        nonlocal shown
        state = f"{run.state.value} {run.detail}".strip()
        if state != shown:
            print(f"{run.name}: {state}", flush=True)
            shown = state

    run = job.wait(watch)
    print(f"{run.name}: {run.state.value} {run.detail}".rstrip())
    if run.state is not RunState.done:
        return 1
    summary = job.summary()
    print(f"loss {summary['train/loss']:.4f}, {summary['throughput/samples_per_s']:,.1f} samples/s")
    print(f"bytes saved on the wire: {summary['comm/saved_fraction']:.1%}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"jobs/slurm.py: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
