"""Rendezvous of the agents: what ends the wait for the workers' start."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from launcher.launch.rendezvous import ALONE, _handler  # pyright: ignore[reportPrivateUsage]
from tests.helpers import make_plan


def test_a_stop_before_the_start_of_the_workers_of_a_single_host() -> None:
    """The agent may have received it while it imported torch: no worker starts then."""
    requests = iter([signal.SIGTERM])
    handler = _handler(make_plan(), ALONE, lambda: next(requests, None))
    with pytest.raises(SignalException) as raised:
        handler.next_rendezvous()
    assert raised.value.sigval is signal.SIGTERM
    assert handler.next_rendezvous().world_size == 1, "without a stop, one host does not wait for others"
