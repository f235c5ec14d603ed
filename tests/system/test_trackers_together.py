"""One real run in several trackers at once; trackers that are out of reach beside others that are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.infra.mirrored import in_mlflow, in_tensorboard
from tests.system.test_wandb import ALONE, SMALL, read_back

pytestmark = pytest.mark.slow


def test_a_run_is_the_same_in_all_and_one_out_of_reach_disturbs_none(launch: Launch, tmp_path: Path) -> None:
    key = "5ecre7" * 6
    env = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_TRACKING_PASSWORD": key, "WANDB_API_KEY": key + "abcd"}
    trackers = ("trackers=[wandb,tensorboard,mlflow]",)
    done = launch(
        "train", *SMALL, *ALONE, *trackers, "checkpoint.enabled=true", "mlflow.tracking_uri=http://127.0.0.1:9", env=env
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("MLflow: ") <= 1
    run = tmp_path / "runs" / "w"
    for path in run.rglob("*"):
        assert not path.is_file() or key.encode() not in path.read_bytes(), path
    written = {r["step"]: r for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    assert [*written] == [*range(1, 13)]
    stored = in_tensorboard(run / "tensorboard")
    assert [*stored] == [*written]
    for step, values in stored.items():
        record = {name: value for name, value in written[step].items() if name != "step"}
        assert values == pytest.approx(record, rel=1e-6), step
    assert [row["step"] for row in read_back(run)[1]] == [*written]
    status = launch("status", "w")
    assert "MLflow" in status.stdout
    assert "problem: " in status.stdout
    assert "127.0.0.1" in status.stdout
    # the same run, to the end, in a store that answers: all of it arrives there
    resumed = launch("resume", "w", "train.steps=14", f"mlflow.tracking_uri={tmp_path / 'mlruns'}", env=env)
    assert resumed.returncode == 0, resumed.stderr
    report = json.loads(launch("status", "w", "--json").stdout)["trackers"]
    assert set(report) == {"wandb", "tensorboard", "mlflow"}
    assert not report["mlflow"]["problem"]
    stored = in_mlflow(str(tmp_path / "mlruns"), report["mlflow"]["run_id"])
    assert [*stored] == [*range(1, 15)]


@pytest.mark.nightly
def test_what_a_tracker_lacks_at_the_end_is_sent_by_a_command(launch: Launch, tmp_path: Path) -> None:
    away = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    there = {"MLFLOW_TRACKING_URI": str(tmp_path / "mlruns")}
    done = launch("train", *SMALL, *ALONE, "trackers=[mlflow]", env=away)
    assert done.returncode == 0, done.stderr
    assert "MLflow is incomplete: `launch status" in done.stdout
    run = tmp_path / "runs" / "w"
    problem = json.loads((run / "mlflow.json").read_text())["problem"]
    assert f"`launch mirror {run}` sends the rest" in problem
    still = launch("mirror", "w", env=away)
    assert still.returncode == 1, still.stderr
    assert "MLflow: The server does not answer" in still.stdout
    assert "launch mirror" not in still.stdout, "that is the command itself"
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for _ in range(2):  # the second time, nothing is missing
        sent = launch("mirror", "w", env=there)
        assert sent.returncode == 0, sent.stderr
        assert sent.stdout.endswith("MLflow: has the whole record.\n")
        stored = in_mlflow(there["MLFLOW_TRACKING_URI"], json.loads((run / "mlflow.json").read_text())["run_id"])
        assert [*stored] == [*range(1, 13)]
        assert [step["train/loss"] for step in stored.values()] == [record["train/loss"] for record in written]
    none = launch("mirror", "nothing")
    assert none.returncode == 2
