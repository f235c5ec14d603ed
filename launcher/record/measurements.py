"""Settings and figures of runs, finished or not, read from plan.json, config.yaml and metrics.jsonl."""

from __future__ import annotations

import json
import re
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from launcher.config.schema import PrecisionKind, facts_by_key, groups_without_effect
from launcher.loss import RESERVED_NAMES
from launcher.plan.host import without_secrets
from launcher.plan.launch_plan import PLAN_FORMAT
from launcher.plan.windows import WARM_UP_WINDOWS
from launcher.quantities import Interval, interval
from launcher.rundir.files import MOST_CONFIG, Unreadable, open_file, read_bytes, read_json, require_plain_yaml
from launcher.rundir.paths import RunPaths

# of the windows that the run's figures are of
_PREDICTED = "predicted/wire_bytes"
# Names of a run's figures, in the order of `--csv` and `--json`. `launch report` adds scaling/*, loss/* and
# total/*; the first line's are decided before the start; the others are measured.
FIGURES = (
    "version", "task", "device", "strategy", "sync", "batch/world_size", "batch/global_size", "batch/micro_size",
    "batch/accumulation", "step", "steps",

    "progress/samples", "own_windows", "time/total_s", "time/step_s", "time/step_low_s", "time/step_high_s",
    "time/data_s", "time/compute_s", "comm/exposed_s", "throughput/samples_per_s", _PREDICTED,
    "scaling/efficiency", "scaling/baseline_world_size",
    "comm/wire_bytes", "comm/wire_bytes_every", "comm/saved_fraction",
    "comm/speedup", "comm/speedup_low", "comm/speedup_high", "outer/step_bytes", "outer/step_s",
    "train/loss", "train/loss_smoothed", "train/loss_smoothed_min", "eval/loss",

    "total/hours", "total/cost", "loss/target", "loss/hours", "loss/cost", "loss/hours_unit", "loss/step",
)  # fmt: skip
# after an out-of-memory error the micro-batch may change within an attempt, and the prediction does not
_PREDICTED_FOR = ("batch/micro_size", "batch/world_size")
_SECTION = re.compile(r"^(?=[A-Za-z_])", re.MULTILINE)  # matches before each top-level key of config.yaml
# setting of a run: the commit of its code, if the summary has it; the characters with -dirty and the digest
COMMIT, _COMMIT_SHOWN = "code.commit", 60
_MOST_LINE = 2**20  # bytes of a line of metrics.jsonl
# bytes of YAML that cannot be nested too deeply for the C loader
_SURELY_FLAT = 2**12
_TEXTS = ("version", "task", "device", "strategy", "sync", "loss/hours_unit")  # figures that are no numbers
_OTHER_VERSION = "its plan was written by another version of launcher"
_NOTHING_RECORDED = "nothing was recorded"
# the launcher's own metrics of training and evaluation
_OWN_METRICS = {"eval/loss", *(f"train/{name}" for name in RESERVED_NAMES)}


# number of latest logged losses to average, so that one lucky window does not count as reaching a loss
SMOOTHED_OVER = 10
# points per drawn curve; more could not be distinguished on a screen
POINTS = 300
SMOOTH_POINTS = 150


class Point(NamedTuple):
    """Loss after an optimizer step. ``seconds``: wall time of training; ``loss``: None if it is not finite."""

    step: float
    samples: float
    seconds: float
    loss: float | None


# the fields of points, one list each; none of a curve without points
Columns = list[list[float | None]]


