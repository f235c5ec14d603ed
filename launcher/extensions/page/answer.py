"""Answer of a report in plain words: what is fastest, cheapest and best, what the savings are, and what is not known.

Sentences are made of measured values with their uncertainty. Settings that ran at least three times have the interval
of their runs; others have that of the steps inside a run. Two settings differ only if their intervals do not overlap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launcher.extensions.page import compare
from launcher.extensions.page.compare import Row, TaskGroup
from launcher.quantities import Interval, count, first_names, interval, number_text

# runs of the same settings from which an interval can be computed
_FEWEST_REPEATS = 3


class Finding(NamedTuple):
    """One finding of the answer, about ``subject``, which is one or two words."""

    subject: str
    text: str


def findings(group: TaskGroup) -> list[Finding]:
    """Return what a task's finished runs say, the most important first."""
    done = [row for row in group.rows if row.done]
    if not done:
        return [Finding("No answer yet", "no run has finished.")]
    timed = [row for row in done if row.ran_alone]
    settings, of_times = compare.repeats(done), compare.repeats(timed)
    found = [
        _fastest(group, of_times), *_cheapest(group, of_times), _best_loss(group, settings), _scaling(group, timed),
        _accumulation(group, timed), _policy(group, done), _limits(group, settings),
    ]  # fmt: skip
    return [finding for finding in found if finding is not None]


# settings with the estimate of a figure, the best first
_Ranking = list[tuple[Sequence[Row], Interval]]
_Estimate = Callable[[Sequence[Row]], Interval | None]


def _ranking(settings: Sequence[Sequence[Row]], estimate: _Estimate, *, highest: bool = False) -> _Ranking:
    found = [(rows, value) for rows in settings if (value := estimate(rows)) is not None]
    return sorted(found, key=lambda each: -each[1].value if highest else each[1].value)


def _overlap(one: Interval, other: Interval) -> bool:
    return one.low <= other.high and other.low <= one.high


def _ratio(one: Interval, other: Interval) -> Interval:
    """Return the interval of a quotient of positive values: at least as wide as it must be."""
    high = one.high / other.low if other.low > 0 else math.inf
    return Interval(one.value / other.value, max(0.0, one.low) / other.high, high)


def _known(value: Interval) -> bool:
    return math.isfinite(value.high)


def _text(value: Interval, form: str | None = None) -> str:
    """Return a value with its interval, if that is known."""

    def text(number: float) -> str:
        return number_text(number) if form is None else format(number, form)

    ends = f" ({text(value.low)} to {text(value.high)})" if _known(value) else ""
    return text(value.value) + ends


def _estimate(rows: Sequence[Row], figure: str, within: Callable[[Row], tuple[float, float]]) -> Interval | None:
    """Return the estimate of a figure over runs of the same settings; None unless all of them have it.

    Args:
        within: the ends of the interval of one run's figure, as multiples of it.
    """
    values: list[float] = [row[figure] for row in rows]
    if not all(values):
        return None
    if len(values) >= _FEWEST_REPEATS:
        return interval(values)
    ends = [(value * low, value * high) for value, (low, high) in zip(values, map(within, rows), strict=True)]
    return Interval(statistics.mean(values), min(low for low, _ in ends), max(high for _, high in ends))


def _step_spread(row: Row) -> tuple[float, float]:
    """Return the interval of a run's step time as multiples of it."""
    step_s, low, high = row["time/step_s"], row["time/step_low_s"], row["time/step_high_s"]
    return (0.0, math.inf) if not step_s or low is None or low <= 0 else (low / step_s, high / step_s)


def _speed(rows: Sequence[Row]) -> Interval | None:
    """Return the samples per second of runs of the same settings."""

    def inverse(row: Row) -> tuple[float, float]:
        low, high = _step_spread(row)
        return (1 / high, 1 / low) if low else (0.0, math.inf)

    return _estimate(rows, "throughput/samples_per_s", inverse)


def _name(group: TaskGroup, rows: Sequence[Row]) -> str:
    """Return the name of a setting: of its first run, or, for cells of a sweep, what they have in common: no seed."""
    name = group.describe(rows[0])
    if len(rows) == 1:
        return name
    common = [
        (key, value) for key, value in rows[0].varied.items() if all(row.varied.get(key) == value for row in rows)
    ]
    if "=" in rows[0].entry.label and common:
        name = compare.settings_text(tuple(common))
    return f"{name}, from {len(rows)} runs"


def _claims(group: TaskGroup, ranking: _Ranking, ratio: Interval, form: str) -> str:
    """Return what may be said of the first settings against the others, and against the last ones.

    Args:
        ratio: of the first and the last settings; above 1.
        form: sentence with {ratio} and {name} of the last settings.
    """
    if not all(_known(value) for _, value in ranking):
        return " Too few runs or steps per setting to tell a difference from chance."
    ties = [group.describe(rows[0]) for rows, value in ranking[1:] if _overlap(value, ranking[0][1])]
    which = f"all {len(ties)} others" if len(ties) == len(ranking) - 1 > 1 else first_names(ties, 3)
    name = group.describe(ranking[-1][0][0]) + _single_starts(ranking[0][0], ranking[-1][0])
    overlap = f" The intervals overlap with that of {which}: no difference is claimed." if ties else ""
    return overlap + (f" {form.format(ratio=_text(ratio, '.2f'), name=name)}" if ratio.excludes(1) else "")


