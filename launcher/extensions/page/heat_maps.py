"""Heat maps of a task's finished runs over the two settings that vary."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.extensions.page import compare
from launcher.extensions.page.compare import Row, TaskGroup, agree, natural_sort_key, settings_text
from launcher.extensions.page.plotly_format import Plot, axes_layout, escape

# of the worst value, of the best, and of the numbers on both
_WORST, _BEST, _INK = "#eef2ff", "#7ea6fb", "#111827"
# most values of a setting, and most cells that are labelled
_MAX_VALUES, _MAX_LABELLED = 40, 80


def heat_maps(group: TaskGroup) -> list[Plot]:
    """Return step time, speed, loss and hours over two settings; none unless exactly two vary, apart from the seed."""
    rows = [row for row in group.rows if row.done]
    keys = compare.axes(rows, [compare.SEED])
    if len(keys) != 2:
        return []
    grid = _Grid.of(rows, keys)
    sizes = [len(values) for values in grid.values]
    if max(sizes) > _MAX_VALUES or len(grid.cells) <= max(sizes):  # not more cells than a line or a diagonal has
        return []
    held_out = all(row["eval/loss"] is not None for row in rows)
    loss = "eval/loss" if held_out else "train/loss_smoothed"
    to_loss = sum(row["loss/hours"] is not None for row in rows) > 1
    unit, factor = group.time_unit
    until = f" to a training loss of {group.loss:.4g}" if to_loss else ""
    plots = (
        grid.plot("Step time", "time/step_s", "ms", 1e3),
        grid.plot("Speed", "throughput/samples_per_s", "samples/s", higher=True),
        grid.plot("Held-out loss" if held_out else "Training loss", loss, one_colour=agree(rows, loss)),
        grid.plot(f"{unit[0].upper()}{unit[1:]}", f"{'loss' if to_loss else 'total'}/hours", f"{unit}{until}", factor),
    )
    return [plot for plot in plots if plot is not None]


@dataclass(frozen=True)
class _Grid:
    """Runs by the values of two settings, of which the first is on the horizontal axis.

    Attributes:
        keys: the settings.
        values: of each setting, in order.
        cells: runs by (value of the first setting, value of the second).
    """

    keys: Sequence[str]
    values: Sequence[Sequence[str]]
    cells: dict[tuple[str, ...], list[Row]]

    @classmethod
    def of(cls, rows: Sequence[Row], keys: Sequence[str]) -> _Grid:
        """Return the grid with the longer axis on the horizontal."""
        values = {key: {row.varied[key] for row in rows} for key in keys}
        keys = sorted(keys, key=lambda key: -len(values[key]))
        cells: dict[tuple[str, ...], list[Row]] = defaultdict(list)
        for row in rows:
            cells[tuple(row.varied[key] for key in keys)].append(row)
        return cls(keys, [sorted(values[key], key=natural_sort_key) for key in keys], cells)

    def plot(
        self,
        title: str,
        figure: str,
        unit: str = "",
        factor: float = 1.0,
        *,
        higher: bool = False,
        one_colour: bool = False,
    ) -> Plot | None:
        """Return the heat map of one figure; None if fewer than two cells have it.

        Args:
            higher: a higher value is better.
            one_colour: the values differ by rounding only.
        """
        along, down = self.values
        grid = [[self._value(one, other, figure, factor) for one in along] for other in down]
        if sum(value is not None for line in grid for value in line) < 2:
            return None
        across, below = (escape(settings_text(((key, ""),)).removesuffix("=")) for key in self.keys)
        labelled = len(along) * len(down) <= _MAX_LABELLED
        data = {
            "type": "heatmap", "x": [*map(escape, along)], "y": [*map(escape, down)], "z": grid, "xgap": 2, "ygap": 2,
            "colorscale": [[0, _WORST if higher else _BEST], [1, _BEST if higher else _WORST]],
            "showscale": not labelled, "texttemplate": "%{z:,.4~g}" if labelled else "", "textfont": {"color": _INK},
            "hovertemplate": f"{across} %{{x}}, {below} %{{y}}: %{{z:,.4~g}} {unit}<extra></extra>",
        }  # fmt: skip
        if one_colour:
            values = [value for line in grid for value in line if value is not None]
            data |= {"zmin": min(values) - 1, "zmax": max(values) + 1}
        layout = axes_layout(across, below, height=150 + max(150, 34 * len(down)), legend=False)
        layout["xaxis"] |= {"type": "category", "showgrid": False}
        layout["yaxis"] |= {"type": "category", "showgrid": False, "autorange": "reversed"}
        unit_text = f"In {unit}. " if unit else ""
        median = (
            " A cell with several runs has their median." if any(len(rows) > 1 for rows in self.cells.values()) else ""
        )
        colours = "All agree within the rounding of their precision" if one_colour else "The bluer, the better"
        caption = f"{unit_text}{colours}. Empty: no finished run.{median}"
        return Plot(title=f"{title} over {across} and {below}", caption=caption, data=[data], layout=layout)

    def _value(self, along: str, down: str, figure: str, factor: float) -> float | None:
        known = [row[figure] * factor for row in self.cells.get((along, down), ()) if row[figure] is not None]
        return statistics.median(known) if known else None
