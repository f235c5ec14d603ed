"""Fixtures of the system tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent / "user_project"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    return tmp_path
