"""Run the checks of the GPU acceptance and print one table: ``make gpu``, or ``python -m jobs.gpu.acceptance``.

Each check is a process with its own time limit, so that none stops another. Checks that measure time or memory run
alone, after the others; checks beyond the time budget are listed as not run. Each check's log is under ``--out``.
Exit status 1 if a check failed or did not run. Needs neither torch nor the launcher to report their absence.
"""

from __future__ import annotations

import argparse
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

from jobs.gpu import checks, direct, engine_checks, llama, memory  # noqa: F401 (they register what they have)
from jobs.gpu.registry import CHECKS, ROOT

# most important first; unlisted checks follow
FIRST = (
    "native bf16 and memory of the device", "single fp32", "fsdp, world 1, fp32", "collectives of FSDP and of a window",
    "DDP's hook and events", "HSDP's streams", "ddp, 2 ranks, fp32", "fsdp, 2 ranks, fp32",
    "resume, bit by bit", "out of memory: shrink", "micro_size=auto", "hang verdict", "launch verify", "single bf16",
    "cpu_offload, fp16", "compile, FSDP2",
)  # fmt: skip
# time to exit after SIGKILL for a process inside a driver call
_ENDS_WITHIN_S = 10.0


@dataclass(frozen=True)
class Result:
    """Result of a check. ``state``: ok, failed, skipped or not run. ``text``: the figure or the reason."""

    name: str
    state: str
    text: str
    seconds: float = 0.0


def ordered(names: list[str]) -> list[str]:
    """Return the names by importance; those that run alone last."""

    def rank(name: str) -> int:
        return next((number for number, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))

    return sorted(names, key=lambda name: (CHECKS[name].alone, rank(name)))


class Runner:
    """Runner of checks until ``budget_s`` is used up: ``parallel`` at a time, with ``patience`` times their limits."""

    def __init__(self, device: str, out: Path, budget_s: float, parallel: int, patience: float) -> None:
        self._device, self._out, self._parallel, self._patience = device, out, parallel, patience
        self._end = time.monotonic() + budget_s
        self._print_lock = threading.Lock()

    def all(self, names: list[str]) -> list[Result]:
        together, alone = ([n for n in names if CHECKS[n].alone is single] for single in (False, True))
        with ThreadPoolExecutor(self._parallel) as pool:
            results = list(pool.map(self._one, together))
        return results + [self._one(name) for name in alone]

    def _one(self, name: str) -> Result:
        left_s = self._end - time.monotonic()
        if left_s < 1:
            return self._print_result(Result(name, "not run", "the time budget was used up"))
        folder = self._out / "".join(c if c.isalnum() else "-" for c in name)
        folder.mkdir(parents=True)
        start = time.monotonic()
        state, text = self._run(name, folder, min(self._patience * CHECKS[name].seconds, left_s))
        return self._print_result(Result(name, state, text, time.monotonic() - start))

    def _run(self, name: str, folder: Path, limit_s: float) -> tuple[str, str]:
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "jobs.gpu", name, self._device, str(folder)], cwd=ROOT, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                end_with_descendants(process)
                return "failed", f"not over within {limit_s:.0f} s"
        if not (folder / "result.json").exists():
            return "failed", f"its process ended with status {status}: {_last_line(folder / 'log')}"
        result = json.loads((folder / "result.json").read_text())
        return result["state"], result["text"]

    def _print_result(self, result: Result) -> Result:
        with self._print_lock:
            print(f"{result.state:8} {result.seconds:6.1f} s  {result.name}: {result.text}", flush=True)
        return result


def end_with_descendants(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and all its descendants: workers and agents have their own sessions."""
    root = psutil.Process(process.pid)
    for each in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            each.kill()
    try:
        process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} does not end after SIGKILL: it is in a system call", flush=True)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def table(results: list[Result]) -> str:
    width = max(len(result.name) for result in results)
    rows = [f"{result.name:{width}}  {result.state:8}  {result.seconds:6.1f}  {result.text}" for result in results]
    states = [result.state for result in results]
    counts = ", ".join(f"{states.count(s)} {s}" for s in ("ok", "failed", "skipped", "not run") if s in states)
    return "\n".join([f"{'check':{width}}  {'state':8}  {'s':>6}  figure", *rows, "", counts])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="directory for logs and the table")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds for all checks together")
    parser.add_argument("--parallel", type=int, default=4, help="checks at a time")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies the time limits of the checks")
    parser.add_argument("--only", help="names of checks, or parts of names, separated by ;")
    chosen = parser.parse_args(arguments)
    names = ordered([name for name, check in CHECKS.items() if not check.selftest])
    if chosen.only:
        parts = chosen.only.split(";")
        names = [name for name in names if any(part in name for part in parts)]
        names += [part for part in parts if part in CHECKS and CHECKS[part].selftest]
    if not names:
        parser.error(f"--only={chosen.only}: there is no such check. Checks: {'; '.join(CHECKS)}")
    out: Path = chosen.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    results = Runner(chosen.device, out, chosen.budget, chosen.parallel, chosen.patience).all(names)
    text = table(results)
    (out / "table.txt").write_text(text + "\n")
    print(f"\n{text}\nlogs: {out}", flush=True)
    return 1 if any(result.state in ("failed", "not run") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
