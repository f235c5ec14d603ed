"""Exports of real runs, and runs that start with them: the same values bit by bit, under every strategy."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.helpers import launch
from tests.infra.checkpoints import tensors
from tests.infra.runs import OWN, PROJECT, records, summary
from tests.user_project.speech.tied import TiedModel

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
CALLBACKS = "callbacks=[{_target_: Ema, decay: 0.7}, {_target_: speech.exported.Start}]"
JOB = [
    *(word for word in OWN if not word.startswith(("run.name", "task."))),
    "task._target_=speech.exported.Tied", "train.steps=4", "checkpoint.every=2",
]  # fmt: skip
FSDP = ["strategy=fsdp", "cluster.workers_per_node=2"]
Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the run `base`, trained by FSDP on two ranks."""
    place = tmp_path_factory.mktemp("project")
    shutil.copytree(PROJECT / "speech", place / "speech")
    launch("train", *JOB, *FSDP, "run.name=base", CALLBACKS, cwd=place, status=0)
    return place


def saved(place: Path, step: int = 4) -> Path:
    return place / "runs" / "base" / "checkpoints" / f"step_{step:06d}"


def reference(place: Path, to: Path, step: int = 4) -> dict[str, Any]:
    """The model's state as torch itself reads the checkpoint."""
    dcp_to_torch_save(saved(place, step), to / "whole.pt")
    return torch.load(to / "whole.pt")["model"]


def assert_export_is_the_state(run: Path, to: Path) -> None:
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    assert launch("export", str(run), "--to", str(to), cwd=run).returncode == 0
    dcp_to_torch_save(checkpoint, to / "whole.pt")
    wanted = torch.load(to / "whole.pt")["model"]
    del wanted["head.weight"]
    assert_equal(load_file(to / "model.safetensors"), wanted)


def export(place: Path, to: Path, *flags: str) -> dict[str, Any]:
    done = launch("export", "base", "--to", str(to), "--json", *flags, cwd=place, status=0)
    assert not list(to.parent.glob(".*")), "nothing temporary is left"
    return json.loads(done.stdout)


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert {name: value.dtype for name, value in found.items()} == {name: v.dtype for name, v in wanted.items()}
    assert [name for name, value in found.items() if not value.equal(wanted[name])] == []


def test_it_is_the_state_that_torch_reads(place: Path, tmp_path: Path) -> None:
    wanted = reference(place, tmp_path)
    assert wanted["head.weight"].equal(wanted["embed.weight"])
    answer = export(place, tmp_path / "out")
    assert (answer["step"], answer["files"]) == (4, ["model.safetensors"])
    assert answer["tied"] == {"head.weight": "embed.weight"}
    file = tmp_path / "out" / "model.safetensors"
    del wanted["head.weight"]
    assert_equal(load_file(file), wanted)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    model = TiedModel(16, tied=True)
    assert load_model(model, file) == (set(), [])
    assert_equal({name: v for name, v in model.state_dict().items() if name != "head.weight"}, wanted)

    (tmp_path / "parts").mkdir()
    answer = export(place, tmp_path / "parts", "--max-shard-size", "1KB", "--dtype", "bf16", "--step", "2")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    earlier = reference(place, tmp_path, step=2)
    parts = {name: load_file(tmp_path / "parts" / file)[name] for name, file in index["weight_map"].items()}
    assert len({*index["weight_map"].values()}) == 3
    assert "model-00003-of-00003.safetensors" in answer["files"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in parts.values())
    assert parts.keys() == wanted.keys()
    for name, value in parts.items():
        assert value.equal(earlier[name].bfloat16() if earlier[name].is_floating_point() else earlier[name])


def test_averages_in_place_of_the_parameters(place: Path, tmp_path: Path) -> None:
    export(place, tmp_path / "out", "--ema")
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), tensors(saved(place))
    for name, value in found.items():
        average = wanted.get(f"callbacks.Ema/averages/{name}")
        assert (average is None) == (name in ("scale", "calls"))
        assert value.equal(wanted[f"model.{name}"] if average is None else average)
    assert not found["embed.weight"].equal(wanted["model.embed.weight"])


