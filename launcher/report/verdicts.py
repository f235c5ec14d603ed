"""Results of `launch verify`, `drill` and `doctor` for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launcher.doctor.check import Check, CheckState
from launcher.drill.verdict import Difference, DrillOutcome, DrillResult, InterruptedRun
from launcher.quantities import count
from launcher.report.tables import named_lines, near
from launcher.verify.certificate import (
    Certificate,
    Comparison,
    Deviation,
    Effect,
    Hazard,
    VerifyOutcome,
    WindowCheck,
    comparison_text,
)

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
    yield _verdict(f"Verdict: {certificate.outcome.value}. ", colour, certificate.reason)


def _verdict(verdict: str, colour: str, reason: str) -> Text:
    return Text(verdict, style=colour).append(reason, style="not bold default")


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


_DRILL_COLOURS = {DrillOutcome.survives: "bold green", DrillOutcome.varies: "bold yellow"}


def drill_parts(drilled: DrillResult, directory: Path) -> Iterator[RenderableType]:
    """Yield the drill's parts in printing order, from the job to the verdict.

    Args:
        directory: of the drill.
    """
    table, add = named_lines("Drill")
    for name, text in drilled.job.items():
        add(name, text)
    windows = f"{count(drilled.windows, 'window')}, saved every {drilled.every}"
    add("each run", f"{windows}; undisturbed {drilled.run_s:.1f} s")
    add("cold start", f"{drilled.cold_start_s:.1f} s from the start to the first step")
    add("files", near(directory))
    yield table
    yield ""
    yield _interruption_table(drilled)
    for interruption in drilled.interrupted:
        yield from _details(interruption)
    if (repeated := drilled.rerun_difference) is not None:
        yield Text(f"undisturbed run repeated: {'bit-identical' if repeated.identical else _difference(repeated)}")
    yield ""
    colour = _DRILL_COLOURS.get(drilled.outcome, "bold red")
    yield _verdict(f"This job {drilled.outcome.value}. ", colour, drilled.reason)


def _interruption_table(drilled: DrillResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("interruption", "at step", "resumed after", "repeated", "recovery", "of a cold start", "result"):
        table.add_column(column, justify="left" if column in ("interruption", "result") else "right", no_wrap=True)
    for interruption in drilled.interrupted:
        fault = interruption.fault(drilled.rerun_difference)
        recovery = "" if interruption.recovery_s is None else f"{interruption.recovery_s:.1f} s"
        share = "" if interruption.recovery_s is None else f"{interruption.recovery_s / drilled.cold_start_s:.2f}x"
        steps = (interruption.at_step, interruption.from_step, interruption.repeated)
        numbers = ["" if step is None else str(step) for step in steps]
        result, style = escape(_result(interruption)), "red" if fault else None
        table.add_row(interruption.kind.value, *numbers, recovery, share, result, style=style)
    return table


def _result(interruption: InterruptedRun) -> str:
    if interruption.problem:
        return "did not recover"
    if interruption.left:
        return "left something behind"
    assert interruption.difference is not None
    return "bit-identical" if interruption.difference.identical else "differs"


def _details(interruption: InterruptedRun) -> Iterator[Text]:
    """Yield the details of an interruption that do not fit into the table."""
    saving = "" if interruption.saving_s is None else f"; it saved and ended {interruption.saving_s:.1f} s later"
    yield Text(f"{interruption.kind.value}: {interruption.what}{saving}.", style="dim")
    if interruption.problem:
        yield Text(f"  {interruption.problem}", style="red")
    if interruption.left:
        yield Text(f"  left behind: {', '.join(interruption.left)}", style="red")
    if interruption.difference is not None and not interruption.difference.identical:
        yield Text(f"  {_difference(interruption.difference)}", style="red")


def _difference(difference: Difference) -> str:
    parts = [part for part in (difference.steps, difference.figure) if part]
    if difference.differing:
        parts.append(
            f"{difference.differing} of {difference.tensors} tensors differ, the first is {difference.first}: "
            f"at most by {difference.absolute:.1e}, {difference.relative:.1e} of the tensor; parameters by "
            f"{difference.norm:.1e} in norm"
        )
    return "; ".join(parts)


_CHECK_COLOURS = {CheckState.ok: "green", CheckState.warning: "yellow", CheckState.failure: "red"}


def checks_table(checks: Sequence[Check]) -> Table:
    """Return a table with one line per check; below one that is not ok, the remedy."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        where = "" if check.node is None else f"{check.node}: "
        remedy = f"\n-> {check.remedy}" if check.remedy else ""
        table.add_row(
            f"[{_CHECK_COLOURS[check.state]}]{check.state.value}[/]", escape(check.name),
            escape(f"{where}{check.found}{remedy}"),
        )  # fmt: skip
    return table


def checks_verdict(checks: Sequence[Check]) -> str:
    counted = Counter(check.state for check in checks)
    problems = [
        count(counted[state], state.value) for state in (CheckState.failure, CheckState.warning) if counted[state]
    ]
    fit = "Not fit to run" if counted[CheckState.failure] else "Fit to run"
    return f"{fit}: {' and '.join(problems)}." if problems else f"{fit}."
