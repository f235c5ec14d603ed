"""Run the checks of the GPU acceptance and print one table: ``make gpu PART=1``, or ``python -m jobs.gpu.acceptance``.

Each check is a process with its own time limit, so that none stops another. They run in the order of PARTS; those that
measure time or memory run alone. Checks that a part's time does not reach are "not run", which is not "failed". Each
check's log is under ``--out``. Exit status 1 if a check failed, 3 if none failed and some did not run. Needs neither
torch nor the launcher to report their absence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from jobs.gpu import checks, direct, engine_checks, llama, node  # noqa: F401 (they register what they have)
from jobs.gpu.registry import CHECKS, ROOT

# Checks of each part, most informative first. A part takes at most PART_S. "node" is for a host with several GPUs.
PARTS = {
    "1": (
        "host syncs, single, bf16", "host syncs, single, fp16", "host syncs, fsdp, bf16",
        "throughput, single", "throughput, ddp", "throughput, fsdp", "idle before the optimizer",
        "failure to verdict, 2 ranks", "failing rank ends", "refused page-lock", "memory of the calibration",
        "HSDP on a (1, 1) mesh, delayed", "FSDP's collectives, delayed", "DDP's hook, delayed", "visible GPUs",
        "single fp32", "single bf16", "single fp16", "fp32 and TF32", "float8 layers",
        "resume, bit by bit", "async saves, bit by bit",
    ),
    "2": (
        "shrink, one of 2 ranks", "one rank out of memory in FSDP's calibration", "hang verdict, launch queue full",
        "flight recorder, launch queue full",
        "seconds of communication, 2 ranks", "predicted memory", "compile without recompiles", "own process group",
        "PowerSGD, 2 ranks", "initial values of 1 B parameters", "launch doctor", "eight loader processes", "MFU",
        "fsdp, 2 ranks, fp32", "ddp, 2 ranks, fp32", "hsdp, 4 ranks, fp32", "fsdp, 2 ranks, gather_once, bf16",
        "cpu_offload, fp16, 2 ranks", "recompute, fsdp, bf16", "compress=bf16, 2 ranks",
        "BatchNorm over the window, 2 ranks", "deterministic", "batches of every type", "micro_size=auto",
        "out of memory in a collective: restart", "memory snapshot", "page-locked copies",
        "flags of a window", "launch verify",
    ),
    "3": ("llama documents", "llama 1b", "llama 1b, compile", "llama 8b", "llama 1b, float8"),
    "node": (
        "ddp, 2 GPUs, bf16", "fsdp, 2 GPUs, bf16", "fsdp, 8 GPUs, bf16", "hsdp, 8 GPUs, bf16", "ddp, 8 GPUs, bf16",
        "launch drill", "a rank that is stopped", "one GPU out of memory", "launch verify, all GPUs",
        "ddp, 4 GPUs, bf16", "fsdp, 4 GPUs, bf16", "ddp, 2 GPUs, fp16", "fsdp, 2 GPUs, fp16", "ddp, 4 GPUs, fp16",
        "fsdp, 4 GPUs, fp16", "ddp, 8 GPUs, fp16", "fsdp, 8 GPUs, fp16", "hsdp, 8 GPUs, fp16",
    ),
}  # fmt: skip
PART_S = 480.0
# time to exit after SIGKILL for a process inside a driver call
_ENDS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Result:
    """Result of a check. ``state``: ok, failed, skipped or not run. ``text``: the figure or the reason."""

    name: str
    state: str
    text: str
    seconds: float = 0.0


class Runner:
    """Runner of checks until ``budget_s`` is used up: ``parallel`` at a time, with ``patience`` times their limits."""

    def __init__(self, device: str, out: Path, budget_s: float, parallel: int, patience: float) -> None:
        self._device, self._out, self._parallel, self._patience = device, out, parallel, patience
        self._end = time.monotonic() + budget_s
        self._print_lock = threading.Lock()

    def all(self, names: list[str]) -> list[Result]:
        results = list[Result]()
        for alone, group in itertools.groupby(names, key=lambda name: CHECKS[name].alone):
            with ThreadPoolExecutor(1 if alone else self._parallel) as pool:
                results += pool.map(self._one, group)
        return results

    def _one(self, name: str) -> Result:
        left_s = self._end - time.monotonic()
        if left_s < 1:
            return self._print_result(Result(name, "not run", "the part's time was used up"))
        folder = self._out / "".join(c if c.isalnum() else "-" for c in name)
        folder.mkdir(parents=True)
        start = time.monotonic()
        limit_s = self._patience * CHECKS[name].seconds
        state, text = self._run(name, folder, min(limit_s, left_s))
        if state == "over":
            state = "failed" if limit_s <= left_s else "not run"
        return self._print_result(Result(name, state, text, time.monotonic() - start))

    def _run(self, name: str, folder: Path, limit_s: float) -> tuple[str, str]:
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobs.gpu", name, self._device, str(folder)], cwd=ROOT, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            status = None
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                end_with_descendants(process)
        with suppress(OSError, ValueError):  # it has no result, or half of one
            result = json.loads((folder / "result.json").read_text())
            return result["state"], result["text"]
        if status is None:
            return "over", f"not over within {limit_s:.0f} s"
        return "failed", f"its process ended with status {status}: {_last_line(folder / 'log')}"

    def _print_result(self, result: Result) -> Result:
        with self._print_lock:
            print(f"{result.state:8} {result.seconds:6.1f} s  {result.name}: {result.text}", flush=True)
        return result


def end_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and all its descendants: workers and agents have their own sessions. All are stopped first, so
    that none starts another meanwhile."""
    root = psutil.Process(process.pid)
    found = [root]
    for each in found:
        with suppress(psutil.NoSuchProcess):
            each.suspend()
            found += [child for child in each.children() if child not in found]
    for each in found:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    try:
        process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end after SIGKILL: it is in a system call", flush=True)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


