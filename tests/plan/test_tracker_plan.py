"""Settings of trackers: what is refused before the start, and where each stores the run."""

from __future__ import annotations

import importlib.util

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import Tracker
from launcher.errors import ConfigError
from launcher.plan.host import batch_env, without_credentials
from launcher.plan.run_plan import RunPlan
from launcher.plan.tracker_plan import mirrors_of, mlflow_uri, require_trackers
from tests.helpers import make_plan


def test_the_default_is_wandb_alone() -> None:
    plan = make_plan()
    assert plan.trackers == mirrors_of(plan) == (Tracker.wandb,)
    assert mirrors_of(make_plan("wandb.mode=disabled")) == ()
    assert mirrors_of(make_plan("trackers=[]")) == ()
    plan = make_plan("trackers=[wandb,tensorboard,mlflow]")
    assert mirrors_of(plan) == tuple(Tracker)
    assert RunPlan.from_json(plan.to_json()) == plan


def test_paths_are_absolute_and_of_this_run() -> None:
    plan = make_plan("trackers=[tensorboard,mlflow]", "tensorboard.dir=tb", "mlflow.tracking_uri=store")
    assert plan.tensorboard.dir == "/nowhere/tb/run-abcd1234"
    assert plan.mlflow.tracking_uri == "/nowhere/store"
    for uri, absolute in (
        ("file:///data/store", "/data/store"),
        ("http://tracking:5000", "http://tracking:5000"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
    ):
        assert make_plan("trackers=[mlflow]", f"mlflow.tracking_uri={uri}").mlflow.tracking_uri == absolute


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
        require_trackers(config, {"MLFLOW_TRACKING_URI": "ftp://me:a@b@x"})
    require_trackers(config, {"MLFLOW_TRACKING_URI": "https://me:password@x"})
    require_trackers(compose([]), {"MLFLOW_TRACKING_URI": "ftp://x"})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    config = compose(["trackers=[tensorboard,mlflow]"])
    with pytest.raises(ConfigError, match=r"mlflow is not installed[\s\S]*launcher\[mlflow\]"):
        require_trackers(config, {})
    require_trackers(compose(["trackers=[mlflow]", "cluster=slurm", "cluster.container=a.sqsh"]), {})
