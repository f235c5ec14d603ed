"""One run, many deaths: whatever is killed at whatever time, the run must end like an undisturbed one.

    python -m tests.system.chaos --deaths 50 [--seed N] [--dir DIR]     # exit status 1 if anything differs

The run is a small bytes_gpt on two workers that saves every few steps. A death happens a few steps after the previous
one, during a save, or before the first step. A run that is not restarted by itself is resumed by `launch resume`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from launcher.extensions.drill.processes import describe
from launcher.extensions.drill.verdict import RecordLines, first_difference, wrong_steps
from launcher.rundir.paths import RunPaths
from tests.helpers import launch_command, patience
from tests.infra import warm
from tests.system.deaths import JOB, Chaos

# files that only a disturbed run has: logs of further attempts, W&B's offline runs, numbers of submissions
_OF_DEATHS = (
    r"logs/rank\d+\.attempt\d+\.(log|error\.json)", r"wandb/.*", r"\.submission\.\d+", r"events\.jsonl",
    r"checkpoints/refused_step_\d+(\.\d+)?/.*",
)  # fmt: skip


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def judge(chaos: Chaos, whole: RunPaths) -> list[str]:
    """Return what differs from the undisturbed run, or was left behind."""
    paths, problems = chaos.paths, [*chaos.problems]
    end = time.monotonic() + patience(60)
    while (left := chaos.processes()) and time.monotonic() < end:
        time.sleep(0.1)
    problems += [f"left: {describe(process)}" for process in left]
    problems += [f"left: {path}" for _, path in paths.partial_checkpoints()]
    further = files(paths.root) - files(whole.root)
    problems += [
        f"left: {name}" for name in sorted(further) if not any(re.fullmatch(pattern, name) for pattern in _OF_DEATHS)
    ]
    problems += [f"missing: {name}" for name in sorted(files(whole.root) - files(paths.root)) if "wandb" not in name]
    refused = len([*paths.checkpoints.glob("refused_*")])
    if refused != chaos.damaged:
        problems.append(f"{refused} checkpoints were refused, and {chaos.damaged} were damaged")
    record = RecordLines.of(paths.metrics)
    problems += [text for text in (wrong_steps(record, chaos.steps),) if text]
    problems += [text for text in (first_difference(record, RecordLines.of(whole.metrics)),) if text]
    checkpoints = [str(each.checkpoint(chaos.steps)) for each in (paths, whole)]
    command = [sys.executable, "-P", "-m", "launcher.extensions.drill.diff", *checkpoints, str(os.getpid())]
    done = warm.run(command, patience(120))
    difference = json.loads(done.stdout) if done.returncode == 0 else {}
    if difference.get("differing") != 0 or not difference["tensors"]:
        problems.append(f"parameters and optimizer: {difference or done.stderr}")
    return problems


def run_chaos(
    directory: Path, deaths: int, seed: int, kinds: Collection[str] = (), job: Sequence[str] = JOB
) -> list[str]:
    """Run the job undisturbed and disturbed in ``directory``. Return the problems. ``kinds``: of deaths; empty: all."""
    chaos = Chaos(directory, deaths, random.Random(seed), kinds, job=job)
    steps = f"train.steps={chaos.steps}"
    whole = warm.run(launch_command("train", *job, "run.name=whole", steps, "--quiet"), patience(600), cwd=directory)
    assert whole.returncode == 0, whole.stderr
    began = time.monotonic()
    try:
        chaos.run()
    except BaseException:
        chaos.tree()
        raise
    seconds = time.monotonic() - began
    problems = judge(chaos, RunPaths(directory / "runs" / "whole"))
    print()
    for kind, count in Counter(kind for kind, _, _ in chaos.done).most_common():
        print(f"{kind:20}{count:4d}")
    print(f"{len(chaos.done)} deaths, {chaos.steps} steps, {seconds:.0f} s, {chaos.damaged} checkpoints damaged.")
    print("\n".join(problems) or "Verdict: bit-identical to the undisturbed run; each step once; nothing is left.")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos", description=__doc__)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="default: random; it is printed")
    parser.add_argument("--dir", type=Path, help="an empty directory, which is kept; default: a temporary one")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes are killed too
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.dir or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        sys.exit(1 if run_chaos(directory.resolve(), given.deaths, seed) else 0)


if __name__ == "__main__":
    main()
