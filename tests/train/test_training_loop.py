"""Lines that rank 0 prints between the steps, and errors of the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.config.schema import StrategyKind
from launcher.errors import TaskError
from launcher.train.training_loop import MAX_STRAGGLER_LINES, TrainingLoop


def loop_and_result(news: Any, samples: int = 8, window: int = 1) -> tuple[Any, Any]:
    """Return a loop whose job reads 4 shards in windows of 8 samples, and the result of a step. ``window``: number in
    its epoch of the next window."""
    plan = SimpleNamespace(
        batch=SimpleNamespace(global_size_at=lambda index: 8),  # noqa: ARG005
        train=SimpleNamespace(data_shards=4),
    )
    position = SimpleNamespace(window=window)
    engine = SimpleNamespace(world=SimpleNamespace(rank=0), stragglers=news, steps=7, plan=plan, position=position)
    loop: Any = SimpleNamespace(engine=engine, straggler_lines=0, smaller_windows=False)
    return loop, SimpleNamespace(skipped=False, nonfinite=None, samples=samples, window=6)


@pytest.mark.parametrize(("samples", "window", "lines"), [(8, 1, 0), (6, 1, 1), (6, 0, 0)])
def test_windows_are_reported_once_that_are_smaller_before_the_end_of_an_epoch(
    samples: int, window: int, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, result = loop_and_result(SimpleNamespace(news=None), samples, window)
    for _ in range(3):
        TrainingLoop.print_events(loop, result)
    assert capsys.readouterr().out.count("train.data_shards=1, keep them whole") == lines


def test_ranks_that_take_turns_as_stragglers_do_not_fill_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, result = loop_and_result(SimpleNamespace(news="Straggler: no more."))
    for _ in range(MAX_STRAGGLER_LINES + 3):
        TrainingLoop.print_events(trainer, result)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MAX_STRAGGLER_LINES
    assert [("metrics.jsonl" in line) for line in lines] == [False] * (MAX_STRAGGLER_LINES - 1) + [True]


@pytest.mark.parametrize(("kind", "expected"), [(StrategyKind.fsdp, TaskError), (StrategyKind.ddp, RuntimeError)])
def test_only_a_sharded_model_has_parameters_that_are_freed(kind: StrategyKind, expected: type[Exception]) -> None:
    plan = SimpleNamespace(strategy=SimpleNamespace(kind=kind), batch=None)
    position, parallel = SimpleNamespace(index=0), SimpleNamespace(module=None)
    engine = SimpleNamespace(plan=plan, shrinks=lambda _: False, place="step 1", parallel=parallel, position=position)
    loop: Any = SimpleNamespace(engine=engine, plan=plan)
    with pytest.raises(expected) as caught:
        TrainingLoop.shrink_or_raise(loop, RuntimeError("setStorage: out of bounds for storage of size 0"))
    assert type(caught.value) is expected
