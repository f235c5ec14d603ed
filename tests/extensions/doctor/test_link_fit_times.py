"""Time of collectives: closed forms, an independent count of messages."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.extensions.doctor.link_fit import Level, Links
from launcher.plan.sync_policy import Collective

INSIDE = Level(latency_s=1.0, bytes_per_s=1000.0, error=0.1)
BETWEEN = Level(latency_s=10.0, bytes_per_s=10.0, error=0.2)
GLOO = Links(inside=INSIDE, between=BETWEEN, gloo=True)
NCCL = dataclasses.replace(GLOO, gloo=False)
FREE = dataclasses.replace(INSIDE, latency_s=0.0), dataclasses.replace(BETWEEN, latency_s=0.0)
KINDS = [Collective.all_reduce, Collective.all_gather, Collective.reduce_scatter]


@pytest.mark.parametrize(
    ("links", "kind", "ranks", "hosts", "groups", "expected"),
    [
        # one host: 2(W-1) steps; each rank sends 2(W-1)/W of 4000 bytes
        (GLOO, Collective.all_reduce, 4, 1, 1, 6 * 1 + 6),
        # two hosts of one rank: both steps on the link
        (GLOO, Collective.all_reduce, 2, 2, 1, 2 * 10 + 400),
        # two hosts of two ranks: the ring leaves each host once
        (GLOO, Collective.all_reduce, 4, 2, 1, 2 * 1 + 4 * 10 + 600),
        # one such ring for each of two workers of a host
        (GLOO, Collective.all_reduce, 2, 2, 2, 2 * 10 + 800),
        # parts of 1000 bytes, each sent to the three others at once
        (GLOO, Collective.all_gather, 4, 1, 1, 1 + 3),
        (GLOO, Collective.reduce_scatter, 2, 2, 1, 10 + 200),
        # each of two ranks sends two parts to the other host
        (GLOO, Collective.all_gather, 4, 2, 1, 10 + 400),
        (NCCL, Collective.all_gather, 4, 1, 1, 3 * 1 + 3),
        (NCCL, Collective.reduce_scatter, 4, 2, 1, 1 * 1 + 2 * 10 + 300),
        # a tree has fewer steps than a ring of 16, and sends 2 times the payload instead of 15/8 of it
        (NCCL, Collective.all_reduce, 16, 16, 1, 2 * 4 * 10 + 800),
        (NCCL, Collective.all_reduce, 2, 2, 1, 2 * 10 + 400),
    ],
)
def test_closed_forms(links: Links, kind: Collective, ranks: int, hosts: int, groups: int, expected: float) -> None:
    assert links.seconds(kind, 4000, ranks=ranks, hosts=hosts, groups=groups) == pytest.approx(expected)


@given(hosts=st.integers(1, 5), on_host=st.integers(1, 6), kind=st.sampled_from(KINDS), gloo=st.booleans())
def test_the_busiest_link_sets_the_rate(hosts: int, on_host: int, kind: Collective, gloo: bool) -> None:
    """The independent reference: all messages of the algorithm, added up for each host's link and each rank."""
    ranks = hosts * on_host
    payload = 60 * ranks
    on_link: Counter[int] = Counter()
    within: Counter[int] = Counter()

    def send(rank: int, peer: int, size: int) -> None:
        if rank // on_host == peer // on_host:
            within[rank] += size
        else:
            on_link[rank // on_host] += size

    for rank in range(ranks):
        if gloo and kind is not Collective.all_reduce:
            for peer in set(range(ranks)) - {rank}:
                send(rank, peer, payload // ranks)
        else:
            for _ in range((2 if kind is Collective.all_reduce else 1) * (ranks - 1)):
                send(rank, (rank + 1) % ranks, payload // ranks)
    most = max(
        max(within.values(), default=0) / INSIDE.bytes_per_s, max(on_link.values(), default=0) / BETWEEN.bytes_per_s
    )
    links = Links(inside=FREE[0], between=FREE[1], gloo=gloo)
    assert links.seconds(kind, payload, ranks=ranks, hosts=hosts) == pytest.approx(most if ranks > 1 else 0)


@given(
    kind=st.sampled_from(KINDS), gloo=st.booleans(), payload=st.integers(0, 10**12), more=st.integers(0, 10**12),
    hosts=st.integers(1, 600), on_host=st.integers(1, 16), added=st.integers(0, 16), groups=st.integers(1, 8),
)  # fmt: skip
def test_more_bytes_and_more_ranks_are_not_faster(
    kind: Collective, gloo: bool, payload: int, more: int, hosts: int, on_host: int, added: int, groups: int
) -> None:
    links = dataclasses.replace(GLOO, gloo=gloo)
    ranks = hosts * on_host
    seconds = links.seconds(kind, payload, ranks=ranks, hosts=hosts, groups=groups)
    assert math.isfinite(seconds)
    assert seconds >= 0
    tiny = 1 + 1e-9
    assert seconds <= links.seconds(kind, payload + more, ranks=ranks, hosts=hosts, groups=groups) * tiny
    assert seconds <= links.seconds(kind, payload, ranks=ranks + added * hosts, hosts=hosts, groups=groups) * tiny
    assert seconds <= links.seconds(kind, payload, ranks=ranks, hosts=hosts, groups=groups + 1) * tiny


def test_links_of_one_host_lead_to_no_other() -> None:
    alone = dataclasses.replace(GLOO, between=None)
    assert alone.seconds(Collective.all_gather, 4000, ranks=4, hosts=1) > 0
    with pytest.raises(ValueError, match="those of one host"):
        alone.seconds(Collective.all_gather, 4000, ranks=4, hosts=2)
