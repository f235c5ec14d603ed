"""strategy.sync=auto: what is predicted is what real ranks then need, and the cheapest policy that fits is taken."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from launcher.config.schema import Sync
from launcher.plan.run_plan import RunPlan
from launcher.plan.task_inspection import weigh_memory
from tests.conftest import Launch
from tests.extensions.forecast.forecast_tasks import MODELS
from tests.extensions.forecast.forecast_worker import TOLERANCE
from tests.helpers import CORPUS, ROOT, patience, torchrun
from tests.infra import warm

WORKER = Path(__file__).parent / "forecast_worker.py"
JOB = (
    CORPUS, "task.width=256", "task.depth=3", "task.heads=4", "task.seq_len=32", "batch.micro_size=2",
    "batch.accumulation=2", "train.loader_workers=0", "run.calibrate_s=0",
)  # fmt: skip


def measured(plan: RunPlan, predicted: dict[str, int], ranks: int, place: Path) -> dict[str, int]:
    """Return the peak of each policy, in bytes, on real ranks."""
    (place / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)))
    arguments = ["peaks", str(place / "plan.json"), json.dumps(predicted)]
    return json.loads(torchrun(WORKER, arguments, ranks, ROOT).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "extra"),
    [
        (2, "strategy=fsdp precision=bf16 strategy.recompute=blocks"),
        pytest.param(4, "strategy=hsdp strategy.shard_size=2 precision=bf16", marks=pytest.mark.nightly),
        pytest.param(2, "strategy=fsdp precision=float8 float8.emulate=true", marks=pytest.mark.nightly),
    ],
)
def test_memory_is_what_was_predicted(ranks: int, extra: str, launch: Launch, tmp_path: Path) -> None:
    words = (*JOB, f"cluster.workers_per_node={ranks}", *extra.split())
    plan = RunPlan.from_json(launch("plan", "--json", *words).stdout)
    known = ("emulates", "float8", "compress", "`launch verify`")
    assert not [note for note in plan.notes if not any(word in note for word in known)]
    peaks = measured(plan, {each.sync.value: each.peak_bytes for each in plan.strategy.forecasts}, ranks, tmp_path)
    assert len(plan.strategy.forecasts) == len(peaks) >= 3
    for forecast in plan.strategy.forecasts:
        assert forecast.peak_bytes == pytest.approx(peaks[forecast.sync.value], rel=TOLERANCE), forecast.sync
    smallest, largest = min(peaks.values()), max(peaks.values())
    # rounded gradients are a second copy while they are sent, which `every` otherwise has room for
    least = 1.02 if "compress" in extra else 1.1
    assert largest > least * smallest, "the policies differ in what they hold, or nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        (2, "strategy=ddp mlp"),
        *(
            pytest.param(ranks, job, marks=pytest.mark.nightly)
            for ranks, job in (
                (2, "strategy=ddp"),
                (2, "strategy=ddp mlp batch.accumulation=1"),
                (2, "strategy=ddp mlp strategy.compress=bf16"),
                (2, "strategy=ddp convolutions"),
                (2, "strategy=ddp precision=bf16"),
                (2, "strategy=fsdp mlp"),
                (2, "strategy=fsdp convolutions precision=bf16"),
                (4, "strategy=hsdp strategy.shard_size=2 mlp"),
                (4, "strategy=hsdp strategy.shard_size=2 convolutions"),
            )
        ),
    ],
)
def test_memory_of_real_ranks_of_other_models(ranks: int, job: str, launch: Launch, tmp_path: Path) -> None:
    """The gradients of layers that are larger than DDP's buckets do not exist twice when it lays these out again."""
    words = {"precision": "precision=fp32"} | {word.split("=")[0]: word for word in JOB}
    for word in job.split():
        if "=" in word:
            words[word.split("=")[0]] = word
        else:
            words = {key: value for key, value in words.items() if not key.startswith("task.")}
            words |= {
                "task": "task._target_=tests.extensions.forecast.forecast_tasks.Wide",
                "kind": f"task.kind={word}",
            }
    env = {"PYTHONPATH": str(ROOT)}
    done = launch("plan", "--json", f"cluster.workers_per_node={ranks}", *words.values(), env=env)
    assert (done.returncode, done.stderr) == (0, "")
    plan = RunPlan.from_json(done.stdout)
    weighed = weigh_memory(plan, choose=False)
    predicted = {each.sync.value: each.peak_bytes for each in weighed.strategy.forecasts}
    assert predicted == pytest.approx(measured(plan, predicted, ranks, tmp_path), rel=TOLERANCE)


