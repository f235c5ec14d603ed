"""With which status `launch` leaves where it was told to end the run."""

from __future__ import annotations

from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR2
from unittest.mock import Mock

import pytest

from launcher.launch.local import _status_before_training, _status_of_stop, _StopForwarder  # pyright: ignore[reportPrivateUsage]
from launcher.plan.clusters import Peers
from launcher.rundir.history import failure_record
from tests.helpers import make_plan  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("asked", "verdict", "trained", "status"),
    [
        ([SIGTERM], "stopped", True, 75),
        ([SIGUSR2], "stopped", False, 75),
        ([SIGTERM], "done", True, 0),
        ([SIGTERM], "failed", True, 1),
        ([SIGTERM], "killed", False, 75),  # before there was anything to save
        ([SIGTERM], "killed", True, 130),  # steps are lost
        ([SIGTERM, SIGINT], "killed", False, 130),
        ([SIGTERM, SIGINT], "stopped", True, 75),
        ([SIGINT], "stopped", True, 130),
        ([SIGINT, SIGINT], "killed", False, 130),
    ],
)
def test_75_is_for_a_scheduler_and_means_that_nothing_is_lost(
    tmp_path: Path, asked: list[int], verdict: str, trained: bool, status: int
) -> None:
    plan = make_plan("checkpoint.enabled=true", run_dir=str(tmp_path))
    assert _status_of_stop(plan, verdict, asked, trained=trained) == status


def test_what_cannot_go_on_is_not_said_to(tmp_path: Path) -> None:
    plan = make_plan("checkpoint.enabled=false", run_dir=str(tmp_path))
    assert _status_of_stop(plan, "killed", [SIGTERM], trained=False) == 130


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
    ("kind", "status"),
    [("ConfigError", 2), ("TaskError", 2), ("SiteError", 2), ("NotFinite", 1), ("Hang", 1), (None, 1)],
)
def test_wrong_input_that_only_the_workers_find_has_the_status_of_wrong_input(kind: str | None, status: int) -> None:
    assert _status_before_training(failure_record("why", None, rank=0, kind=kind)) == status
