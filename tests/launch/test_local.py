"""Stop signals that `launch` forwards to the agent, and its status after them."""

from __future__ import annotations

import signal
from pathlib import Path
from signal import SIGINT, SIGTERM
from unittest.mock import Mock

import pytest

from launcher.launch import local
from launcher.launch.local import _StopForwarder  # pyright: ignore[reportPrivateUsage]
from launcher.plan.clusters import Peers
from tests.helpers import make_plan


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


@pytest.mark.parametrize(
    ("asked", "trained", "saves", "status"),
    [
        ([SIGTERM], False, True, 75),
        ([SIGTERM], True, True, 130),
        ([SIGTERM], False, False, 130),
        ([SIGTERM, SIGINT], False, True, 130),
        ([SIGINT], False, True, 130),
    ],
)
def test_a_killed_job_is_resumable_if_it_could_save_and_had_nothing_to_save(
    asked: list[int], trained: bool, saves: bool, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(f"checkpoint.enabled={saves}".lower(), run_dir=str(tmp_path / "run"))
    local.create(plan, "")

    def agent_that_is_killed(*_: object) -> Mock:
        for number in asked:
            signal.raise_signal(number)
        if trained:
            plan.paths.metrics.write_text("{}\n")
        return Mock(poll=Mock(return_value=-9), returncode=-9)

    monkeypatch.setattr(local, "_start_agent", agent_that_is_killed)
    verdict = local.run_job(plan, Mock(), Peers())
    assert (verdict.status, verdict.summary["verdict"]) == (status, "killed")