def bytes_cases(ranks: int, *, complete: bool) -> list[tuple[list[str], str]]:
    """(overrides, model) of each job that is predicted and then run."""
    common = [
        "batch.accumulation=3", "batch.micro_size=2", "train.loader_workers=0", "run.calibrate_s=0",
        "wandb.mode=disabled", f"cluster.workers_per_node={ranks}",
    ]  # fmt: skip
    if ranks == 4:
        hsdp = [*common, "strategy=hsdp", "strategy.shard_size=2"]
        return [([*hsdp, "precision=fp32"], "adapters"), ([*hsdp, "precision=bf16"], "Distilled")]
    narrow, full, ddp = (
        [*common, *words]
        for words in (("strategy=fsdp", "precision=bf16"), ("strategy=fsdp", "precision=fp32"), ("precision=fp32",))
    )
    if not complete:
        cases = [(narrow, "narrow_base"), (ddp, "shared"), (ddp, "Recurrent")]
        return cases + [(full, model) for model in ("last_block_of_loaded", "Distilled", "shared", "needs_values")]
    cases = [(strategy, model) for strategy in (full, ddp) for model in MODELS]
    # a process predicts one model: the first
    return cases + [(narrow, model) for model in ("narrow", "narrow_base", "adapters", "Distilled", "loaded")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "complete"),
    [(2, False), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((4, False), (2, True)))],
)
def test_bytes_are_what_the_ranks_then_send(ranks: int, complete: bool, tmp_path: Path) -> None:
    """The forecast of each policy is right to the byte, whatever is frozen, loaded, converted or shared."""
    plans, cases = tmp_path / "plans", bytes_cases(ranks, complete=complete)
    arguments = [json.dumps([overrides, {"model": model}]) for overrides, model in cases]
    command = [sys.executable, "-m", "tests.extensions.forecast.forecast_worker", "predict", str(plans), *arguments]
    done = warm.run(command, patience(240), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in plans.read_text().splitlines()]
    output = torchrun(WORKER, ["count", str(plans)], ranks, ROOT).splitlines()
    counted = [json.loads(line) for line in output if line.startswith("{")]
    assert len(found) == len(counted) == len(cases)
    for (overrides, model), prediction, sent in zip(cases, found, counted, strict=True):
        case = model, overrides[-2:]
        assert prediction["predicted"] == sent, case
        assert prediction["problem"] is None, case
        if prediction["plan"]["strategy"]["kind"] != "ddp":
            assert all(peak > 0 for peak in prediction["peaks"]), case
            # without the task's windows: no padding, and a frozen part is gathered as if gradients passed through it
            for sync, payload in prediction["arithmetic"].items():
                assert payload == pytest.approx(sent[sync], rel=0.25), (case, sync)


TASKS = "task._target_=tests.extensions.forecast.forecast_tasks.Task"
SMALL = (TASKS, "batch.global_size=16", "batch.micro_size=2", "cluster.workers_per_node=2", "precision=fp32")


@pytest.mark.slow
def test_the_plan_of_a_model_with_frozen_parts(launch: Launch) -> None:
    env = {"PYTHONPATH": str(ROOT)}
    done = launch("plan", *SMALL, "strategy=fsdp", "task.model=last_block_of_loaded", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "190 of 614 parameters trained" in done.stdout
    assert "note" not in done.stdout, "nothing is unknown, and an ordinary load_state_dict is not worth a word"


@pytest.mark.slow
def test_where_the_loss_needs_values_the_bytes_are_known_and_the_memory_is_not(launch: Launch) -> None:
    env = {"PYTHONPATH": str(ROOT)}
    job = (*SMALL, "strategy=fsdp", "task.model=loaded", "task.loss_needs_values=true")
    done = launch("plan", "--json", *job, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    plan = RunPlan.from_json(done.stdout)
    assert [forecast.payload_bytes for forecast in plan.strategy.forecasts] == [29120, 21224, 5264]
    assert {forecast.peak_bytes for forecast in plan.strategy.forecasts} == {None}
    assert plan.strategy.sync is Sync.gather_once
    assert not plan.strategy.rehearses or plan.strategy.sync is Sync.gather_once
    (note,) = plan.notes
    assert note.startswith("The memory of each sync policy is unknown")
