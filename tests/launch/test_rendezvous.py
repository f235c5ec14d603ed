"""Rendezvous of the agents: what ends the wait for the workers' start."""

from __future__ import annotations

import dataclasses
import signal
import socket
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from launcher.launch.rendezvous import ALONE, AgentStore, _handler  # pyright: ignore[reportPrivateUsage]
from tests.helpers import make_plan


def test_a_stop_before_the_start_of_the_workers_of_a_single_host() -> None:
    """The agent may have received it while it imported torch: no worker starts then."""
    requests = iter([signal.SIGTERM])
    handler = _handler(make_plan(), ALONE, lambda: next(requests, None))
    with pytest.raises(SignalException) as raised:
        handler.next_rendezvous()
    assert raised.value.sigval is signal.SIGTERM
    assert handler.next_rendezvous().world_size == 1, "without a stop, one host does not wait for others"


def test_no_program_can_take_the_port_of_the_workers_store() -> None:
    """It listens before any worker starts, and each start of the workers has one of its own."""
    handler = _handler(make_plan(), ALONE, lambda: None)
    assert handler.use_agent_store
    for attempt in range(2):
        master = handler.next_rendezvous().bootstrap_store_info
        assert master is not None
        with pytest.raises(OSError, match="in use"):
            socket.create_server((master.master_addr, master.master_port))
        store = TCPStore(master.master_addr, master.master_port, wait_for_workers=False)
        assert store.add("starts", 1) == 1, f"start {attempt}"


def test_the_port_of_the_agents_store_was_taken() -> None:
    """Between the choice of the port and the start of node 0's agent, which imports torch, another program may."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = dataclasses.replace(ALONE, store=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(RendezvousClosedError, match=r"cannot listen there: Address already in use\..*again"):
            _handler(make_plan(), place, lambda: None).next_rendezvous()


class CountingStore:
    """A store that counts the requests to it."""

    def __init__(self) -> None:
        self.store, self.requests = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self.store, name)


def test_the_reports_of_many_agents_are_read_in_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 reads them at each check for hangs: with one request for each it would be busy with little else."""
    agents, counting = AgentStore(ALONE, 1), CountingStore()
    monkeypatch.setattr(agents, "_connection", counting)
    texts = {f"states/{node}": f"text of {node}" for node in range(512)}
    assert agents.read(texts) == {}
    for key, text in texts.items():
        agents.post(key, text)
    counting.requests = 0
    assert agents.read(texts) == texts
    assert counting.requests == 2
    assert agents.read([*texts, "states/512"]) == texts
    assert agents.read([]) == {}
