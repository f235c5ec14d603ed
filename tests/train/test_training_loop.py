"""Lines that rank 0 prints between the steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.train.training_loop import MAX_STRAGGLER_LINES, TrainingLoop


def test_ranks_that_take_turns_as_stragglers_do_not_fill_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    news = SimpleNamespace(news="Straggler: no more.")
    engine = SimpleNamespace(world=SimpleNamespace(rank=0), stragglers=news, steps=7)
    trainer: Any = SimpleNamespace(engine=engine, straggler_lines=0)
    result: Any = SimpleNamespace(skipped=False, nonfinite=None)
    for _ in range(MAX_STRAGGLER_LINES + 3):
        TrainingLoop.print_events(trainer, result)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MAX_STRAGGLER_LINES
    assert [("metrics.jsonl" in line) for line in lines] == [False] * (MAX_STRAGGLER_LINES - 1) + [True]
