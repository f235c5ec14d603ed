"""What a person reads: whole tables as text, and the live display from growing files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from launcher.paths import write_text
from launcher.process import LAST_WORDS
from launcher.report.tables import failure_text, plan_table, summary_table
from launcher.report.terminal import LiveDisplay
from launcher.tail import Tail
from tests.helpers import make_plan


def shown(*renderables: object) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(*renderables)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_the_plan() -> None:
    plan = make_plan("batch.global_size=64", "optimizer.lr_scaling=linear", "optimizer.reference_batch=128")
    text = shown(plan_table(plan))
    assert text == (
        "Plan: run\n"
        "workers       1 host × 2 workers, cpu\n"
        "global batch  64 samples = 4 micro-batch × 8 accumulation × 2 ranks\n"
        "task          some.Task: 1,000 samples, 1,000 parameters\n"
        "windows       16 an epoch, the last one short: 40 samples\n"
        "length        300 steps = 18.8 epochs\n"
        "precision     bf16\n"
        "optimizer     adamw, lr 0.0015 (linear of 0.003), cosine with 20 warm-up steps, clip 1\n"
        "strategy      ddp, sync boundary: fewest wire bytes\n"
        "wire a step   4.00 kB a rank predicted; 32.00 kB with sync=every\n"
        "files         /nowhere/run\n"
        "W&B           offline, project launcher, id abcd1234"
    )


def test_the_plan_of_a_stream() -> None:
    text = shown(plan_table(make_plan("train.epochs=2", "schedule=constant", "train.clip_norm=null", samples=None)))
    assert "windows       as many as the stream has; the last one is exact, however short" in text
    assert "length        2 epochs of a stream" in text
    assert "no clipping" in text


def test_dropped_samples_are_said() -> None:
    assert "batch.short_window=drop leaves out 40 samples an epoch" in shown(
        plan_table(make_plan("batch.short_window=drop"))
    )


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (
            257.0,
            "257 samples; the global batch of 64 is far below this critical size: a step makes 20% of the progress",
        ),
        (256.0, "256 samples; the global batch of 64 is near this critical size: a step makes 20% of the progress"),
        (64.0, "64 samples; the global batch of 64 is near this critical size: a step makes 50% of"),
        (16.0, "16 samples; the global batch of 64 is near this critical size: a step makes 80% of"),
        (4.25, "4.2 samples; the global batch of 64 is far above this critical size: a step makes 94% of"),
    ],
)
def test_what_the_noise_scale_says_of_the_global_batch(scale: float, words: str) -> None:
    summary = {"verdict": "done", "noise/scale": scale}
    text = " ".join(shown(summary_table(make_plan(), summary)).split())
    assert f"noise scale about {words}" in text
    assert ("a larger one" in text, "a smaller one" in text) == ("far below" in words, "far above" in words)


def test_without_a_noise_scale_nothing_is_said_of_it() -> None:
    assert "noise" not in shown(summary_table(make_plan(), {"verdict": "done"}))


def test_the_summary(tmp_path: Path) -> None:
    plan = make_plan(run_dir=str(tmp_path))
    summary = {
        "verdict": "done", "steps": 300, "train/loss": 1.5, "eval/loss": 1.75,
        "time/step_s": 0.25, "time/total_s": 80.0, "throughput/samples_per_s": 256.0,
        "comm/wire_bytes": 4000, "comm/wire_bytes_every": 32000, "comm/saved_fraction": 0.875,
        "comm/speedup": 1.5, "comm/step_s": 0.2, "comm/step_s_every": 0.3,
        "checkpoint": "/nowhere/run/checkpoints/step_000300",
    }  # fmt: skip
    (tmp_path / "wandb.json").write_text(json.dumps({"dir": "/nowhere/run/wandb/offline-run-x"}))
    assert shown(summary_table(plan, summary)) == (
        "Run run: done\n"
        "loss          1.5000, held-out 1.7500 after 300 steps\n"
        "throughput    256.0 samples/s, 250.0 ms a step (median); 80.0 s in all\n"
        "global batch  64 samples in every full window\n"
        "wire a step   4.00 kB a rank counted; 32.00 kB with sync=every: 87.5% saved\n"
        "speed-up      1.50x measured: 200.0 ms a step, 300.0 ms with sync=every\n"
        f"metrics       {tmp_path}/metrics.jsonl\n"
        "checkpoint    /nowhere/run/checkpoints/step_000300\n"
        "W&B           /nowhere/run/wandb/offline-run-x\n"
        "to send it    wandb sync /nowhere/run/wandb/offline-run-x"
    )
    del summary["comm/speedup"]
    assert "speed-up      not measured" in shown(summary_table(plan, summary)), "a speed-up is never computed"


def test_a_failure_is_the_ranks_own_words_first() -> None:
    failure = {
        "rank": 3,
        "exit_code": 1,
        "kind": None,
        "error": "ValueError: x",
        "traceback": "Traceback ...\n",
        "log": "/l",
    }
    assert failure_text({"failure": failure}) == "Traceback ...\nlaunch: rank 3 failed: ValueError: x\n  Its log: /l"


def test_a_record_that_takes_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    path.write_text("1\n2\n3\n")
    assert tail.lines() == ["1", "2", "3"]
    write_text(path, "1\n2\n3\nand more\n")
    assert tail.lines() == ["1", "2", "3", "and more"]
    assert (tail.lines(), tail.replaced) == ([], 1)
    path.write_text("1\n")  # cut in place
    assert (tail.lines(), tail.replaced) == (["1"], 2)


def test_the_live_display_of_a_run_that_begins_again(tmp_path: Path) -> None:
    plan = make_plan("train.steps=3", run_dir=str(tmp_path))
    lines = [f'{{"step": {n}, "train/loss": {n}, "throughput/samples_per_s": 1}}\n' for n in (1, 2, 3)]
    out = io.StringIO()
    display = LiveDisplay(plan, Console(file=out, width=100))
    plan.paths.metrics.write_text("".join(lines))
    display.refresh()
    write_text(plan.paths.metrics, lines[0])
    for line in (None, *lines[1:]):
        with plan.paths.metrics.open("a") as file:
            file.write(line or "")
        display.refresh()
    display.close()
    assert out.getvalue().splitlines() == [
        "step 3/3  loss 3.0000  1 samples/s",
        "--- goes on after step 1 ---",
        "step 3/3  loss 3.0000  1 samples/s",
    ]


def test_a_run_that_is_resumed_shows_nothing_of_its_earlier_starts(tmp_path: Path) -> None:
    plan = make_plan("train.steps=9", run_dir=str(tmp_path))
    plan.paths.logs.mkdir()
    for attempt, text in enumerate(("the first start\n", "the second\n")):
        plan.paths.rank_log(0, attempt).write_text(text)
    record = '{"step": %d, "train/loss": 5.5, "throughput/samples_per_s": 1}\n'
    plan.paths.metrics.write_text(record % 8)
    out = io.StringIO()
    display = LiveDisplay(plan, Console(file=out, width=100))
    display.refresh()
    plan.paths.rank_log(0, 2).write_text("Going on\n")
    with plan.paths.metrics.open("a") as file:
        file.write(record % 9)
    display.refresh()
    display.close()
    shown = out.getvalue().splitlines()
    assert shown == ["--- rank0.attempt2.log ---", "Going on", "step 9/9  loss 5.5000  1 samples/s"]


def test_the_live_display_follows_the_files(tmp_path: Path) -> None:
    plan = make_plan("train.steps=9", run_dir=str(tmp_path))
    plan.paths.logs.mkdir()
    out = io.StringIO()
    display = LiveDisplay(plan, Console(file=out, width=100))
    display.refresh()  # nothing is there yet
    log, metrics = plan.paths.rank_log(0), plan.paths.metrics
    log.write_text("first [not markup]\nhalf a")
    metrics.write_text('{"step": 1, "train/loss": 5.5, "throughput/samples_per_s": 1234.5}\n{"step": 2, "tra')
    display.refresh()
    with log.open("a") as file:
        file.write(f" line\n[rank0]: {LAST_WORDS}\n[rank0]: Traceback that is not its own\n")
    (tmp_path / "wandb.json").write_text('{"problem": "no server"}')
    with metrics.open("a") as file:
        file.write('in/loss": 5.25, "eval/loss": 5.0, "throughput/samples_per_s": 1000}\n')
        # a last window without items
        file.write('{"step": 9, "train/loss": null, "throughput/samples_per_s": 1000}\n')
    for _ in range(2):
        display.refresh()
    display.close()
    assert out.getvalue().splitlines() == [
        "first [not markup]",
        "step 1/9  loss 5.5000  1,234 samples/s",
        "half a line",
        "step 9/9  loss -  1,000 samples/s",
        "W&B: no server",
    ]
