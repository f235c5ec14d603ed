"""One run, many deaths: whatever dies, whenever, it ends as the run that nothing happened to.

    python -m tests.system.chaos --deaths 50 [--seed N] [--dir DIR]     # exit status 1 where anything differs

A small bytes_gpt on two workers that saves every few steps. A death comes some steps after the one before, or in a
save, or before the first step. A run that does not begin again by itself goes on with `launch resume`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from launcher.drill.verdict import Record, first_difference, wrong_steps
from launcher.rundir.paths import RunPaths
from tests.helpers import launch_command, patience
from tests.system.deaths import JOB, Chaos

# what deaths leave that no undisturbed run has: logs of further attempts, W&B's offline runs, numbers that are taken
_FURTHER = (
    r"logs/rank\d+\.attempt\d+\.(log|error\.json)", r"wandb/.*", r"\.submission\.\d+", r"events\.jsonl",
    r"checkpoints/refused_step_\d+(\.\d+)?/.*",
)  # fmt: skip


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def judge(chaos: Chaos, whole: RunPaths) -> list[str]:
    """What is not as in the undisturbed run, or was left."""
    paths, wrong = chaos.paths, [*chaos.wrong]
    end = time.monotonic() + patience(60)
    while (left := chaos.processes()) and time.monotonic() < end:
        time.sleep(0.1)
    wrong += [f"left: {process}" for process in left]
    wrong += [f"left: {path}" for _, path in paths.partial_checkpoints()]
    further = files(paths.root) - files(whole.root)
    wrong += [f"left: {name}" for name in sorted(further) if not any(re.fullmatch(known, name) for known in _FURTHER)]
    wrong += [f"missing: {name}" for name in sorted(files(whole.root) - files(paths.root)) if "wandb" not in name]
    refused = len([*paths.checkpoints.glob("refused_*")])
    if refused != chaos.refusals:
        wrong.append(f"{refused} checkpoints were refused, and {chaos.refusals} were damaged")
    record = Record.of(paths.metrics)
    wrong += [text for text in (wrong_steps(record, chaos.steps),) if text]
    wrong += [text for text in (first_difference(record, Record.of(whole.metrics)),) if text]
    places = [str(each.checkpoint(chaos.steps)) for each in (paths, whole)]
    command = [sys.executable, "-P", "-m", "launcher.train.checkpoint.diff", *places, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout) if done.returncode == 0 else {}
    if found.get("differing") != 0 or not found["tensors"]:
        wrong.append(f"parameters and optimizer: {found or done.stderr}")
    return wrong


def wreak(place: Path, deaths: int, seed: int, kinds: Collection[str] = ()) -> list[str]:
    """Run it undisturbed and disturbed in ``place``; what is wrong. ``kinds``: of deaths; all where none is given."""
    chaos = Chaos(place, deaths, random.Random(seed), kinds)
    steps = f"train.steps={chaos.steps}"
    whole = subprocess.run(
        launch_command("train", *JOB, "run.name=whole", steps, "--quiet"), cwd=place, timeout=patience(600), check=False
    )
    assert whole.returncode == 0
    began = time.monotonic()
    try:
        chaos.run()
    except BaseException:
        chaos.tree()
        raise
    seconds = time.monotonic() - began
    wrong = judge(chaos, RunPaths(place / "runs" / "whole"))
    print()
    for kind, count in Counter(kind for kind, _, _ in chaos.book).most_common():
        print(f"{kind:20}{count:4d}")
    print(f"{len(chaos.book)} deaths, {chaos.steps} steps, {seconds:.0f} s, {chaos.refusals} checkpoints damaged.")
    print("\n".join(wrong) or "Verdict: the undisturbed run, bit by bit; each step once; nothing is left.")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.system.chaos", description=__doc__)
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time; it is printed")
    parser.add_argument("--dir", type=Path, help="an empty directory that stays; default: a temporary one")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves nothing behind either
    with tempfile.TemporaryDirectory() as temporary:
        place = given.dir or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        sys.exit(1 if wreak(place.resolve(), given.deaths, seed) else 0)


if __name__ == "__main__":
    main()
