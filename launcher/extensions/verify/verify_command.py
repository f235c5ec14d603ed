"""`launch verify [key=value ...]`: compare the job's accumulated gradient with that of one big batch."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launcher.cli.overrides import print_result, signals_as_interrupt, take_flag, with_config
from launcher.config.schema import ClusterKind, Config, RunConfig, check_values
from launcher.errors import ConfigError
from launcher.extensions.verify.certificate import (
    Certificate,
    Comparison,
    Deviation,
    Effect,
    Hazard,
    VerifyOutcome,
    WindowCheck,
    comparison_text,
)
from launcher.launch import local
from launcher.launch.planner import initial_weights, plan_job
from launcher.plan.clusters import Peers
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count
from launcher.report import live, tables
from launcher.report.tables import named_lines, verdict_text
from launcher.rundir.files import read_json, value_from_json

FLAGS = ("--json", "--help", "--cfg", "--config-dir", "--config-name")
VERIFY_COMMAND = ("-P", "-m", "launcher.extensions.verify.verify_worker")

_VERIFY_HELP = """\
launch verify [key=value ...] [--json]: compares the job's accumulated gradient with that of one big batch.

Takes the overrides of `launch train`. Runs the job's first windows and a short one on its ranks, on this machine, and
compares their gradients in fp32 with each window as one batch in one process. Trains nothing and leaves no files.
Exit status: 0 equal up to rounding; 1 different, or not comparable, or training would fail; 2 the input is wrong,
which includes what `launch train` refuses with status 2.
"""


def launch_verify(arguments: list[str]) -> int:
    """Return exit status 0 if the gradient is that of the big batch, 1 if it is not or cannot be compared."""
    as_json = take_flag("--json", arguments)
    if {"--help", "-h"} & set(arguments):
        print(_VERIFY_HELP)

    def act(config: Config, yaml: str) -> int:
        check_values(config, "run")
        if config.cluster.kind != ClusterKind.local:
            raise ConfigError(
                "cluster", config.cluster.kind, "`launch verify` runs its ranks on this machine.",
                "Use cluster=local with cluster.workers_per_node=RANKS, the job's number of ranks or fewer: a window "
                "is the same in every world size. On a cluster, type that in an allocation.",
            )  # fmt: skip
        directory, keep = Path(tempfile.mkdtemp(prefix="launch-verify-")), False
        try:
            with signals_as_interrupt():  # otherwise SIGTERM would leave the directory behind
                plan = _verify_plan(config, directory)
                if plan.task.stream is not None and plan.task.stream.ready:
                    raise ConfigError(
                        "task._target_", plan.task.target, "its training data has ready batches; `launch verify` "
                        "divides windows of samples.", "Return the DataLoader's dataset from train_data() to verify.",
                    )  # fmt: skip
                status, keep = _verify(plan, yaml, as_json=as_json)
            return status
        finally:
            if not keep:
                shutil.rmtree(directory, ignore_errors=True)

    return with_config("verify", arguments, act, on_login_node=False)


def _verify_plan(config: Config, directory: Path) -> RunPlan:
    """Return the plan of `launch train` in ``directory``, without calibration, mirror and checkpoints."""
    run = RunConfig(name="verify", dir=str(directory), calibrate_s=0.0)
    weights = initial_weights(config, str(Path.cwd()))  # a name of a run is searched in the run.dir of the job
    checkpoint = dataclasses.replace(config.checkpoint, init_from=weights and weights.path)
    plan = plan_job(dataclasses.replace(config, run=run, trackers=[], checkpoint=checkpoint))
    if plan.sites is not None:
        plan.sites.refuse(
            "`launch verify` compares the gradient of one window with that of one big batch, and each site has windows "
            "of its own.",
            f"Verify the window of a site: leave {plan.sites.key} out, with the site's ranks and share of the global "
            "batch.",
        )
    return dataclasses.replace(
        plan,
        command=VERIFY_COMMAND,
        cluster=dataclasses.replace(plan.cluster, max_restarts=0),
        # no hang detection: work between two windows does not count as progress
        train=dataclasses.replace(plan.train, hang_timeout=None),
        checkpoint=dataclasses.replace(plan.checkpoint, enabled=False),
    )


def _verify(plan: RunPlan, yaml: str, *, as_json: bool) -> tuple[int, bool]:
    """Return the exit status, and whether to keep the directory, which has the logs of failed workers."""
    local.create(plan, yaml)
    output = live.rank_logs(plan.paths, 0, up_to_exception=True)  # in stderr, because a script may read the result
    verdict = local.run_job(plan, live.LogFollower(output, sys.stderr), Peers())
    if "failure" in verdict.summary:
        print(tables.failure_text(verdict.summary), file=sys.stderr)
        return verdict.status, True
    fields = read_json(plan.paths.certificate)
    if fields is None:  # stopped
        return verdict.status, False
    certificate: Certificate = value_from_json(Certificate, fields)
    status = certificate.exit_status
    print_result(fields | {"exit_status": status}, certificate_parts(certificate), as_json=as_json)
    return status, False


_CERTIFICATE_COLOURS = {VerifyOutcome.exact: "bold green", VerifyOutcome.undecided: "bold yellow"}
_EFFECTS = {
    Effect.noted: "[yellow]noted[/]", Effect.suspect: "[yellow]suspect[/]", Effect.breaks: "[red]breaks it[/]",
    Effect.blinds: "[yellow]blinds[/]",
}  # fmt: skip


def certificate_parts(certificate: Certificate) -> Iterator[RenderableType]:
    """Yield the certificate's parts in printing order, from the job to the verdict."""
    table, add = named_lines("Certificate")
    for name, text in certificate.job.items():
        add(name, text)
    yield table
    for window in certificate.windows:
        yield ""
        yield from _window(window)
    if certificate.hazards:
        yield ""
        yield Text("Hazards", style="bold")
        yield from map(_hazard, certificate.hazards)
    yield ""
    for note in certificate.notes:
        yield Text(note)
    colour = _CERTIFICATE_COLOURS.get(certificate.outcome, "bold red")
    yield verdict_text(f"Verdict: {certificate.outcome.value}. ", colour, certificate.reason)


