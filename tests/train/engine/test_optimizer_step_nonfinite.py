"""`train.on_nonfinite=skip`: a window that is not finite leaves no trace but its place in the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError
from tests.conftest import Launch
from tests.helpers import make_plan, printed_by
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.runs import OWN, records, summary

WORKER = Path(__file__).parent / "nonfinite_worker.py"
LINES = (
    "loss one strategy=ddp precision=fp32",
    "input one strategy=ddp",
    "gradient several strategy=ddp precision=bf16 strategy.sync=every",
    "input several strategy=fsdp precision=bf16",
    "gradient one strategy=fsdp precision=fp32 strategy.sync=gather_once batch.norm=sync",
    "loss one strategy=ddp precision=fp16 precision.init_scale=64",
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    answers = printed_by(WORKER, [*LINES, "end"], 2, tmp_path_factory.mktemp("nonfinite"))
    return dict(zip([*LINES, "end"], answers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_as_if_the_data_lacked_the_window(seen: dict[str, dict[str, Any]], line: str) -> None:
    found = seen[line]
    assert found["equal"], "parameters, buffers and optimizer state, bit by bit"
    assert found["random"], "dropout continues as if the window had not been run"
    assert found["results"], "loss, norm and rate of each step"
    assert found["finite"]
    assert (found["skipped"], found["steps"], found["window"], found["samples"]) == (3, 6, 9, 9 * 16)
    assert found["counters"] == [0, 0]
    for reason, step in zip(found["reasons"], (3, 4, 4), strict=True):
        what = f"The gradient of step {step} has norm" if "gradient" in line else f"The loss of step {step} is not"
        assert reason.startswith(what)
        assert "rank 1, micro-batch 3" in reason or "gradient" in line


@pytest.mark.slow
def test_too_many_in_a_row(seen: dict[str, dict[str, Any]]) -> None:
    error = seen["end"]["error"]
    assert "The loss of step 2 is not finite" in error
    assert "The 20 windows before it were not finite either" in error


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_job_continues_and_resumes_bit_by_bit(launch: Launch, project: Path) -> None:
    job = [word for word in OWN if not word.startswith(("task.", "run.name", "precision"))]
    job += ["task._target_=speech.hooked.Poisoned", "train.epochs=2", "checkpoint.every=2"]
    stopped = launch("train", *job, "run.name=stop")
    assert stopped.returncode == 1
    assert "The loss of step" in stopped.stderr
    through = launch("train", *job, "run.name=through", "train.on_nonfinite=skip")
    assert through.returncode == 0, through.stderr
    assert through.stdout.count("The window is skipped (train.on_nonfinite=skip).") == 2, "one in each epoch"
    assert "2 windows skipped: loss or gradient was inf or nan" in through.stdout
    of_through = project / "runs" / "through"
    assert summary(of_through)["batch/nonfinite_windows"] == 2
    assert summary(of_through)["steps"] == 8
    lines = records(of_through)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["batch/nonfinite_windows"] == 2
    resumed = launch("resume", "stop", "train.on_nonfinite=skip")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_tensors(*(project / "runs" / name / "checkpoints" / "step_000008" for name in ("through", "stop")))
    assert [line["train/loss"] for line in records(project / "runs" / "stop")] == [line["train/loss"] for line in lines]


def test_powersgd_cannot_skip() -> None:
    with pytest.raises(ConfigError, match=r"train.on_nonfinite=skip: does not work with strategy.compress=powersgd"):
        make_plan("train.on_nonfinite=skip", "strategy.compress=powersgd")
