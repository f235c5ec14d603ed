"""`launch train`, `plan` and `run`: from a config to a job, or to its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.overrides import explain, take, with_config
from launcher.cli.start import prepare, require_no_wait, run_here, run_script_here, submitted
from launcher.config.schema import ClusterKind
from launcher.errors import EXIT_DONE, ConfigError, UserError

if TYPE_CHECKING:
    from launcher.config.multirun import AskedCell, Result
    from launcher.config.schema import Config


def _require_no_sweep(config: Config) -> None:
    for name, value in dataclasses.asdict(config.sweep).items():
        if value is not None:
            raise ConfigError(f"sweep.{name}", value, "has no effect on a single run.", "Add -m for a sweep.")


def train(arguments: list[str]) -> int:
    quiet, wait, yes = (take(flag, arguments) for flag in ("--quiet", "--wait", "--yes"))
    if {"-m", "--multirun"} & set(arguments) and not {"--help", "-h", "--cfg", "-c"} & set(arguments):
        from launcher.cli.sweep import train_sweep

        return train_sweep(arguments, quiet=quiet, wait=wait, confirmed=yes)
    if yes:
        raise UserError("--yes: has no effect on a single run.\n  It begins a sweep (-m) of very many cells.")

    def act(config: Config, yaml: str) -> int:
        from launcher.launch.planner import plan_job
        from launcher.launch.slurm import client
        from launcher.report import live, tables

        require_no_wait(config, wait=wait)
        _require_no_sweep(config)
        if config.cluster.kind is ClusterKind.slurm:
            client.require()
        plan = plan_job(config)
        console = live.console(quiet=quiet)
        if plan.cluster.slurm is not None:
            from launcher.launch.slurm import submit

            plan, job = submit.submit(plan, yaml)
            console.print(tables.plan_table(plan), "")
            return submitted(plan, job, console, wait=wait)
        return run_here(*prepare(plan, yaml, config, console), console)

    return with_config("train", arguments, act)


def plan(arguments: list[str]) -> int:
    from launcher.launch.planner import Once, plan_job

    as_json = take("--json", arguments)
    once = Once()
    statuses = [EXIT_DONE]

    def act(config: Config, yaml: str) -> int:  # noqa: ARG001
        solved = plan_job(config, once)
        if as_json:
            print(solved.to_json())
        else:
            from launcher.report import live, tables

            live.console().print(tables.plan_table(solved))
            if solved.cluster.slurm is not None:
                from launcher.launch.slurm import submit

                print(f"\nThe batch script:\n\n{submit.script(solved)}", end="")
        return EXIT_DONE

    def cells(asked: Sequence[AskedCell], with_results: bool) -> Sequence[Result]:
        """Print each cell's plan, or its error, below its overrides."""
        if with_results:
            raise UserError(
                "hydra/sweeper: it learns from results, and a plan has none.\n  Leave it out, or use train."
            )
        for cell in asked:
            if not as_json:
                print(f"\n{' '.join(cell.overrides)}")
            try:
                act(cell.config, cell.yaml)
            except UserError as error:
                statuses.append(explain(error))
        return [None] * len(asked)

    return max(with_config("plan", arguments, act, cells=cells, confirmed=True), *statuses)


def run_script(arguments: list[str]) -> int:
    from launcher.launch.planner import new_run, where
    from launcher.launch.slurm import client
    from launcher.plan.placement import solve_script
    from launcher.plan.validation import check
    from launcher.report import live

    if "--" not in arguments and not {"--help", "-h", "--cfg"} & set(arguments):
        raise UserError("launch run: no script.\n  Use: launch run [key=value ...] -- SCRIPT [arguments ...].")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    ours, script = arguments[:cut], arguments[cut + 1 :]
    quiet, wait = take("--quiet", ours), take("--wait", ours)
    for argument in ours:
        group = argument.lstrip("+").partition("=")[0].partition(".")[0]
        if "=" in argument and group not in ("cluster", "run", "hydra"):
            raise ConfigError(argument, None, "has no effect on a script.", "`launch run` takes cluster and run keys.")

    def act(config: Config, yaml: str) -> int:
        check(config)
        require_no_wait(config, wait=wait)
        if config.cluster.kind is ClusterKind.slurm:
            client.require()
        if not script or not Path(script[0]).is_file():
            raise UserError(f"launch run: {script[0] if script else 'nothing after --'}: there is no such script.")
        site = where(config.cluster)
        solved = solve_script(config.cluster, site, new_run(config.run, Path(script[0]).stem, site.cwd), script)
        console = live.console(quiet=quiet)
        if solved.cluster.slurm is not None:
            from launcher.launch.slurm import submit

            solved, job = submit.submit(solved, yaml)
            return submitted(solved, job, console, wait=wait)
        return run_script_here(*prepare(solved, yaml, config, console), console)

    return with_config("run", ours, act)
