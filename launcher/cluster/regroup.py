"""A host is gone, and those that are left go on without it: as a new incarnation, with the plan for so many."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TypeVar

from launcher.cluster import events
from launcher.cluster.agent import begin
from launcher.cluster.peers import Again
from launcher.incarnation import Fence
from launcher.paths import write_text
from launcher.plan import LaunchPlan

P = TypeVar("P", bound=LaunchPlan)


def go_on(plan: P, again: Again, fence: Fence) -> tuple[P, Path, Fence]:
    """This host's plan, its file and its fence in the incarnation that follows that of ``fence``, whose workers have
    ended on all hosts that are left. Node 0 opens it, before any of the others can begin.

    Raises:
        Superseded: somebody else has begun the run again.
    """
    assert plan.cluster.place is not None
    place = dataclasses.replace(plan.cluster.place, node=again.node, store=again.store)
    plan = plan.on(again.nodes)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, place=place))
    own = dataclasses.replace(fence.own, restart=fence.own.restart + 1)
    fence = Fence(fence.paths, own)
    ranks = plan.cluster.world_size
    if again.node == 0:
        begin(fence, ranks=ranks, from_step=again.step)
        events.note(fence.paths, "lost", host=again.lost, incarnation=str(own), ranks=ranks, from_step=again.step)
    file = fence.paths.plan_for(again.nodes, again.node)
    write_text(file, plan.to_json() + "\n")
    return plan, file, fence


def words(plan: LaunchPlan, again: Again) -> str:
    """The line for whoever watches; ``plan``: of this host from here on."""
    nodes, ranks = again.nodes, plan.cluster.world_size
    return (
        f"{again.lost[0].upper()}{again.lost[1:]} is gone: going on with {nodes} host{'' if nodes == 1 else 's'}, "
        f"{ranks} rank{'' if ranks == 1 else 's'}, from step {again.step}. This is node {again.node} now."
    )
