"""Config groups of runs, sweeps and outer steps, which are part of the schema (launcher/config/schema.py)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.choices import OuterKind


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name and directory of the run, calibration."""

    name: str | None = None
    """Name of its directory. Default: the task's name, the time and four random characters."""
    dir: str = "runs"
    """Parent of the run directories."""
    calibrate_s: float | None = None
    """Maximum seconds of the calibration before training, which measures the first window's micro-batches with
    sync=every, with the job's own policy and without communication: the speed-up and the exposed communication.
    0: never. Default: 15, and no more than a tenth of the predicted run time; but three rounds are measured where that
    takes a tenth of the run, or less than 15 seconds and no longer than the run."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Many runs from one command (-m)."""

    name: str | None = None
    """Name of its directory, and W&B group. Default: the task's name and a digest of the command, so that the same
    command continues the same sweep."""
    at_once: int | None = None
    """slurm: cells of one array that run at the same time. Default: no limit."""
    objective: str | None = None
    """Result that a sweeper which learns from results, such as Optuna's, receives for a cell: a number in its
    summary.json, such as eval/accuracy; or best, the best value of checkpoint.best. Default: eval/loss if there is
    one, else train/loss."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Outer steps between sites that are joined by slow links. Not the gradient of one global batch: see
    docs/guides/outer.md."""

    kind: OuterKind = OuterKind.none
    """none: all ranks take each optimizer step together; diloco: the ranks of a site do, on its share of the global
    batch, and the sites average their progress every ``every`` steps (DiLoCo)."""
    group: str | int = "node"
    """diloco: the ranks of a site: node: of one host; shard: of one shard group of strategy.shard_size ranks (hsdp,
    whose sites then compute as fsdp); or their number."""
    every: int = 50
    """diloco: optimizer steps between two averages of a parameter."""
    lr: float = 0.7
    """diloco: learning rate of the outer step."""
    momentum: float = 0.9
    """diloco: Nesterov momentum of the outer step; 0 and lr=1: plain averaging."""
    fragments: int = 1
    """diloco: parts of the model that are averaged in turn, every/fragments steps apart (Streaming DiLoCo)."""
    delay: int = 0
    """diloco: optimizer steps for which a part is under way while training continues; below every."""
    mixing: float | None = None
    """diloco: share of the site's own parameters, which have changed during the delay, that is kept when an average
    arrives. Default: 0.5 with a delay; without one 0, and no other value."""
