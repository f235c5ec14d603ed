"""Division of jobs into sites: groups of ranks that take optimizer steps on their own, on equal shares of each window.

The config group of an extension (entry point ``launcher.config``) divides a job if its property ``divides`` names a
function: (group, job) -> DividedJob. Standard library only.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.config.schema import Config, StrategyConfig
from launcher.plan.batch import Batch
from launcher.plan.launch_plan import ClusterPlan, SitesPlan
from launcher.targets import load_named


class UndividedJob(NamedTuple):
    """A job before its division.

    Args:
        samples: in an epoch; None for a stream.
        short_window: samples in an epoch's last window, 0 if it is full.
        parameters: trained parameters; None: not known.
    """

    config: Config
    batch: Batch
    cluster: ClusterPlan
    samples: int | None
    short_window: int
    parameters: int | None


class DividedJob(NamedTuple):
    """How a job is divided.

    Args:
        strategy: strategy of the ranks of one site.
        notes: what the user should know.
    """

    sites: SitesPlan
    strategy: StrategyConfig
    notes: list[str]


def division_of(job: UndividedJob) -> DividedJob | None:
    """Return the division of a job by the first extension that divides it; None: all ranks are one site.

    Raises:
        ConfigError: it is not possible.
    """
    for name, group in job.config.added.items():
        if path := getattr(group, "divides", ""):
            return load_named(path, f"The config group {name}")(group, job)
    return None
