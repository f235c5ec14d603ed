"""Stop signals that `launch` forwards to the agent."""

from __future__ import annotations

from signal import SIGINT, SIGTERM
from unittest.mock import Mock

import pytest

from launcher.launch.local import _StopForwarder  # pyright: ignore[reportPrivateUsage]
from launcher.plan.clusters import Peers


@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
def test_only_who_typed_ctrl_c_reads_of_it(number: int) -> None:
    agent, display = Mock(), Mock()
    agent.poll.return_value = None
    forwarder = _StopForwarder(agent, display, Peers(), 1.0)
    forwarder.forward([])
    forwarder.forward([number])
    (message,) = display.say.call_args.args
    assert message.startswith("Stopping at the end of this window.")
    assert ("Ctrl-C" in message) == (number == SIGINT)
    agent.send_signal.assert_called_once_with(SIGTERM)