_FACTS = """
import os, platform, torch
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    native = "native" if torch.cuda.is_bf16_supported(including_emulation=False) else "emulated"
    print(f"{card.name}, {total / 2**30:.0f} GiB of which {free / 2**30:.0f} free, bf16 {native}", end=", ")
    print("NCCL", ".".join(map(str, torch.cuda.nccl.version())), end=", ")
else:
    print("no GPU", end=", ")
print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
"""


def facts() -> str:
    """Return the card, its driver and the versions, for the table."""
    commands = {
        "": [sys.executable, "-c", _FACTS],
        "driver ": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "commit ": ["git", "rev-parse", "--short", "HEAD"],
    }
    found = list[str]()
    for name, command in commands.items():
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
            lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
            if lines and (done.returncode == 0 or not name):
                found.append(name + lines[-1])
    return ", ".join(found)


def table(results: list[Result], device: str) -> str:
    """Return a table in Markdown, with the counts of each state and ``device`` below."""
    cells = [("check", "state", "s of limit", "bound", "figure")]
    cells += [
        (
            result.name, result.state, f"{result.seconds:.0f} of {CHECKS[result.name].seconds:.0f}",
            CHECKS[result.name].bound, result.text.replace("|", "/"),
        )
        for result in results
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)][:-1]
    rows = [
        " | ".join([*(f"{cell:{width}}" for cell, width in zip(row[:-1], widths, strict=True)), row[-1]])
        for row in cells
    ]
    states = [result.state for result in results]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("ok", "failed", "skipped", "not run") if s in states)
    rows[1:1] = ["|".join("---" for _ in cells[0])]
    return "\n".join(
        [*(f"| {row} |" if "---|" not in row else f"|{row}|" for row in rows), "", f"{counts}. On: {device}"]
    )


def chosen_checks(part: str | None, only: str | None) -> list[list[str]]:
    """Return the names of the checks to run, part by part."""
    parts = [list(names) for name, names in PARTS.items() if part == name or (part is None and name != "node")]
    if only:
        words = only.split(";")
        parts = [[name for name in names if any(word in name for word in words)] for names in parts]
        parts.append([word for word in words if word in CHECKS and CHECKS[word].selftest])
    return [names for names in parts if names]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=PARTS, help="default: 1, 2 and 3, one after another")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="directory for logs and the table")
    parser.add_argument("--budget", type=float, help="seconds for all checks of a part; default: 480, node: 1200")
    parser.add_argument("--parallel", type=int, default=4, help="checks at a time")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time limits of the checks")
    parser.add_argument("--only", help="names of checks, or parts of names, separated by ;")
    chosen = parser.parse_args(arguments)
    parts = chosen_checks(chosen.part, chosen.only)
    if not parts:
        parser.error(f"--only={chosen.only}: there is no such check. Checks: {'; '.join(CHECKS)}")
    out: Path = chosen.out / f"part{chosen.part or ''}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    results = list[Result]()
    budget_s = chosen.budget if chosen.budget is not None else 1200.0 if chosen.part == "node" else PART_S
    for names in parts:
        results += Runner(chosen.device, out, budget_s, chosen.parallel, chosen.patience).all(names)
    text = table(results, facts())
    (out / "table.md").write_text(text + "\n")
    print(f"\n{text}\nlogs: {out}", flush=True)
    states = {result.state for result in results}
    return 1 if "failed" in states else 3 if "not run" in states else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
