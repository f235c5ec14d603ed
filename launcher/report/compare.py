"""Comparison of runs: settings that vary, figures, grouping into plot lines, and caveats."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.quantities import NO_INTERVAL
from launcher.report.figures import SMOOTHED_OVER, Facts, Figures, Measured
from launcher.runs.status import State

Key = tuple[tuple[str, str], ...]

WORKERS = frozenset({"cluster.nodes", "cluster.workers_per_node"})
_ACCUMULATION = frozenset({"batch.accumulation", "batch.micro_size"})
_GLOBAL = "batch.global_size"
# settings of the run's length and of work between steps; they do not affect the time of a step
_BETWEEN_STEPS = ("train.steps", "train.epochs", "train.eval_every", "train.log_every", "checkpoint.")


def varying(facts: Iterable[Facts]) -> tuple[str, ...]:
    """Return the settings that differ between these runs; a setting that a run lacks counts as open ("null")."""
    settings = [each.settings for each in facts]
    keys = dict.fromkeys(key for each in settings for key in each)
    return tuple(key for key in keys if len({each.get(key, "null") for each in settings}) > 1)


def over_workers(facts: Sequence[Facts]) -> list[Key]:
    """Return the key of each run's line in a plot over the world size."""
    keys = [key for key in varying(facts) if key not in WORKERS and not key.startswith(_BETWEEN_STEPS)]
    return [_key(each, keys) for each in facts]


def over_accumulation(facts: Sequence[Facts]) -> list[Key]:
    """Return the key of each run's line in a plot over accumulation.

    ``batch.global_size`` distinguishes lines unless accumulation determines it, as in a study with a constant
    micro-batch.
    """
    keys = [key for key in varying(facts) if key not in _ACCUMULATION and not key.startswith(_BETWEEN_STEPS)]
    without = [key for key in keys if key != _GLOBAL]
    sizes: dict[Key, set[tuple[int, int]]] = defaultdict(set)
    for each in facts:
        sizes[_key(each, without)].add((each.accumulation, each.global_size))
    found: list[Key] = []
    for each in facts:
        pairs = sizes[_key(each, without)]
        follows = len({accumulation for accumulation, _ in pairs}) == len(pairs) > 1
        found.append(_key(each, without if follows else keys))
    return found


def _key(facts: Facts, keys: Iterable[str]) -> Key:
    return tuple((key, facts.settings.get(key, "null")) for key in keys)


def said(key: Key) -> str:
    """Return ``accumulation=4 lr=0.001 strategy=fsdp``: settings without their groups, options with their group."""
    return " ".join(f"{name.removesuffix('.kind').rpartition('.')[2]}={value}" for name, value in key)


def natural(text: str) -> tuple[tuple[int, float, str], ...]:
    """Return a sort key that orders numbers inside ``text`` by value."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text)
    return tuple((0, float(part), "") if number % 2 else (1, 0.0, part) for number, part in enumerate(parts) if part)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Scaling efficiency.

    Attributes:
        value: samples/s divided by the baseline's, scaled to this world size.
        baseline: the baseline's world size.
    """

    value: float
    baseline: int


def samples_per_s(figures: Figures) -> float | None:
    """Return the samples/s of the whole job: global batch divided by the median step."""
    if figures.facts is None or figures.measured is None or not figures.measured.step_s:
        return None
    return figures.facts.global_size / figures.measured.step_s


def efficiencies(runs: Sequence[tuple[Facts, float, bool]]) -> list[Efficiency | None]:
    """Return the scaling efficiency of each run; None if its line has no other world size, or no finished run.

    The baseline is the fastest finished run on the fewest workers of the same line.

    Args:
        runs: (facts, samples/s, finished) of runs of one task.
    """
    lines = over_workers([facts for facts, *_ in runs])
    worlds: dict[Key, set[int]] = defaultdict(set)
    baselines: dict[Key, tuple[int, float]] = {}
    for line, (facts, speed, done) in zip(lines, runs, strict=True):
        worlds[line].add(facts.world_size)
        known = baselines.get(line, (facts.world_size, 0.0))
        if done and (facts.world_size, -speed) <= (known[0], -known[1]):
            baselines[line] = facts.world_size, speed
    found: list[Efficiency | None] = []
    for line, (facts, speed, _) in zip(lines, runs, strict=True):
        if line not in baselines or len(worlds[line]) == 1:
            found.append(None)
            continue
        smallest, base = baselines[line]
        found.append(Efficiency(value=speed / (facts.world_size / smallest * base), baseline=smallest))
    return found


