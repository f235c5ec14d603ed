"""Comparison of runs: settings that vary, figures that need other runs, lines of plots, and caveats."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.quantities import Interval, first_names
from launcher.record.measurements import COMMIT, SMOOTHED_OVER, RunData
from launcher.runs.status import RunState

# (setting, value) pairs that runs on one line of a plot have in common
Key = tuple[tuple[str, str], ...]

PRICE, SEED = "cluster.price_per_gpu_hour", "train.seed"
_WORKERS = ("cluster.nodes", "cluster.workers_per_node")
_ACCUMULATION = ("batch.accumulation", "batch.micro_size")
# settings of the run's length and of work between steps; they do not affect the time of a step
_BETWEEN_STEPS = ("train.steps", "train.epochs", "train.eval_every", "train.log_every", "checkpoint.")
# maximum number of varying settings shown beside a run's name
_SETTINGS_SHOWN = 5
# most runs in the plots of a task
MOST_DRAWN = 200


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Row of the report before its data are read.

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """Row of the report.

    Attributes:
        figures: of the run, by the names in ``FIGURES`` and of all rows' metrics; rows with the same run share them.
        varied: the settings that differ between the rows of the report; empty if the run's are not known.
        same_as: label of an earlier row with the same run, which is counted once.
    """

    entry: Entry
    data: RunData
    figures: dict[str, Any]
    varied: dict[str, str]
    same_as: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def done(self) -> bool:
        return self.entry.state == RunState.done

    @property
    def name(self) -> str:
        """Return the label, with the state unless it is a finished run."""
        return self.entry.label if self.done else f"{self.entry.label} ({self.entry.state})"

    @property
    def counts(self) -> bool:
        """Return whether the row is part of plots and comparisons."""
        return self["step"] is not None and not self.same_as

    @property
    def ran_alone(self) -> bool:
        """Return whether the run's times may be compared: no other cell of its sweep ran beside it."""
        return self.data.cells_at_once == 1

    @cached_property
    def speedup(self) -> Interval | None:
        return Interval.of_record(self.figures, "comm/speedup") if self.ran_alone else None

    @property
    def claimed_speedup(self) -> float | None:
        """Return the speed-up if its interval excludes 1."""
        return self.speedup.value if self.speedup is not None and self.speedup.excludes(1) else None