def _single_starts(*settings: Sequence[Row]) -> str:
    """Return what limits a comparison of settings that did not run often: their intervals are those of steps."""
    return ", in single starts" if any(len(rows) < _FEWEST_REPEATS for rows in settings) else ""


def _fastest(group: TaskGroup, settings: Sequence[Sequence[Row]]) -> Finding | None:
    ranking = _ranking(settings, _speed, highest=True)
    if not ranking:
        return None
    rows, best = ranking[0]
    text = f"{_text(best)} samples/s on {count(rows[0]['batch/world_size'], group.worker)}: {_name(group, rows)}."
    if len(ranking) == 1:
        return Finding("Speed", f"{text} There are no other settings to compare with.")
    claim = _claims(group, ranking, _ratio(best, ranking[-1][1]), "That is {ratio} times as fast as {name}.")
    return Finding("Fastest", text + claim)


def _cheapest(group: TaskGroup, settings: Sequence[Sequence[Row]]) -> list[Finding]:
    """Return the lowest costs of a number of samples and of a loss: prices if every run has one, else hours."""
    priced = all(row["total/cost"] is not None for rows in settings for row in rows)

    def of_samples(rows: Sequence[Row]) -> Interval | None:
        price = float(rows[0].data.settings[compare.PRICE]) if priced else 1.0
        speed, hours = _speed(rows), price * rows[0]["batch/world_size"] * 1e6 / 3600
        return None if speed is None else _ratio(Interval(hours, hours, hours), speed)

    def of_loss(rows: Sequence[Row]) -> Interval | None:  # within one run, the noise of its loss is not known
        return _estimate(rows, "loss/cost" if priced else "loss/hours", lambda _: (0.0, math.inf))

    unit, factor = ("", 1.0) if priced else group.time_unit
    loss = f"{unit} to a training loss of {group.loss or 0:.4g}"
    found = [
        _lowest_cost(
            group,
            settings,
            "Cheapest",
            of_samples,
            f"{'' if priced else group.worker + '-hours'} per million samples",
            1.0,
        ),
        _lowest_cost(group, settings, "Cheapest to a loss", of_loss, loss, factor),
    ]
    return [finding for finding in found if finding is not None]


def _lowest_cost(
    group: TaskGroup, settings: Sequence[Sequence[Row]], subject: str, estimate: _Estimate, unit: str, factor: float
) -> Finding | None:
    ranking = _ranking(settings, estimate)
    if len(ranking) < 2:
        return None
    rows, best = ranking[0]
    claim = _claims(group, ranking, _ratio(ranking[-1][1], best), "It takes {ratio} times as much with {name}.")
    missing = len(settings) - len(ranking)
    left_out = f" Not known for {count(missing, 'other setting')}." if missing else ""
    shown = Interval(best.value * factor, best.low * factor, best.high * factor)
    return Finding(subject, f"{_text(shown)} {unit.strip()}: {_name(group, rows)}.{claim}{left_out}")


def _best_loss(group: TaskGroup, settings: Sequence[Sequence[Row]]) -> Finding | None:
    rows = [row for each in settings for row in each]
    held_out = all(row["eval/loss"] is not None for row in rows)
    figure, name = ("eval/loss", "held-out loss") if held_out else ("train/loss_smoothed", "smoothed training loss")
    ranking = _ranking(settings, lambda rows: _estimate(rows, figure, lambda _: (0.0, math.inf)))
    if not ranking:
        return None
    runs, best = ranking[0]
    text = f"a {name} of {_text(best, '.4f')}: {_name(group, runs)}."
    if len(ranking) == 1:
        return Finding("Loss", text)
    if compare.agree(rows, figure):
        return Finding(
            "Loss", f"all {len(ranking)} settings learn the same: their {name}es of {best.value:.4f} agree within the "
            "rounding of their precision.",
        )  # fmt: skip
    last = ranking[-1]
    text += f" The highest is {_text(last[1], '.4f')}: {_name(group, last[0])}."
    lengths = " The runs have different numbers of steps." if len({row["step"] for row in rows}) > 1 else ""
    return Finding("Lowest loss", text + lengths + _claims(group, ranking, Interval(1, 1, 1), ""))