def smoothed_points(points: Sequence[Point]) -> list[Point]:
    """Return each point with the mean of the latest SMOOTHED_OVER finite losses; None before the first."""
    latest: deque[float] = deque(maxlen=SMOOTHED_OVER)
    smoothed: list[Point] = []
    for step, samples, seconds, loss in points:
        if loss is not None:
            latest.append(loss)
        smoothed.append(Point(step, samples, seconds, sum(latest) / len(latest) if latest else None))
    return smoothed


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Round to six digits: more are invisible in a plot, and would enlarge the page."""
    return [None if value is None else float(f"{value:.6g}") for value in values]


def thinned(points: list[Point], limit: int = POINTS) -> list[Point]:
    """Return about ``limit`` points: first, last, and the lowest and highest loss of each of equally long stretches.

    No spike is lost. A loss that is not finite interrupts the curve.
    """
    count, stretches = len(points), limit // 2 - 1
    if count <= limit:
        return points
    kept = {0, count - 1}
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        finite = [(loss, index) for index in stretch if (loss := points[index].loss) is not None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if points[index].loss is None))
    return [points[index] for index in sorted(kept)]


def fewer_points(columns: Columns, limit: int) -> Columns:
    """Return a curve with about ``limit`` points."""
    if limit >= POINTS or len(columns[0]) <= limit:
        return columns
    points = thinned([Point(*each) for each in zip(*columns, strict=True)], limit)
    return [[*column] for column in zip(*points, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data of one run.

    Attributes:
        figures: by the names in ``FIGURES``; None: unknown or not measured. Medians are over full windows.
        settings: flattened config.yaml, with solved values in place of those left open.
        metrics: last values of the metrics of the task's own loss, and the best evaluation, by name.
        curves_json: ``curves`` as JSON. The report of many runs draws few of them.
        minima: (step, seconds, smoothed loss) where the latter was lower than ever before.
        trackers: those that the plan lists.
        problem: why there are no settings or no measurements.
        resumed_after: step after which the run was resumed with settings that change a step's time or traffic; 0:
            never. Figures of steps cover the steps after it.
        damaged_lines: lines of the record that could not be parsed.
        cells_at_once: cells of a sweep that may have run at the same time on the machine. If there are several, the
            times are not comparable with those of other runs.
    """

    figures: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(FIGURES))
    settings: dict[str, str] = field(default_factory=dict[str, str])
    curves_json: str = ""
    minima: list[list[float]] = field(default_factory=list[list[float]])
    trackers: list[str] = field(default_factory=list[str])
    metrics: dict[str, float | None] = field(default_factory=dict[str, "float | None"])
    problem: str = ""
    resumed_after: int = 0
    damaged_lines: int = 0
    cells_at_once: int = 1

    @property
    def curves(self) -> dict[str, Columns]:
        """Return training loss, smoothed and held-out loss, thinned and rounded as they are drawn."""
        return json.loads(self.curves_json or "{}")

    def first_reached(self, loss: float) -> tuple[float, float] | None:
        """Return step and seconds at which the smoothed loss was first ``loss`` or lower; None if it never was."""
        return next(((step, seconds) for step, seconds, lowest in self.minima if lowest <= loss), None)


def read_run(run: Path) -> RunData:
    """Return the data in the directory ``run``. Never raises: errors are described in ``problem``."""
    import orjson  # not at module level: `launch runs` works without it

    paths = RunPaths(run)
    try:
        plan = orjson.loads(read_bytes(paths.plan))
        if not isinstance(plan, dict) or plan.get("format") != PLAN_FORMAT:  # pyright: ignore[reportUnknownMemberType]
            return RunData(problem=_OTHER_VERSION, trackers=_trackers(plan))  # pyright: ignore[reportUnknownArgumentType]
        if "batch" not in plan:
            if not paths.loop_plan.exists():
                return RunData(problem="its script has no record: it does not call engine.resume()")
            plan = _plan_of_loop(plan, paths)  # pyright: ignore[reportUnknownArgumentType]
        figures, settings = _planned(plan), _all_settings(plan, paths)  # pyright: ignore[reportUnknownArgumentType]
        data = checked(RunData(figures=figures, settings=settings, trackers=_trackers(plan)))  # pyright: ignore[reportUnknownArgumentType]
    except FileNotFoundError as error:
        return RunData(problem=f"its {Path(error.filename).name} is missing")
    except Exception as error:  # any content is possible: another version, a damaged disk
        return RunData(problem=f"unreadable: {reason(error, run)}")
    try:
        return checked(_measured(paths.metrics, data))
    except FileNotFoundError:
        return replace(data, problem=_NOTHING_RECORDED)
    except Exception as error:
        return replace(data, problem=f"unreadable: {reason(error, run)}")


