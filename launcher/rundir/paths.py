"""Paths of every file of a run, a sweep and a drill, defined only here; and discovery of runs and sweeps."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# directory of a run with those of its sites
_SITES = "sites"
# file of a checkpoint with everything that is not a tensor
STATE = "state.json"
# file of a checkpoint with size and checksum of each of its files
MANIFEST = "manifest.json"


class _Path:
    """Attribute of a class with a ``root``: the path ``name`` below it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, paths: RunPaths | SweepPaths | DrillPaths, owner: object) -> Path:
        return paths.root / self._name


@dataclass(frozen=True)
class RunPaths:
    """Files of one run in its directory ``root``."""

    root: Path

    plan = _Path("plan.json")  # the only input of a worker
    loop_plan = _Path("loop_plan.json")  # plan of the engine that a script of `launch run` has made
    config = _Path("config.yaml")  # the composed config, with which the run can be repeated
    metrics = _Path("metrics.jsonl")  # the record: one JSON object per logged step, appended by rank 0
    summary = _Path("summary.json")  # verdict and last values
    fitted = _Path("fitted.json")  # micro-batch sizes that were found to fit into memory
    precision = _Path("precision.json")  # number format that the run's first start chose for precision=auto
    certificate = _Path("certificate.json")  # result of `launch verify`
    job = _Path("job.json")  # list of submissions: who, when, as which job
    events = _Path("events.jsonl")  # one JSON object per start, stop, requeue, ...
    newest_incarnation = _Path("incarnation.json")  # the newest start of the agents: only that start may write
    report_entry = _Path("report_entry.jsonl")  # the run's part of a report, written when it ends
    code = _Path("code")  # directory of the code snapshot taken at submission
    slurm = _Path("slurm")  # submitit's folder: batch scripts, and output from before the agent's log starts
    logs = _Path("logs")
    launch_log = _Path("logs/launch.log")  # output of a `launch` without a terminal: of a drill's runs
    checkpoints = _Path("checkpoints")
    # name of the newest complete checkpoint, for users and their scripts; may be outdated after a crash, and a resume
    # looks at the directories instead
    latest = _Path("checkpoints/latest")

    def site(self, number: int) -> Path:
        """Return the directory of a site's own files (``outer``); the first one's are the run's."""
        return self.root if number == 0 else self.root / _SITES / str(number)

    @property
    def run(self) -> RunPaths:
        """Return the paths of the run that this site belongs to; without sites these paths."""
        if self.root.parent.name != _SITES:
            return self
        above = RunPaths(self.root.parent.parent)  # or a directory of runs with that name
        return above if above.plan.exists() or above.loop_plan.exists() else self

    def plan_of(self, node: int) -> Path:
        """Return the plan of one host's agent and workers.

        Hosts differ in directories, addresses and interfaces, and may share the disk.
        """
        return self.plan if node == 0 else self.root / f"plan.node{node}.json"

    def plan_for(self, nodes: int, node: int = 0) -> Path:
        """Return the plan that workers read if the job has ``nodes`` hosts, fewer than planned.

        Args:
            node: host, if hosts have plans of their own.
        """
        return self.root / f"plan.nodes{nodes}{f'.node{node}' if node else ''}.json"

    def plan_until(self, submission: int) -> Path:
        """Return the plan that was valid up to and including a submission, kept when the next one changed it."""
        return self.root / f"plan.{submission}.json"

    def config_until(self, submission: int) -> Path:
        return self.root / f"config.{submission}.yaml"

    def tracker_status(self, tracker: str) -> Path:
        """Return the status of one tracker: its directory or URL, the last step delivered, its problem."""
        return self.root / f"{tracker}.json"

    def tracker_log(self, tracker: str) -> Path:
        return self.logs / f"{tracker}.log"

    def summary_of(self, node: int) -> Path:
        """Return the path of one host's summary; node 0's is the run's."""
        return self.summary if node == 0 else self.root / f"summary.node{node}.json"

    def submission(self, number: int) -> Path:
        """Return the marker file that reserves a submission number."""
        return self.root / f".submission.{number}"

    def failure_of(self, node: int) -> Path:
        """Return the failure of one Slurm node's workers; the summary has the earliest of all nodes."""
        return self.root / f"failure.node{node}.json"

    def failed_nodes(self) -> list[int]:
        """Return the Slurm nodes whose workers have failed, from one listing of the directory."""
        names = (re.fullmatch(r"failure\.node(\d+)\.json", path.name) for path in self.root.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)

    def node_log(self, node: int) -> Path:
        return self.logs / f"node{node}.log"

    def rank_log(self, rank: int, attempt: int = 0) -> Path:
        """Return the log of one rank's standard output and error; a restarted rank writes a new file."""
        return self.logs / (f"rank{rank}.log" if attempt == 0 else f"rank{rank}.attempt{attempt}.log")

    def newest_rank_log(self, rank: int) -> Path:
        """Return the log of the rank's latest attempt; not all ranks have one of each, nor have all attempts logs."""
        logs = (self.rank_log(rank, attempt) for attempt in reversed(range(self.next_attempt())))
        return next((log for log in logs if log.exists()), self.rank_log(rank))

    def next_attempt(self) -> int:
        """Return the number after that of the latest attempt that left a log."""
        numbers = [re.fullmatch(r"rank\d+(?:\.attempt(\d+))?\.log", path.name) for path in self.logs.glob("rank*.log")]
        return max((int(number[1] or 0) + 1 for number in numbers if number), default=0)

    def rank_error(self, rank: int, attempt: int = 0) -> Path:
        """Return the file in which torch's ``@record`` stores a rank's exception."""
        return self.logs / f"rank{rank}.attempt{attempt}.error.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def partial_checkpoint(self, step: int, incarnation: object) -> Path:
        """Return the directory of a checkpoint being written. Two incarnations never share one."""
        return self.checkpoints / f".step_{step:06d}.{incarnation}.partial"

    def discarded_checkpoint(self, step: int, incarnation: object) -> Path:
        """Return a new directory for a checkpoint being deleted; an earlier one may still exist."""
        return self.checkpoints / f".step_{step:06d}-{secrets.token_hex(4)}.{incarnation}.partial"

    def partial_checkpoints(self) -> list[tuple[str, Path]]:
        """Return all directories of both kinds, each with its incarnation."""
        return [
            (path.name.split(".", 2)[2].removesuffix(".partial"), path)
            for path in self.checkpoints.glob(".step_*.*.partial")
        ]

    def committed_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints, the newest first."""
        found = [path for path in self.checkpoints.glob("step_*") if re.fullmatch(r"step_[0-9]+", path.name)]
        return sorted(found, key=lambda path: -int(path.name.removeprefix("step_")))  # excludes copies made by users

    def newest_step(self) -> int:
        """Return the step of the newest complete checkpoint; 0 without one."""
        return max((int(path.name.removeprefix("step_")) for path in self.committed_checkpoints()), default=0)

    def trace(self, step: int, rank: int) -> Path:
        """Return the profiler's trace of one step on one rank (callback Profile)."""
        return self.root / "traces" / f"step_{step:06d}.rank{rank}.json"

    def memory_snapshot(self, step: int, rank: int) -> Path:
        """Return the GPU memory snapshot of a rank that ran out of memory (callback MemorySnapshot)."""
        return self.root / "memory" / f"step_{step:06d}.rank{rank}.pickle"

    def samples(self, step: int) -> Path:
        """Return the directory of what the model generated after one step (callback GeneratedSamples)."""
        return self.root / "samples" / f"step_{step:06d}"

    def refused_checkpoint(self, checkpoint: Path) -> Path:
        """Return the path to which a damaged checkpoint is moved, so that it is kept but not used."""
        first = self.checkpoints / f"refused_{checkpoint.name}"
        others = (first.with_name(f"{first.name}.{number}") for number in itertools.count(2))
        return next(path for path in itertools.chain([first], others) if not path.exists())


