"""torchmetrics objects over all ranks are those of the whole set in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import TaskError
from launcher.loss import Loss
from launcher.train.eval_metrics import EvalMetrics
from launcher.train.inspection.task_probe import probe
from launcher.train.world import World
from tests.helpers import inspection_of
from tests.infra.runs import records, summary
from tests.train.evaluation_tasks import Detector, Ranked, Sequences, padded
from tests.train.test_evaluation import FP32, SETS, TASKS, job, run, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ddp": ({}, (FP32, "checkpoint.best=eval/far/auroc", "checkpoint.best_mode=max")),
    "fsdp": ({}, (FP32, "strategy=fsdp", "train.eval_micro_size=1", "train.loader_workers=0")),
    "bf16": ({}, ("precision=bf16", "train.eval_micro_size=3")),
    "three samples": ({"held_out": "three samples"}, (FP32, "train.eval_micro_size=1")),  # a rank may have none
    "classes": ({"kind": "classes", "held_out": "one"}, (FP32,)),
    "one": ({"kind": "one", "held_out": "one"}, (FP32,)),
}


def by_hand(model: torch.nn.Module, data: Sequences) -> dict[str, float]:
    """In fp64, of the whole set: the AUROC as the share of pairs in the right order."""
    x, mask, labels = padded([data[n] for n in range(len(data))])
    with torch.no_grad():
        p = model(x.double(), mask).sigmoid()
    pairs = p[labels == 1].unsqueeze(1) - p[labels == 0].unsqueeze(0)
    auroc = ((pairs > 0).double() + 0.5 * (pairs == 0)).mean() if pairs.numel() else torch.zeros(())
    right = {name: ((p > limit) == (labels == 1)).double().mean() for name, limit in (("low", 0.3), ("high", 0.7))}
    corr = torch.corrcoef(torch.stack([p, labels.double()]))[0, 1]
    values = {"auroc": auroc, "mse": (p - labels).square().mean(), "corr": corr, **right}
    return {name: value.item() for name, value in values.items()} | {"positive": labels.double().mean().item()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (4, ["ddp", "hsdp", "three samples", "classes"]),
        *(pytest.param(ranks, [*CASES], marks=pytest.mark.nightly) for ranks in (1, 2, 4)),
    ],
)
def test_metrics_are_those_of_the_whole_set(ranks: int, names: list[str], tmp_path: Path) -> None:
    cases = {name: CASES.get(name, ({}, (FP32, "strategy=hsdp", "strategy.shard_size=2"))) for name in names}
    jobs = [job(tmp_path, name, *case) | {"target": f"{TASKS}.Ranked"} for name, case in cases.items()]
    run(jobs, ranks, tmp_path)
    for name in cases.keys() & {"ddp", "fsdp", "hsdp", "bf16"}:
        last, model = records(tmp_path / name)[-1], trained(tmp_path / name)
        for of, data in SETS.items():
            expected = by_hand(model, data)
            seen = {key: last[f"eval/{of}/{key}"] for key in expected}
            if name == "bf16":  # a rounded score may change places
                assert seen == pytest.approx(expected, abs=0.15)
            else:
                assert seen == pytest.approx(expected, rel=2e-5, abs=1e-6), (name, of)
        assert last["eval/auroc"] == last["eval/near/auroc"]
        assert summary(tmp_path / name)["eval/far/auroc"] == last["eval/far/auroc"]
        assert ["eval/auroc" in record for record in records(tmp_path / name)] == [False, True, True]
    best = summary(tmp_path / "ddp")["best"]
    history = [record.get("eval/far/auroc", -1.0) for record in records(tmp_path / "ddp")]
    assert best["value"] == max(history)
    assert best["step"] == history.index(best["value"]) + 1

    last, model = records(tmp_path / "three samples")[-1], trained(tmp_path / "three samples")
    few = by_hand(model, Sequences(3, 10))
    del few["corr"]  # torchmetrics' own merge of single samples is nan
    assert {key: last[f"eval/{key}"] for key in few} == pytest.approx(few, rel=2e-5, abs=1e-6)

    last, model = records(tmp_path / "classes")[-1], trained(tmp_path / "classes")
    x, mask, labels = padded([SETS["near"][n] for n in range(13)])
    right = (model(x.double(), mask) > 0) == (labels == 1)
    for label, key in enumerate(("no", "yes")):
        (value,) = [last[name] for name in last if name.startswith("eval/") and name.endswith(f"_{key}")]
        assert value == pytest.approx(right[labels == label].double().mean().item())
    if "one" in names:
        assert records(tmp_path / "one")[-1]["eval/BinaryAUROC"] == pytest.approx(
            by_hand(trained(tmp_path / "one"), SETS["near"])["auroc"], rel=2e-5
        )


@pytest.mark.slow
def test_mistakes_show_before_the_first_step(tmp_path: Path) -> None:
    wrong = {
        "without outputs": "The task has eval_metrics(), and 0 terms of its loss with outputs: there must be one.",
        "vector": "compute() of BinaryConfusionMatrix returned a tensor of shape [2, 2], and must return one number.",
        "twice": "eval_metrics() has positive, as the loss has.",
    }
    jobs = [
        job(tmp_path, kind, {"kind": kind}, (FP32,), raises="TaskError") | {"target": f"{TASKS}.Ranked"}
        for kind in wrong
    ]
    out = run(jobs, 2, tmp_path)
    for kind, words in wrong.items():
        assert words in out
        assert not (tmp_path / kind / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("function", "eval_metrics()['auroc'] is a function, whose state cannot be merged over ranks"),
        ("of my own", "eval_metrics() is a SimpleNamespace, whose state cannot be merged over ranks"),
        ("holds one", "eval_metrics() is a Sequential, whose state cannot be merged over ranks"),
        ("a name", "eval_metrics() has the name 'val/auroc'"),
    ],
)
def test_the_plan_refuses_other_objects(kind: str, words: str) -> None:
    with pytest.raises(TaskError, match=re.escape(words)):
        probe(inspection_of(f"{TASKS}.Ranked", kind=kind))


ALONE = World(0, 1, 0)


def test_metrics_are_reset_and_outputs_are_widened() -> None:
    metrics = EvalMetrics(Ranked("one"), 0, ALONE, torch.device("cpu"))
    labels = torch.tensor([0, 1, 0, 1])
    for preds in ([0.1, 0.9, 0.2, 0.8], [0.9, 0.1, 0.8, 0.2]):
        outputs = (torch.tensor(preds, dtype=torch.bfloat16), labels)
        metrics.update([Loss(torch.zeros(()), 4), Loss(torch.zeros(()), 4, outputs=outputs)])
        assert metrics.compute() == {"BinaryAUROC": float(preds[1] > preds[0])}
    with pytest.raises(TaskError, match="and 2 terms of its loss with outputs"):
        metrics.update([Loss(torch.zeros(()), 4, outputs=outputs)] * 2)


def test_a_task_without_metrics_costs_nothing() -> None:
    metrics = EvalMetrics(Detector(), 0, ALONE, torch.device("cpu"))
    metrics.update([Loss(torch.zeros(()), 1)])
    assert metrics.compute() == {}
