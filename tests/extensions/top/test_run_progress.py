"""Progress of runs: from records with a known rate, and from processes of the test's own."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.extensions.top.run_progress import ProgressReader, RunProgress, device_use, sparkline
from launcher.rundir import history
from launcher.rundir.history import Submission
from launcher.rundir.paths import RunPaths
from launcher.runs.control import status_of
from launcher.runs.status import RunState
from tests.infra.made_runs import make_run

LOSSES = st.lists(st.floats(-1e6, 1e6), max_size=50)


def running(root: Path, name: str, *overrides: str, steps: int = 30, recorded: int = 30) -> RunPaths:
    """Make a run whose `launch` is this process, and which has recorded ``recorded`` of its steps."""
    paths = make_run(root, name, *overrides, steps=steps, verdict=None)
    paths.metrics.write_text("".join(paths.metrics.read_text().splitlines(keepends=True)[:recorded]))
    history.add_submission(paths, Submission.now().by_this_process())
    return paths


@given(LOSSES, st.integers(1, 60))
def test_a_curve_has_a_character_for_each_part(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


@given(LOSSES.map(sorted), st.integers(1, 60))
def test_a_curve_rises_with_its_values(values: list[float], width: int) -> None:
    assert all(left <= right for left, right in pairwise(sparkline(values, width)))
    assert all(left >= right for left, right in pairwise(sparkline(values[::-1], width)))


def test_a_curve_reaches_from_the_lowest_to_the_highest() -> None:
    assert sparkline([3, 1, 2, 8], 4) == "▃▁▂█"
    assert sparkline([5, 5], 9) == "▁▁"


def test_the_time_that_is_left_is_that_of_the_newest_steps(tmp_path: Path) -> None:
    paths = running(tmp_path, "half", steps=100, recorded=60)
    progress = RunProgress.of(status_of(paths))
    assert progress.run.state is RunState.running
    assert progress.run.left_s == pytest.approx(40 * 0.7, rel=0.01)  # 0.2 s, and half a second between steps
    assert progress.losses[0] > progress.losses[-1]
    assert status_of(make_run(tmp_path, "over")).left_s is None
    earlier, later = paths.metrics.read_text().splitlines()[:50], paths.metrics.read_text().splitlines()[50:]
    earlier = [line.replace('"time/total_s": ', '"time/total_s": -1') for line in earlier]
    later = [line.replace("{", '{"progress/measured_since": 50, ', 1) for line in later]
    paths.metrics.write_text("\n".join([*earlier, *later]) + "\n")
    assert status_of(paths).left_s == pytest.approx(40 * 0.7, rel=0.01), "other hardware until step 50"


def test_a_speedup_is_shown_if_it_was_measured(tmp_path: Path) -> None:
    def shown(**interval: float) -> str:
        metrics = {f"comm/speedup{name}": value for name, value in interval.items()}
        return RunProgress.of(status_of(make_run(tmp_path, str(interval), **metrics))).speedup

    assert shown(**{"": 1.5, "_low": 1.4, "_high": 1.6}) == "1.50x"
    assert shown(**{"": 1.02, "_low": 0.9, "_high": 1.1}) == "none"
    assert not shown()


def test_active_runs_come_first(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        make_run(tmp_path, name)
    running(tmp_path, "z", recorded=3)
    reader = ProgressReader(tmp_path, 3)
    assert [each.name for each in reader.newest()][0:1] == ["z"]
    assert len(reader.newest()) == 3


def test_what_was_read_follows_the_run(tmp_path: Path) -> None:
    paths = running(tmp_path, "grows", recorded=3)
    reader = ProgressReader(tmp_path, 3)
    before = reader.newest()
    assert reader.newest()[0] is before[0]
    lines = make_run(tmp_path / "other", "whole", loss=9.0).metrics.read_text()
    paths.metrics.write_text(lines)
    assert reader.newest()[0].losses[-1] == 9.0


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad").metrics.write_text('{"step": "x", "train/loss": NaN}\n{"train/loss": "many"}\n')
    make_run(tmp_path, "worse").events.write_text('{"event": "odd"}\n')
    found = {each.name: each for each in ProgressReader(tmp_path, 9).newest()}
    assert set(found) == {"good", "bad", "worse"}
    assert found["good"].losses
    assert not found["bad"].losses
    assert "cannot be read" in found["worse"].event


def test_the_use_of_cores_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = status_of(running(tmp_path, "mine"))
    device_use([run])
    began = time.process_time()
    while time.process_time() < began + 0.3:
        pass
    assert float(device_use([run])[run.dir].removesuffix(" cores")) > 0

    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $1 in\n*utilization*) printf 'GPU-1, 91\\nGPU-2, 7\\n';;\n"
        f"*) printf '{os.getpid()}, GPU-1\\n1, GPU-2\\n';;\nesac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert device_use([run]) == {run.dir: "GPU 91%"}
