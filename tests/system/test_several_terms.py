"""A loss of several terms with metrics, in a job: record, summary, status, and what `launch verify` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.conftest import Launch
from tests.infra.runs import OWN, records, summary

pytestmark = pytest.mark.slow
AVERAGES = {"accuracy", "loss_tokens", "loss_long"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("task", ["Scored", pytest.param("Counted", marks=pytest.mark.nightly)])
def test_averages_of_one_big_batch_everywhere(
    launch: Launch, project: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    job = (*OWN, f"task._target_=speech.several.{task}", "train.steps=6", "train.log_every=2", "train.eval_every=3")
    done = launch("train", *job, "precision=fp32")
    assert done.returncode == 0, done.stderr
    run = project / "runs" / "own"
    seen, last = {record["step"]: record for record in records(run)}, summary(run)
    assert list(seen) == [2, 3, 4, 6]
    for record in seen.values():
        assert all(f"train/{name}" in record for name in AVERAGES), record
    assert {name for name in seen[3] if name.startswith("eval/")} == {"eval/loss", *(f"eval/{n}" for n in AVERAGES)}
    for name in AVERAGES:
        assert last[f"train/{name}"] == seen[6][f"train/{name}"]
        assert last[f"eval/{name}"] == seen[6][f"eval/{name}"]
    for record in (seen[2], seen[6]):
        assert record["train/loss"] == pytest.approx(record["train/loss_tokens"] + record["train/loss_long"], rel=1e-6)
    assert seen[2]["progress/items"] % 1, "class weights are no whole numbers"
    assert f"eval/accuracy {last['eval/accuracy']:.4g}" in done.stdout

    # the evaluation of the last parameters, in plain PyTorch
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "user_project"))
    from speech.several import Scored

    scored = Scored()
    held_out = scored.eval_data()
    model = _restored(run)
    terms = scored.loss(model, nn.utils.rnn.pad_sequence([held_out[i] for i in range(20)], batch_first=True))
    correct, count = terms[0].metrics["accuracy"]
    assert last["eval/accuracy"] == pytest.approx((correct / count).item(), rel=1e-6)
    means = [(term.total / term.items).item() for term in terms]
    assert [last["eval/loss_tokens"], last["eval/loss_long"]] == pytest.approx(means, rel=1e-5)
    assert last["eval/loss"] == pytest.approx(sum(means), rel=1e-5)

    status = json.loads(launch("status", "own", "--json").stdout)
    assert status["metrics"]["train/accuracy"] == seen[6]["train/accuracy"]
    checked = launch("verify", *job, "run.name=checked", "precision=fp32")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _restored(run: Path) -> nn.Module:
    model = nn.Sequential(nn.Embedding(30, 16), nn.GELU(), nn.Linear(16, 30))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=run / "checkpoints" / "step_000006", no_dist=True)
    model.load_state_dict(state["model"])
    return model.eval().requires_grad_(requires_grad=False)
