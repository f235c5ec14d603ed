"""Sweeps and jobs from Python say what the command line would."""

from __future__ import annotations

import pytest

from launcher.api import typed
from launcher.config.hydra import compose

VALUES = [None, True, 3, 1e-4, "a", "a b", "a,b", "it's", "x\\'y", "back\\", "", "[x]", "null", "3", [1, None, "q,r"]]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_as_it_was_given(value: object) -> None:
    assert compose([f"task.word={typed(value)}"]).task["word"] == value
