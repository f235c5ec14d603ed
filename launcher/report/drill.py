"""What a drill found, for people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.drill.verdict import Difference, Drilled, Interrupted, Outcome
from launcher.report.tables import named_lines, near
from launcher.sizes import count

_COLOURS = {Outcome.survives: "bold green", Outcome.varies: "bold yellow"}


def parts(found: Drilled, place: Path) -> Iterator[RenderableType]:
    """From the job to the verdict, to be printed one after the other. ``place``: the drill's directory."""
    table, add = named_lines("Drill")
    for name, text in found.job.items():
        add(name, text)
    add("each run", f"{count(found.windows, 'window')}, saved every {found.every}; undisturbed {found.run_s:.1f} s")
    add("cold start", f"{found.cold_start_s:.1f} s from the start to the first step")
    add("files", near(place))
    yield table
    yield ""
    yield _table(found)
    for one in found.interrupted:
        yield from _words(one)
    if found.by_itself is not None and not found.by_itself.identical:
        yield Text(f"undisturbed twice: {_difference(found.by_itself)}")
    elif found.by_itself is not None:
        yield Text("undisturbed twice: bit-identical")
    yield ""
    verdict = Text(f"This job {found.outcome.value}. ", style=_COLOURS.get(found.outcome, "bold red"))
    yield verdict.append(found.reason, style="not bold default")


def _table(found: Drilled) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("interruption", "at step", "went on after", "repeated", "recovery", "of a cold start", "result"):
        table.add_column(column, justify="left" if column in ("interruption", "result") else "right", no_wrap=True)
    for one in found.interrupted:
        fault = one.fault(found.by_itself)
        recovery = "" if one.recovery_s is None else f"{one.recovery_s:.1f} s"
        share = "" if one.recovery_s is None else f"{one.recovery_s / found.cold_start_s:.2f}x"
        table.add_row(
            one.kind.value, _number(one.at_step), _number(one.from_step), _number(one.repeated), recovery, share,
            escape(_result(one)), style="red" if fault else None,
        )  # fmt: skip
    return table


def _result(one: Interrupted) -> str:
    if one.problem:
        return "did not recover"
    if one.left:
        return "left something behind"
    assert one.difference is not None
    return "bit-identical" if one.difference.identical else "differs"


def _words(one: Interrupted) -> Iterator[Text]:
    """What the table has no room for."""
    saving = "" if one.saving_s is None else f"; it had saved and ended {one.saving_s:.1f} s later"
    yield Text(f"{one.kind.value}: {one.what}{saving}.", style="dim")
    if one.problem:
        yield Text(f"  {one.problem}", style="red")
    if one.left:
        yield Text(f"  left behind: {', '.join(one.left)}", style="red")
    if one.difference is not None and not one.difference.identical:
        yield Text(f"  {_difference(one.difference)}", style="red")


def _difference(known: Difference) -> str:
    told = [part for part in (known.steps, known.figure) if part]
    if known.differing:
        told.append(
            f"{known.differing} of {known.tensors} tensors differ, the first is {known.first}: "
            f"{known.absolute:.1e} at most, {known.relative:.1e} of its tensor; parameters {known.norm:.1e} in norm"
        )
    return "; ".join(told)


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
