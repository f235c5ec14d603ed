"""Sweep conductor: checks and plans the cells, reuses finished runs, starts the others, and waits for them."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.config.multirun import RequestedCell, Result, override_key
from launcher.config.schema import ClusterKind, Config, groups_without_effect
from launcher.errors import EXIT_DONE, EXIT_USER, ConfigError, RunError, UserError
from launcher.launch import local
from launcher.launch.planner import CallCache, plan_jobs, task_stem
from launcher.launch.slurm import client, submit
from launcher.plan.clusters import cluster_of, require_at_hand
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count, first_lines, first_names
from launcher.rundir import code_snapshot
from launcher.rundir.files import read_json
from launcher.rundir.job_end import STOPS
from launcher.rundir.paths import RunPaths, SweepPaths, is_run
from launcher.runs import control
from launcher.runs.status import ACTIVE, Run, RunState, statuses_of
from launcher.sweeps import manifest
from launcher.sweeps.local_cells import run_cells
from launcher.sweeps.manifest import Cell, Sweep, content_of, digest
from launcher.sweeps.reuse import look_at_sweeps, recognise, run_name

_SHOWN_REFUSALS = 4


def require_one_sweep(requested: Sequence[RequestedCell]) -> None:
    """Check that the cells form one sweep.

    Raises:
        ConfigError: a key that belongs to a single run, or a key that must be equal in all cells and is not.
    """
    for cell in requested:
        config = cell.config
        if config.run.name is not None:
            raise ConfigError(
                "run.name", config.run.name, "names one run, and a sweep has many.",
                "Use sweep.name; its runs are named after the keys that vary.",
            )  # fmt: skip
        if cluster_of(config.cluster.kind).typed_on_each_host:
            raise ConfigError(
                "cluster", config.cluster.kind, "has no scheduler that could start the cells of a sweep on all hosts.",
                "Use cluster=slurm, or type the command for each cell.",
            )  # fmt: skip
        first = requested[0].config
        for key in ("sweep.name", "sweep.at_once", "sweep.objective", "run.dir"):
            group, name = key.split(".")
            value = getattr(getattr(config, group), name)
            if value != getattr(getattr(first, group), name):
                raise ConfigError(key, value, "must be the same for all cells of a sweep.", "Do not vary it.")


# what the tasks report by themselves (train/, eval/, task/) is theirs to judge
_TIMES = re.compile(r"(time|throughput)/|comm/(speedup|overlap)|(?!train/|eval/|task/)\S+_s(_every|_low|_high|_max)?$")


def _require_comparable_results(config: Config) -> None:
    """Raise ConfigError for a result that cells side by side change."""
    objective, at_once = config.sweep.objective or "", config.sweep.at_once or 1
    if config.cluster.kind == ClusterKind.local and at_once > 1 and _TIMES.match(objective):
        raise ConfigError(
            "sweep.objective", objective, f"is not comparable between cells that run side by side (sweep.at_once="
            f"{at_once}).", "Leave sweep.at_once out.",
        )  # fmt: skip


def require_a_possible_one(requested: Sequence[RequestedCell], wrong: Sequence[UserError | None]) -> None:
    """Check that at least one cell can run.

    Args:
        wrong: the error of each cell; None if it can run.

    Raises:
        UserError: no cell can run; the cells' own error if all have the same.
    """
    errors = [error for error in wrong if error is not None]
    if len(errors) < len(requested):
        return
    problems = {str(error): words.overrides for error, words in zip(errors, requested, strict=True)}
    if len(problems) == 1:
        raise errors[0]
    lines = [_with_cell(problem, overrides) for problem, overrides in problems.items()]
    raise UserError("\n  ".join(["No cell of this sweep can run.", *first_lines(lines, _SHOWN_REFUSALS)]))


def _with_cell(problem: str, overrides: Sequence[str]) -> str:
    """Return the problem of a cell with the cell's overrides in front, unless it starts with its only one already."""
    named = len(overrides) == 1 and problem.startswith(overrides[0].partition("=")[0] + "=")
    return problem if named else f"{' '.join(overrides)}: {problem}"


# prefixes of arguments that do not identify the sweep
_OF_THIS_COMMAND = ("hydra", "-", "trackers=", "run.dir=", *groups_without_effect())


