"""Installed trackers: what is refused before the start, and which ones a run has."""

from __future__ import annotations

import importlib.util

import pytest

from launcher.config.hydra import compose
from launcher.errors import ConfigError, SiteError, without_credentials
from launcher.plan.run_plan import RunPlan
from launcher.trackers import installed
from launcher.trackers.installed import described_tracker, mirrors_of, require_trackers
from tests.helpers import make_plan


def test_the_default_is_wandb_alone() -> None:
    plan = make_plan()
    assert plan.trackers == mirrors_of(plan) == ("wandb",)
    assert mirrors_of(make_plan("wandb.mode=disabled")) == ()
    assert mirrors_of(make_plan("trackers=[]")) == ()
    plan = make_plan("trackers=[wandb,tensorboard,mlflow]")
    assert mirrors_of(plan) == ("wandb", "tensorboard", "mlflow")
    assert RunPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trackers=[neptune]", r"trackers=neptune: no tracker of this name is installed[\s\S]*Installed: .*wandb"),
        ("trackers=[wnadb]", "did you mean 'wandb'"),
        ("trackers=tensorboard", "trackers"),
        ("trackers=[wandb,wandb]", "wandb is there twice"),
    ],
)
def test_wrong_names(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_trackers(compose([override]), {})


def test_one_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_trackers", lambda: {"broken": "launcher.no_such_module:Class"})
    with pytest.raises(SiteError, match=r"trackers=broken: launcher.no_such_module:Class cannot be imported"):
        require_trackers(compose(["trackers=[broken]"]), {})
    assert described_tracker("broken").title == "broken"


def test_what_is_shown_of_a_uri() -> None:
    assert without_credentials("GET https://me:a@b@there:80/x@y?z=1, then") == "GET https://***@there:80/x@y?z=1, then"
    assert without_credentials("https://me:a@b@there/x", "") == "https://there/x"
    assert without_credentials("a://b/c?x=1&Password=p&d") == "a://b/c?x=1&Password=***&d"
    assert without_credentials("sqlite:////data/a@b.db") == "sqlite:////data/a@b.db"


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    config = compose(["trackers=[tensorboard,mlflow]"])
    with pytest.raises(ConfigError, match=r"mlflow is not installed[\s\S]*samebatch\[mlflow\]"):
        require_trackers(config, {})
    require_trackers(compose(["trackers=[mlflow]", "cluster=slurm", "cluster.container=a.sqsh"]), {})
