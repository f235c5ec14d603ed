"""Time to truncate a long run's record when the run resumes.

    python jobs/bench_resume.py [--steps 100000] [--tries 5] [--dir DIR]

Writes a metrics.jsonl of that many steps, with lines like a real run's, and truncates it to a step near its end, in its
middle and near its start. Times include the copy and writing it to disk.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from launcher.train.metrics import truncate_record

# a record of `launch train` for FSDP on two ranks, with every number at its maximum length
LINE = {
    "train/loss": 3.2188758248682006, "train/grad_norm": 0.4381294713269138, "train/lr": 0.0009990133642141358,
    "batch/global_size": 64, "batch/micro_size": 4, "batch/accumulation": 8, "batch/world_size": 2,
    "batch/samples": 64, "batch/items": 16384, "progress/samples": 6400000, "progress/items": 1638400000,
    "progress/epoch": 21.333333333333332, "comm/collectives": 57, "comm/payload_bytes": 169304064,
    "comm/wire_bytes": 169304064, "comm/wire_bytes_every": 541762048, "comm/wire_bytes_saved": 372457984,
    "comm/saved_fraction": 0.6874930192378292, "comm/time_s": 0.18234713895712048, "comm/flags_bytes": 56,
    "time/step_s": 0.7429038179572448, "time/data_s": 0.002934719238471938, "time/total_s": 74291.38179572448,
    "throughput/samples_per_s": 86.14842197139457, "throughput/items_per_s": 22053.996024677012,
    "memory/peak_bytes": 1728053248, "batch/empty_windows": 0, "noise/scale": 1823.4719384719238,
    "noise/grad_sq": 0.0013847192384719238, "noise/variance": 2.5249719384719238,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="directory for the record; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        record = Path(folder) / "metrics.jsonl"
        text = json.dumps(LINE)[1:]
        content = "".join(f'{{"step": {step}, {text}\n' for step in range(1, arguments.steps + 1))
        print(f"{arguments.steps:,} steps, {len(content) / 1e6:.0f} MB")
        for step in (arguments.steps - 10, arguments.steps // 2, 1):
            seconds: list[float] = []
            for _ in range(arguments.tries):
                record.write_text(content + '{"step": 1')
                start = time.perf_counter()
                truncate_record(record, step, None)
                seconds.append(time.perf_counter() - start)
                with record.open("rb") as file:
                    assert sum(1 for _ in file) == step
            print(f"truncated to step {step:,}: best {min(seconds):.3f} s, worst {max(seconds):.3f} s")


if __name__ == "__main__":
    main()
