"""Plots of what was predicted: one step under each sync policy, and predicted step times beside measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.record.measurements import POLICY_TIMES
from launcher.report.compare import Row, TaskGroup
from launcher.report.plotly_format import NEUTRAL, Plot, axes_layout, bar_layout, escape

_MEASURED, _LANE = "#2563eb", 0.2


def forecast_plots(group: TaskGroup) -> list[Plot]:
    """Return the plots; none of them without predictions."""
    return [*_policies(group), *_beside(group)]


def _beside(group: TaskGroup) -> list[Plot]:
    """Return the plot of predicted step times beside measured ones."""
    rows = [row for row in group.rows if row["predicted/step_s"] and row["time/step_s"]]
    if not rows:
        return []
    places, names = list(range(len(rows))), [escape(group.describe(row)) for row in rows]
    predicted = _points("predicted, with its 90% interval", NEUTRAL, "line-ns-open", places, names)
    predicted |= _with_interval(
        [row["predicted/step_s"] for row in rows],
        [row["predicted/step_low_s"] or row["predicted/step_s"] for row in rows],
        [row["predicted/step_high_s"] or row["predicted/step_s"] for row in rows],
    )
    measured = _points("measured", _MEASURED, "circle", places, names)
    measured["x"] = [1e3 * row["time/step_s"] for row in rows]
    layout = bar_layout(rows, "ms per step", legend=True)
    layout["xaxis"]["rangemode"] = "tozero"
    caption = "Predicted by the plan before the start; measured: median over full windows."
    return [
        Plot(
            title="Predicted and measured step time",
            caption=caption,
            data=[predicted, measured],
            layout=layout,
            wide=True,
        )
    ]


def _points(name: str, colour: str, symbol: str, places: Sequence[float], names: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name, "y": places, "text": names,
        "marker": {"color": colour, "size": 10, "symbol": symbol, "line": {"width": 2, "color": colour}},
        "hovertemplate": f"%{{text}}<br>{name}: %{{x:,.4~g}} ms<extra></extra>",
    }  # fmt: skip


def _with_interval(values: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> dict[str, Any]:
    """Return x and error bars of seconds with their intervals, in ms."""
    error = {
        "type": "data", "symmetric": False, "color": NEUTRAL, "thickness": 1.5,
        "array": [1e3 * (high - value) for value, high in zip(values, highs, strict=True)],
        "arrayminus": [1e3 * (value - low) for value, low in zip(values, lows, strict=True)],
    }  # fmt: skip
    return {"x": [1e3 * value for value in values], "error_x": error}


def _policies(group: TaskGroup) -> list[Plot]:
    """Return the timeline of a step under each sync policy, of a run with many workers and micro-batches."""
    row = max(group.rows, key=lambda row: (len(row.data.policies), row["batch/world_size"], row["batch/accumulation"]))
    steps = {sync: dict(zip(POLICY_TIMES, times, strict=True)) for sync, times in row.data.policies.items()}
    if len(steps) < 2:
        return []
    # name, colour, lane, and each policy's (start, length) in seconds
    bars: list[tuple[str, str, float, list[tuple[float, float]]]] = [
        ("data", "#f2c14e", -_LANE, []), ("computing", "#5b7a9d", -_LANE, []),
        ("waiting for collectives", "#e8710a", -_LANE, []), ("optimizer", "#16935a", -_LANE, []),
        ("collectives", "#a78bda", _LANE, []),
    ]  # fmt: skip
    for step in steps.values():
        at = 0.0
        for (*_, spans), name in zip(bars, ("data_s", "compute_s", "exposed_s", "optimizer_s"), strict=False):
            spans.append((at, step[name]))
            at += step[name]
        end = at - step["optimizer_s"]
        bars[-1][-1].append((max(0.0, end - step["communication_s"]), min(end, step["communication_s"])))
    data = [
        {
            "type": "bar", "orientation": "h", "name": name, "marker": {"color": colour}, "width": 2 * _LANE,
            "y": [place + lane for place in range(len(steps))],
            "base": [1e3 * start for start, _ in spans], "x": [1e3 * length for _, length in spans],
            "customdata": [1e3 * length for _, length in spans],
            "hovertemplate": f"{name}: %{{customdata:,.4~g}} ms<extra></extra>",
        }
        for name, colour, lane, spans in bars
        if any(length for _, length in spans)
    ]  # fmt: skip
    names = [f"{sync}, used" if sync == row["sync"] else sync for sync in steps]
    whole = _points(
        "whole step, with its 90% interval", NEUTRAL, "line-ns-open", [n - _LANE for n in range(len(steps))], names
    )
    whole |= _with_interval(*([step[name] for step in steps.values()] for name in ("step_s", "low_s", "high_s")))
    data += [whole, *_measured_steps(row, list(steps))]
    layout = axes_layout("ms", "", height=150 + 90 * len(steps))
    layout |= {"barmode": "overlay"}
    layout["yaxis"] |= {
        "autorange": "reversed", "showgrid": False, "zeroline": False, "tickvals": list(range(len(steps))),
        "ticktext": [f"{name}  " for name in names],
    }  # fmt: skip
    caption = (
        f"Predicted by the plan of {group.describe(row)}. Upper bar: device; lower bar: network. The lengths are sums "
        "over the window: the collectives of its micro-batches are drawn together, at the end of the computing that "
        "hides them."
    )
    return [Plot(title="One step under each sync policy", caption=caption, data=data, layout=layout, wide=True)]


def _measured_steps(row: Row, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the points of the steps that were measured: the run's own, and that with sync=every by its calibration."""
    step_s = row["time/step_s"]
    found = {row["sync"]: step_s, **({"every": step_s * row.speedup.value} if step_s and row.speedup else {})}
    known = {policy: found[policy] for policy in policies if found.get(policy)}
    if not known:
        return []
    points = _points("measured", _MEASURED, "diamond", [policies.index(each) - _LANE for each in known], list(known))
    return [points | {"x": [1e3 * seconds for seconds in known.values()]}]
