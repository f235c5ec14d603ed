"""Settings of trackers: what is refused before the start, and where each stores the run."""

from __future__ import annotations

import importlib.util
import json
import socket
from pathlib import Path

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import Tracker
from launcher.errors import ConfigError
from launcher.launch.planner import plan_job
from launcher.plan.host import batch_env, without_credentials
from launcher.plan.run_plan import RunPlan
from launcher.plan.tracker_plan import mirrors_of, mlflow_uri, require_trackers
from tests.helpers import make_plan


def test_the_default_is_wandb_alone() -> None:
    plan = make_plan()
    assert plan.trackers == mirrors_of(plan) == (Tracker.wandb,)
    assert mirrors_of(make_plan("wandb.mode=disabled")) == ()
    assert mirrors_of(make_plan("trackers=[]")) == ()
    plan = make_plan("trackers=[wandb,tensorboard,mlflow,trackio,prometheus]", "prometheus.port=0")
    assert mirrors_of(plan) == tuple(Tracker)
    assert RunPlan.from_json(plan.to_json()) == plan
    early = json.loads(plan.to_json())
    for name in ("trackers", "tensorboard", "mlflow", "trackio", "prometheus"):
        del early[name]
    assert RunPlan.from_json(json.dumps(early)).trackers == (Tracker.wandb,)


def test_paths_are_absolute_and_of_this_run() -> None:
    plan = make_plan(
        "trackers=[tensorboard,mlflow,prometheus]", "tensorboard.dir=tb", "mlflow.tracking_uri=store",
        "prometheus.textfile=metrics",
    )  # fmt: skip
    assert plan.tensorboard.dir == "/nowhere/tb/run-abcd1234"
    assert plan.mlflow.tracking_uri == "/nowhere/store"
    assert plan.prometheus.textfile == "/nowhere/metrics/run-abcd1234.prom"
    for uri, absolute in (
        ("file:///data/store", "/data/store"),
        ("http://tracking:5000", "http://tracking:5000"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
    ):
        assert make_plan("trackers=[mlflow]", f"mlflow.tracking_uri={uri}").mlflow.tracking_uri == absolute
    named = make_plan("trackers=[prometheus]", "prometheus.textfile=/var/a.prom")
    assert named.prometheus.textfile == "/var/a.prom"


def test_mlflows_own_variable_is_its_default() -> None:
    plan = make_plan("trackers=[mlflow]")
    assert mlflow_uri(plan, {}) == "/nowhere/mlruns"
    assert mlflow_uri(plan, {"MLFLOW_TRACKING_URI": "http://there"}) == "http://there"
    configured = make_plan("trackers=[mlflow]", "mlflow.tracking_uri=http://here")
    assert mlflow_uri(configured, {"MLFLOW_TRACKING_URI": "http://there"}) == "http://here"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trackers=[neptune]"], "trackers: must be one of wandb, .*, not 'neptune'"),
        (["trackers=tensorboard"], "trackers"),
        (["trackers=[wandb,wandb]"], "wandb is there twice"),
        (["trackers=[prometheus]"], "Set prometheus.port, for a scrape endpoint, or prometheus.textfile"),
        (["trackers=[prometheus]", "prometheus.port=70000"], "prometheus.port=70000: must be between 0 and 65535"),
        (["trackers=[mlflow]", "mlflow.tracking_uri=ftp://x"], "mlflow.tracking_uri=ftp://x: MLflow has no store ftp"),
        (["trackers=[mlflow]", "mlflow.tracking_uri=http:///x"], "names no server"),
    ],
)
def test_wrong_settings(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(*overrides)


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


def test_what_is_shown_of_a_uri() -> None:
    assert without_credentials("GET https://me:a@b@there:80/x@y?z=1, then") == "GET https://***@there:80/x@y?z=1, then"
    assert without_credentials("https://me:a@b@there/x", "") == "https://there/x"
    assert without_credentials("a://b/c?x=1&Password=p&d") == "a://b/c?x=1&Password=***&d"
    assert without_credentials("sqlite:////data/a@b.db") == "sqlite:////data/a@b.db"
    assert batch_env({"MLFLOW_TRACKING_URI": "postgresql://there/name?password=p"}, ()) == {}


def test_mlflows_variable_has_an_address_that_mlflow_knows() -> None:
    config = compose(["trackers=[mlflow]"])
    with pytest.raises(ConfigError, match=r"MLFLOW_TRACKING_URI=ftp://\*\*\*@x: MLflow has no store ftp"):
        require_trackers(config, {"MLFLOW_TRACKING_URI": "ftp://me:a@b@x"}, "/")
    require_trackers(config, {"MLFLOW_TRACKING_URI": "https://me:password@x"}, "/")
    require_trackers(compose([]), {"MLFLOW_TRACKING_URI": "ftp://x"}, "/")


def test_a_port_out_of_bounds_is_a_mistake_of_the_user() -> None:
    with pytest.raises(ConfigError, match="must be between 0 and 65535"):
        plan_job(compose(["trackers=[prometheus]", "prometheus.port=99999", "wandb.mode=disabled"]))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "prometheus_client" else object())
    config = compose(["trackers=[tensorboard,prometheus]", "prometheus.port=0"])
    with pytest.raises(ConfigError, match=r"prometheus_client is not installed[\s\S]*launcher\[prometheus\]"):
        require_trackers(config, {}, "/")
    image = compose(["trackers=[prometheus]", "prometheus.port=0", "cluster=slurm", "cluster.container=a.sqsh"])
    require_trackers(image, {}, "/")


def test_port_and_directory_of_this_machine(tmp_path: Path) -> None:
    def require(*overrides: str) -> None:
        require_trackers(compose(["trackers=[prometheus]", *overrides]), {}, str(tmp_path.parent))

    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"prometheus.port={port}: cannot be opened on this machine"):
            require(f"prometheus.port={port}")
        require(f"prometheus.port={port}", "cluster=slurm")
    require("prometheus.port=0", f"prometheus.textfile={tmp_path}")
    require(f"prometheus.textfile={tmp_path}/a.prom")
    require(f"prometheus.textfile={tmp_path.name}")
    with pytest.raises(ConfigError, match="its directory does not exist"):
        require(f"prometheus.textfile={tmp_path}/no/a.prom")
