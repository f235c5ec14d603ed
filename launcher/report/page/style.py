"""How a configuration looks in every plot of a page: a colour for its settings, a dash for its number of workers."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

from launcher.report.comparison import series
from launcher.report.comparison.compare import Row

_COLOURS = (
    "#2563eb", "#e8710a", "#16935a", "#c62f4b", "#7c4dcc", "#0e8fa8", "#b8860b", "#d1529b", "#6b4f3a", "#556070",
)  # fmt: skip
_LOOKS = ("solid", "dashed", "dotted", "dash-dotted", "long dashes", "long dash-dots")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


class Style:
    """Of one task's runs. Where they differ in nothing but the workers, the workers have the colours."""

    def __init__(self, rows: Sequence[Row]) -> None:
        facts = [row.facts for row in rows if row.facts is not None]
        lines = series.over_workers(facts)
        self._worlds = sorted({each.world_size for each in facts})
        self._by_world = len(set(lines)) == 1
        keys = [
            str(each.world_size) if self._by_world else series.said(line)
            for each, line in zip(facts, lines, strict=True)
        ]
        known = sorted(set(keys), key=series.natural)
        self._colour = {key: _colour(number, len(known)) for number, key in enumerate(known)}
        self._of = {id(row): key for row, key in zip([row for row in rows if row.facts], keys, strict=True)}

    def colour(self, row: Row) -> str:
        return self._colour[self._of[id(row)]]

    def dash(self, row: Row) -> str:
        if self._by_world or row.facts is None:
            return "solid"
        return self.dash_of(self._worlds.index(row.facts.world_size))

    @staticmethod
    def dash_of(number: int) -> str:
        return _DASHES[number % len(_DASHES)]

    @property
    def said(self) -> str:
        """What a reader of the legend should know."""
        if len(self._of) == 1:
            return ""
        if self._by_world:
            return "A colour for each number of workers, the same in all plots."
        if len(self._worlds) == 1:
            return "A colour for each configuration, the same in all plots."
        dashes = ", ".join(
            f"{_LOOKS[number % len(_DASHES)]}: {world} worker{'' if world == 1 else 's'}"
            for number, world in enumerate(self._worlds[: len(_DASHES)])
        )
        return f"A colour for each setting, the same in all plots; {dashes}."


def _colour(number: int, count: int) -> str:
    if count <= len(_COLOURS):
        return _COLOURS[number]
    red, green, blue = colorsys.hls_to_rgb(0.62 - 0.92 * number / count, 0.42, 0.62)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"
