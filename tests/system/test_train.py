"""`launch train` with real workers: what a run writes, a stranger's task, and where it arrives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional

from launcher.record.measurements import read_run
from launcher.record.report_entry import identity_of, read_entry
from launcher.train.data.randomness import Permutation
from tests.conftest import Launch
from tests.helpers import CORPUS
from tests.infra.runs import OWN, processes_of, records, summary

pytestmark = pytest.mark.slow


def test_the_main_job_learns_and_writes_everything_down(launch: Launch, tmp_path: Path) -> None:
    size = (CORPUS, "task.width=32", "task.depth=1", "task.heads=1", "task.seq_len=32", "task.eval_samples=64")
    done = launch(
        "train", *size, "train.steps=24", "run.calibrate_s=1000", "run.name=main", "wandb.mode=disabled",
        "optimizer.lr=1e-2", "train.eval_every=12", "checkpoint.every=10", "checkpoint.keep=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    run = tmp_path / "runs" / "main"
    seen = records(run)
    assert [record["step"] for record in seen] == list(range(1, 25)), "every step once"
    assert seen[0]["train/loss"] == pytest.approx(5.55, abs=0.3), "ln 256 before anything is learned"
    assert seen[-1]["train/loss"] < seen[0]["train/loss"] - 1
    assert [record["step"] for record in seen if "eval/loss" in record] == [12, 24]
    assert seen[-1]["batch/items"] == 64 * 32
    assert seen[-1]["progress/samples"] == 24 * 64
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_000020", "step_000024"]

    # accumulation 8: an eighth of the payload in every window
    plan = json.loads((run / "plan.json").read_text())
    (every,) = [each for each in plan["strategy"]["forecasts"] if each["sync"] == "every"]
    for record in seen:
        assert record["comm/payload_bytes"] * 8 == every["payload_bytes"]
        assert record["comm/saved_fraction"] == pytest.approx(7 / 8)
    # once ten windows after the first two have shown what a step takes, and at the end
    assert [record["step"] for record in seen if "comm/speedup" in record] == [12, 24]
    assert summary(run)["verdict"] == "done"
    for name in (
        "comm/speedup",
        "comm/speedup_low",
        "comm/exposed_s",
        "comm/exposed_s_high",
        "comm/calibration_rounds",
    ):
        assert summary(run)[name] == seen[-1][name]
    assert summary(run)["comm/step_s"] == summary(run)["time/step_s"]
    for text in ("64 samples = 4 micro-batch × 8 accumulation × 2 ranks", "step 24/24", "87.5% saved", "metrics.jsonl"):
        assert text in done.stdout
    assert processes_of(run) == []
    assert read_entry(run, identity_of(run)) == (["main", ""], read_run(run)), "a report needs no other file"


def reference_parameters(epochs: int, global_size: int) -> Tensor:
    """The stranger's task trained by one process on whole windows, in fp64: what every world must arrive at."""
    from tests.user_project.speech.tasks import Utterances

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 16), nn.GELU(), nn.Linear(16, 30)).double()
    torch.manual_seed(0)
    model32 = nn.Sequential(nn.Embedding(30, 16), nn.GELU(), nn.Linear(16, 30))
    model.load_state_dict(model32.double().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    data = Utterances(100)
    for epoch in range(epochs):
        order = Permutation(100, 0, epoch)
        for first in range(0, 100, global_size):
            samples = [data[index] for index in order.take(first, min(global_size, 100 - first))]
            batch = nn.utils.rnn.pad_sequence(samples, batch_first=True)
            targets = batch[:, 1:].flatten()
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), targets, ignore_index=0)
            loss.backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [4, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 2))])