# maximum number of varying settings shown beside a run's name
_SAID = 5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Row of the report before its figures are read.

    Attributes:
        state: of the run or sweep cell.
        detail: reason for the state.
        dir: None without a run.
        elsewhere: directory of another sweep that has the cell's run, or "".
    """

    label: str
    state: str
    detail: str
    dir: Path | None
    elsewhere: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Row of the report.

    Attributes:
        same_as: label of an earlier row with the same run, which is counted once.
        hours: worker-hours until the loss at which the task's runs are compared; None if not reached.
    """

    entry: Entry
    figures: Figures
    same_as: str = ""
    efficiency: Efficiency | None = None
    reached_step: int | None = None
    hours: float | None = None

    @property
    def facts(self) -> Facts | None:
        return self.figures.facts

    @property
    def measured(self) -> Measured | None:
        return self.figures.measured

    @property
    def counts(self) -> bool:
        """Return whether the row is part of plots and comparisons."""
        return self.facts is not None and self.measured is not None and not self.same_as

    @property
    def done(self) -> bool:
        return self.entry.state == State.done

    @property
    def samples_per_s(self) -> float | None:
        return samples_per_s(self.figures)

    @property
    def exposed_s(self) -> float | None:
        """Return the exposed communication of a step, never below zero; None if not measured."""
        if self.measured is None or self.measured.exposed_s is None:
            return None
        return max(0.0, self.measured.exposed_s)

    @property
    def rest_s(self) -> float | None:
        """Return a step's time minus data wait and measured exposed communication; None if these exceed the step."""
        if self.measured is None or self.measured.step_s is None or self.measured.data_s is None:
            return None
        rest = self.measured.step_s - self.measured.data_s - (self.exposed_s or 0.0)
        return rest if rest >= 0 else None

    @property
    def saved_fraction(self) -> float | None:
        sent = self.measured.wire_bytes if self.measured else None
        every = self.measured.wire_bytes_every if self.measured else None
        return None if sent is None or not every else 1 - sent / every