@dataclass(frozen=True, kw_only=True)
class TaskGroup:
    """Runs of one task; speeds and losses are compared only within it.

    Attributes:
        varying: settings that differ between the runs.
        loss: loss up to which hours are counted; None if no finished run has one.
        loss_given: whether the user specified that loss.
    """

    target: str
    rows: tuple[Row, ...]
    varying: tuple[str, ...]
    loss: float | None
    loss_given: bool

    def describe(self, row: Row) -> str:
        """Return the run's name, with the varying settings unless its label contains them."""
        if row not in self._descriptions:
            label, settings = row.entry.label, settings_text(_key(row, self.varying[:_SETTINGS_SHOWN]))
            known = "=" in label or not self.varying
            described = row.name if known else f"{label} ({settings}){row.name.removeprefix(label)}"
            self._descriptions[row] = described
        return self._descriptions[row]

    @cached_property
    def _descriptions(self) -> dict[Row, str]:
        return {}

    @cached_property
    def worker(self) -> str:
        """Return the name of a worker: GPU or worker."""
        return "GPU" if {row["device"] for row in self.rows} == {"cuda"} else "worker"

    @property
    def time_unit(self) -> tuple[str, float]:
        """Return (unit name, factor from hours) that suits the costs of these runs."""
        longest = max((row["total/hours"] for row in self.rows if row["total/hours"] is not None), default=0.0)
        if longest * 60 < 2:
            return f"{self.worker}-seconds", 3600
        return (f"{self.worker}-minutes", 60) if longest < 2 else (f"{self.worker}-hours", 1)


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Compared runs.

    Attributes:
        rows: all rows in the requested order.
        groups: the rows that count, by task.
        metrics: names of the metrics of the tasks' own losses.
    """

    title: str
    rows: tuple[Row, ...]
    groups: tuple[TaskGroup, ...]
    notes: tuple[str, ...]
    metrics: tuple[str, ...] = ()

    @cached_property
    def varying(self) -> tuple[str, ...]:
        return varying(self.rows)

    @property
    def hours_unit(self) -> str:
        return "/".join(sorted({f"{group.worker}-hours" for group in self.groups})) or "worker-hours"


def side_by_side(
    title: str, entries: Sequence[Entry], data: Mapping[Path, RunData], loss: float | None
) -> RunComparison:
    """Return the comparison of ``entries``.

    Args:
        loss: loss up to which hours are counted; None: the lowest that all finished runs of a task have reached.
    """
    keys = _varying([run.settings for run in data.values() if run.settings])
    rows: list[Row] = []
    first: dict[Path | None, Row] = {}
    for entry in entries:
        earlier = first.get(entry.dir) if entry.dir else None
        run = data[entry.dir] if entry.dir else RunData()
        figures = earlier.figures if earlier else dict(run.figures)
        varied = {key: run.settings.get(key, "null") for key in keys if run.settings}
        again = earlier.entry.label if earlier else ""
        rows.append(Row(entry=entry, data=run, figures=figures, varied=varied, same_as=again))
        first.setdefault(entry.dir, rows[-1])
    metrics = dict.fromkeys(name for row in rows for name in row.data.metrics)
    for row in rows:
        row.figures.update(dict.fromkeys(metrics) | row.data.metrics)
    targets = dict.fromkeys(row["task"] for row in rows if row.counts)
    groups = [_group(target, [row for row in rows if row["task"] == target], loss) for target in targets]
    notes = tuple(_notes(rows, groups))
    return RunComparison(title=title, rows=tuple(rows), groups=tuple(groups), notes=notes, metrics=tuple(metrics))


def _group(target: str, rows: Sequence[Row], given: float | None) -> TaskGroup:
    """Return the group of a task's runs, and add to ``rows`` the figures that follow from all of them."""
    counted = tuple(row for row in rows if row.counts)
    lowest = [row["train/loss_smoothed_min"] for row in counted if row.done]
    loss = given if given is not None else max((each for each in lowest if each is not None), default=None)
    group = TaskGroup(target=target, rows=counted, varying=varying(counted), loss=loss, loss_given=given is not None)
    set_efficiencies(counted)
    for row in rows:
        row.figures.update({"loss/target": loss, "loss/hours_unit": f"{group.worker}-hours"})
    for row in counted:
        _add_hours(row, "total", row["time/total_s"])
        if loss is not None and (reached := row.data.first_reached(loss)) is not None:
            step, seconds = reached
            row.figures["loss/step"] = int(step)
            _add_hours(row, "loss", seconds)
    return group


def _add_hours(row: Row, name: str, seconds: float) -> None:
    """Add the hours of all workers in ``seconds``, and their price if the run has one."""
    hours, price = row["batch/world_size"] * seconds / 3600, row.data.settings.get(PRICE, "null")
    row.figures[f"{name}/hours"] = hours
    row.figures[f"{name}/cost"] = None if price == "null" else hours * float(price)


def set_efficiencies(rows: Sequence[Row]) -> None:
    """Add the scaling efficiency to each row whose line has several world sizes and a finished run.

    The baseline is the fastest finished run on the fewest workers of the same line.

    Args:
        rows: runs of one task.
    """
    timed = [row for row in rows if row.ran_alone and row["throughput/samples_per_s"] is not None]
    for line in lines_over_workers(timed).values():
        done = [row for row in line if row.done]
        if not done or len({row["batch/world_size"] for row in line}) == 1:
            continue
        base = min(done, key=lambda row: (row["batch/world_size"], -row["throughput/samples_per_s"]))
        for row in line:
            workers = row["batch/world_size"] / base["batch/world_size"]
            efficiency = row["throughput/samples_per_s"] / (workers * base["throughput/samples_per_s"])
            baseline = {"scaling/baseline_world_size": base["batch/world_size"]}
            row.figures.update({"scaling/efficiency": efficiency, **baseline})