@dataclass(frozen=True)
class _Planned:
    """Cell that can run.

    Attributes:
        roots: directories of the user's modules.
        files: digest of their files.
        resumes: whether it resumes from a checkpoint in its existing directory.
    """

    request: RequestedCell
    plan: RunPlan
    roots: tuple[Path, ...]
    files: str
    content: str
    resumes: bool = False


class Conductor:
    """One command's part in a sweep, over all batches of cells that a sweeper requests.

    Args:
        arguments: command line, from which the sweep's name is derived.
        run_here: runs a plan on this machine in its existing directory and returns the exit status.
        watch: called periodically with the states of Slurm jobs, or of cells side by side, while waiting for them.
        say: called with messages to the user before cells start.
        wait: whether to wait for Slurm jobs.
        confirmed: whether finished cells may start again because the code has changed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        run_here: Callable[[RunPlan], int],
        watch: Callable[[Sequence[Run]], None],
        say: Callable[[str], None],
        *,
        wait: bool,
        confirmed: bool = True,
    ) -> None:
        self.paths: SweepPaths | None = None
        self.status = EXIT_DONE
        self.submitted: list[str] = []
        self.reused: list[RunPaths] = []
        self._arguments = tuple(arguments)
        self._run_here, self._watch, self._say, self._wait = run_here, watch, say, wait
        self._confirmed = confirmed
        self._cache = CallCache()

    def begin(self, requested: Sequence[RequestedCell], with_results: bool) -> list[Result]:
        """Start a batch of cells.

        Args:
            with_results: whether the sweeper needs the cells' results; otherwise None is returned for each.

        Raises:
            UserError: no cell can start.
            KeyboardInterrupt: a cell was stopped, so the others do not start.
        """
        require_one_sweep(requested)
        for cell in requested:
            require_at_hand(cell.config.cluster)
        on_slurm = requested[0].config.cluster.kind == ClusterKind.slurm
        if on_slurm:
            client.require()
            if with_results and not self._wait:
                raise UserError(
                    "hydra/sweeper: this sweeper needs the cells' results, and with cluster=slurm the command does not "
                    "wait for them.\n  Add --wait."
                )
        _require_comparable_results(requested[0].config)
        self.paths = paths = self._sweep_paths(requested[0])
        requested = self._as_listed(requested, paths)
        if on_slurm:
            submit.require_shared(paths.root)
        plans = plan_jobs([cell.config for cell in requested], self._cache)
        cells = [self._checked(cell, plan, paths) for cell, plan in zip(requested, plans, strict=True)]
        if not with_results:
            require_a_possible_one(requested, [cell if isinstance(cell, UserError) else None for cell in cells])
        runs, statuses = self._begin_planned(requested, cells, paths)
        if on_slurm and self._wait:
            control.wait_for(runs, self._watch)
            statuses += map(control.run_exit_status, statuses_of(runs))
        self.status = max([self.status, *statuses])
        if not with_results:
            return [None] * len(requested)
        runs_by_overrides = manifest.load_sweep(paths).runs(paths)
        return [_result(cell, runs_by_overrides.get(cell.overrides)) for cell in requested]

    def _sweep_paths(self, first: RequestedCell) -> SweepPaths:
        config = first.config
        name = config.sweep.name or f"{task_stem(config)}-sweep-{digest(sorted(self._arguments))[:8]}"
        root = (Path.cwd() / config.run.dir / name).resolve()
        if is_run(root):
            raise ConfigError("sweep.name", name, f"{root} is a run.", "Choose another sweep.name.")
        return SweepPaths(root)

    def _checked(self, requested: RequestedCell, plan: RunPlan | UserError, paths: SweepPaths) -> _Planned | UserError:
        if isinstance(plan, UserError):
            return plan
        try:
            roots = tuple(self._cache(code_snapshot.roots_of_task, plan.task.target, plan.cluster.cwd))
            files, code = self._cache(code_snapshot.digests, roots, paths.root.parent, paths.root)
        except UserError as error:
            return error
        return _Planned(requested, plan, roots, files, content_of(plan, code))

    def _begin_planned(
        self, requested: Sequence[RequestedCell], cells: Sequence[_Planned | UserError], paths: SweepPaths
    ) -> tuple[list[RunPaths], list[int]]:
        """Return the runs of all possible cells, and the exit statuses so far."""
        entries = [
            Cell(overrides=request.overrides, content=None, run=None, problem=str(cell))
            if isinstance(cell, UserError)
            else Cell(overrides=request.overrides, content=cell.content, run=None, problem=None)
            for cell, request in zip(cells, requested, strict=True)
        ]
        statuses = [EXIT_USER for entry in entries if entry.problem]
        with manifest.alone(paths):
            sweep = self._opened(paths, requested)
            self._look_at_replaced(paths, sweep, entries)
            existing = recognise([entry for entry in entries if entry.content], paths)
            run_of = existing.reusable
            self.reused += run_of.values()
            new: dict[str, _Planned] = {}
            for number, cell in enumerate(cells):
                if not isinstance(cell, _Planned):
                    continue
                if cell.content not in run_of:  # cells with equal content share one run
                    if (stopped := existing.resumable.get(cell.content)) is not None:
                        cell = dataclasses.replace(cell, plan=RunPlan.load(stopped.plan), resumes=True)
                    else:
                        cell = self._named(cell, paths, run_name(entries[number]))
                    new[cell.content], run_of[cell.content] = cell, cell.plan.paths
                run = run_of[cell.content].root
                place = run.name if run.parent == paths.root else f"../{run.relative_to(paths.root.parent)}"
                entries[number] = dataclasses.replace(entries[number], run=place)
            # saved before they start, so that the manifest lists them whatever happens
            sweep = sweep.with_cells(tuple(entries))
            sweep.save(paths)
            if of_slurm := [cell for cell in new.values() if cell.plan.cluster.kind == ClusterKind.slurm]:
                refused = self._submit(paths, sweep, of_slurm)
                statuses += [EXIT_USER] * len(refused)
                refused_cells = tuple(
                    dataclasses.replace(cell, run=None, problem=refused[str(cell.content)])
                    for cell in sweep.cells
                    if cell.content in refused
                )
                sweep.with_cells(refused_cells).save(paths)
            here = [cell for cell in new.values() if cell.plan.cluster.kind != ClusterKind.slurm]
            statuses += self._run(paths, here, sweep.at_once)
        return [run for run in run_of.values() if is_run(run.root)], statuses

    def _opened(self, paths: SweepPaths, requested: Sequence[RequestedCell]) -> Sweep:
        varying = {override_key(word) for word in requested[0].overrides}
        fixed = [word for key, word in self._typed().items() if key not in varying]
        return manifest.opened(paths, tuple(sorted(fixed)), varying, requested[0].config.sweep.at_once)

    def _typed(self) -> dict[str, str]:
        """Return by key the arguments that identify the sweep. Of a repeated key the last value is used."""
        typed = (word for word in self._arguments if "=" in word and not word.startswith(_OF_THIS_COMMAND))
        return {override_key(word): word for word in typed}

    def _as_listed(self, requested: Sequence[RequestedCell], paths: SweepPaths) -> list[RequestedCell]:
        """Return the cells with the overrides under which the manifest lists them: in its order, so that none is listed
        twice, and with the keys of which this command names one value only."""
        if not paths.manifest.exists():
            return [*requested]
        varying = {override_key(word) for word in requested[0].overrides}
        cells = manifest.load_sweep(paths).varied_by(varying).cells
        order = {override_key(word): number for cell in cells[:1] for number, word in enumerate(cell.overrides)}
        single = [word.removeprefix("++") for key, word in self._typed().items() if key in order.keys() - varying]

        def listed(words: Sequence[str]) -> tuple[str, ...]:
            return tuple(sorted([*words, *single], key=lambda word: order.get(override_key(word), len(order))))

        return [dataclasses.replace(cell, overrides=listed(cell.overrides)) for cell in requested]

    def _look_at_replaced(self, paths: SweepPaths, sweep: Sweep, entries: Sequence[Cell]) -> None:
        """Report the cells whose recorded run has different content.

        Raises:
            UserError: such a run is active, and would no longer be listed anywhere.
        """
        contents = {cell.overrides: cell.content for cell in entries if cell.content}
        replaced_cells = [cell for cell in sweep.cells if contents.get(cell.overrides, cell.content) != cell.content]
        runs = sweep.runs(paths)
        replaced = {str(runs[cell.overrides].root): cell.label for cell in replaced_cells if cell.overrides in runs}
        old = statuses_of([RunPaths(Path(run)) for run in replaced if is_run(run)])
        done = [replaced[run.dir] for run in old if run.state is RunState.done]
        if active := [replaced[run.dir] for run in old if run.state in ACTIVE]:
            raise UserError(
                f"sweep.name={paths.root.name}: {len(active)} of these cells are active with other code, another "
                f"torch or another share of the machine (sweep.at_once): {first_names(active)}.\n"
                "  `launch cancel` ends them; or choose another sweep.name."
            )
        if done and not self._confirmed:
            raise UserError(
                f"sweep.name={paths.root.name}: the code, torch, or a cell's share of the machine "
                f"(sweep.at_once) is not that of {count(len(done), 'finished cell')}, which would start again: "
                f"{first_names(done)}.\n"
                f"  Add --yes; or `launch retry {paths.root.name} --failed` starts only the failed cells, with "
                "their own code; or choose another sweep.name."
            )
        if old:
            self._say(
                "The code, torch, or a cell's share of the machine (sweep.at_once) differs from that of "
                f"{count(len(old), 'run')}: these cells start again, and the old runs are kept."
            )

    def _named(self, cell: _Planned, paths: SweepPaths, name: str) -> _Planned:
        """Return the cell as a run of this sweep, on a snapshot of the code."""
        root, number = paths.root / name, 1
        while root.exists():
            root, number = paths.root / f"{name}.retry{number}", number + 1
        plan = cell.plan.as_run(dataclasses.replace(cell.plan.run, name=root.name, dir=str(root)))
        copies = self._cache(code_snapshot.take_once, cell.roots, paths.code / cell.files, paths.root.parent)
        plan = dataclasses.replace(
            plan,
            cluster=dataclasses.replace(plan.cluster, import_from=copies or plan.cluster.import_from),
            wandb=dataclasses.replace(plan.wandb, group=plan.wandb.group or paths.root.name),
        )
        return dataclasses.replace(cell, plan=plan)

    def _submit(self, paths: SweepPaths, sweep: Sweep, new: Sequence[_Planned]) -> dict[str, str]:
        """Submit the cells; return Slurm's refusals by cell content."""
        most = submit.max_array_size()
        for cell in new:
            if not cell.resumes:
                local.create(cell.plan, cell.request.yaml)
        plans = [cell.plan for cell in new]
        answers = submit.submit_in_arrays(plans, paths.root.name, paths.slurm, most, sweep.at_once)
        refused: dict[str, str] = {}
        for cell, answer in zip(new, answers, strict=True):
            if isinstance(answer, UserError):
                if not cell.resumes:
                    shutil.rmtree(cell.plan.paths.root, ignore_errors=True)
                refused[cell.content] = str(answer)
            else:
                self.submitted.append(answer)
        return refused

    def _run(self, paths: SweepPaths, new: Sequence[_Planned], at_once: int | None) -> list[int]:
        """Run the cells one after the other or side by side; a failed cell does not prevent the others."""

        def start(cell: _Planned) -> RunPlan:
            if not cell.resumes:
                local.create(cell.plan, cell.request.yaml)
            return cell.plan

        def watch() -> None:
            self._watch(look_at_sweeps([paths])[str(paths.root)])

        starts = [partial(start, cell) for cell in new]
        statuses = run_cells(starts, at_once or 1, self._run_here, watch, self._say)
        if stopped := {*statuses} & {*STOPS}:
            self.status = max(stopped)
            raise KeyboardInterrupt
        return statuses


def _result(cell: RequestedCell, paths: RunPaths | None) -> Result:
    """Return the objective from the run's summary, or the error for which there is none."""
    summary = {} if paths is None else read_json(paths.summary) or {}
    name = " ".join(cell.overrides)
    if paths is None or summary.get("verdict") != "done":
        return RunError(f"{name}: did not finish, and so has no result.")
    key = cell.config.sweep.objective or ("eval/loss" if "eval/loss" in summary else "train/loss")
    value = summary.get(key)
    if isinstance(value, dict):  # best
        value = value.get("value")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if key in summary and value is None:
        return RunError(f"{name}: its {key} was not finite{'' if key == 'best' else ' at the end'}.")
    numbers = sorted(name for name, entry in summary.items() if isinstance(entry, int | float))
    return ConfigError("sweep.objective", key, "is not a number in the summary.", f"There are: {', '.join(numbers)}.")