def reason(error: Exception, run: Path) -> str:
    """Return in one line why a file in the directory ``run`` cannot be read."""
    if isinstance(error, OSError):
        return f"{error.strerror}: {Path(str(error.filename)).name}"
    kind = "" if isinstance(error, Unreadable) else f"{type(error).__name__}: "
    return f"{kind}{str(error).replace(f'{run}/', '').partition(chr(10))[0]}"


def checked(data: RunData) -> RunData:
    """Return ``data`` if reports can reckon with it, whoever has written the files.

    Raises:
        TypeError: a text where a number belongs, or the other way round.
    """
    for name, value in [*data.figures.items(), *data.metrics.items()]:
        if value is not None and not isinstance(value, str if name in _TEXTS else int | float):
            raise TypeError(f"{name} is {json.dumps(value, default=str)[:40]}")
    float(data.settings.get("cluster.price_per_gpu_hour", "null").replace("null", "0"))
    if not all(isinstance(value, int | float) for row in data.minima for value in row):
        raise TypeError("a measured time is no number")
    return data


def _trackers(plan: Any) -> list[str]:
    return [*plan.get("trackers", ())] if isinstance(plan, dict) and "batch" in plan else []  # pyright: ignore[reportUnknownArgumentType]


def _plan_of_loop(plan: dict[str, Any], paths: RunPaths) -> dict[str, Any]:
    """Return the plan of the engine in a script of `launch run`, of which ``plan`` is the job's; its task is the
    script."""
    script = next((word for word in plan["command"] if word.endswith(".py")), "")
    engine: dict[str, Any] = json.loads(read_bytes(paths.loop_plan))
    return engine | {"task": engine["task"] | {"target": Path(script).name}}


