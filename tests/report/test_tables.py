"""Tables of plans, verdicts, failures and summaries, as text."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from launcher.report.tables import failure_text, forecast_lines, plan_table, resume_hint, summary_table
from launcher.rundir.job_end import HANG, error_of, failure_record
from tests.helpers import make_plan, shown


def test_the_plan() -> None:
    plan = make_plan("batch.global_size=64", "optimizer.lr_scaling=linear", "optimizer.reference_batch=128")
    text = shown(plan_table(plan))
    assert text == (
        "Plan: run\n"
        "workers       1 host × 2 workers, cpu\n"
        "global batch  64 samples = 4 micro-batch × 8 accumulation × 2 ranks\n"
        "precision     auto: bf16 if every worker's device computes it natively, else fp32; decided at the start\n"
        "strategy      ddp, sync boundary: fewest wire bytes\n"
        "wire a step   4.00 kB a rank predicted; 32.00 kB with sync=every\n"
        "\n"
        "task          some.Task: 1,000 samples, 1,000 parameters\n"
        "windows       16 an epoch, the last one short: 40 samples\n"
        "length        300 steps = 18.8 epochs\n"
        "optimizer     adamw, lr 0.0015 (from 0.003, linear rule, k=0.5), cosine with 20 warm-up steps, clip 1\n"
        "              ndim<2: weight_decay 0.0\n"
        "\n"
        "memory        A rank needs at least 16.00 kB for parameters, gradients and the state of AdamW.\n"
        "\n"
        "files         /nowhere/run\n"
        "checkpoints   every 5 minutes, at a stop and at the end; the newest 3 are kept\n"
        "W&B           offline, project launcher, id abcd1234"
    )


def test_groups_without_parameters_are_not_shown() -> None:
    plan = make_plan()
    for sizes, listed in ((None, True), ((1000, 0), False), ((900, 100), True)):
        task = dataclasses.replace(plan.task, group_parameters=sizes)
        assert ("ndim<2" in shown(plan_table(dataclasses.replace(plan, task=task)))) == listed


def test_the_plan_shows_what_the_square_root_rule_has_scaled() -> None:
    text = shown(plan_table(make_plan("optimizer.lr_scaling=sqrt", "optimizer.reference_batch=16")))
    assert "adamw, lr 0.006 (from 0.003, sqrt rule, k=4)" in text
    assert "betas 0.6 and 0.8 (from 0.9 and 0.95), eps 5e-09 (from 1e-08)" in text
    assert "betas" not in shown(plan_table(make_plan("optimizer.lr_scaling=linear", "optimizer.reference_batch=16")))


def test_the_plan_of_a_slurm_job_names_its_python() -> None:
    assert sys.executable in shown(plan_table(make_plan("cluster=slurm"))).replace("\n", "")
    assert sys.executable not in shown(plan_table(make_plan()))


def test_the_plan_says_when_the_run_is_saved() -> None:
    text = shown(plan_table(make_plan("checkpoint.every=100", "checkpoint.every_minutes=2.5")))
    assert "checkpoints   every 100 steps, every 2.5 minutes, at a stop and at the end\n" in text
    assert "checkpoints   none: the run cannot resume\n" in shown(plan_table(make_plan("checkpoint.enabled=false")))


def test_the_plan_says_which_evaluation_is_the_best() -> None:
    text = shown(plan_table(make_plan("checkpoint.best=eval/loss", "train.eval_every=5", "train.patience=3")))
    assert "the lowest eval/loss, its checkpoint is kept, the run ends after 3 evaluations without a better one" in text
    text = shown(plan_table(make_plan("checkpoint.best=eval/f1", "checkpoint.best_mode=max", "train.eval_every=5")))
    assert "the highest eval/f1, its checkpoint is kept\n" in text


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
    ("scale", "low", "high", "words"),
    [
        (
            300.0, 257.0, 576.0,
            "about 300, between 257 and 576 samples (95%). The global batch of 64 is far below it: a larger one would "
            "save many steps for few more samples. (With tuned SGD, a step makes 10% to 20% of the progress of a step",
        ),
        (1800.0, 400.0, None, "about 1,800, 400 or more samples (95%). The global batch of 64 is far below it: "),
        (None, 400.0, None, "400 or more samples (95%). The global batch of 64 is far below it: "),
        (64.0, 16.0, 256.0, "about 64, between 16 and 256 samples (95%). The global batch of 64 is near it: steps and"),
        (4.25, 0.0, 15.9, "about 4.2, between 0.0 and 16 samples (95%). The global batch of 64 is far above it: "),
        (300.0, 255.0, 400.0, "not known yet: between 255 and 400 samples (95%)"),
        (300.0, 15.0, None, "not known yet: 15 or more samples (95%)"),
        (40.0, 15.0, 100.0, "not known yet: between 15 and 100 samples (95%)"),
        (5000.0, 0.0, None, "not known yet: the noise hides the gradient"),
    ],
)  # fmt: skip
def test_advice_about_the_global_batch_is_what_all_of_the_interval_supports(
    scale: float | None, low: float, high: float | None, words: str
) -> None:
    summary = {"verdict": "done", "steps": 300, "noise/scale_low": low}
    summary |= {} if scale is None else {"noise/scale": scale}
    summary |= {} if high is None else {"noise/scale_high": high}
    text = " ".join(shown(summary_table(make_plan(), summary)).split())
    assert f"noise scale {words}" in text
    assert ("a larger one" in text, "a smaller one" in text) == ("far below" in words, "far above" in words)


def test_no_advice_about_the_global_batch_before_the_warm_up_is_over() -> None:
    for steps, given in ((20, False), (21, True)):
        summary = {"verdict": "stopped", "steps": steps, "noise/scale": 300.0, "noise/scale_low": 257.0}
        text = shown(summary_table(make_plan("schedule.warmup_steps=20"), summary | {"noise/scale_high": 400.0}))
        assert ("a larger one" in " ".join(text.split())) == given
        assert ("not known yet: the learning rate is warming up" in text) == (not given)


def test_a_straggler_is_shown_with_the_steps_in_which_it_was_one() -> None:
    found = {"rank": 1, "host": "b", "share": 0.5, "of": "data", "over": True, "steps": 30, "measured": 1078}
    words = "rank 1 on b was the slowest in 30 of 1,078 measured steps, by waiting for data: 50% of a step"
    text = shown(summary_table(make_plan(), {"verdict": "done", "straggler": found}))
    assert words in text
    assert text.count("it is over") == 1


def test_the_summary(tmp_path: Path) -> None:
    plan = make_plan(run_dir=str(tmp_path))
    summary = {
        "verdict": "done", "steps": 300, "train/loss": 1.5, "eval/loss": 1.75,
        "time/step_s": 0.25, "time/total_s": 80.0, "throughput/samples_per_s": 256.0,
        "comm/wire_bytes": 4000, "comm/wire_bytes_every": 32000, "comm/saved_fraction": 0.875,
        "comm/speedup": 1.5, "comm/step_s": 0.2, "comm/step_s_every": 0.3, "comm/speedup_low": 1.25,
        "comm/speedup_high": 1.75,
        "checkpoint": "/nowhere/run/checkpoints/step_000300",
    }  # fmt: skip
    (tmp_path / "wandb.json").write_text(json.dumps({"dir": "/nowhere/run/wandb/offline-run-x"}))
    plan.paths.metrics.touch()
    plan.save()
    assert shown(summary_table(plan, summary)) == (
        "Run run: done\n"
        "loss          1.5000, held-out 1.7500 after 300 steps\n"
        "throughput    256.0 samples/s, 250.0 ms a step (median); 80.0 s in all\n"
        "global batch  64 samples in every full window\n"
        "wire a step   4.00 kB a rank counted; 32.00 kB with sync=every: 87.5% saved\n"
        "speed-up      1.50x measured (1.25 to 1.75): 200.0 ms a step, 300.0 ms with sync=every\n"
        f"metrics       {tmp_path}/metrics.jsonl\n"
        "checkpoint    /nowhere/run/checkpoints/step_000300\n"
        "W&B           /nowhere/run/wandb/offline-run-x\n"
        "upload        wandb sync /nowhere/run/wandb/offline-run-x"
    )
    summary |= {
        "stopped_early": "eval/f1 has not improved in 2 evaluations, since step 4 (0.5)", "eval/f1": 0.25,
        "eval/x": None,
        "best": {"metric": "eval/f1", "step": 4, "value": 0.5, "directory": "/nowhere/run/checkpoints/step_000004"},
    }  # fmt: skip
    text = shown(summary_table(plan, summary))
    assert "stopped early  eval/f1 has not improved in 2 evaluations, since step 4 (0.5)" in text
    assert "averages       eval/f1 0.25, eval/x not finite" in text
    assert "best           eval/f1 0.5 at step 4: /nowhere/run/checkpoints/step_000004" in text
    summary["best"] |= {"step": None, "value": None, "directory": None, "judged": 9}
    assert "best           none (eval/f1 was not finite in any evaluation)" in shown(summary_table(plan, summary))
    del summary["stopped_early"], summary["best"]
    summary |= {"comm/speedup": 1.01, "comm/speedup_low": 0.98, "comm/speedup_high": 1.03}
    text = "speed-up      not distinguishable from no speed-up (between 0.98 and 1.03 times as fast): 200.0 ms"
    assert text in shown(summary_table(plan, summary))
    del summary["comm/speedup"]
    assert "speed-up      not measured" in shown(summary_table(plan, summary)), "a speed-up is never computed"
    summary["comm/not_measured"] = "3 rounds take 90 s"
    assert "speed-up      not measured (3 rounds take 90 s)" in shown(summary_table(plan, summary))


@pytest.mark.parametrize(
    ("low", "value", "high", "words"),
    [
        (0.001, 0.002, 0.004, "2.0 ms of a step (1.0 to 4.0) is exposed communication; 25% is hidden"),
        (-0.001, 0.002, 0.004, "no exposed communication measured (95%: -1.0 to 4.0 ms)"),
        (-0.004, -0.002, -0.001, "no exposed communication measured (95%: -4.0 to -1.0 ms)"),
    ],
)
def test_exposed_communication_is_said_with_its_interval(low: float, value: float, high: float, words: str) -> None:
    summary = {
        "verdict": "done", "comm/wire_bytes": 4000, "comm/wire_bytes_every": 32000, "comm/saved_fraction": 0.875,
        "comm/exposed_s_low": low, "comm/exposed_s": value, "comm/exposed_s_high": high, "comm/overlap": 0.25,
    }  # fmt: skip
    assert f"exposed       {words}" in shown(summary_table(make_plan(), summary))


def test_a_failure_is_the_ranks_own_words_first() -> None:
    failure = failure_record("ValueError: x", "/l", rank=3, exit_code=1, traceback="Traceback ...\n")
    assert failure_text({"failure": failure}) == "Traceback ...\nlaunch: rank 3 failed: ValueError: x\n  Its log: /l"


def test_an_error_of_all_ranks_names_the_rank_once() -> None:
    error = "The loss of step 3 is not finite: rank 1, micro-batch 2."
    failure = failure_record(error, "/l", rank=0, kind="NotFinite")
    assert failure_text({"failure": failure}) == f"launch: the job failed: {error}\n  Its log: /l"
    assert error_of(failure) == error
    hang = failure_record("hangs in step 3; rank 0 waits", "/l", rank=1, kind=HANG)
    assert failure_text({"failure": hang}).startswith("launch: rank 1 failed: hangs")


def test_a_failed_run_says_how_to_resume() -> None:
    killed = failure_record("killed by SIGKILL", "rank1.log", rank=1)
    assert resume_hint(killed, 20, "r") == resume_hint(None, 20, "r") == "  `launch resume r` continues from step 20."
    assert resume_hint(killed, 0, "r") == "  `launch resume r` starts it again, from step 0."
    for kind in ("TaskError", "WrongCheckpoint"):
        assert resume_hint(failure_record("x", None, kind=kind), 20, "r") == ""
    assert resume_hint(failure_record("Free space: `launch resume r`.", None), 20, "r") == ""


def test_memory_is_that_of_each_policy_or_at_least_what_a_rank_holds() -> None:
    plan = make_plan("strategy.sync=boundary", "batch.accumulation=4", "precision=fp32")
    lines = dict(forecast_lines(plan))
    assert lines["wire a step"] == "4.00 kB a rank predicted; 16.00 kB with sync=every"
    assert lines["memory"].startswith("A rank needs at least 16.00 kB for parameters, gradients")
    forecasts = tuple(dataclasses.replace(each, peak_bytes=10**6) for each in plan.strategy.forecasts)
    plan = dataclasses.replace(
        plan, strategy=dataclasses.replace(plan.strategy, forecasts=forecasts, memory_bytes=10**9)
    )
    assert [text for _, text in forecast_lines(plan)][1:] == [
        "every: 16.00 kB on the wire a step, 1.00 MB of memory at most",
        "boundary: 4.00 kB on the wire a step, 1.00 MB of memory at most",
        "1.00 GB are available to each rank",
    ]


def test_one_rank_has_no_line_on_bytes_that_it_does_not_send() -> None:
    plan = make_plan("cluster.workers_per_node=1", "batch.accumulation=4", "precision=fp32")
    assert {each.wire_bytes for each in plan.strategy.forecasts} == {0}
    assert "wire a step" not in dict(forecast_lines(plan))
