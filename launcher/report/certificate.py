"""The certificate of `launch verify`, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launcher.certificate import Certificate, Deviation, Effect, Hazard, Outcome, WindowCheck
from launcher.report.tables import named_lines

_COLOURS = {Outcome.exact: "bold green", Outcome.undecided: "bold yellow"}
_EFFECTS = {Effect.noted: "[yellow]noted[/]", Effect.breaks: "[red]breaks it[/]", Effect.blinds: "[yellow]blinds[/]"}


def parts(found: Certificate) -> Iterator[RenderableType]:
    """From the job to the verdict, to be printed one after the other."""
    table, add = named_lines("Certificate")
    for name, text in found.job.items():
        add(name, text)
    if found.windows:
        rounding = "" if found.rounding is None else f"; this model rounds {found.rounding:.1e} in fp32"
        add("tolerance", f"{found.tolerance:.1e} relative, in fp32{rounding}")
    yield table
    for window in found.windows:
        yield ""
        yield from _window(window, found.tolerance)
    if found.hazards:
        yield ""
        yield Text("Hazards", style="bold")
        yield from map(_hazard, found.hazards)
    yield ""
    for note in found.notes:
        yield Text(note)
    verdict = Text(f"Verdict: {found.outcome.value}. ", style=_COLOURS.get(found.outcome, "bold red"))
    yield verdict.append(found.reason, style="not bold default")


def _window(window: WindowCheck, tolerance: float) -> Iterator[RenderableType]:
    agrees = "agrees" if window.agrees(tolerance) else "DIFFERS"
    batches = "one batch" if window.reference_batches == 1 else f"{window.reference_batches} batches"
    yield Text(
        f"{window.name}: {agrees}, {_error(window.whole)} off in all. {window.samples} samples, {window.items} items, "
        f"{window.micro_batches} micro-batches a rank; loss {window.loss:.6f}, as {batches} "
        f"{window.reference_loss:.6f}",
        style="bold",
    )
    if window.items != window.reference_items:
        yield Text(f"  Counted as one batch it has {window.reference_items:g} items.", style="red")
    table = Table(show_header=True, box=None, padding=(0, 2, 0, 2), header_style="dim")
    for column in ("parameters of", "numbers", "||g - r|| / ||r||", "of the whole"):
        table.add_column(column, justify="left" if column == "parameters of" else "right")
    for group in window.groups:
        _row(table, group, tolerance)
    table.add_section()
    table.add_row("[dim]those that are off most[/]", "", "", "")
    for one in window.worst:
        _row(table, one, tolerance)
    yield table
    if window.configured is not None:
        one_batch = "not finite" if window.configured_one_batch is None else f"{window.configured_one_batch:.1e}"
        yield Text(
            f"  In the job's own precision: {window.configured:.1e} off; one big batch in that precision: {one_batch}"
        )


def _row(table: Table, one: Deviation, tolerance: float) -> None:
    style = None if one.within(tolerance) else "red"
    share = "-" if one.share is None else f"{one.share:.1e}"
    table.add_row(escape(one.name), f"{one.parameters:,}", _error(one), share, style=style)


def _error(one: Deviation) -> str:
    return "r is 0" if one.error is None else f"{one.error:.1e}"


def _hazard(hazard: Hazard) -> RenderableType:
    body = Text("\n").join(Text(text) for text in (hazard.seen, hazard.matters, f"-> {hazard.remedy}"))
    head = Text.from_markup(f"  {_EFFECTS[hazard.effect]}: [bold]{escape(hazard.name)}[/]")
    return Group(head, Padding(body, (0, 0, 0, 4), expand=False))
