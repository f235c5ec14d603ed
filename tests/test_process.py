"""Contexts that change the process for a while."""

from __future__ import annotations

import os
import signal

import pytest

from launcher.process import environment, signal_handler


def test_environment_and_signal_handlers_are_put_back_after_an_exception() -> None:
    variables, handler = dict(os.environ), signal.getsignal(signal.SIGUSR2)
    received: list[int] = []

    def use() -> None:
        with environment({"ONLY": "1"}), signal_handler((signal.SIGUSR2,), lambda number, _: received.append(number)):
            assert dict(os.environ) == {"ONLY": "1"}
            os.environ["MORE"] = "2"
            signal.raise_signal(signal.SIGUSR2)
            raise KeyError

    with pytest.raises(KeyError):
        use()
    assert received == [signal.SIGUSR2]
    assert dict(os.environ) == variables
    assert signal.getsignal(signal.SIGUSR2) == handler
