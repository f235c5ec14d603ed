"""A run that was stopped and begun again, by other processes, is the run that was never stopped: bit by bit."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from launcher.errors import WrongCheckpoint
from launcher.rundir import history
from launcher.rundir.paths import RunPaths
from launcher.train.checkpoint.file_format import Reader, read_values
from tests.infra.checkpoints import assert_same_tensors, tensors
from tests.infra.runs import records, run_jobs, timeless

run = partial(run_jobs, Path(__file__).parent / "resume_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

COMMON = ("batch.global_size=16", "precision=fp32", "train.steps=10", "checkpoint.every=3", "run.calibrate_s=1")
DDP = ("strategy.bucket_mb=0.002",)
HERE = ("train.loader_workers=0",)
EPOCH = "train.eval_every=epoch"
PLAIN = {"norm": False}  # torch has no BatchNorm in bf16 on a CPU
STREAM = {"streams": True, "samples": 50}
POWERSGD = (*DDP, *HERE, "strategy.compress=powersgd", "powersgd.start=3")
FP16 = (*DDP, *HERE, "precision=fp16", "precision.init_scale=1e6", "precision.growth_interval=3")
CASES: dict[int, dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[int, ...]]]] = {
    2: {
        "ddp": ((*DDP, "batch.micro_size=2", "train.epochs=2", "train.steps=null", EPOCH), {"remembers": True}, (1, 4)),
        "here": ((*DDP, *HERE, "batch.micro_size=2", "train.eval_every=3"), {"remembers": True}, (7,)),
        "fsdp": (("strategy=fsdp", "batch.micro_size=2", "precision=bf16"), PLAIN, (5,)),
        "powersgd": ((*POWERSGD, "batch.micro_size=4"), {}, (2, 3)),
        "window": (("strategy=fsdp", *FP16[1:], "batch.micro_size=4", "batch.norm=window"), {}, (5,)),
        "fp16": ((*FP16, "batch.micro_size=4", "train.log_every=2"), {}, (8, 4)),
        "remembers": (("strategy=fsdp", *HERE, "batch.micro_size=4"), {"optimizer": "Remembers"}, (4,)),
        "two points": ((*DDP, *HERE, "batch.micro_size=4", "train.eval_every=2"), {"optimizer": "TwoPoints"}, (4, 3)),
        "stream": (("batch.micro_size=4",), STREAM, (2, 3)),
        "stream here": (
            ("batch.micro_size=4", "train.epochs=3", "train.steps=null", "schedule=constant", *HERE, EPOCH),
            STREAM,
            (4, 3),
        ),
    },
    4: {
        "ddp": ((*DDP, "batch.micro_size=2"), {}, (1, 3)),
        "fsdp": (("strategy=fsdp", "batch.micro_size=4", *HERE), {}, (4,)),
        "hsdp": (("strategy=hsdp", "strategy.shard_size=2", "batch.micro_size=1", "precision=bf16"), PLAIN, (3,)),
        "powersgd": ((*POWERSGD, "batch.micro_size=2"), {}, (4,)),
        "fp16": ((*FP16, "batch.micro_size=2"), {}, (9,)),
    },
}  # fmt: skip


def assert_same(run: Path, undisturbed: Path, resumed: int) -> None:
    """Parameters, optimizer state, random state and every record."""
    ours, theirs = ([*sorted((path / "checkpoints").glob("step_*"))][-1] for path in (run, undisturbed))
    assert ours.name == theirs.name
    assert_same_tensors(ours, theirs)
    assert len([name for name in tensors(ours) if name.startswith("optimizer.state")]) > 20
    states = [json.loads((path / "state.json").read_text())["engine"] for path in (ours, theirs)]
    for state in states:  # whether there was time enough to measure is the machine's affair
        del state["calibration"], state["gathered_by_every"]
    assert states[0] == states[1]

    by_step = {record["step"]: timeless(record) for record in records(undisturbed)}
    seen = [timeless(record) for record in records(run)]
    assert [record["step"] for record in seen] == sorted({record["step"] for record in seen}), "each once, in order"
    assert {*by_step} <= {record["step"] for record in seen}
    for record in seen:  # a stop is recorded, even where its step would not have been
        assert record == by_step.get(record["step"], record)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (run, undisturbed)]
    seconds = [record["time/total_s"] for record in records(run)]
    assert seconds == sorted({*seconds}), "the clock goes on where the run does"
    assert seconds[-1] <= summaries[0]["time/total_s"]
    assert [summary.pop("resumed") for summary in summaries] == [resumed, 0]
    assert [summary.pop("checkpoint") for summary in summaries] == [str(ours), str(theirs)]
    assert timeless(summaries[0]) == timeless(summaries[1])
    assert summaries[0]["verdict"] == "done"


# what four ranks add are the replicas of shard groups; their other cases are nightly. So are those of two ranks that
# differ from the others in an optimizer (test_contents_optimizer.py) or in the process that reads the samples.
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["ddp", "window", "fp16", "stream"]),
        (4, ["hsdp"]),
        pytest.param(2, [*CASES[2]], marks=pytest.mark.nightly),
        pytest.param(4, [*CASES[4]], marks=pytest.mark.nightly),
    ],
    ids=["2", "4", "2-all", "4-all"],
)
def test_in_pieces_it_is_the_same_run(ranks: int, names: list[str], tmp_path: Path) -> None:
    cases = {name: CASES[ranks][name] for name in names}
    jobs = {
        name: {"run": str(tmp_path / name), "overrides": [*COMMON, *overrides], "task": task}
        for name, (overrides, task, _) in cases.items()
    }
    whole = [job | {"run": f"{job['run']} whole"} for job in jobs.values()]
    first = [jobs[name] | {"stop": stops[0]} for name, (_, _, stops) in cases.items()]
    run([*whole, *first], ranks, tmp_path)
    # each further piece in a process that has seen nothing of the run
    second = [jobs[name] | {"stop": stops[1]} for name, (_, _, stops) in cases.items() if len(stops) > 1]
    rest = [job for job in jobs.values() if job["run"] not in {piece["run"] for piece in second}]
    run([*second, *rest], ranks, tmp_path)
    if second:
        run([jobs[Path(str(piece["run"])).name] for piece in second], ranks, tmp_path)
    for name, (_, _, stops) in cases.items():
        assert_same(tmp_path / name, tmp_path / f"{name} whole", resumed=len(stops))
        saved = sorted((tmp_path / name / "checkpoints").glob("step_*/state.json"))
        each = [json.loads(path.read_text())["engine"]["calibration"] for path in saved]
        assert each[0] is not None
        assert all(calibration == each[0] for calibration in each), "a resumed run does not measure again"
        state = json.loads(saved[-1].read_text())["engine"]
        assert (state["noise"]["windows"] > 3) == (name != "powersgd"), "its averages are compared too"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "flipped": ("__1_0.distcp", flip, "the content of __1_0.distcp has changed"),
    "cut": ("__0_0.distcp", cut, "bytes instead of"),
    "gone": ("__1_0.distcp", Path.unlink, "__1_0.distcp: No such file"),
    "counters": ("state.json", flip, "the content of state.json has changed"),
    "index": (".metadata", cut, ".metadata has"),
    "manifest": ("manifest.json", Path.unlink, "it has no manifest.json"),
    "list": ("manifest.json", cut, "its manifest.json cannot be read"),
}


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_serves(tmp_path: Path) -> None:
    job = {"overrides": [*COMMON, *DDP, *HERE, "batch.micro_size=4", "checkpoint.keep=3"], "task": {}}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run([job | {"run": str(whole)}, job | {"run": str(stopped), "stop": 7}], 2, tmp_path)
    for name, (file, damage, _) in DAMAGES.items():
        shutil.copytree(stopped, tmp_path / name)
        damage(tmp_path / name / "checkpoints" / "step_000007" / file)
    with (tmp_path / "flipped" / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 8, "trai')
    shutil.copytree(stopped, tmp_path / "none")
    for checkpoint in (tmp_path / "none" / "checkpoints").glob("step_*"):
        flip(checkpoint / "__0_0.distcp")
    last_words = tmp_path / "last words"  # died between its last save and what it had to say of that
    shutil.copytree(whole, last_words)
    (last_words / "summary.json").unlink()
    lines = (last_words / "metrics.jsonl").read_text().splitlines(keepends=True)
    (last_words / "metrics.jsonl").write_text("".join(lines[:-1]))

    jobs = [job | {"run": str(tmp_path / name)} for name in (*DAMAGES, "last words")]
    said = run([*jobs, job | {"run": str(tmp_path / "none"), "raises": "NoGoodCheckpoint"}], 2, tmp_path)
    for name, (file, _, why) in DAMAGES.items():
        (line,) = (line for line in said.splitlines() if f"{name}/checkpoints/step_000007 is damaged" in line)
        assert why in line
        assert_same(tmp_path / name, whole, resumed=1)
        refused = tmp_path / name / "checkpoints" / "refused_step_000007"
        assert {p.name for p in refused.iterdir()} | {file} == {
            p.name for p in (stopped / "checkpoints" / "step_000007").iterdir()
        }, "it is moved aside, as it was"
        event = history.read_events(RunPaths(tmp_path / name))[-1]
        assert (event["event"], event["from_step"], event["why"]) == ("resumed", 6, "damaged: step_000007")
    assert_same(last_words, whole, resumed=1)
    assert history.read_events(RunPaths(tmp_path / "none"))[-1]["event"] == "not resumed"
    assert "None of the 3 checkpoints" in said
    assert len(records(tmp_path / "none")) == 7, "and nothing is begun at step 0"


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_what_is_left_of_an_earlier_start_changes_nothing(tmp_path: Path) -> None:
    job = {"overrides": [*COMMON, *HERE, "strategy=single", "batch.micro_size=4"], "task": {}}
    whole, killed, late, never = (job | {"run": str(tmp_path / name)} for name in ("whole", "killed", "late", "never"))
    never["overrides"] = [*job["overrides"], "checkpoint.enabled=false"]
    # written beside the steps, that of step 3 could still be under way when the newer attempt begins
    late["overrides"] = [*job["overrides"], "checkpoint.async_save=false"]
    with pytest.raises(AssertionError, match="exitcode  : -9"):
        run([killed | {"dies": 2}], 1, tmp_path)
    saved = tmp_path / "killed" / "checkpoints"
    assert {path.name for path in saved.iterdir()} == {"step_000003", "latest", ".step_000006.0.0.partial"}
    # the whole one is asked to stop in its last window: then it is done
    first = [whole | {"stop": 10}, killed | {"incarnation": "0.1"}, never | {"stop": 4}, never]
    run([*first, late | {"superseded": 5, "raises": "Superseded"}], 1, tmp_path)
    assert_same(tmp_path / "killed", tmp_path / "whole", resumed=1)
    assert not [*saved.glob(".*")]
    assert [record["step"] for record in records(tmp_path / "never")] == [*range(1, 11)]

    left = tmp_path / "late"
    assert {path.name for path in (left / "checkpoints").glob("step_*")} == {"step_000003"}, "6 was not committed"
    assert not (left / "summary.json").exists()
    before = contents(left)
    run([late | {"raises": "Superseded"}], 1, tmp_path)
    assert contents(left) == before, "an older one that starts late leaves everything as it is"
    run([late | {"incarnation": "0.7"}], 1, tmp_path)
    assert_same(left, tmp_path / "whole", resumed=1)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_loading_runs_nothing_that_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, state in (("whole", {"x": torch.ones(2), "n": 3}), ("evil state", {"x": torch.ones(2), "n": Evil()})):
        dcp.save(state, checkpoint_id=tmp_path / place, no_dist=True)
    state = {"x": torch.zeros(2), "n": 0}
    read_values(state, tmp_path / "whole", no_dist=True)
    assert (state["x"].tolist(), state["n"]) == ([1, 1], 3)
    with pytest.raises(WrongCheckpoint, match="Weights only load failed"):
        read_values(state, tmp_path / "evil state", no_dist=True)
    index = io.BytesIO()
    pickle.dump(Evil(), index)
    (tmp_path / "whole" / ".metadata").write_bytes(index.getvalue())
    with pytest.raises(WrongCheckpoint, match="mkdir, which no checkpoint needs"):
        Reader(tmp_path / "whole").read_metadata()
    assert not (tmp_path / "evil").exists()
