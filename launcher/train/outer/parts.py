"""Parts of an engine that belong to outer steps, by the kind of its plan."""

from __future__ import annotations

from launcher.plan.run_plan import RunPlan
from launcher.train.outer.outer_steps import OuterSteps
from launcher.train.outer.sites import Sites
from launcher.train.outer.store_sites import StoreSites
from launcher.train.outer.store_steps import StoreOuterSteps
from launcher.train.world import World


def outer_parts(plan: RunPlan, world: World) -> tuple[Sites, list[OuterSteps]]:
    """Return the sites of a job, and the callback that takes the outer steps, if the plan has any."""
    if plan.outer is None:
        return Sites(world, plan.train.hang_timeout), []
    if plan.outer.whole_job_is_site:
        stores = StoreSites(world, plan)
        return stores, [StoreOuterSteps(plan.outer, stores)]
    sites = Sites(world, plan.train.hang_timeout)
    return sites, [OuterSteps(plan.outer, sites)]
