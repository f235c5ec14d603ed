"""`launch plan`: what would run, and with -m which of several settings is the best."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.cli.overrides import print_progress, take_flag, with_config
from launcher.config.multirun import RequestedCell, Result, cell_label, override_key
from launcher.config.schema import Config, StrategyKind, Sync
from launcher.errors import EXIT_DONE, ConfigError, UserError
from launcher.launch.planner import CallCache, global_sizes, plan_job, plan_jobs
from launcher.launch.slurm import submit
from launcher.plan.batch import DEFAULT_GLOBAL_SIZE
from launcher.plan.host import without_secrets
from launcher.plan.run_plan import RunPlan
from launcher.plan.strategy_choice import Candidate, Ranking, rank, require_equal_work
from launcher.quantities import bytes_text, duration_text, first_names, seconds_text
from launcher.report import live, tables
from launcher.report.recorded_step import RecordedSteps
from launcher.sweeps.conductor import require_a_possible_one

ALL = "all"
MICRO_SIZE = "batch.micro_size"
# keys of which `all` is every option
_OPTIONS = {
    "strategy": [kind.value for kind in StrategyKind if kind is not StrategyKind.auto],
    "strategy.sync": [sync.value for sync in Sync if sync is not Sync.auto],
}


def launch_plan(arguments: list[str]) -> int:
    as_json = take_flag("--json", arguments)
    several = {"-m", "--multirun"} & set(arguments) and not {"--help", "-h", "--cfg", "-c"} & set(arguments)
    if not several:
        for key in sorted(_keys_with_all(arguments)):
            raise ConfigError(key, ALL, "stands for several values.", "Add -m, which compares them.")
        return with_config("plan", arguments, lambda config, _: _show(config, as_json=as_json))
    wide = _keys_with_all(arguments)
    arguments = [_with_options(argument) for argument in arguments]

    def cells(requested: Sequence[RequestedCell], with_results: bool) -> Sequence[Result]:
        if with_results:
            raise UserError(
                "hydra/sweeper: this sweeper needs results, and a plan has none.\n  Leave it out, or use launch train."
            )
        ranking = _rank(requested, wide)
        recorded = RecordedSteps(Path(requested[0].config.run.dir))
        if as_json:
            print(ranking_json(ranking, recorded))
        else:
            console = live.console()
            for part in ranking_tables(ranking, recorded):
                console.print(part, markup=False, highlight=False)
        return [None] * len(requested)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        raise AssertionError("the cells are ranked together")

    return with_config("plan", arguments, act, cells=cells, confirmed=True)


def _show(config: Config, *, as_json: bool) -> int:
    with live.waiting("Inspecting the task"):
        solved = plan_job(config, starts=False)
    recorded = RecordedSteps(solved.paths.root.parent).step_of(solved)
    if as_json:
        measured = None if recorded is None else dataclasses.asdict(recorded)
        print(json.dumps(without_secrets(dataclasses.asdict(solved) | {"measured": measured}), indent=2))
    else:
        live.console().print(tables.plan_table(solved, recorded))
        if solved.cluster.slurm is not None:
            print(f"\nThe batch script:\n\n{submit.batch_script(solved)}", end="")
    return EXIT_DONE


def _keys_with_all(arguments: Sequence[str]) -> set[str]:
    """Return the keys that have the value ``all``."""
    pairs = (argument.partition("=") for argument in arguments)
    return {key for key, _, value in pairs if value == ALL and key in (*_OPTIONS, MICRO_SIZE)}


def _with_options(argument: str) -> str:
    """Return ``strategy=all`` and ``strategy.sync=all`` with a list of the options, and any other argument as it is."""
    key, _, value = argument.partition("=")
    return f"{key}={','.join(_OPTIONS[key])}" if value == ALL and key in _OPTIONS else argument


def _with_micro_sizes(cell: RequestedCell) -> list[RequestedCell]:
    """Return the cell for each divisor of the global batch if its micro-batch is ``all``, else the cell itself."""
    batch = cell.config.batch
    if batch.micro_size != ALL:
        return [cell]
    total = DEFAULT_GLOBAL_SIZE if batch.global_size is None else batch.global_size
    kept = [word for word in cell.overrides if override_key(word) != MICRO_SIZE]
    sizes = {divisor for low in range(1, math.isqrt(max(total, 0)) + 1) if total % low == 0
             for divisor in (low, total // low)}  # fmt: skip
    return [
        dataclasses.replace(
            cell,
            overrides=(*kept, f"{MICRO_SIZE}={size}"),
            config=dataclasses.replace(cell.config, batch=dataclasses.replace(batch, micro_size=size)),
        )
        for size in sorted(sizes)
    ]


def _rank(requested: Sequence[RequestedCell], wide: set[str]) -> Ranking:
    """Plan all cells and return their ranking.

    Args:
        wide: keys with the value ``all``, which stands for all values that are possible.

    Raises:
        UserError: no cell has a plan, or the cells do not compare.
    """
    cells = [each for cell in requested for each in _with_micro_sizes(cell)]
    configs, cache, done = [cell.config for cell in cells], CallCache(), itertools.count(1)
    in_tokens = any(config.batch.global_tokens is not None for config in configs)
    require_equal_work(global_sizes(configs, cache), "batch.global_tokens" if in_tokens else "batch.global_size")
    with _progress() as report:

        def planned(number: int, _: RunPlan | UserError) -> None:
            report(f"planned {next(done)} of {len(cells)}: {cell_label(cells[number].overrides)}")

        plans = plan_jobs(configs, cache, starts=False, weighs=True, planned=planned)
    require_a_possible_one(cells, [plan if isinstance(plan, UserError) else None for plan in plans])
    candidates: list[Candidate] = []
    refused: list[tuple[tuple[str, ...], UserError]] = []
    possible: set[tuple[str, ...]] = set()
    for cell, plan in zip(cells, plans, strict=True):
        chosen = tuple(word for word in cell.overrides if override_key(word) not in wide)
        if isinstance(plan, UserError):
            refused.append((chosen if wide else cell.overrides, plan))
        else:
            possible.add(chosen)
            candidates.append(Candidate(cell_label(cell.overrides), plan))
    # `all` means all that are possible: what it adds to a setting is no mistake if the setting is possible
    shown: dict[tuple[str, ...], UserError] = {}
    for words, error in sorted(refused, key=lambda each: str(each[1]).startswith("strategy")):  # a batch says more
        if not wide or words not in possible:
            shown.setdefault(words, error)
    return rank(candidates, [(cell_label(words), str(error).partition("\n")[0]) for words, error in shown.items()])


@contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """Return a context with a function that shows how far the plans are: in one line on a terminal, else in many."""
    if not sys.stderr.isatty():
        yield print_progress
        return
    with Console(stderr=True).status("planning") as status:
        yield lambda text: status.update(Text(text))


_SHOWN_LABELS = 6  # of the settings that have one problem


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
            "measured": None if step is None else dataclasses.asdict(step),
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
