"""W&B and MLflow: what their stores have after kills, failures and resumes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb

from launcher.callbacks.samples import png
from launcher.config.multirun import typed
from launcher.plan.host import batch_env
from launcher.plan.run_plan import RunPlan
from launcher.report.server_trackers import MlflowAdapter, WandbAdapter, mlflow_name, wandb_media
from launcher.report.tracker_entry import StepEntry, entries_of, sample_files
from launcher.rundir.paths import RunPaths
from tests.helpers import make_plan, patience
from tests.infra.mlflow_server import MlflowServer
from tests.infra.runs import wait_for
from tests.report.mirrored import (
    Growing,
    differences,
    in_mlflow,
    in_wandb,
    kill_often,
    mirror,
    mirror_to_the_end,
    mlflow_client,
    record_of,
    saved_plan,
    status_of,
    wandb_records,
)
from tests.report.test_file_trackers import SAMPLES, with_samples

WANDB = {"WANDB_TAGS": "theirs,too", "WANDB_NOTES": "their notes", "WANDB_JOB_TYPE": "theirs", "WANDB_RUN_GROUP": "all"}

NOTES = """it's the "last" one:
  lr = {0.1, [0.2  \\ $HOME"""


@pytest.mark.slow
@pytest.mark.parametrize("configured", [False, True])
def test_the_environment_says_what_the_config_does_not(
    configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WANDB.items():
        monkeypatch.setenv(name, value)
    own = (
        ["wandb.tags=[a,b]", f"wandb.notes={typed(NOTES)}", "wandb.job_type=train", "wandb.group=g"]
        if configured
        else []
    )
    make_plan(*own, run_dir=str(tmp_path)).save()
    adapter = WandbAdapter(RunPlan.load(RunPaths(tmp_path).plan), {})  # as the tracker's process reads it
    adapter.open()
    run = adapter._run
    shown = (set(run.tags), run.notes, run.job_type, run.group)
    run.finish()
    wandb.teardown()
    ours, theirs = ({"a", "b"}, NOTES, "train", "g"), ({"theirs", "too"}, "their notes", "theirs", "all")
    assert shown == (ours if configured else theirs)


@pytest.mark.slow
def test_wandb_offline_continues_after_the_last_step_in_its_files(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path / "run", "wandb.mode=offline")
    lines = [json.dumps(record_of(step)) for step in range(1, 1201)]
    for number, end in enumerate((700, 1200)):  # several blocks of a file, in which records are divided
        adapter = WandbAdapter(plan, {})
        delivered = adapter.open()["delivered"]
        assert delivered == (0, 700)[number]
        adapter.log([*entries_of(plan, lines[:end], delivered)])
        directory = Path(adapter._run.dir).parent
        adapter._run.finish()
        wandb.teardown()
        directory.rename(f"{directory}-{number}")  # the second one in a second has such a name
    stored = in_wandb(tmp_path / "run")
    assert [values.pop("step") for values in stored.values()] == [*stored]
    assert differences(stored, 1200) == []


def last_summary(run: Path) -> dict[str, Any]:
    """Return the summary as it stands at the end of a run's newest offline file."""
    values: dict[str, Any] = {}
    for record in wandb_records(max(run.glob("wandb/offline-run-*/run-*.wandb"))):
        if record.HasField("summary"):
            values |= {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.summary.update}
    return values


@pytest.mark.slow
def test_the_summary_in_wandb_is_the_runs(tmp_path: Path) -> None:
    """The last row has the numbers of one step, and the summary those of the whole run, at an end and after it."""
    plan = saved_plan(tmp_path / "run", "wandb.mode=offline")
    lines = [json.dumps(record_of(step)) for step in range(1, 13)]
    for start, end in ((0, 8), (8, 12)):  # the second one is a requeue
        adapter = WandbAdapter(plan, {})
        adapter.open()
        adapter.log([*entries_of(plan, lines[start:end], start)])
        adapter.finish({"verdict": "done", "step": end, "train/loss": 0.5, "time/total_s": 1000.0 + end})
        wandb.teardown()
        found = last_summary(tmp_path / "run")
        assert (found["train/loss"], found["time/total_s"], found["verdict"]) == (0.5, 1000.0 + end, "done")
        assert found["progress/items"] == 4096 * end
        for directory in (tmp_path / "run" / "wandb").glob("offline-run-*"):
            if start == 0:  # the second one may start in the same second
                directory.rename(f"{directory.parent}/offline-run-0-{directory.name}")


def test_a_job_of_slurm_s_takes_them_along() -> None:
    uri = {"MLFLOW_TRACKING_URI": "http://tracking:5000"}
    secrets_of_mlflow = {"MLFLOW_TRACKING_PASSWORD": "secret", "MLFLOW_TRACKING_TOKEN": "secret"}
    assert batch_env(WANDB | uri | secrets_of_mlflow | {"WANDB_API_KEY": "secret"}, ()) == WANDB | uri
    assert batch_env({"MLFLOW_TRACKING_URI": "http://me:secret@tracking"}, ()) == {}


def test_wandb_shows_texts_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(wandb, "Html", lambda text, inject: made.append((text, inject)) or "html")
    monkeypatch.setattr(wandb, "Image", lambda path: made.append(path) or "image")
    paths = RunPaths(tmp_path)
    assert sample_files(paths, 3) == ()
    paths.samples(3).mkdir(parents=True)
    (paths.samples(3) / "story.txt").write_text("a < b")
    (paths.samples(3) / "face.png").write_bytes(png(torch.zeros(2, 2)))
    (paths.samples(3) / ".partial").write_text("")
    entry = StepEntry({"step": 3}, sample_files(paths, 3), 0)
    assert wandb_media(entry) == {"samples/face": "image", "samples/story": "html"}
    assert made == [str(paths.samples(3) / "face.png"), ('<pre style="white-space: pre-wrap">a &lt; b</pre>', False)]


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
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.nightly)])
def test_each_step_is_in_mlflow_once_however_often_it_is_killed(kills: int, tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path / "runs" / "run")
    steps = kill_often(plan, "mlflow", kills)
    stored = in_mlflow(str(tmp_path / "runs" / "mlruns"), status_of(plan, "mlflow")["run_id"])
    assert differences(stored, steps, mlflow=True) == []


