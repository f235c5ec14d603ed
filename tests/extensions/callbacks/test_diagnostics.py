"""Traces of chosen steps and ranks; snapshots of memory, which need a GPU (jobs/gpu), say so on CPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError
from launcher.extensions.callbacks import MemorySnapshot, Profile
from tests.conftest import Launch
from tests.infra.runs import OWN


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_traces_of_chosen_steps(launch: Launch, project: Path) -> None:
    callbacks = "callbacks=[{_target_: Profile, steps: [2, 4], ranks: [1]},{_target_: MemorySnapshot}]"
    done = launch("train", *OWN, "train.steps=4", callbacks, "checkpoint.enabled=false", status=0)
    assert "MemorySnapshot has no effect: the job runs on CPUs." in done.stdout
    traces = project / "runs" / "own" / "traces"
    assert sorted(path.name for path in traces.iterdir()) == ["step_000002.rank1.json", "step_000004.rank1.json"]
    for path in traces.iterdir():
        names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
        assert sum("embedding" in name and "backward" not in name for name in names) >= 4, "micro-batches"
        assert any("AdamW.step" in name for name in names), "the optimizer step is part of it"


@pytest.mark.parametrize(
    ("cls", "arguments", "words"),
    [
        (Profile, {"steps": []}, "steps=\\[\\]"),
        (Profile, {"steps": [0]}, "steps=\\[0\\]: must be a list of numbers of at least 1"),
        (Profile, {"steps": [1], "ranks": [-1]}, "ranks=\\[-1\\]"),
        (MemorySnapshot, {"max_entries": 0}, "max_entries=0"),
    ],
)
def test_values_that_make_no_sense(cls: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cls(**arguments)