def test_a_task_adds_files_of_its_own(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "hooked"
    shutil.copytree(place / "runs" / "base", run)
    text = (run / "plan.json").read_text()
    (run / "plan.json").write_text(text.replace("speech.exported.Tied", "speech.exported.Hooked"))
    done = launch("export", str(run), "--to", str(tmp_path / "out"), cwd=place, status=0)
    assert "Files: model.safetensors, sums.pt" in done.stdout
    assert "head.weight is embed.weight" in done.stdout
    sums = torch.load(tmp_path / "out" / "sums.pt")
    assert_equal(sums, {name: value.sum() for name, value in reference(place, tmp_path).items()})


STRATEGIES = {
    "single": ("checkpoint", ["strategy=single", "cluster.workers_per_node=1"]),
    "ddp": ("parts", ["strategy=ddp", "cluster.workers_per_node=2"]),
    "fsdp": ("run", FSDP),
    "hsdp": (
        "safetensors", ["strategy=hsdp", "strategy.shard_size=2", "cluster.workers_per_node=4", "batch.micro_size=6"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("single", "hsdp"))]
)
def test_a_run_starts_with_the_weights_bit_by_bit(strategy: str, place: Path, tmp_path: Path) -> None:
    kind, words = STRATEGIES[strategy]
    source = {"run": "bas", "checkpoint": str(saved(place))}.get(kind, str(tmp_path / "out"))
    if kind in ("safetensors", "parts"):
        export(place, tmp_path / "out", *(["--max-shard-size", "2KB"] if kind == "parts" else []))
    done = launch(
        "train", *JOB, *words, f"run.name={strategy}", CALLBACKS, f"checkpoint.init_from={source}", "train.seed=5",
        "train.steps=1", cwd=place, status=0,
    )  # fmt: skip
    assert "starts with" in done.stdout
    started, wanted = torch.load(place / "start.pt"), reference(place, tmp_path)
    torch.manual_seed(5)
    wanted["offset"] = TiedModel(16, tied=True).offset
    assert_equal(started, wanted)
    plan = json.loads((place / "runs" / strategy / "plan.json").read_text())["initial"]
    assert_export_is_the_state(place / "runs" / strategy, tmp_path / "trained")
    expected = {"run": ("base", 4), "checkpoint": ("base", 4)}.get(kind, (None, None))
    assert (plan["run"], plan["step"]) == expected


def test_a_run_with_a_checkpoint_does_not_read_them_again(place: Path, tmp_path: Path) -> None:
    export(place, tmp_path / "out")
    source = tmp_path / "out"
    words = [*JOB, "run.name=short", f"checkpoint.init_from={source}", "train.steps=2"]
    assert launch("train", *words, *FSDP, cwd=place).returncode == 0
    before = tensors(place / "runs" / "short" / "checkpoints" / "step_000002")
    refused = launch("resume", "short", "checkpoint.init_from=base", cwd=place)
    assert refused.returncode == 2
    assert "the run has started with other parameters" in refused.stderr

    launch("retry", "short", cwd=place, status=0)
    after = tensors(place / "runs" / "short.retry1" / "checkpoints" / "step_000002")
    assert all(value.equal(before[name]) for name, value in after.items()), "from the same weights"

    data = bytearray((source / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (source / "model.safetensors").write_bytes(data)
    changed = launch("retry", "short", cwd=place)
    assert changed.returncode == 2, changed.stdout
    assert "has changed since the run was planned" in changed.stderr
    assert not (place / "runs" / "short.retry2").exists(), "nothing was started"

    shutil.rmtree(source)
    launch("resume", "short", "train.steps=4", "strategy=ddp", "cluster.workers_per_node=1", cwd=place, status=0)
    assert summary(place / "runs" / "short")["verdict"] == "done"


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["task.width=12"], ["embed.weight has the shape [30, 16] there, and [30, 12] in the model"]),
        (
            ["task._target_=speech.tasks.Tagger"],
            ["0.weight is not among them", "embed.weight is not in the model", "and 4 more"],
        ),
        (["checkpoint.init_from=bse"], ["no such run in", "did you mean 'base'?"]),
        (["checkpoint.init_from=speech"], ["has no weights", "Name a run"]),
    ],
)
def test_weights_that_do_not_fit_are_refused(words: list[str], messages: list[str], place: Path) -> None:
    before = sorted((place / "runs").iterdir())
    done = launch("train", *JOB, *FSDP, "checkpoint.init_from=base", *words, cwd=place, status=2)
    assert done.stderr.count("launch: error: ") == 1
    for message in messages:
        assert message in done.stderr
    assert sorted((place / "runs").iterdir()) == before


