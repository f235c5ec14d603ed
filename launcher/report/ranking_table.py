"""Ranking of plans as text for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from launcher.plan.strategy_choice import Candidate, Ranking
from launcher.quantities import bytes_text, duration_text, first_names, seconds_text
from launcher.report.recorded_step import RecordedSteps

_SHOWN_LABELS = 6


def ranking_tables(ranking: Ranking, recorded: RecordedSteps) -> Iterator[Table | str]:
    """Yield what the terminal shows, in order: tables and lines of text, none of which is markup.

    Args:
        recorded: steps of earlier runs.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("#", justify="right")
    table.add_column("cell", overflow="fold")
    table.add_column("strategy and sync", overflow="fold")
    for heading in ("ranks", "acc.", "memory", "wire a step"):
        table.add_column(heading, justify="right", overflow="fold")
    found = {each: recorded.step_of(each.plan) for each in ranking.fitting}
    if any(found.values()):
        for heading in ("measured step", "whole run", "of run"):
            table.add_column(heading, overflow="fold")
    for place, each in enumerate(ranking.fitting, 1):
        numbers = f"{each.plan.batch.world_size:,}", f"{each.plan.batch.accumulation:,}"
        sizes = _text_of_bytes(_peak_bytes(each)), _text_of_bytes(each.wire_bytes)
        step, times = found[each], ()
        if step is not None:
            total = "" if step.total_s is None else duration_text(step.total_s)
            times = seconds_text(step.step_s), total, step.run
        table.add_row(str(place), each.label, _policy_text(each), *numbers, *sizes, *times)
    if table.rows:
        yield table
        yield "Ranked by wire bytes per step, then by simplicity."
    if ranking.too_large:
        yield ""
        yield _too_large(ranking.too_large)
    if ranking.impossible:
        yield ""
        yield "Impossible:"
        for reason, labels in ranking.impossible.items():
            yield f"  {first_names(labels, _SHOWN_LABELS)}: {reason}"
    for note in ranking.notes:
        yield f"note: {note}"


def _policy_text(candidate: Candidate) -> str:
    """Return strategy and sync policy of a candidate."""
    strategy = candidate.plan.strategy
    return f"{strategy.kind.value} {strategy.sync.value}"


def _too_large(candidates: Sequence[Candidate]) -> Table:
    table = Table(title="Do not fit into memory", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("cell", overflow="fold")
    table.add_column("strategy and sync", overflow="fold")
    for heading in ("needs", "too much", "memory of a rank"):
        table.add_column(heading, justify="right")
    for each in candidates:
        texts = map(_text_of_bytes, (_peak_bytes(each), each.missing_bytes, each.plan.strategy.memory_bytes))
        table.add_row(each.label, _policy_text(each), *texts)
    return table


def ranking_json(ranking: Ranking, recorded: RecordedSteps) -> str:
    """Return the ranking as JSON, the best cell first; seconds, hours and bytes; null for what is unknown."""

    def record(candidate: Candidate) -> dict[str, Any]:
        plan, step = candidate.plan, recorded.step_of(candidate.plan)
        known = None not in (plan.strategy.memory_bytes, _peak_bytes(candidate))
        return {
            "cell": candidate.label,
            "strategy": plan.strategy.kind.value,
            "sync": plan.strategy.sync.value,
            "sync_reason": plan.strategy.sync_reason,
            "nodes": plan.cluster.nodes,
            "ranks": plan.batch.world_size,
            "micro_size": plan.batch.micro_size,
            "accumulation": plan.batch.accumulation,
            "wire_bytes": candidate.wire_bytes,
            "peak_bytes": _peak_bytes(candidate),
            "memory_bytes": plan.strategy.memory_bytes,
            "missing_bytes": candidate.missing_bytes,
            "fits": not candidate.missing_bytes if known else None,
            "measured": None if step is None else asdict(step),
            "notes": plan.notes,
        }

    cells = (*ranking.fitting, *ranking.too_large)
    content = {
        "global_size": next((each.plan.batch.global_size for each in cells), None),
        "cells": [record(each) for each in cells],
        "impossible": [{"cells": labels, "reason": reason} for reason, labels in ranking.impossible.items()],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _peak_bytes(candidate: Candidate) -> int | None:
    return None if candidate.forecast is None else candidate.forecast.peak_bytes


def _text_of_bytes(number: int | None) -> str:
    return "" if number is None else bytes_text(number)
