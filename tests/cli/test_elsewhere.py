"""Runs on other machines without the package that reaches them."""

from __future__ import annotations

import pytest

from launcher import cli
from launcher.cli import elsewhere


def test_without_a_package_there_are_only_local_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elsewhere, "present_entry_points", lambda _: {})
    monkeypatch.setattr(elsewhere, "elsewhere", elsewhere.elsewhere.__wrapped__)
    assert cli.run(["train", "cluster=slurm", "cluster.login=there"]) == 2
    assert "cluster.login: no installed package runs commands there" in capsys.readouterr().err
