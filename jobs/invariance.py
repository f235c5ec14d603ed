"""Loss curves of one job at several shapes of the same global batch, which must coincide.

    python jobs/invariance.py                                # 100 steps of a small bytes_gpt in fp32: two minutes
    python jobs/invariance.py --to docs/explanations         # also draws invariance.png
    python jobs/invariance.py train.steps=20 task.width=192  # any key of `launch train`, except batch and ranks

Shapes are ranks x accumulation (x micro-batch): 1x8, 2x4, 4x2 and, with micro-batches twice as large, 4x1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MICRO = 8
SHAPES = {"1x8": (1, MICRO), "2x4": (2, MICRO), "4x2": (4, MICRO), "4x1, micro-batch x2": (4, 2 * MICRO)}
JOB = (
    f"batch.global_size={8 * MICRO}", "train.steps=100", "precision=fp32", "train.log_every=1", "train.eval_every=0",
    "run.calibrate_s=0", "checkpoint.enabled=false", "wandb.mode=disabled", "cluster.device=cpu",
    "task.width=64", "task.depth=2", "task.heads=2", "task.seq_len=64",
)  # fmt: skip
LAUNCH = (sys.executable, "-P", "-c", "from launcher.cli import main; main()", "train", "--quiet")


def curve(ranks: int, micro: int, overrides: list[str]) -> list[float]:
    """Return the loss of each step."""
    with tempfile.TemporaryDirectory() as directory:
        shape = [f"cluster.workers_per_node={ranks}", f"batch.micro_size={micro}"]
        own = [f"run.dir={directory}", "run.name=curve", *(["strategy=single"] if ranks == 1 else [])]
        command = [*LAUNCH, *JOB, *shape, *own, *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"jobs/invariance.py: {' '.join(command[len(LAUNCH) :])}\n{done.stdout}{done.stderr}")
        records = map(json.loads, (Path(directory) / "curve" / "metrics.jsonl").read_text().splitlines())
        return [record["train/loss"] for record in records]


def differences(one: list[float], other: list[float]) -> list[float]:
    """Return the relative difference of each step's loss."""
    return [abs(a / b - 1) for a, b in zip(other, one, strict=True)]


def table(curves: dict[str, list[float]]) -> str:
    first = next(iter(curves.values()))
    shown = sorted({0, len(first) // 4, len(first) // 2, 3 * len(first) // 4, len(first) - 1})
    rows = [["ranks x accumulation", *(f"step {step + 1}" for step in shown), "largest relative difference"]]
    rows.append(["---"] * len(rows[0]))
    for name, losses in curves.items():
        rows.append([name, *(f"{losses[step]:.6f}" for step in shown), f"{max(differences(first, losses)):.1e}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(curves: dict[str, list[float]], to: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    (one, first), *others = curves.items()
    steps = range(1, len(first) + 1)
    for width, (name, losses) in zip((7, 5, 3, 1), curves.items(), strict=False):  # otherwise only the last is visible
        left.plot(steps, losses, label=name, linewidth=width)
    left.set(xlabel="step", ylabel="loss (nats a byte)")
    left.legend()
    for name, losses in others:
        right.semilogy(steps, [max(difference, 1e-9) for difference in differences(first, losses)], label=name)
    right.set(xlabel="step", ylabel=f"relative difference from {one}")
    right.legend()
    figure.savefig(to, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="directory for invariance.png")
    parser.add_argument("--within", type=float, default=1e-5, help="largest relative difference; else exit status 1")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=tuple(SHAPES),
        default=list(SHAPES),
        help="the others are compared with the first",
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    for name in options.shapes:
        curves[name] = curve(*SHAPES[name], options.overrides)
        print(f"{name}: loss {curves[name][-1]:.6f} after {len(curves[name])} steps", flush=True)
    first, *others = curves.values()
    largest = max(max(differences(first, losses)) for losses in others)
    print(f"largest relative difference: {largest:.1e}\n{table(curves)}")
    if options.to:
        draw(curves, options.to / "invariance.png")
    return int(largest > options.within)


if __name__ == "__main__":
    sys.exit(main())