def varying(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the settings that differ between these runs; a setting that a run lacks counts as open ("null")."""
    return _varying([row.varied for row in rows if row.varied])


def _varying(settings: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    keys: dict[str, str] = {}
    changed: set[str] = set()
    for each in settings:
        keys.update(each)
        changed.update(key for key, _ in each.items() ^ settings[0].items())
    return tuple(key for key in keys if key in changed and len({each.get(key, "null") for each in settings}) > 1)


def axes(rows: Iterable[Row], but: Sequence[str]) -> list[str]:
    """Return the settings that vary and affect a step or what is learned, without those in ``but``."""
    left_out = (*but, COMMIT)  # most runs have another commit, and speeds remain comparable
    return [key for key in varying(rows) if key not in left_out and not key.startswith(_BETWEEN_STEPS)]


def lines_over_workers(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """Return the lines of a plot over the world size, by the settings that their runs have in common."""
    keys = axes(rows, _WORKERS)
    return _lines(rows, lambda row: _key(row, keys))


def lines_over_accumulation(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """Return the lines of a plot over accumulation, by the settings that their runs have in common.

    ``batch.global_size`` distinguishes lines unless accumulation determines it, as in a study with a constant
    micro-batch.
    """
    keys = axes(rows, _ACCUMULATION)
    without_size = [key for key in keys if key != "batch.global_size"]
    sizes: dict[Key, set[tuple[int, int]]] = defaultdict(set)
    for row in rows:
        sizes[_key(row, without_size)].add((row["batch/accumulation"], row["batch/global_size"]))

    def key(row: Row) -> Key:
        pairs = sizes[_key(row, without_size)]
        determined = len({accumulation for accumulation, _ in pairs}) == len(pairs) > 1
        return _key(row, without_size if determined else keys)

    return _lines(rows, key)


# relative differences of losses that are due to rounding alone: sums in another order, in each of many steps
_ROUNDING = {"fp32": 2e-6, "fp16": 2.0**-12}
_NARROW = 2.0**-10


def agree(rows: Sequence[Row], figure: str) -> bool:
    """Return whether the runs' losses are equal within the rounding of the runs' precision."""
    values: list[float] = [row[figure] for row in rows if row[figure] is not None]
    rounding = max(_ROUNDING.get(row.data.settings.get("precision.kind", ""), _NARROW) for row in rows)
    return bool(values) and max(values) - min(values) <= rounding * max(map(abs, values))


def repeats(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the runs by their settings; what differs within a group is the seed, and chance."""
    keys = [key for key in varying(rows) if key != SEED]
    return [*_lines(rows, lambda row: _key(row, keys)).values()]


def _families(rows: Sequence[Row]) -> dict[Key, list[Row]]:
    """Return the runs that differ only in workers, accumulation, batch sizes and length, by their other settings."""
    keys = axes(rows, (*_WORKERS, *_ACCUMULATION, "batch.global_size"))
    return _lines(rows, lambda row: _key(row, keys))


def with_drawn_runs(group: TaskGroup) -> TaskGroup:
    """Return the group with at most MOST_DRAWN runs, which are enough for plots: more cannot be told apart.

    Runs that are compared with each other over workers or accumulation stay together. First come those that end with
    the lowest smoothed loss of a finished run.
    """
    if len(group.rows) <= MOST_DRAWN:
        return group
    best_families = sorted(_families(group.rows).values(), key=lambda family: min(map(_final_loss, family)))
    drawn = {*[row for family in best_families for row in sorted(family, key=_final_loss)][:MOST_DRAWN]}
    return replace(group, rows=tuple(row for row in group.rows if row in drawn))


def _final_loss(row: Row) -> tuple[bool, float]:
    """Return a key that puts finished runs with a low smoothed loss first."""
    loss = row["train/loss_smoothed"]
    return not row.done, math.inf if loss is None else loss


def _lines(rows: Sequence[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    lines: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        lines[key(row)].append(row)
    return dict(sorted(lines.items(), key=lambda item: natural_sort_key(settings_text(item[0]))))


def _key(row: Row, keys: Iterable[str]) -> Key:
    return tuple((key, row.varied[key]) for key in keys)


def settings_text(key: Key) -> str:
    """Return ``accumulation=4 lr=0.001 strategy=fsdp``: settings without their groups, options with their group."""
    return " ".join(f"{name.removesuffix('.kind').rpartition('.')[2]}={value}" for name, value in key)


def natural_sort_key(text: str) -> tuple[tuple[int, float, str], ...]:
    """Return a sort key that orders numbers inside ``text`` by value."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", text)
    return tuple((0, float(part), "") if number % 2 else (1, 0.0, part) for number, part in enumerate(parts) if part)


def _notes(rows: Sequence[Row], groups: Sequence[TaskGroup]) -> list[str]:
    """Return the caveats that a reader must know before comparing."""
    notes: list[str] = []
    if unfinished := Counter(row.entry.state for row in rows if not row.done):
        counted = ", ".join(f"{number} {state}" for state, number in unfinished.items())
        notes.append(
            f"Not every row is a finished run: {counted}. Their figures cover the steps they recorded. "
            "Only finished runs are baselines of efficiency and set the loss up to which hours are counted."
        )
    if len(groups) > 1:
        notes.append(f"{len(groups)} tasks: losses and speeds are compared only within each.")
    versions, devices = (sorted({row[name] for row in rows if row[name]}) for name in ("version", "device"))
    if len(versions) > 1:
        notes.append(f"The runs used different versions of launcher: {', '.join(versions)}.")
    if len(devices) > 1:
        notes.append(f"The runs used different devices: {', '.join(devices)}. Each device has its own lines.")
    if len(commits := {row.varied.get(COMMIT, "null") for row in rows} - {"null"}) > 1:
        notes.append(f"The runs used {len(commits)} versions of the code: what differs may be due to it.")
    unequal = [group for group in groups if {"train.log_every", "batch.global_size"} & {*group.varying}]
    if any(row["loss/hours"] is not None for group in unequal for row in group.rows):
        notes.append(
            f"The smoothed loss averages {SMOOTHED_OVER} logged steps, of different numbers of samples in these runs: "
            "train.log_every or batch.global_size varies."
        )
    problems: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.data.problem:
            problems[row.data.problem].append(row.entry.label)
        elif row.same_as and row.same_as != row.entry.label:
            notes.append(f"{row.entry.label} is the same run as {row.same_as}, and is counted once.")
    notes += [f"{first_names(labels)}: {problem}." for problem, labels in problems.items()]
    counted_rows = [row for row in rows if row.counts]
    notes += [
        f"{row.entry.label} was resumed after step {row.data.resumed_after} with settings or hardware that change a "
        "step's time or traffic: step times, traffic and speed-up cover the steps after it; wall time and hours cover "
        "all steps, with hours at the present number of workers."
        for row in counted_rows
        if row.data.resumed_after
    ]
    timed = [row for row in counted_rows if row["own_windows"]]
    for text, concerned in (
        ("no full window yet, so the speed is unknown", [row for row in counted_rows if not row["own_windows"]]),
        (
            "exposed communication was not measured and is not separated from compute",
            [row for row in timed if row["comm/exposed_s"] is None],
        ),
        (
            "the calibration measured more exposed communication than a step takes, so compute is unknown",
            [row for row in timed if row["comm/exposed_s"] is not None and row["time/compute_s"] is None],
        ),
        (
            "ran beside other cells on one machine (sweep.at_once), so times, speeds and hours are not comparable, and "
            "nothing is concluded from them",
            [row for row in counted_rows if not row.ran_alone],
        ),
        (
            "damaged lines of metrics.jsonl were skipped",
            [row for row in counted_rows if row.data.damaged_lines],
        ),
    ):
        if concerned:
            notes.append(f"{first_names([row.entry.label for row in concerned])}: {text}.")
    return notes