def _scaling(group: TaskGroup, rows: Sequence[Row]) -> Finding | None:
    """Return the finding on scaling from the fewest workers to the most that were compared with them."""
    compared = [
        row for row in rows if row["batch/world_size"] > (row["scaling/baseline_world_size"] or row["batch/world_size"])
    ]
    if not compared:
        return None
    most = max(row["batch/world_size"] for row in compared)
    compared = [row for row in compared if row["batch/world_size"] == most]
    baseline = min(row["scaling/baseline_world_size"] for row in compared)
    values = [row["scaling/efficiency"] for row in compared if row["scaling/baseline_world_size"] == baseline]
    gained = " to ".join(dict.fromkeys(f"{value * most / baseline:.2f}" for value in (min(values), max(values))))
    span = " to ".join(dict.fromkeys(f"{value:.0%}" for value in (min(values), max(values))))
    over = "" if len(values) == 1 else f" across {len(values)} settings"
    text = f"{gained} times the speed on {most} {group.worker}s as on {baseline}: {span} scaling efficiency{over}."
    return Finding("Scaling", text)


def _accumulation(group: TaskGroup, rows: Sequence[Row]) -> Finding | None:
    """Return what each accumulation gains over the lowest, on the line with the most workers and the widest range."""
    timed = [row for row in rows if row["throughput/samples_per_s"]]
    lines: list[list[Row]] = []
    for line in compare.lines_over_accumulation(timed).values():
        fastest: dict[int, Row] = {}
        for row in sorted(line, key=lambda row: (row["batch/accumulation"], -row["throughput/samples_per_s"])):
            fastest.setdefault(row["batch/accumulation"], row)
        if len(fastest) > 1:
            lines.append([*fastest.values()])
    if not lines:
        return None
    few, *others = max(lines, key=lambda line: (line[0]["batch/world_size"], line[-1]["batch/accumulation"]))
    parts = [f"{_accumulated(row)} {_gain(row, few)}" for row in others]
    text = (
        f"on {count(few['batch/world_size'], group.worker)}, compared with {_accumulated(few)}: {'; '.join(parts)}. "
        "These are samples/s in single starts."
    )
    sizes = sorted({row["batch/global_size"] for row in (few, *others)})
    learned = f" The global batch is {sizes[0]:,} to {sizes[-1]:,}." if len(sizes) > 1 else ""
    return Finding("Accumulation", text + learned)


def _accumulated(row: Row) -> str:
    return f"{count(row['batch/accumulation'], 'micro-batch', 'micro-batches')} of {row['batch/micro_size']:,}"


def _gain(row: Row, few: Row) -> str:
    """Return how much faster a run is than another one, as far as that is known."""
    one, other = _speed([row]), _speed([few])
    assert one is not None
    assert other is not None
    ratio = _ratio(one, other)
    if not _known(ratio):
        return f"{ratio.value:.2f} times as fast, of too few steps"
    if ratio.excludes(1):
        return f"{_text(ratio, '.2f')} times as fast"
    return ratio.undecided()


def _policy(group: TaskGroup, rows: Sequence[Row]) -> Finding | None:
    """Return what the sync policy saves, in the run where it saves most."""
    saving = [row for row in rows if row["comm/saved_fraction"]]
    if not saving:
        return None
    best = max(saving, key=lambda row: (row.claimed_speedup or 0.0, row["comm/saved_fraction"]))
    if best.claimed_speedup is not None and best.speedup is not None:
        gain = f"a step ran {_text(best.speedup, '.2f')} times as fast"
    elif best.speedup is not None:
        gain = f"speed {best.speedup.undecided()}"
    else:
        gain = "the effect on speed was not measured"
    bytes_saved = f"{best['comm/saved_fraction']:.1%} fewer bytes on the wire"
    text = f"{best['sync']} instead of every: {gain}, with {bytes_saved}."
    return Finding("Sync policy", f"{text} This is {group.describe(best)}, compared within the run.")


def _limits(group: TaskGroup, settings: Sequence[Sequence[Row]]) -> Finding:
    """Return what the answer is based on, and what was not measured."""
    rows = [row for each in settings for row in each]
    several = [row for row in rows if row["batch/world_size"] > 1]
    missing = {
        "how much a second start of the same settings differs, as on a machine with other work": all(
            len(each) < _FEWEST_REPEATS for each in settings
        ),
        "held-out loss": all(row["eval/loss"] is None for row in rows),
        f"other numbers of {group.worker}s": len({row["batch/world_size"] for row in rows}) == 1,
        "exposed communication": bool(several) and all(row["comm/exposed_s"] is None for row in several),
        "speed of cells alone on the machine": not any(row.ran_alone for row in rows),
    }
    names = [name for name, absent in missing.items() if absent]
    devices = ", ".join(sorted({row["device"] for row in rows}))
    based = f"{len(rows)} of {count(len(group.rows), 'run')} finished, on {devices}."
    unknown = f" Not measured: {'; '.join(names)}." if names else ""
    ranges = (
        " Ranges are 95% intervals: over runs where settings ran at least three times, else over the steps of a run, "
        "without what changes from one start to the next."
    )
    return Finding("Basis", based + unknown + ranges)
