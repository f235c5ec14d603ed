"""Answer of a report: claims that the data carry, and none that they do not."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.extensions.page import compare
from launcher.extensions.page.answer import findings
from launcher.extensions.page.comparison_tables import as_json
from launcher.extensions.page.plots import plots
from launcher.extensions.page.report_command import compare_runs, launch_report
from launcher.quantities import interval
from launcher.rundir.paths import RunPaths, find
from tests.infra.made_runs import make_run, read_records, write_records


def answer(runs: Path) -> dict[str, str]:
    """Return the findings on the runs of one task, as on the page."""
    (group,) = compare_runs(find(runs), title="runs").groups
    return dict(findings(group))


def workers(number: int) -> str:
    return f"cluster.workers_per_node={number}"


def test_what_is_fastest_cheapest_and_saved(tmp_path: Path) -> None:
    for accumulation, number, step_s in ((1, 1, 0.4), (4, 1, 0.4), (1, 2, 0.3), (4, 2, 0.2)):
        make_run(
            tmp_path, f"a{accumulation}w{number}", f"batch.accumulation={accumulation}", workers(number), step_s=step_s,
            loss=3 + number,
        )  # fmt: skip
    found = answer(tmp_path)
    speed = 64 / (0.2 * 1.003)
    assert found["Fastest"].startswith(f"{speed:,.4g} (")
    assert " on 2 workers: a4w2 (" in found["Fastest"]
    assert "That is 2.00 (" in found["Fastest"]
    assert "times as fast as a4w1" in found["Fastest"]
    assert found["Fastest"].endswith("in single starts.")
    assert (
        found["Scaling"]
        == "1.33 to 2.00 times the speed on 2 workers as on 1: 67% to 100% scaling efficiency across 2 settings."
    )
    assert found["Accumulation"].startswith(
        "on 2 workers, compared with 1 micro-batch of 32: 4 micro-batches of 8 1.50 ("
    )
    assert found["Sync policy"].startswith(
        "boundary instead of every: a step ran 1.33 (1.25 to 1.40) times as fast, with 75.0% fewer bytes on the wire."
    )
    assert "a1w1" in found["Lowest loss"]
    assert "Too few runs or steps per setting" in found["Lowest loss"]
    assert found["Basis"].startswith("4 of 4 runs finished, on cpu. Not measured: how much a second start")


def test_cells_that_ran_beside_others_are_in_no_statement_on_time(tmp_path: Path) -> None:
    """The fastest is one of them."""
    grid = ((1, 1, 0.4), (4, 1, 0.4), (1, 2, 0.3), (4, 2, 0.2), (8, 2, 0.01))
    for accumulation, number, step_s in grid:
        make_run(
            tmp_path, f"a{accumulation}w{number}", f"batch.accumulation={accumulation}", workers(number), step_s=step_s,
            loss=3 - number - accumulation / 10, **({"sweep/at_once": 4} if accumulation == 8 else {}),
        )  # fmt: skip
    found = answer(tmp_path)
    assert " on 2 workers: a4w2 (" in found["Fastest"]
    assert found["Scaling"].startswith("1.33 to 2.00 times")
    assert "8 micro-batches" not in found["Accumulation"]
    assert "a8w2" in found["Lowest loss"]
    comparison = compare_runs(find(tmp_path), title="runs")
    (note,) = [note for note in comparison.notes if "side by side" in note or "beside other cells" in note]
    assert note.startswith("a8w2: ran beside other cells on one machine (sweep.at_once)")
    (group,) = comparison.groups
    assert all(
        "a8w2" not in str(plot) for plot in plots(group) if "Speed" in plot.title or "time of a step" in plot.title
    )
    assert json.loads(as_json(comparison))["runs"][-1]["sweep/at_once"] == 4


def test_no_difference_is_claimed_where_intervals_overlap(tmp_path: Path) -> None:
    for number, clip in enumerate((1, 2, 3)):
        make_run(tmp_path, f"r{number}", workers(1), f"train.clip_norm={clip}", step_s=0.2)
    for accumulation in (2, 4):
        make_run(tmp_path, f"a{accumulation}", workers(1), f"batch.accumulation={accumulation}", "train.clip_norm=4")
    found = answer(tmp_path)
    assert "The intervals overlap with that of all 4 others: no difference is claimed." in found["Fastest"]
    assert "times as fast" not in found["Fastest"]
    assert found["Accumulation"].startswith(
        "on 1 worker, compared with 2 micro-batches of 32: 4 micro-batches of 16 not distinguishable (between "
    )
    assert "Scaling" not in found
    assert "Sync policy" not in found


def test_cells_of_several_seeds_are_named_by_what_they_have_in_common(tmp_path: Path) -> None:
    for clip, seed in itertools.product((1, 2), (0, 1)):
        words = f"train.clip_norm={clip}", f"train.seed={seed}"
        make_run(
            tmp_path, f"clip_norm={clip} seed={seed}", *words, loss=2 + clip + 0.01 * seed, steps=30 * clip
        )  # fmt: skip
    found = answer(tmp_path)["Lowest loss"]
    assert "The runs have different numbers of steps." in found
    assert "clip_norm=1, from 2 runs. The highest is " in found
    assert "clip_norm=2, from 2 runs" in found
    assert "seed" not in found


def test_repeated_settings_have_the_interval_of_their_runs(tmp_path: Path) -> None:
    """The steps of one run say nothing about the next start; an interval over starts is wider."""
    times = (0.2, 0.21, 0.26)
    for clip, factor in ((1, 1.0), (2, 1.1), (3, 3.0)):
        for seed, step_s in enumerate(times):
            words = (f"train.seed={seed}", f"train.clip_norm={clip}")
            make_run(tmp_path, f"c{clip}s{seed}", *words, step_s=factor * step_s, loss=2 + clip + 0.01 * seed)
    found = answer(tmp_path)
    expected = interval([64 / (1.003 * step_s) for step_s in times])
    assert found["Fastest"].startswith(f"{expected.value:,.4g} ({expected.low:,.4g} to {expected.high:,.4g})")
    assert "from 3 runs" in found["Fastest"]
    assert "overlap with that of c2s0" in found["Fastest"]
    assert "c3s0" in found["Fastest"].partition("times as fast as")[2]
    losses = interval([3.125, 3.135, 3.145])
    assert f"{losses.value:.4f} ({losses.low:.4f} to {losses.high:.4f})" in found["Lowest loss"]
    assert "Too few" not in found["Lowest loss"]
    assert "single starts" not in found["Fastest"]
    assert "second start" not in found["Basis"]


def test_one_run_is_compared_with_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, "one", workers(1))
    assert launch_report([str(tmp_path / "one")]) == 0
    assert (tmp_path / "report.html").exists()
    found = answer(tmp_path)
    assert found.keys() == {"Speed", "Loss", "Basis"}
    assert "other numbers of workers" in found["Basis"]
    assert not any("times as" in text for text in found.values())


def test_runs_that_have_not_finished_answer_nothing(tmp_path: Path) -> None:
    make_run(tmp_path, "going", verdict=None, step_s=0.1)
    assert answer(tmp_path) == {"No answer yet": "no run has finished."}
    make_run(tmp_path, "slow", workers(2), step_s=9.0)
    found = answer(tmp_path)
    assert "slow" in found["Speed"]
    assert found["Basis"].startswith("1 of 2 runs finished")


@pytest.mark.parametrize(("steps", "step_s"), [(1, 0.1), (2, 0.1), (4, 0.1)])
def test_too_few_steps_claim_nothing(steps: int, step_s: float, tmp_path: Path) -> None:
    """Two steps are left out as a warm-up."""
    make_run(tmp_path, "short", workers(2), steps=steps, step_s=step_s)
    make_run(tmp_path, "long", workers(1), step_s=0.3)
    assert "times as fast" not in answer(tmp_path)["Fastest"]


def test_the_price_decides_where_every_run_has_one(tmp_path: Path) -> None:
    def priced(price: int) -> str:
        return f"cluster.price_per_gpu_hour={price}"

    make_run(tmp_path, "dear", workers(1), priced(9), step_s=0.2)
    make_run(tmp_path, "cheap", workers(2), priced(2), step_s=0.2)
    cheapest = answer(tmp_path)["Cheapest"]
    assert re.match(r"[\d.,]+ \([\d.,]+ to [\d.,]+\) per million samples: cheap \(", cheapest)
    make_run(tmp_path, "free", workers(4), step_s=0.2)
    assert "worker-hours per million samples: dear (" in answer(tmp_path)["Cheapest"], (
        "not every run has a price: worker-hours count"
    )


def test_hours_to_a_loss_are_compared_only_over_repeated_runs(tmp_path: Path) -> None:
    """Which of two curves is the first below a loss may be chance, however well a step is known."""
    for seed in range(3):
        for number, step_s in ((1, 0.3), (2, 0.3)):
            if seed:
                make_run(
                    tmp_path, f"w{number}s{seed}", workers(number), f"train.seed={seed}", step_s=step_s + seed / 100
                )
            else:
                make_run(tmp_path, f"w{number}", workers(number), step_s=step_s)
        found = answer(tmp_path)["Cheapest to a loss"]
        assert ("Too few runs" in found) == (seed < 2)
        assert ("times as much" in found) == (seed == 2)
    write_records(
        RunPaths(tmp_path / "w2"), [line | {"train/loss": None} for line in read_records(RunPaths(tmp_path / "w2"))]
    )
    assert "Cheapest to a loss" not in answer(tmp_path), "one setting has reached it with all of its runs"


def without_interval(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if "speedup_" not in name}


def no_difference(line: dict[str, float]) -> dict[str, float]:
    return line | ({"comm/speedup_low": 0.9} if "comm/speedup" in line else {})


def unmeasured(line: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if "speedup" not in name}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_interval, "the effect on speed was not measured"),
        (no_difference, "speed not distinguishable (between 0.90 and 1.40 times as fast)"),
        (unmeasured, "the effect on speed was not measured"),
    ],
)
def test_a_speedup_is_claimed_only_with_an_interval_that_excludes_1(
    change: Callable[[dict[str, float]], dict[str, float]], text: str, tmp_path: Path
) -> None:
    paths = make_run(tmp_path, "one", workers(2), "batch.accumulation=4")
    write_records(paths, [change(line) for line in read_records(paths)])
    assert answer(tmp_path)["Sync policy"].startswith(f"boundary instead of every: {text}, with 75.0% fewer bytes")


def test_the_interval_of_a_run_is_that_of_its_full_windows(tmp_path: Path) -> None:
    paths = make_run(tmp_path, "one")
    own = [line["time/step_s"] for line in read_records(paths) if line["batch/samples"] == line["batch/global_size"]][
        2:
    ]
    (row,) = compare_runs([paths], title="one").rows
    assert row["time/step_s"] == statistics.median(own)
    assert (row["time/step_low_s"], row["time/step_high_s"]) == (interval(own).low, interval(own).high)


def test_every_accumulation_is_compared_with_the_lowest(tmp_path: Path) -> None:
    for accumulation, step_s in ((1, 0.4), (2, 0.3), (4, 0.4), (8, 0.2)):
        make_run(tmp_path, f"a{accumulation}", workers(1), f"batch.accumulation={accumulation}", step_s=step_s)
    text = answer(tmp_path)["Accumulation"]
    assert "compared with 1 micro-batch of 64: 2 micro-batches of 32 1.33 (" in text
    assert "; 4 micro-batches of 16 not distinguishable" in text
    assert "; 8 micro-batches of 8 2.00 (" in text


def test_losses_that_differ_by_rounding_are_no_ranking(tmp_path: Path) -> None:
    for number in range(4):
        make_run(
            tmp_path,
            f"r{number}",
            workers(1 + number % 2),
            f"batch.accumulation={1 + number // 2}",
            loss=3 + 1e-7 * number,
        )
    found = answer(tmp_path)
    assert "Lowest loss" not in found
    assert "all 4 settings learn the same" in found["Loss"]


def test_runs_that_are_not_alike_are_no_repeats(tmp_path: Path) -> None:
    """A run resumed with another learning rate, one of other code, and one of another model."""
    alike, resumed, edited, model = (make_run(tmp_path, name) for name in ("alike", "resumed", "edited", "model"))
    make_run(tmp_path, "twin")
    config, plan = (json.loads(path.read_text()) for path in (resumed.config, resumed.plan))
    config["optimizer"]["lr"] = plan["optimizer"]["lr"] = 0.5
    resumed.config_until(0).write_text(json.dumps(config))
    resumed.plan_until(0).write_text(json.dumps(plan))
    for paths, commit in ((alike, "a" * 40), (edited, "b" * 40)):
        summary = json.loads(paths.summary.read_text())
        paths.summary.write_text(json.dumps(summary | {"commit": commit}))
    plan = json.loads(model.plan.read_text())
    plan["task"]["parameters"] = 12345
    model.plan.write_text(json.dumps(plan))
    compared = compare_runs(find(tmp_path), title="")
    (group,) = compared.groups
    assert len(compare.repeats(group.rows)) == 5, "the twin has no known commit"
    described = " ".join(map(group.describe, group.rows))
    assert "lr=0.5 then 0.003" in described
    assert "parameters=12345" in described
    assert "2 versions of the code" in " ".join(compared.notes)
