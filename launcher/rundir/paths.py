"""Paths of every file of a run, a sweep and a drill, defined only here; and discovery of runs and sweeps."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# file of a checkpoint with everything that is not a tensor
STATE = "state.json"


@dataclass(frozen=True)
class RunPaths:
    """Files of one run in its directory ``root``."""

    root: Path

    @property
    def plan(self) -> Path:
        """Return the path of the plan, the only input of a worker."""
        return self.root / "plan.json"

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

    @property
    def config(self) -> Path:
        """Return the path of the composed config, with which the run can be repeated."""
        return self.root / "config.yaml"

    def plan_until(self, submission: int) -> Path:
        """Return the plan that was valid up to and including a submission, kept when the next one changed it."""
        return self.root / f"plan.{submission}.json"

    def config_until(self, submission: int) -> Path:
        return self.root / f"config.{submission}.yaml"

    @property
    def metrics(self) -> Path:
        """Return the path of the record: one JSON object per logged step, appended by rank 0."""
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """Return the path of the verdict and the last values."""
        return self.root / "summary.json"

    @property
    def fitted(self) -> Path:
        """Return the path of the micro-batch sizes that were found to fit into memory."""
        return self.root / "fitted.json"

    @property
    def precision(self) -> Path:
        """Return the path of the number format that the run's first start chose for precision=auto."""
        return self.root / "precision.json"

    @property
    def certificate(self) -> Path:
        """Return the path of the result of `launch verify`."""
        return self.root / "certificate.json"

    def summary_of(self, node: int) -> Path:
        """Return the path of one host's summary; node 0's is the run's."""
        return self.summary if node == 0 else self.root / f"summary.node{node}.json"

    @property
    def job(self) -> Path:
        """Return the path of the list of submissions: who, when, as which job."""
        return self.root / "job.json"

    def submission(self, number: int) -> Path:
        """Return the marker file that reserves a submission number."""
        return self.root / f".submission.{number}"

    @property
    def events(self) -> Path:
        """Return the path of the event log: one JSON object per start, stop, requeue, ..."""
        return self.root / "events.jsonl"

    @property
    def code(self) -> Path:
        """Return the directory of the code snapshot taken at submission."""
        return self.root / "code"

    @property
    def slurm(self) -> Path:
        """Return submitit's folder: each submission's batch script, and output from before the agent's log starts."""
        return self.root / "slurm"

    @property
    def incarnation(self) -> Path:
        """Return the path of the newest start's record: only that start may write."""
        return self.root / "incarnation.json"

    def failure_of(self, node: int) -> Path:
        """Return the failure of one Slurm node's workers; the summary has the earliest of all nodes."""
        return self.root / f"failure.node{node}.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def node_log(self, node: int) -> Path:
        return self.logs / f"node{node}.log"

    def rank_log(self, rank: int, attempt: int = 0) -> Path:
        """Return the log of one rank's standard output and error; a restarted rank writes a new file."""
        return self.logs / (f"rank{rank}.log" if attempt == 0 else f"rank{rank}.attempt{attempt}.log")

    def newest_rank_log(self, rank: int) -> Path:
        """Return the log of the rank's latest attempt."""
        attempt = 0
        while self.rank_log(rank, attempt + 1).exists():
            attempt += 1
        return self.rank_log(rank, attempt)

    def next_attempt(self) -> int:
        """Return the number after that of the latest attempt with a log."""
        numbers = [re.fullmatch(r"rank\d+(?:\.attempt(\d+))?\.log", path.name) for path in self.logs.glob("rank*.log")]
        return max((int(number[1] or 0) + 1 for number in numbers if number), default=0)

    def rank_error(self, rank: int, attempt: int = 0) -> Path:
        """Return the file in which torch's ``@record`` stores a rank's exception."""
        return self.logs / f"rank{rank}.attempt{attempt}.error.json"

    @property
    def launch_log(self) -> Path:
        """Return the output of a `launch` without a terminal: of a drill's runs."""
        return self.logs / "launch.log"

    @property
    def wandb_log(self) -> Path:
        return self.logs / "wandb.log"

    @property
    def wandb_status(self) -> Path:
        """Return the W&B mirror's status: mode, directory or URL, the first problem."""
        return self.root / "wandb.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    @property
    def latest(self) -> Path:
        """Return the file with the name of the newest complete checkpoint, for users and their scripts.

        It may be outdated after a crash; a resume looks at the directories instead.
        """
        return self.checkpoints / "latest"

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

    def refused_checkpoint(self, checkpoint: Path) -> Path:
        """Return the path to which a damaged checkpoint is moved, so that it is kept but not used."""
        first = self.checkpoints / f"refused_{checkpoint.name}"
        others = (first.with_name(f"{first.name}.{number}") for number in itertools.count(2))
        return next(path for path in itertools.chain([first], others) if not path.exists())


@dataclass(frozen=True)
class SweepPaths:
    """Files of one sweep in its directory ``root``, which also contains its runs."""

    root: Path

    @property
    def manifest(self) -> Path:
        """Return the manifest: the cells, and the run of each."""
        return self.root / "sweep.json"

    @property
    def code(self) -> Path:
        """Return the directory of code snapshots: one for each version of the code."""
        return self.root / "code"

    @property
    def slurm(self) -> Path:
        """Return submitit's folder for the arrays."""
        return self.root / "slurm"

    @property
    def report(self) -> Path:
        """Return the path of the page that `launch report` writes."""
        return self.root / "report.html"


@dataclass(frozen=True)
class DrillPaths:
    """Files of one drill in its directory ``root``, which also contains its runs."""

    root: Path

    @property
    def result(self) -> Path:
        """Return the result, in the format of `launch drill --json`."""
        return self.root / "drill.json"


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
            return sorted(Path(entry.path) for entry in entries if wanted(entry.path))
    except (FileNotFoundError, NotADirectoryError):
        return []
