"""MLflow: what its store has after kills, failures and resumes, and which settings are refused."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher.config.hydra import compose
from launcher.errors import ConfigError
from launcher.extensions.trackers.mlflow_tracker import MlflowTracker, mlflow_name, mlflow_uri
from launcher.plan.run_plan import RunPlan
from launcher.trackers.installed import require_trackers
from launcher.trackers.tracker import StepEntry, entries_of
from tests.extensions.trackers.test_tensorboard_tracker import SAMPLES, with_samples
from tests.helpers import make_plan, patience
from tests.infra.mirrored import (
    Growing,
    differences,
    in_mlflow,
    kill_often,
    mirror,
    mirror_to_the_end,
    mlflow_client,
    record_of,
    saved_plan,
    status_of,
)
from tests.infra.mlflow_server import MlflowServer
from tests.infra.runs import wait_for


def test_names_in_mlflow() -> None:
    assert mlflow_name("eval/held out/acc-1_x.y") == "eval/held out/acc-1_x.y"
    assert mlflow_name("train/acc@5") == "train/acc_405"
    assert mlflow_name("a//b") == "a_2f_2fb"


def mlflow_plan(run_dir: Path, *overrides: str) -> RunPlan:
    return saved_plan(run_dir, "trackers=[mlflow]", *overrides)


@pytest.mark.slow
def test_a_run_in_mlflows_files(tmp_path: Path) -> None:
    """Settings, samples, summary and state; what a resume changes; a later start that adds steps."""
    plan = mlflow_plan(tmp_path / "runs" / "run", SAMPLES)
    with_samples(plan, 2)
    growing = Growing(plan)
    growing.add(8)
    plan.paths.summary.write_text('{"verdict": "stopped", "train/loss": 1.5, "train": 1, "eval/loss": null}')
    assert mirror_to_the_end(plan, "mlflow") == 0, plan.paths.tracker_log("mlflow").read_text()
    status = status_of(plan, "mlflow")
    store = str(tmp_path / "runs" / "mlruns")
    assert (status["dir"], status["delivered"]) == (store, 8)
    client = mlflow_client(store)
    run = client.get_run(status["run_id"])
    assert (run.info.run_name, run.info.status) == ("run", "KILLED")
    assert run.data.params["batch.global_size"] == "64"
    assert run.data.tags["launcher.run_id"] == "abcd1234"
    assert (run.data.tags["summary.verdict"], run.data.tags["summary.train.loss"]) == ("stopped", "1.5")
    samples = {artifact.path for artifact in client.list_artifacts(run.info.run_id, "samples/step_000002")}
    assert samples == {"samples/step_000002/face.png", "samples/step_000002/story.txt"}
    make_plan("precision=fp32", "trackers=[mlflow]", "train.log_every=2", run_dir=plan.run.dir).save()
    growing.add(4)
    plan.paths.summary.write_text('{"verdict": "done"}')
    assert mirror_to_the_end(plan, "mlflow") == 0
    run = client.get_run(status["run_id"])
    assert run.info.status == "FINISHED"
    assert (run.data.params["train.log_every"], run.data.tags["changed.train.log_every"]) == ("1", "2")
    assert differences(in_mlflow(store, status["run_id"]), 12, mlflow=True) == []
    (experiment,) = [e for e in client.search_experiments() if e.name == "launcher"]
    assert len(client.search_runs([experiment.experiment_id])) == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("kills", [30])
def test_each_step_is_in_mlflow_once_however_often_it_is_killed(kills: int, tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path / "runs" / "run")
    steps = kill_often(plan, "mlflow", kills)
    stored = in_mlflow(str(tmp_path / "runs" / "mlruns"), status_of(plan, "mlflow")["run_id"])
    assert differences(stored, steps, mlflow=True) == []


def test_a_batch_that_was_stored_in_part_is_completed(tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path / "runs" / "run")
    whole = [*entries_of(plan, [json.dumps(record_of(step)) for step in range(1, 6)], 0)]
    first = MlflowTracker(plan, {})
    first.open()
    first.log(whole[:4])
    part = {name: value for name, value in whole[4].record.items() if name in ("step", "train/loss")}
    first.log([StepEntry(part, (), whole[4].at)])
    metrics = next((tmp_path / "runs" / "mlruns").glob("*/*/metrics"))
    (metrics / "empty").touch()  # a process was killed between creating and writing it
    again = MlflowTracker(plan, {"run_id": first._run_id})
    assert again.open()["delivered"] == 4
    again.log(whole[4:])
    assert differences(in_mlflow(str(tmp_path / "runs" / "mlruns"), first._run_id), 5, mlflow=True) == []


class Refusing(BaseHTTPRequestHandler):
    """Server that accepts no login."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"You are not authenticated.")

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize(
    "cause", ["The server refuses the login", pytest.param("There is no host of this name", marks=pytest.mark.nightly)]
)
def test_the_cause_of_a_refusal_and_what_to_check_are_reported(cause: str, tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path / "runs" / "run")
    Growing(plan).add(5)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}" if "login" in cause else "no-such-host.invalid:5000"
        env = {"MLFLOW_TRACKING_URI": f"http://me:hunter22@{host}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        assert mirror_to_the_end(plan, "mlflow", env=env) == 1
        server.shutdown()
    problem = status_of(plan, "mlflow")["problem"]
    assert problem.startswith(f"{cause} (http://***@{host}, experiment launcher). Check mlflow.tracking_uri")
    for file in (plan.paths.tracker_status("mlflow"), plan.paths.tracker_log("mlflow")):
        assert "hunter22" not in file.read_text()
    assert problem.endswith("sends the rest.")
    assert "tried again" not in problem, "the run is over"
    assert mirror_to_the_end(plan, "mlflow") == 0
    status = status_of(plan, "mlflow")
    assert status["problem"] is None
    assert differences(in_mlflow(status["dir"], status["run_id"]), 5, mlflow=True) == []


@pytest.mark.nightly
@pytest.mark.slow
def test_a_real_server_that_comes_and_goes(tmp_path: Path) -> None:
    """Needs the package mlflow, with its server, which is down at the start, and dies in the middle."""
    with MlflowServer(tmp_path) as server:
        plan = mlflow_plan(tmp_path / "runs" / "run", f"mlflow.tracking_uri={server.uri}", SAMPLES)
        with_samples(plan, 2)
        growing = Growing(plan)
        growing.add(20)
        process = mirror(plan, "mlflow", env={"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
        wait_for(lambda: status_of(plan, "mlflow").get("problem"), "a problem")
        assert status_of(plan, "mlflow")["problem"].startswith("The server does not answer")
        server.start()
        wait_for(lambda: status_of(plan, "mlflow").get("run_id"), "the run", 120)
        growing.start()
        wait_for(lambda: not status_of(plan, "mlflow")["problem"], "a delivery", 120)
        server.kill()
        wait_for(lambda: status_of(plan, "mlflow").get("problem"), "a problem", 120)
        growing.stop()
        server.start()
        process.communicate(timeout=patience(120))  # the end of the run
        assert process.returncode == 0, plan.paths.tracker_log("mlflow").read_text()
        status = status_of(plan, "mlflow")
        assert (status["problem"], status["delivered"]) == (None, growing.step)
        assert status["url"] == f"{server.uri}/#/experiments/1/runs/{status['run_id']}"
        assert differences(in_mlflow(server.uri, status["run_id"]), growing.step, mlflow=True) == []
        samples = {
            each.path for each in mlflow_client(server.uri).list_artifacts(status["run_id"], "samples/step_000002")
        }
        assert samples == {"samples/step_000002/face.png", "samples/step_000002/story.txt"}


def test_a_directory_is_relative_to_where_the_job_was_started() -> None:
    for uri, absolute in (
        ("store", "/nowhere/store"),
        ("file:///data/store", "/data/store"),
        ("http://tracking:5000", "http://tracking:5000"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
    ):
        assert mlflow_uri(make_plan("trackers=[mlflow]", f"mlflow.tracking_uri={uri}"), {}) == absolute


def test_mlflows_own_variable_is_its_default() -> None:
    plan = make_plan("trackers=[mlflow]")
    assert mlflow_uri(plan, {}) == "/nowhere/mlruns"
    assert mlflow_uri(plan, {"MLFLOW_TRACKING_URI": "http://there"}) == "http://there"
    configured = make_plan("trackers=[mlflow]", "mlflow.tracking_uri=http://here")
    assert mlflow_uri(configured, {"MLFLOW_TRACKING_URI": "http://there"}) == "http://here"


@pytest.mark.parametrize(
    ("uri", "message"),
    [("ftp://x", "mlflow.tracking_uri=ftp://x: MLflow has no store ftp"), ("http:///x", "names no server")],
)
def test_wrong_addresses(uri: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_trackers(compose(["trackers=[mlflow]", f"mlflow.tracking_uri={uri}"]), {})


@pytest.mark.parametrize("trackers", ["mlflow", "wandb"])
@pytest.mark.parametrize(
    "uri",
    [
        "https://me:hunter22@tracking", "https://hunter22@tracking", "https://me:at@hunter22@tracking/a",
        "postgresql://there/name?sslmode=require&password=hunter22", "postgresql://there/name?user=hunter22",
        "https://there/?access_token=hunter22",
    ],
)  # fmt: skip
def test_credentials_in_the_uri_are_refused_and_not_repeated(uri: str, trackers: str) -> None:
    with pytest.raises(ConfigError, match="contains a user or a password") as caught:
        make_plan(f"trackers=[{trackers}]", f'mlflow.tracking_uri="{uri}"')
    assert "hunter22" not in str(caught.value)
    assert "MLFLOW_TRACKING_PASSWORD" in str(caught.value)


def test_mlflows_variable_has_an_address_that_mlflow_knows() -> None:
    config = compose(["trackers=[mlflow]"])
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI=ftp://\*\*\*@x: MLflow has no store ftp"):
        require_trackers(config, {"MLFLOW_TRACKING_URI": "ftp://me:a@b@x"})
    require_trackers(config, {"MLFLOW_TRACKING_URI": "https://me:password@x"})
    require_trackers(compose([]), {"MLFLOW_TRACKING_URI": "ftp://x"})
