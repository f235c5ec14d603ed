"""The certificate of `launch verify`, for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from launcher.certificate import Certificate, Comparison, Deviation, Effect, Hazard, Outcome, WindowCheck, words
from launcher.report.tables import named_lines
from launcher.sizes import count

_COLOURS = {Outcome.exact: "bold green", Outcome.undecided: "bold yellow"}
_EFFECTS = {
    Effect.noted: "[yellow]noted[/]", Effect.suspect: "[yellow]suspect[/]", Effect.breaks: "[red]breaks it[/]",
    Effect.blinds: "[yellow]blinds[/]",
}  # fmt: skip


def parts(found: Certificate) -> Iterator[RenderableType]:
    """From the job to the verdict, to be printed one after the other."""
    table, add = named_lines("Certificate")
    for name, text in found.job.items():
        add(name, text)
    yield table
    for window in found.windows:
        yield ""
        yield from _window(window)
    if found.hazards:
        yield ""
        yield Text("Hazards", style="bold")
        yield from map(_hazard, found.hazards)
    yield ""
    for note in found.notes:
        yield Text(note)
    verdict = Text(f"Verdict: {found.outcome.value}. ", style=_COLOURS.get(found.outcome, "bold red"))
    yield verdict.append(found.reason, style="not bold default")


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
        yield Text(f"  {words(comparison)}", style="" if comparison.agrees else "red")
        if comparison is window.comparisons[0] or not comparison.agrees:
            yield _table(comparison)


def _table(comparison: Comparison) -> Table:
    table = Table(show_header=True, box=None, padding=(0, 2, 0, 2), header_style="dim")
    for column in ("parameters of", "numbers", "||g - r|| / ||r||", "of the whole", "limit"):
        table.add_column(column, justify="left" if column == "parameters of" else "right")
    for group in comparison.groups:
        _row(table, group)
    table.add_section()
    table.add_row("[dim]those that are off most[/]", "", "", "", "")
    for one in comparison.worst:
        _row(table, one)
    return table


def _row(table: Table, one: Deviation) -> None:
    error = "r is 0" if one.error is None else f"{one.error:.1e}"
    share = "-" if one.share is None else f"{one.share:.1e}"
    style = None if one.within else "red"
    table.add_row(escape(one.name), f"{one.parameters:,}", error, share, f"{one.limit:.1e}", style=style)


def _hazard(hazard: Hazard) -> RenderableType:
    body = Text("\n").join(Text(text) for text in (hazard.seen, hazard.matters, f"-> {hazard.remedy}"))
    head = Text.from_markup(f"  {_EFFECTS[hazard.effect]}: [bold]{escape(hazard.name)}[/]")
    return Group(head, Padding(body, (0, 0, 0, 4), expand=False))
