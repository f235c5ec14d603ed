"""The grid from the command line: all of its cells, or those that `make test` runs.

python -m tests.equivalence.run [--cells covering|balanced|whole] [--world 1 2 4]

Prints the largest relative errors of each policy of each strategy; exit status 1 where one is out of bounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.equivalence.grid import STEPS, STRATEGIES, Outcome
from tests.helpers import torchrun

WORKER = Path(__file__).parent / "worker.py"


def run(world: int, selection: str, where: Path, *mistakes: str) -> list[Outcome]:
    """The outcomes of a selection's cells, in one start of torchrun."""
    lines = torchrun(WORKER, [selection, *(mistakes or ["none"])], world, where, timeout=3600).splitlines()
    return [Outcome(**json.loads(line)) for line in lines if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", choices=("covering", "balanced", "whole"), default="whole")
    parser.add_argument("--world", type=int, nargs="+", choices=tuple(STRATEGIES), default=list(STRATEGIES))
    options = parser.parse_args()
    failed = False
    for world in options.world:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as where:
            outcomes = run(world, options.cells, Path(where))
        took = time.perf_counter() - began
        print(
            f"world {world}: {len(outcomes)} cells of {STEPS[options.cells]} steps in {took:.0f} s; "
            "largest relative errors"
        )
        for group in dict.fromkeys(outcome.cell.split(",")[0] for outcome in outcomes):
            cells = [outcome for outcome in outcomes if outcome.cell.startswith(f"{group},")]
            full, short, norm, parameters = (
                max(getattr(outcome, name) for outcome in cells) for name in ("full", "short", "norm", "parameters")
            )
            print(
                f"  {group:26} {len(cells):3} cells  gradient {full:.1e} (short window {short:.1e})  "
                f"norm {norm:.1e}  parameters {parameters:.1e}"
            )
        for outcome in outcomes:
            if outcome.failures:
                failed = True
                print(f"  OUT OF BOUNDS: {outcome}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
