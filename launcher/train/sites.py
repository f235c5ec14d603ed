"""Sites of a job: groups of ranks that take optimizer steps on their own. A job has one, unless the plan divides it; an
extension adds several, see ``launcher.plan.division``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

from launcher.plan.run_plan import RunPlan
from launcher.rundir.paths import RunPaths
from launcher.targets import load_named
from launcher.train.world import Everyone, World

T = TypeVar("T")


class OneSite:
    """Sites of a job, as this rank sees them. In this base class all ranks are one site.

    All ranks of all sites call each method, in the same order.

    Attributes:
        site, count: number of this site, and of all.
        joined: this site did not exist when the checkpoint was saved, and has loaded the first site's.
        callbacks: they exchange parameters between the sites, and are called before those of the user.
    """

    def __init__(self, world: World) -> None:
        self.world, self.site, self.count = world, world.site, world.sites
        self.joined, self.callbacks = False, list[object]()

    def of_all(self, value: T) -> list[T]:
        """Return the ``value`` of every site, by site."""
        return [value]

    def whole_job(self) -> Everyone:
        """Return all ranks of all sites."""
        return _WholeJob(*self.world.in_job, self)

    def agree(self, window: int, *, stop: bool, save_due: bool) -> tuple[bool, bool]:  # noqa: ARG002
        """Return whether all sites stop after this window, and save."""
        return stop, save_due

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of this site since the last call."""
        return {}

    def summary(self, windows: int) -> dict[str, float]:  # noqa: ARG002
        """Return the metrics of the whole run, in which this process has run so many windows."""
        return {}

    def leave(self) -> None:
        """Wait until no other site needs an answer from this one."""


@dataclasses.dataclass(frozen=True)
class _WholeJob:
    """All ranks of all sites, to compare what they have."""

    rank: int
    size: int
    sites: OneSite

    def of_all(self, value: T) -> list[T]:
        return [each for site in self.sites.of_all(self.sites.world.of_all(value)) for each in site]


def own_site(plan: RunPlan) -> tuple[World, RunPlan]:
    """Return the world of this process, and the plan of its site: its share of each window, and its own directory (the
    first site's is the run's). A plan that is already that of a site is returned unchanged."""
    world = World.here(1 if plan.sites is None else plan.sites.count)
    if world.sites == 1 or plan.batch.sites > 1:
        return world, plan
    directory = str(RunPaths(Path(plan.run.dir)).site(world.site))
    run = dataclasses.replace(plan.run, dir=directory)
    return world, dataclasses.replace(plan, run=run, batch=plan.batch.of_site(world.sites))


def sites_of(world: World, plan: RunPlan) -> OneSite:
    """Return the sites of the job.

    Raises:
        SiteError: the plan has several, and the extension that divided the job is not installed here.
    """
    if plan.sites is None:
        return OneSite(world)
    what = f"{plan.sites.key}={plan.sites.value} needs an extension (install it on every node)"
    return load_named(plan.sites.connect, what)(world, plan)
