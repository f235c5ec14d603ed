"""Node 0 waits for the others: until all are there, or enough of them and nobody else comes."""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.cluster.agree import differences
from launcher.cluster.channel import Channel, Door, Message, wait
from launcher.cluster.network import Route
from launcher.errors import SiteError, UserError
from launcher.worlds import NodeRange

# so long node 0 waits for one more host, where those that are there are enough
SETTLE_S = 30

Say = Callable[[str], None]


def wait_for_hosts(
    door: Door, guests: list[Channel], allowed: NodeRange, known: Message, route: Route, say: Say, within_s: float
) -> None:
    """Fill ``guests``, in the order in which they come.

    Args:
        door: where they come in.
        guests: those who are there.
        allowed: how many hosts the job may have, this one among them.
        known: what must be the same on all of them.
        route: where they meet.
        say: shows one line to the user.
        within_s: seconds in which as many as the job needs must have come.

    Raises:
        UserError: one was not given the same job.
        SiteError: too few came.
    """
    say(f"This is node 0 of {allowed.words}, waiting at {route.shown} for the others.")
    begun = last_change = time.monotonic()
    said_for = 0
    while (here := len(guests) + 1) < allowed.most:
        enough = here >= allowed.least
        if enough and said_for != here:
            said_for = here
            say(f"{here} {'host is' if here == 1 else 'hosts are'} enough: waiting {SETTLE_S} s for one more.")
        if enough and time.monotonic() - last_change >= SETTLE_S:
            return
        if not enough and time.monotonic() - begun > within_s:
            raise SiteError(
                f"cluster.nodes={_typed(allowed)}: {here} of {allowed.words} hosts came to {route.shown} within "
                f"{within_s // 60:.0f} minutes.\n  Type the same command on each of them."
            )
        wait([*door.sources(), *guests], 1.0)
        if _changed(door, guests, allowed, known, route, say):
            last_change, said_for = time.monotonic(), 0


def _changed(door: Door, guests: list[Channel], allowed: NodeRange, known: Message, route: Route, say: Say) -> bool:
    """Let in who is at the door, and go who leaves; whether anybody did."""
    before = list(guests)
    for channel, hello in door.arrivals():
        if len(guests) == allowed.most - 1:
            channel.send(refused=f"cluster.rendezvous={route.shown}: all {allowed.most} hosts are here already.")
            channel.close()
            continue
        guests.append(channel)
        differing = differences(known, hello.get("facts"), route.rendezvous[0], channel.peer)
        if differing:
            raise UserError(differing)
        say(f"{channel.peer} is here: {len(guests) + 1} of {allowed.words} hosts.")
    for guest in [guest for guest in guests if guest.receive() or not guest.open]:
        guest.close()
        guests.remove(guest)
        say(f"{guest.peer} has left again.")
    return guests != before


def _typed(allowed: NodeRange) -> str:
    return str(allowed.most) if allowed.fixed else f"{allowed.least}:{allowed.most}"