def test_a_checkpoint_that_has_changed_is_found_by_the_workers(place: Path, tmp_path: Path) -> None:
    shutil.copytree(saved(place), tmp_path / "step_000004")
    data = next((tmp_path / "step_000004").glob("__1_*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    done = launch("train", *JOB, *FSDP, f"checkpoint.init_from={tmp_path / 'step_000004'}", cwd=place, status=2)
    assert f"is damaged: the content of {data.name} has changed." in done.stderr
    assert "Traceback" not in done.stderr


def test_an_untied_model_gets_both_names_of_a_checkpoint(place: Path, tmp_path: Path) -> None:
    words = [*JOB, "run.name=untied", "task.tied=false", "train.steps=1", CALLBACKS]
    assert (done := launch("train", *words, "checkpoint.init_from=base", *FSDP, cwd=place)).returncode == 0, done.stderr
    wanted = reference(place, tmp_path)
    started = torch.load(place / "start.pt")
    assert started["head.weight"].equal(wanted["embed.weight"])
    export(place, tmp_path / "out")
    again = [*words, "run.name=untied-again", f"checkpoint.init_from={tmp_path / 'out'}"]
    refused = launch("train", *again, *FSDP, cwd=place)
    assert refused.returncode == 2
    assert "head.weight is not among them" in refused.stderr
    back = launch("train", *JOB, *FSDP, "run.name=tied", "checkpoint.init_from=untied", cwd=place)
    assert back.returncode == 2, back.stdout
    assert "embed.weight and head.weight are one parameter of the model, and two with different" in back.stderr


OWN_LOOP = """
import sys, torch
from torch.distributed.tensor import DTensor
from launcher import Engine, make_plan
from speech.tied import TiedModel

job = ["run.name=loop", "batch.global_size=8", "checkpoint.every=1", "train.steps=2"]
plan = make_plan([*job, *sys.argv[1:]], samples=40)
engine = Engine(lambda: TiedModel(16, True), lambda p: torch.optim.SGD(p, 0.1), plan)
state = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in engine.model.state_dict().items()}
resumed = engine.resume()
for window in engine.windows(torch.arange(40) % 30):
    for ids in window:
        engine.backward(engine.model(ids[:, None]).square().sum(), len(ids))
    engine.finish_step(engine.step())
if engine.world.rank == 0:
    torch.save(state, f"loop-{resumed is not None}.pt")
"""


def test_a_loop_of_ones_own_starts_with_them(place: Path, tmp_path: Path) -> None:
    export(place, tmp_path / "out")
    (place / "loop.py").write_text(OWN_LOOP)
    weights = f"checkpoint.init_from={tmp_path / 'out'}"
    script = ["cluster.workers_per_node=2", "run.name=loop", "--", "loop.py", "strategy=fsdp", weights]
    assert (done := launch("run", *script, cwd=place)).returncode == 0, done.stderr
    assert_equal(torch.load(place / "loop-False.pt"), reference(place, tmp_path))
    shutil.rmtree(tmp_path / "out")
    (place / "runs" / "loop" / "summary.json").unlink()
    plan = place / "runs" / "loop" / "plan.json"
    plan.write_text(plan.read_text().replace('"strategy=fsdp"', '"strategy=ddp", "train.steps=3"'))
    assert (done := launch("resume", "loop", cwd=place)).returncode == 0, done.stderr
    assert (place / "loop-True.pt").exists()


@pytest.mark.nightly
def test_verify_starts_with_them(place: Path) -> None:
    job = [*(word for word in JOB if not word.startswith("checkpoint")), *FSDP, "train.steps=1", "train.seed=3"]
    weights = "checkpoint.init_from=base"
    done = launch("verify", "--json", *job, weights, "run.name=verified", cwd=place, status=0)
    assert launch("train", *job, weights, "run.name=verified-run", cwd=place).returncode == 0
    (record,) = records(place / "runs" / "verified-run")
    assert record["train/loss"] == pytest.approx(json.loads(done.stdout)["windows"][0]["loss"], rel=1e-6)
