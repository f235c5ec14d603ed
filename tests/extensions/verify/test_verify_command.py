"""Certificate in the terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from launcher.extensions.verify.verify_command import _window
from tests.helpers import shown


def test_one_is_no_plural_in_a_certificate() -> None:
    check: Any = SimpleNamespace(
        name="window 1", agrees=True, samples=1, items=1, micro_batches=1, reference_batches=1, loss=1.0,
        reference_loss=1.0, counts_agree=True, comparisons=(),
    )  # fmt: skip
    assert "1 sample, 1 item, 1 micro-batch a rank; loss" in shown(*_window(check))