@dataclass(frozen=True)
class SweepPaths:
    """Files of one sweep in its directory ``root``, which also contains its runs."""

    root: Path

    manifest = _Path("sweep.json")  # the cells, and the run of each
    report_entry = _Path("report_entry.jsonl")  # the run's part of a report, written when it ends
    code = _Path("code")  # directory of code snapshots: one for each version of the code
    slurm = _Path("slurm")  # submitit's folder for the arrays
    report = _Path("report.html")  # page that `launch report` writes


@dataclass(frozen=True)
class DrillPaths:
    """Files of one drill in its directory ``root``, which also contains its runs."""

    root: Path

    result = _Path("drill.json")  # in the format of `launch drill --json`


def find(runs: Path) -> list[RunPaths]:
    """Return all runs directly in a directory; runs of a sweep are in the sweep's directory."""
    return [RunPaths(place) for place in _places(runs, is_run)]


def find_sweeps(runs: Path) -> list[SweepPaths]:
    return [SweepPaths(place) for place in _places(runs, is_sweep)]


def is_run(directory: str | Path) -> bool:
    """Return whether this is a run's directory; False if this user may not read it."""
    return os.path.isfile(os.path.join(directory, "plan.json"))  # noqa: PTH113, PTH118 (pathlib raises where closed)


def is_sweep(directory: str | Path) -> bool:
    return os.path.isfile(os.path.join(directory, "sweep.json"))  # noqa: PTH113, PTH118


def _places(runs: Path, wanted: Callable[[str], bool]) -> list[Path]:
    try:
        with os.scandir(runs.absolute()) as entries:
            return [Path(place) for place in sorted(entry.path for entry in entries if wanted(entry.path))]
    except (FileNotFoundError, NotADirectoryError):
        return []