def test_a_strangers_task_arrives_where_one_big_batch_does(launch: Launch, project: Path, ranks: int) -> None:
    done = launch(
        "train", *OWN, "optimizer=sgd", "optimizer.lr=0.5", "train.epochs=2", "train.clip_norm=null",
        f"cluster.workers_per_node={ranks}", "run.calibrate_s=5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = project / "runs" / "own"
    assert [record["batch/samples"] for record in records(run)] == [24, 24, 24, 24, 4] * 2
    wanted = reference_parameters(2, 24)
    state = {"model": {name: torch.empty(shape) for name, shape in
             (("0.weight", (30, 16)), ("2.weight", (30, 16)), ("2.bias", (30,)))}}  # fmt: skip
    dcp.load(state, checkpoint_id=run / "checkpoints" / "step_000010", no_dist=True)
    found = torch.cat([state["model"][name].flatten().double() for name in ("0.weight", "2.weight", "2.bias")])
    assert ((found - wanted).norm() / wanted.norm()).item() < 1e-6


def test_a_stream_ends_with_its_short_window(launch: Launch, project: Path) -> None:
    done = launch("train", *OWN, "task._target_=speech.tasks.Streamed", "train.epochs=1")
    assert done.returncode == 0, done.stderr
    assert [record["batch/samples"] for record in records(project / "runs" / "own")] == [24, 24, 24, 24, 4]


def test_a_bare_mean_is_taken_with_a_warning(launch: Launch, project: Path) -> None:
    done = launch("train", *OWN, "task._target_=speech.tasks.MeanTagger", "train.steps=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("returned a bare tensor") == 1
    assert "def loss(" in done.stdout, "the user's line, not one of the launcher"
    assert "launcher/task.py" not in done.stdout
    assert records(project / "runs" / "own")[0]["batch/items"] == 24


def test_fp16_counts_what_it_skips(launch: Launch, project: Path) -> None:
    done = launch("train", *OWN, "precision=fp16", "precision.init_scale=1e30", "train.steps=5")
    assert done.returncode == 0, done.stderr
    run = project / "runs" / "own"
    seen = records(run)
    assert [record["step"] for record in seen] == [1, 2, 3, 4, 5], "a skipped window is no step"
    skipped = summary(run)["amp/skipped_steps"]
    assert skipped > 10, "1e30 must overflow fp16 many times before it is halved into range"
    assert seen[0]["progress/samples"] > 24, "the samples of skipped windows are counted"
    assert done.stdout.count("skipped, fp16 overflowed") == skipped


@pytest.mark.usefixtures("project")
def test_a_constructor_that_computes_with_its_tensors(launch: Launch) -> None:
    done = launch("train", *OWN, "task.trouble=real tensors", "train.steps=2")
    assert done.returncode == 0, done.stderr


def test_rarely_used_options_run(launch: Launch, project: Path) -> None:
    done = launch(
        "train", *OWN, "strategy.static_graph=true", "train.deterministic=true", "checkpoint.every_minutes=0.00001",
        "train.steps=4", "train.log_every=3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = project / "runs" / "own"
    assert len(list((run / "checkpoints").iterdir())) == 5, "four, and the name of the latest"
    assert json.loads((run / "plan.json").read_text())["strategy"]["sync"] == "every"


@pytest.mark.parametrize("ranks", [1, 2])
def test_unused_parameters_are_allowed_on_demand(launch: Launch, project: Path, ranks: int) -> None:
    done = launch(
        "train", *OWN, "task.trouble=unused", "strategy.find_unused_parameters=true", "train.steps=4",
        f"cluster.workers_per_node={ranks}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert records(project / "runs" / "own")[-1]["comm/saved_fraction"] == 0, "each micro-batch is synchronised then"


@pytest.mark.usefixtures("project")
def test_quiet_prints_nothing(launch: Launch) -> None:
    done = launch("train", *OWN, "--quiet", "train.steps=2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_users_own_config_dir(launch: Launch, project: Path) -> None:
    (project / "myconf" / "task").mkdir(parents=True)
    (project / "myconf" / "task" / "tagger.yaml").write_text("_target_: speech.tasks.Tagger\nwidth: 8\nsamples: 60\n")
    done = launch("train", "--config-dir", "myconf", "task=tagger", "task.width=12", *OWN[1:], "train.steps=2")
    assert done.returncode == 0, done.stderr
    plan = json.loads((project / "runs" / "own" / "plan.json").read_text())
    assert plan["task"]["params"] == {"width": 12, "samples": 60}
    assert plan["task"]["samples"] == 60


def test_a_ramp_is_one_curve_whatever_the_world(launch: Launch, project: Path) -> None:
    """Each stage has its own global batch, an epoch's short window among them; calibrated is a step of the last one."""
    shape = (
        "batch.global_size=24",
        "batch.micro_size=2",
        "batch.ramp=[[3,8],[4,16]]",
        "train.steps=20",
        "run.calibrate_s=1000",
    )
    curves: list[list[float]] = []
    for world in (1, 2):
        done = launch("train", *OWN, *shape, f"cluster.workers_per_node={world}", f"run.name=w{world}")
        assert done.returncode == 0, done.stderr
        lines = records(project / "runs" / f"w{world}")
        assert [line["batch/global_size"] for line in lines] == [8] * 3 + [16] * 4 + [24] * 13
        assert [line["batch/samples"] for line in lines][:9] == [8, 8, 8, 16, 16, 16, 16, 12, 24]
        assert lines[0]["batch/accumulation"] * world == 4
        assert ("comm/speedup" in lines[-1]) is (world == 2)
        curves.append([line["train/loss"] for line in lines])
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
