"""Report of the benchmark of forecasts: a table of all cells, a summary, and a figure."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher.plan.forecast import StepTime
from launcher.plan.past_runs import corrected_step, likeness

BEGIN, END = "<!-- bench-forecast: begin -->", "<!-- bench-forecast: end -->"
TITLE = "# Forecasts\n\nHow well `launch plan` predicts what then runs.\n"

Result = dict[str, Any]


def report(results: Path, to: Path) -> None:
    """Write the table between the marks of forecasts.md, and forecasts.png."""
    lines = with_corrections([json.loads(line) for line in results.read_text().splitlines()])
    page = to / "forecasts.md"
    text = page.read_text(encoding="utf-8") if page.exists() else f"{TITLE}\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{measured_part(lines)}\n{END}{after}", encoding="utf-8")
    plot(lines, to / "forecasts.png")


def with_corrections(lines: Sequence[Result]) -> list[Result]:
    """Return the results with the predictions of held-out cells corrected by the runs of the other cells."""
    fitting = [each for each in lines if each["predicted"] and not each["cell"]["held_out"]]
    corrected: list[Result] = []
    for each in lines:
        if each["predicted"] and each["cell"]["held_out"]:
            ratios = [
                (weight, other["step_s"] / other["predicted"]["step_s"])
                for other in fitting
                if (weight := likeness(each["job"], other["job"])) > 0
            ]
            step = corrected_step(StepTime(**each["predicted"]), ratios)
            each = each | {"corrected": {"step_s": step.step_s, "low_s": step.low_s, "high_s": step.high_s}}
        corrected.append(each)
    return corrected


def error_of(result: Result, which: str = "predicted") -> float:
    """Return measured / predicted - 1 of the step."""
    return result["step_s"] / result[which]["step_s"] - 1


def inside(result: Result, which: str = "predicted") -> bool:
    return result[which]["low_s"] <= result["step_s"] <= result[which]["high_s"]


def memory_error(result: Result) -> float | None:
    expected = result["predicted_peak"]
    return None if not expected else result["peak_bytes"] / expected - 1


def row(result: Result) -> str:
    """Return a line of the table."""
    cell, predicted = result["cell"], result["predicted"]
    times = f"{result['step_s'] * 1e3:,.1f} | not predicted | |"
    if predicted is not None:
        ends = f"{predicted['low_s'] * 1e3:,.1f} to {predicted['high_s'] * 1e3:,.1f}"
        corrected = deviation(result, "corrected") if "corrected" in result else ""
        times = f"{result['step_s'] * 1e3:,.1f} | {predicted['step_s'] * 1e3:,.1f} ({ends}) | {deviation(result)} "
        times += f"| {corrected}"
    more, memory = result["wire_bytes"] - result["predicted_bytes"], memory_error(result)
    job = f"{cell['task']} | {cell['strategy']} {cell['sync']} | {cell['accumulation']}"
    return (
        f"| {result['setting']} | {job} | {'held out' if cell['held_out'] else ''} | {times} | "
        f"{'exact' if not more else f'{more:+,}'} | {'' if memory is None else f'{memory:+.1%}'} |"
    )


def deviation(result: Result, which: str = "predicted") -> str:
    return f"{error_of(result, which):+.1%}" + ("" if inside(result, which) else ", outside")


def measured_part(lines: Sequence[Result]) -> str:
    """Return the summary and the table."""
    timed = [each for each in lines if each["predicted"]]
    held_out = [each for each in timed if each["cell"]["held_out"]]
    exact = sum(each["wire_bytes"] == each["predicted_bytes"] for each in lines)
    memory = [abs(error) for each in lines if (error := memory_error(each)) is not None]
    head = (
        "| setting | task | policy | accumulation | | step, ms | predicted, ms (interval) | step / predicted "
        "| corrected | bytes | memory |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    parts = [
        f"Made by `make bench-forecast` (`jobs/bench_forecast.py`) on {machine()}, one thread for each rank.",
        "",
        f"Of {len(lines)} cells, {len(timed)} have a predicted step. Bytes on the wire are exact in {exact}.",
        f"Peak of a rank's tensors: {_spread(memory)}.",
        "",
        "| error of the step | cells | median | 90% of cells | worst | inside of the 90% interval |",
        "|---|---|---|---|---|---|",
        _summary("all, uncorrected", timed, error_of, inside),
        _summary("held out, uncorrected", held_out, error_of, inside),
        _summary(
            "held out, corrected by the others",
            held_out,
            lambda each: error_of(each, "corrected"),
            lambda each: inside(each, "corrected"),
        ),
        *(
            _summary(f"{name}, uncorrected", [each for each in timed if each["setting"] == name], error_of, inside)
            for name in dict.fromkeys(each["setting"] for each in timed)
        ),
        "",
        "![measured over predicted step](forecasts.png)",
        "",
        head,
        *map(row, lines),
    ]
    return "\n".join(parts)


def _spread(errors: Sequence[float]) -> str:
    if not errors:
        return "not predicted"
    return f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%} ({len(errors)} cells)"


def _summary(
    name: str, lines: Sequence[Result], error: Callable[[Result], float], fits: Callable[[Result], bool]
) -> str:
    if not lines:
        return f"| {name} | 0 | | | | |"
    errors = sorted(abs(error(each)) for each in lines)
    most = errors[max(0, math.ceil(0.9 * len(errors)) - 1)]
    share = sum(map(fits, lines)) / len(lines)
    return f"| {name} | {len(lines)} | {statistics.median(errors):.1%} | {most:.1%} | {errors[-1]:.1%} | {share:.0%} |"


def machine() -> str:
    """Return the number and model of this machine's processors."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{os.cpu_count()} cores: {', '.join(dict.fromkeys(models))}"


def plot(lines: Iterable[Result], place: Path) -> None:
    """Write the figure: measured over predicted step of each cell, with its interval."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    timed = [each for each in lines if each["predicted"]]
    names = list(dict.fromkeys(each["setting"] for each in timed))
    figure, panel = pyplot.subplots(figsize=(9, 6), layout="constrained")
    colours = {name: pyplot.get_cmap("tab10")(number) for number, name in enumerate(names)}
    for name in names:
        for held_out in (False, True):
            cells = [each for each in timed if each["setting"] == name and each["cell"]["held_out"] is held_out]
            expected = [each["predicted"]["step_s"] * 1e3 for each in cells]
            ends = [
                [(each["predicted"]["step_s"] - each["predicted"]["low_s"]) * 1e3 for each in cells],
                [(each["predicted"]["high_s"] - each["predicted"]["step_s"]) * 1e3 for each in cells],
            ]
            measured = [each["step_s"] * 1e3 for each in cells]
            panel.errorbar(
                measured, expected, yerr=ends, fmt="s" if held_out else "o", color=colours[name], linewidth=1,
                markerfacecolor=colours[name] if held_out else "none", label=None if held_out else name,
            )  # fmt: skip
    ends = [each["step_s"] * 1e3 for each in timed]
    line = [0.8 * min(ends, default=1), 1.25 * max(ends, default=10)]
    panel.plot(line, line, color="black", linewidth=0.8)
    for share in (0.8, 1.2):
        panel.plot(line, [share * value for value in line], color="grey", linewidth=0.6, linestyle=":")
    panel.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step and its interval, ms")
    panel.set_title("squares: held out; dotted: 20% off")
    panel.legend(fontsize=8)
    figure.savefig(place, dpi=80)
