"""`launch plan`: what would run, and with -m which of several settings is the best."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launcher.cli.overrides import take_flag, with_config
from launcher.config.multirun import RequestedCell, Result, cell_label, override_key
from launcher.config.schema import Config, StrategyKind, Sync
from launcher.errors import EXIT_DONE, ConfigError, UserError
from launcher.launch.planner import Once, global_sizes, plan_job, plan_jobs
from launcher.launch.slurm import submit
from launcher.plan.batch import DEFAULT_GLOBAL_SIZE
from launcher.plan.host import without_secrets
from launcher.plan.run_plan import RunPlan
from launcher.plan.strategy_choice import Candidate, Ranking, rank, require_equal_work
from launcher.report import live, ranking_table, tables
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
        return with_config("plan", arguments, lambda config, _: _show(_planned(config), as_json=as_json))
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
            print(ranking_table.ranking_json(ranking, recorded))
        else:
            console = live.console()
            for part in ranking_table.ranking_tables(ranking, recorded):
                console.print(part, markup=False, highlight=False)
        return [None] * len(requested)

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        raise AssertionError("the cells are ranked together")

    return with_config("plan", arguments, act, cells=cells, confirmed=True)


def _planned(config: Config) -> RunPlan:
    with live.waiting("Inspecting the task"):
        return plan_job(config, starts=False)


def _show(solved: RunPlan, *, as_json: bool) -> int:
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
    configs, once, done = [cell.config for cell in cells], Once(), itertools.count(1)
    require_equal_work(global_sizes(configs, once))
    with _progress() as report:

        def planned(number: int, _: RunPlan | UserError) -> None:
            report(next(done), len(cells), cell_label(cells[number].overrides))

        plans = plan_jobs(configs, once, starts=False, weighs=True, planned=planned)
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
def _progress() -> Generator[Callable[[int, int, str], None]]:
    """Return a context with a function that reports how many plans are made, of how many, and which one was the last:
    in a bar on a terminal, else in a line."""
    if not sys.stderr.isatty():

        def print_line(number: int, of: int, which: str) -> None:
            print(f"planned {number} of {of}: {which}", file=sys.stderr, flush=True)

        yield print_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown, console=Console(stderr=True), transient=True) as bar:
        shown_plans = bar.add_task("planned", total=None)

        def update(number: int, of: int, which: str) -> None:
            bar.update(shown_plans, completed=number, total=of, description=f"planned {which}")

        yield update