def _window(window: WindowCheck) -> Iterator[RenderableType]:
    agrees = "agrees" if window.agrees else "DIFFERS"
    batches = "one batch" if window.reference_batches == 1 else f"{window.reference_batches} batches"
    yield Text(
        f"{window.name}: {agrees}. {count(window.samples, 'sample')}, {count(window.items, 'item')}, "
        f"{count(window.micro_batches, 'micro-batch', 'micro-batches')} a rank; "
        f"loss {window.loss:.6f}, as {batches} {window.reference_loss:.6f}",
        style="bold",
    )
    if not window.counts_agree:
        yield Text(f"  Counted as one batch it has {window.reference_items:g} items.", style="red")
    for comparison in window.comparisons:
        yield Text(f"  {comparison_text(comparison)}", style="" if comparison.agrees else "red")
        if comparison is window.comparisons[0] or not comparison.agrees:
            yield _comparison_table(comparison)


def _comparison_table(comparison: Comparison) -> Table:
    table = Table(show_header=True, box=None, padding=(0, 2, 0, 2), header_style="dim")
    for column in ("parameters of", "numbers", "||g - r|| / ||r||", "of the whole", "limit"):
        table.add_column(column, justify="left" if column == "parameters of" else "right")
    for group in comparison.groups:
        _row(table, group)
    table.add_section()
    table.add_row("[dim]largest differences[/]", "", "", "", "")
    for deviation in comparison.worst:
        _row(table, deviation)
    return table


def _row(table: Table, deviation: Deviation) -> None:
    error = "r is 0" if deviation.error is None else f"{deviation.error:.1e}"
    share = "-" if deviation.share is None else f"{deviation.share:.1e}"
    style = None if deviation.within else "red"
    name, parameters = escape(deviation.name), f"{deviation.parameters:,}"
    table.add_row(name, parameters, error, share, f"{deviation.limit:.1e}", style=style)


def _hazard(hazard: Hazard) -> RenderableType:
    body = Text("\n").join(Text(text) for text in (hazard.seen, hazard.matters, f"-> {hazard.remedy}"))
    head = Text.from_markup(f"  {_EFFECTS[hazard.effect]}: [bold]{escape(hazard.name)}[/]")
    return Group(head, Padding(body, (0, 0, 0, 4), expand=False))