@dataclass(frozen=True, kw_only=True)
class TaskGroup:
    """Runs of one task; speeds and losses are compared only within it.

    Attributes:
        loss: loss up to which hours are counted; None if no finished run has one.
        given: whether the user specified that loss.
    """

    target: str
    rows: tuple[Row, ...]
    varying: tuple[str, ...]
    loss: float | None
    given: bool

    def said(self, row: Row) -> str:
        """Return a description of the run: its label, with the varied settings unless the label contains them."""
        if row.facts is None or "=" in row.entry.label or not self.varying:
            return row.entry.label
        settings = tuple((key, row.facts.settings.get(key, "null")) for key in self.varying[:_SAID])
        return f"{row.entry.label} ({said(settings)})"

    @property
    def hours(self) -> str:
        """Return the name of the unit: GPU-hours or worker-hours."""
        devices = {row.facts.device for row in self.rows if row.facts}
        return "GPU-hours" if devices == {"cuda"} else "worker-hours"

    @property
    def time_unit(self) -> tuple[str, float]:
        """Return (unit name, factor from hours) that suits the durations of these runs."""
        longest = max((row.hours for row in self.rows if row.hours is not None), default=0.0)
        who = self.hours.partition("-")[0]
        if longest * 60 < 2:
            return f"{who}-seconds", 3600
        return (f"{who}-minutes", 60) if longest < 2 else (self.hours, 1)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compared runs.

    Attributes:
        rows: all rows in the requested order.
        groups: the rows that count, by task.
    """

    title: str
    rows: tuple[Row, ...]
    groups: tuple[TaskGroup, ...]
    notes: tuple[str, ...]

    @property
    def varying(self) -> tuple[str, ...]:
        return varying(row.facts for row in self.rows if row.facts is not None)


def compare(title: str, entries: Sequence[Entry], figures: Mapping[Path, Figures], loss: float | None) -> Comparison:
    """Return the comparison of ``entries``.

    Args:
        loss: loss up to which hours are counted; None: the lowest that all finished runs of a task have reached.
    """
    rows: list[Row] = []
    first: dict[Path, str] = {}
    for entry in entries:
        if entry.dir is None:
            rows.append(Row(entry=entry, figures=Figures(facts=None, measured=None)))
            continue
        rows.append(Row(entry=entry, figures=figures[entry.dir], same_as=first.get(entry.dir, "")))
        first.setdefault(entry.dir, entry.label)
    targets = dict.fromkeys(row.facts.target for row in rows if row.counts and row.facts)
    groups = [_group(target, rows, loss) for target in targets]
    derived = {row.entry.dir: row for group in groups for row in group.rows}
    rows = [replace(derived.get(row.entry.dir, row), entry=row.entry, same_as=row.same_as) for row in rows]
    return Comparison(title=title, rows=tuple(rows), groups=tuple(groups), notes=tuple(_notes(rows, groups)))


def _group(target: str, rows: Sequence[Row], given: float | None) -> TaskGroup:
    mine = [row for row in rows if row.counts and row.facts and row.facts.target == target]
    lowest = [row.measured.lowest for row in mine if row.done and row.measured and row.measured.lowest is not None]
    loss = given if given is not None else max(lowest, default=None)
    fast = [(row.facts, speed, row.done) for row in mine if row.facts and (speed := row.samples_per_s) is not None]
    found = iter(efficiencies(fast))
    with_all: list[Row] = []
    for row in mine:
        assert row.facts is not None
        assert row.measured is not None
        efficiency = next(found) if row.samples_per_s is not None else None
        reached = None if loss is None else row.measured.reached(loss)
        step, hours = (None, None) if reached is None else (reached[0], row.facts.world_size * reached[1] / 3600)
        with_all.append(replace(row, efficiency=efficiency, reached_step=step, hours=hours))
    return TaskGroup(
        target=target,
        rows=tuple(with_all),
        varying=varying(row.facts for row in mine if row.facts),
        loss=loss,
        given=given is not None,
    )


def _notes(rows: Sequence[Row], groups: Sequence[TaskGroup]) -> list[str]:
    """Return the caveats that a reader must know before comparing."""
    notes: list[str] = []
    unlike = Counter(row.entry.state for row in rows if not row.done)
    if unlike:
        counted = ", ".join(f"{number} {state}" for state, number in unlike.items())
        notes.append(
            f"Not every row is a finished run: {counted}. Their figures are of the steps they recorded; "
            "only finished runs are what efficiency is reckoned from, and set the loss that hours are counted to."
        )
    if len(groups) > 1:
        notes.append(f"{len(groups)} tasks: losses and speeds are compared within each only.")
    versions = sorted({row.facts.version for row in rows if row.facts})
    if len(versions) > 1:
        notes.append(f"The runs are of different versions of launcher: {', '.join(versions)}.")
    devices = sorted({row.facts.device for row in rows if row.facts})
    if len(devices) > 1:
        notes.append(f"The runs are on different devices: {', '.join(devices)}; these are lines of their own.")
    unlike_points = [group for group in groups if {"train.log_every", "batch.global_size"} & {*group.varying}]
    if any(row.hours is not None for group in unlike_points for row in group.rows):
        notes.append(
            f"The smoothed loss is of {SMOOTHED_OVER} logged steps, which here are of unlike numbers of samples: "
            "train.log_every or batch.global_size varies."
        )
    for row in rows:
        if row.figures.problem:
            notes.append(f"{row.entry.label}: {row.figures.problem}.")
        elif row.same_as and row.same_as != row.entry.label:
            notes.append(f"{row.entry.label} is the same run as {row.same_as}, and counts once.")
    measured = [(row, row.measured) for row in rows if row.measured and not row.same_as]
    for row, m in measured:
        if m.since:
            notes.append(
                f"{row.entry.label} was resumed after step {m.since} under settings that change what a step takes or "
                "sends: step times, traffic and speed-up are of the steps after it; wall time and hours are of all, "
                "at the present number of workers."
            )
    for why, which in (
        ("no full window yet: no speed", [row for row, m in measured if not m.windows]),
        (
            "exposed communication was not measured: it is inside their computation",
            [row for row, m in measured if m.exposed_s is None and m.windows],
        ),
        (
            "the exposed communication that calibration measured is longer than their step: no computation is told",
            [row for row, m in measured if m.windows and row.rest_s is None],
        ),
        (
            f"the speed-up was {NO_INTERVAL}, and is left out",
            [row for row, m in measured if m.speedup is not None and m.speedup_95 is None],
        ),
        (
            "records without time/total_s (an older version): wall time is time/step_s added up",
            [row for row, m in measured if m.estimated_time],
        ),
        ("lines of metrics.jsonl were damaged, and left out", [row for row, m in measured if m.damaged]),
    ):
        if which:
            notes.append(f"{_named(which)}: {why}.")
    return notes


def _named(rows: Sequence[Row]) -> str:
    names = [row.entry.label for row in rows]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
