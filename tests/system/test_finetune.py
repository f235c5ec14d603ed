"""jobs/finetune.py, a script moved to `launch train`: the same result as in plain PyTorch, also after interruptions."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.task import build_model, eval_sets, load_task, train_data
from launcher.train.data.randomness import Permutation
from tests.helpers import launch
from tests.infra.checkpoints import tensors
from tests.infra.runs import records, summary

ROOT = Path(__file__).resolve().parents[2]
WINDOWS, BATCH, SEED, WIDTH, DEPTH = 20, 64, 0, 16, 1
SETTINGS = (
    "precision=fp32",
    "train.epochs=null",
    f"train.steps={WINDOWS}",
    "train.eval_every=10",
    f"task.width={WIDTH}",
    f"task.depth={DEPTH}",
    "wandb.mode=disabled",
)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def finetune(command: str, *overrides: str) -> str:
    done = launch(command, "--config-dir", "jobs", "--config-name", "finetune", *SETTINGS, *overrides, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[list[float]]]:
    """Parameters, their averages, and (loss, accuracy) of each evaluation of the plain script on the same samples."""
    before = sys.path[:]
    task: Any = load_task("jobs.finetune.Finetune", {"width": WIDTH, "depth": DEPTH}, [str(ROOT)], SEED)
    sys.path[:] = before
    from jobs import finetune_plain as script

    model, data = build_model(task, SEED), train_data(task, SEED)
    sets = eval_sets(task, SEED)
    windows = [
        Permutation(len(data), SEED, epoch).take(first, min(BATCH, len(data) - first))
        for epoch in range(2)
        for first in range(0, len(data), BATCH)
    ]
    seen: list[list[float]] = []
    evaluate = script.evaluate

    def noting(model: Any, held_out: Any) -> tuple[float, float]:
        seen.append(list(evaluate(model, held_out)))
        return 1.0, 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "evaluate", noting)
        patch.setattr(script, "EVALUATE_EVERY", 10)
        patch.setattr(script, "PATIENCE", math.inf)
        patch.setattr(torch, "save", lambda *_: None)
        average = script.train(model, data, sets[""], windows[:WINDOWS])
    return dict(model.named_parameters()), dict(average.named_parameters()), seen


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(("strategy=ddp", "cluster.workers_per_node=2"), marks=pytest.mark.nightly),
        ("strategy=fsdp", "cluster.workers_per_node=2"),
        pytest.param(
            ("strategy=hsdp", "strategy.shard_size=2", "cluster.workers_per_node=4", "batch.micro_size=4"),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["ddp", "fsdp", "hsdp"],
)
def test_the_moved_script_learns_the_same(strategy: tuple[str, ...], plain: Any, tmp_path: Path) -> None:
    parameters, averages, evaluations = plain
    finetune("train", *strategy, "train.patience=null", f"run.dir={tmp_path}", "run.name=moved")
    run = tmp_path / "moved"
    state = tensors(run / "checkpoints" / f"step_{WINDOWS:06d}")
    for prefix, wanted in (("model.", parameters), ("callbacks.Ema/averages/", averages)):
        for name, parameter in wanted.items():
            if name.endswith(
                "in_proj_bias"
            ):  # softmax cancels the keys' bias: its gradient is rounding, scaled by Adam
                continue
            difference = (state[f"{prefix}{name}"] - parameter.data).norm() / parameter.data.norm()
            assert difference < 1e-3, (prefix, name)
    evaluated = [each for each in records(run) if "eval/loss" in each]
    assert [each["step"] for each in evaluated] == [10, 20]
    for each, (loss, accuracy) in zip(evaluated, evaluations, strict=True):
        assert each["eval/loss"] == pytest.approx(loss, rel=1e-4)
        assert each["eval/accuracy"] == pytest.approx(accuracy, abs=0.01)
    best = max(evaluated, key=lambda each: each["eval/accuracy"])
    assert (summary(run)["best"]["step"], summary(run)["best"]["value"]) == (best["step"], best["eval/accuracy"])
    assert all(0 <= each["train/accuracy"] <= 1 for each in records(run))


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_the_moved_script_survives_interruptions(strategy: str, tmp_path: Path) -> None:
    ranks = ("strategy.shard_size=2", "cluster.workers_per_node=4") if strategy == "hsdp" else ()
    shown = finetune("drill", f"strategy={strategy}", *ranks, f"run.dir={tmp_path}", "run.name=drilled")
    assert "bit by bit" in shown
