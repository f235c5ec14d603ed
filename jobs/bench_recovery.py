"""Time from a worker's death to the job's next step, compared with a cold start; several deaths within one run.

    python jobs/bench_recovery.py [--deaths 5] [key=value ...]

Accepts every key of `launch train`. Exit status 1 if the median is above 1.5 times the cold start.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import tempfile
import time

from launcher.config.hydra import compose_with_yaml
from launcher.errors import UserError
from launcher.extensions.drill.backends import LocalBackend
from launcher.extensions.drill.runner import POLL_S, next_step
from launcher.extensions.drill.verdict import Interruption, RecordLines
from launcher.launch.planner import plan_job

MAX_RATIO = 1.5
STEPS_BETWEEN = 4


def wait_for_step(backend: LocalBackend, record: RecordLines, step: int) -> RecordLines:
    while record.step < step:
        if backend.ended():
            sys.exit(f"the run was over at step {record.step}: {backend.problem(None) or 'raise train.steps'}")
        time.sleep(POLL_S)
        record = RecordLines.of(backend.plan.paths.metrics)
    return record


def measure(overrides: list[str], deaths: int) -> tuple[float, list[float]]:
    """Return the seconds of the cold start and of each recovery."""
    with tempfile.TemporaryDirectory() as directory:
        defaults = ["train.steps=1000000", "checkpoint.every=2", "checkpoint.keep=2"]
        fixed = [f"run.dir={directory}", "wandb.mode=disabled", "run.calibrate_s=0", f"cluster.max_restarts={deaths}"]
        config, yaml = compose_with_yaml([*defaults, *overrides, *fixed])
        plan = plan_job(config)
        backend, recoveries = LocalBackend(), list[float]()
        start = time.monotonic()
        backend.start(dataclasses.replace(plan, notes=()), yaml)
        try:
            record = wait_for_step(backend, RecordLines(), 1)
            cold_s = time.monotonic() - start
            for _ in range(deaths):
                record = wait_for_step(backend, record, record.step + STEPS_BETWEEN)
                died = time.monotonic()
                event = backend.interrupt(Interruption.worker)
                _, after, recovery_s = next_step(backend, plan.paths, record, died, None)
                if recovery_s is None:
                    sys.exit(f"{event}: the run did not recover: {backend.problem(None)}")
                print(f"{event}: resumed after step {after}; the next step came after {recovery_s:.2f} s", flush=True)
                recoveries.append(recovery_s)
                record = RecordLines.of(plan.paths.metrics)
            return cold_s, recoveries
        finally:
            backend.abandon()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--deaths", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="which ranks are killed")
    arguments, overrides = parser.parse_known_args()
    random.seed(arguments.seed)
    cold_s, recoveries = measure(overrides, arguments.deaths)
    typical = statistics.median(recoveries)
    print(
        f"cold start {cold_s:.2f} s; recovery {typical:.2f} s (median of {len(recoveries)}; {min(recoveries):.2f} to "
        f"{max(recoveries):.2f}): {typical / cold_s:.2f}x"
    )
    return int(typical > MAX_RATIO * cold_s)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"jobs/bench_recovery.py: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
