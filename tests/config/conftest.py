"""Configs as Hydra composes them, without the cache of tests/infra/composition.py."""

from __future__ import annotations

import hydra
import pytest

from tests.infra.composition import by_hydra


@pytest.fixture(autouse=True)
def _composed_by_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra, "compose", by_hydra)