def _planned(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the figures in ``plan``, the object in plan.json."""
    return dict.fromkeys(FIGURES) | {
        "version": plan["run"]["version"],
        "task": plan["task"]["target"],
        "device": plan["cluster"]["device"],
        "strategy": plan["strategy"]["kind"],
        "sync": plan["strategy"]["sync"],
        "steps": plan["train"]["steps"],
        **{f"batch/{key}": plan["batch"][key] for key in ("world_size", "global_size", "micro_size", "accumulation")},
    }


def _all_settings(plan: dict[str, Any], paths: RunPaths) -> dict[str, str]:
    """Return the settings, and what else makes runs unlike: model, data, code, and the earlier values of keys with
    which the run was resumed (``0.1 then 0.01``)."""
    names = (re.fullmatch(r"config\.(\d+)\.yaml", path.name) for path in paths.root.glob("config.*.yaml"))
    starts = [
        _settings(json.loads(read_bytes(paths.plan_until(number))), paths, paths.config_until(number))
        for number in sorted(int(name[1]) for name in names if name)
        if paths.plan_until(number).exists()
    ]
    settings = _settings(plan, paths, paths.config)
    # only the last value counts of the length, and of what does not affect steps
    last_counts = {"train.steps", "train.epochs"}
    last_counts |= {key for key, facts in facts_by_key().items() if facts.affects <= {"record"}}
    for key in {*chain(settings, *starts)} if starts else ():
        values = [value for value, _ in groupby(each.get(key, "null") for each in (*starts, settings))]
        if len(values) > 1 and key not in last_counts:
            settings[key] = " then ".join(values)
    task, summary = plan["task"], read_json(paths.summary) or {}
    changes: list[dict[str, Any]] = summary.get("commits") or []
    commits = [changes[0]["from"], *(each["to"] for each in changes)] if changes else [summary.get("commit")]
    found = {
        "model.parameters": task.get("parameters"), "data.samples": task.get("samples"),
        COMMIT: " then ".join(str(commit)[:_COMMIT_SHOWN] for commit in commits if commit) or None,
    }  # fmt: skip
    return settings | {name: _text(value) for name, value in found.items() if value is not None}


def _settings(plan: dict[str, Any], paths: RunPaths, file: Path) -> dict[str, str]:
    """Return config.yaml flattened, with the values that the plan has solved."""
    config: dict[str, str] = {}
    for section in _SECTION.split(read_bytes(file, MOST_CONFIG).decode()):
        config |= _flat_section(section)
    cluster, precision = plan["cluster"], plan["precision"]["kind"]
    solved = {f"cluster.{name}": cluster[name] for name in ("workers_per_node", "device")}
    if cluster.get("min_nodes") is None:  # a range is shown as configured
        solved["cluster.nodes"] = cluster["nodes"]
    if precision == PrecisionKind.auto and (decided := read_json(paths.precision)) is not None:
        precision = decided["kind"]
    solved |= {"optimizer.lr": plan["optimizer"]["lr"], "precision.kind": precision}
    return config | {name: _text(value) for name, value in solved.items()}


@lru_cache(10_000)
def _flat_section(text: str) -> dict[str, str]:
    """Return a top-level section of config.yaml flattened, without what is no setting. Most sections are the same in
    many runs."""
    import yaml

    if "*" in text or len(text) > _SURELY_FLAT:
        require_plain_yaml(text)
    # the C loader is ten times as fast, but not in every build
    content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    flat = _flat(without_secrets(content), "") if content else {}
    # keys that name a run or configure its trackers do not affect measurements
    unmeasured = ("run.", "trackers", "hydra.", *groups_without_effect())
    return {key: value for key, value in flat.items() if not key.startswith(unmeasured)}


def _flat(value: Any, prefix: str) -> dict[str, str]:
    if isinstance(value, dict) and value:
        flat: dict[str, str] = {}
        for key, inner in value.items():  # pyright: ignore[reportUnknownVariableType]
            flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))  # pyright: ignore[reportUnknownArgumentType]
        return flat
    return {prefix: _text(value)}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


class _Record:
    """Content of metrics.jsonl.

    Attributes:
        full_windows: step seconds, data seconds, wire bytes, and wire bytes of sync=every of each full window of the
            largest global batch.
        full_size: the largest global batch so far.
        seen: latest value of every field of the records.
        calibration: latest record with results of the calibration.
        prediction: latest record with a prediction of windows like the last one.
        outer: bytes that the first site has sent to others, and seconds that the exchange between sites has taken.
    """

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.held_out: list[Point] = []
        self.full_windows: list[tuple[float, ...]] = []
        self.last: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.calibration: dict[str, Any] = {}
        self.prediction: dict[str, Any] = {}
        self.damaged_lines = self.resumed_after = 0
        self.full_size = 0.0
        self.outer = (0.0, 0.0)

    def add(self, record: dict[str, Any]) -> None:
        """Add a line. Its fields are looked up before anything changes, so that an invalid line adds nothing."""
        step, elapsed = record["step"], record["time/total_s"]
        loss, held_out = record.get("train/loss"), record.get("eval/loss")
        samples = float(record["progress/samples"])
        point = Point(float(step), samples, float(elapsed), None if loss is None else float(loss))
        window = (
            record["time/step_s"], record["time/data_s"], record["comm/wire_bytes"], record["comm/wire_bytes_every"]
        )  # fmt: skip
        global_size, window_samples = float(record["batch/global_size"]), float(record["batch/samples"])
        if (resumed_after := int(record.get("progress/measured_since", 0))) != self.resumed_after:
            self.resumed_after, self.full_size = resumed_after, 0.0
            self.full_windows.clear()
            self.calibration, self.prediction, self.outer = {}, {}, (0.0, 0.0)
        if global_size > self.full_size:  # the ramp has reached its next stage
            self.full_size = global_size
            self.full_windows.clear()
        if window_samples == self.full_size:
            self.full_windows.append(window)
        if "outer/sites" in record:
            sent, spent = self.outer
            self.outer = sent + record["outer/wire_bytes"], spent + record["outer/time_s"]
        self.points.append(point)
        if held_out is not None:
            self.held_out.append(point._replace(loss=held_out))
        if "comm/step_s" in record or "comm/exposed_s" in record:
            self.calibration |= record
        if _PREDICTED in record:
            self.prediction = record
        elif self.prediction and any(record.get(name) != self.prediction.get(name) for name in _PREDICTED_FOR):
            self.prediction = {}
        self.last = record
        self.seen |= record


def _measured(metrics: Path, planned: RunData) -> RunData:
    """Return the data of a run with what its record says."""
    import orjson  # not at module level: `launch runs` works without it

    record = _Record()
    with open_file(metrics) as file:
        while line := file.readline(_MOST_LINE):
            try:
                record.add(orjson.loads(line))
            except Exception:
                # an incomplete last line of an active run is not damage
                record.damaged_lines += line.endswith(b"\n")
    if not record.points:
        if record.damaged_lines:
            raise Unreadable("metrics.jsonl: none of its lines is a record")
        return replace(planned, problem=_NOTHING_RECORDED)
    smoothed = smoothed_points(record.points)
    minima: list[list[float]] = []
    for step, _, seconds, loss in smoothed:
        if loss is not None and (not minima or loss < minima[-1][2]):
            minima.append([step, seconds, loss])
    curves = {
        "training loss": thinned(record.points),
        "smoothed": thinned(smoothed, SMOOTH_POINTS),
        "held-out loss": thinned(record.held_out),
    }
    columns = {name: [*map(rounded, zip(*points, strict=True))] for name, points in curves.items()}
    return replace(
        planned,
        figures=planned.figures | _figures(record, planned.figures["batch/global_size"], smoothed, minima),
        curves_json=orjson.dumps(columns).decode(),
        minima=minima,
        metrics=task_metrics(record.seen)
        | {name: record.seen[name] for name in ("best/step", "best/value") if name in record.seen},
        resumed_after=record.resumed_after,
        damaged_lines=record.damaged_lines,
        cells_at_once=int(record.last.get("sweep/at_once", 1)),
    )


def _figures(record: _Record, global_size: int, smoothed: list[Point], minima: list[list[float]]) -> dict[str, Any]:
    last = record.last
    # one value per column; without a full window all are None
    windows = record.full_windows[WARM_UP_WINDOWS:] or record.full_windows
    columns = zip(*windows, strict=True) if windows else ()
    step_s, data_s, wire_bytes, wire_bytes_every = [statistics.median(column) for column in columns] or [None] * 4
    steps = interval([window[0] for window in windows]) if len(windows) > 2 else None
    # an outer step is no part of time/step_s
    sent, spent = record.outer
    taken = last["step"] - record.resumed_after
    outer_bytes, outer_s = (sent / taken, spent / taken) if "outer/sites" in last and taken > 0 else (None, None)
    exposed_s = 0.0 if last.get("batch/world_size") == 1 else record.calibration.get("comm/exposed_s")
    compute_s = None
    if step_s is not None and data_s is not None and exposed_s is not None:
        compute_s = step_s - data_s - max(0.0, exposed_s)
    speedup = Interval.of_record(record.calibration, "comm/speedup")
    return {
        "step": int(last["step"]),
        "progress/samples": int(record.points[-1].samples),
        "own_windows": len(record.full_windows),
        "time/total_s": record.points[-1].seconds,
        "time/step_s": step_s,
        "time/step_low_s": steps and steps.low,
        "time/step_high_s": steps and steps.high,
        "time/data_s": data_s,
        "time/compute_s": compute_s if compute_s is not None and compute_s >= 0 else None,
        "comm/exposed_s": exposed_s,
        "throughput/samples_per_s": None if not step_s else (global_size / (step_s + (outer_s or 0.0))),
        "outer/step_bytes": outer_bytes,
        "outer/step_s": outer_s,
        _PREDICTED: record.prediction.get(_PREDICTED) if record.full_size == global_size else None,
        "comm/wire_bytes": wire_bytes,
        "comm/wire_bytes_every": wire_bytes_every,
        "comm/saved_fraction": 1 - wire_bytes / wire_bytes_every
        if wire_bytes is not None and wire_bytes_every
        else None,
        "comm/speedup": record.calibration.get("comm/speedup"),
        "comm/speedup_low": speedup and speedup.low,
        "comm/speedup_high": speedup and speedup.high,
        "train/loss": last.get("train/loss"),
        "train/loss_smoothed": smoothed[-1].loss,
        "train/loss_smoothed_min": minima[-1][2] if minima else None,
        "eval/loss": record.held_out[-1].loss if record.held_out else None,
    }


def task_metrics(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics in a record or a summary that the task's loss and its terms have, and those of further
    evaluation sets."""
    return {name: record[name] for name in _metric_names(tuple(record))}


@lru_cache(1000)  # most records of a run have the same names
def _metric_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(("train/", "eval/")) and name not in _OWN_METRICS)