def test_a_batch_that_was_stored_in_part_is_completed(tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path / "runs" / "run")
    whole = [*entries_of(plan, [json.dumps(record_of(step)) for step in range(1, 6)], 0)]
    first = MlflowAdapter(plan, {})
    first.open()
    first.log(whole[:4])
    part = {name: value for name, value in whole[4].record.items() if name in ("step", "train/loss")}
    first.log([StepEntry(part, (), whole[4].at)])
    metrics = next((tmp_path / "runs" / "mlruns").glob("*/*/metrics"))
    (metrics / "empty").touch()  # a process was killed between creating and writing it
    again = MlflowAdapter(plan, {"run_id": first._run_id})
    assert again.open()["delivered"] == 4
    again.log(whole[4:])
    assert differences(in_mlflow(str(tmp_path / "runs" / "mlruns"), first._run_id), 5, mlflow=True) == []


@pytest.mark.slow
def test_a_server_out_of_reach_is_reported_and_later_gets_everything(tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path / "runs" / "run")
    Growing(plan).add(5)
    away = {"MLFLOW_TRACKING_URI": "http://me:hunter22@127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    assert mirror_to_the_end(plan, "mlflow", env=away) == 1
    assert "127.0.0.1" in status_of(plan, "mlflow")["problem"]
    assert "hunter22" not in plan.paths.tracker_status("mlflow").read_text()
    assert "hunter22" not in plan.paths.tracker_log("mlflow").read_text()
    assert mirror_to_the_end(plan, "mlflow") == 0
    status = status_of(plan, "mlflow")
    assert status["problem"] is None
    assert differences(in_mlflow(status["dir"], status["run_id"]), 5, mlflow=True) == []


class Refusing(BaseHTTPRequestHandler):
    """Server that accepts no login."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()
        self.wfile.write(b"You are not authenticated.")

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["The server refuses the login", "There is no host of this name"])
def test_the_cause_of_a_refusal_and_what_to_check_are_reported(cause: str, tmp_path: Path) -> None:
    plan = mlflow_plan(tmp_path / "runs" / "run")
    Growing(plan).add(5)
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}" if "login" in cause else "no-such-host.invalid:5000"
        env = {"MLFLOW_TRACKING_URI": f"http://{host}", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        assert mirror_to_the_end(plan, "mlflow", env=env) == 1
        server.shutdown()
    problem = status_of(plan, "mlflow")["problem"]
    assert problem.startswith(f"{cause} (http://{host}). Check mlflow.tracking_uri")
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
