"""Held-out figures are those of the whole set at once, for every world size, strategy and size of micro-batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from torch.utils.data import IterableDataset

from launcher.errors import TaskError
from launcher.task import eval_sets, train_data
from launcher.train.evaluation import eval_batches
from launcher.train.inspection.task_probe import near_misses, probe
from launcher.train.world import World
from tests.helpers import inspection_of, make_plan
from tests.infra.checkpoints import tensors
from tests.infra.runs import records, run_jobs, summary
from tests.train import evaluation_tasks
from tests.train.evaluation_tasks import Scorer, Sequences, padded

run = partial(run_jobs, Path(__file__).parent / "checkpoint" / "resume_worker.py")
TASKS = "tests.train.evaluation_tasks"
CPU = torch.device("cpu")
JOB = ("batch.global_size=8", "batch.micro_size=2", "train.steps=3", "run.calibrate_s=0", "train.eval_every=2")
FP32 = "precision=fp32"
SETS = {"near": Sequences(13, 2), "far": Sequences(7, 3), "stream": Sequences(11, 4)}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one": ({}, (FP32,)),
    "several": ({"held_out": "several"}, (FP32, "train.eval_micro_size=3")),
    "several here": ({"held_out": "several"}, ("train.loader_workers=0",)),
    "limited": ({"held_out": "several"}, (FP32, "train.eval_samples=5", "train.eval_micro_size=1")),
    "sharded": ({"held_out": "several"}, (FP32, "strategy=fsdp", "train.eval_micro_size=1")),
    "three samples": ({"held_out": "three samples"}, (FP32, "strategy=fsdp", "train.eval_micro_size=1")),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def job(place: Path, name: str, task: dict[str, Any], overrides: Sequence[str], **more: Any) -> dict[str, Any]:
    """A line of the worker's jobs."""
    overrides = [
        *JOB,
        *(["strategy.bucket_mb=0.001"] if not any("strategy=" in o for o in overrides) else []),
        *overrides,
    ]
    task = {"samples": 48, **task}
    return {"run": str(place / name), "target": f"{TASKS}.Detector", "overrides": overrides, "task": task, **more}


def by_hand(model: torch.nn.Module, data: Sequences, indices: Sequence[int] | None = None) -> float:
    """The mean over items in fp64, of one big batch."""
    x, mask, labels = padded([data[n] for n in (range(len(data)) if indices is None else indices)])
    with torch.no_grad():
        each = functional.binary_cross_entropy_with_logits(model(x.double(), mask), labels.double(), reduction="none")
    return ((each * mask.sum(1)).sum() / mask.sum()).item()


def trained(run: Path) -> torch.nn.Module:
    """The run's last model, in fp64 and in eval mode."""
    model = Scorer()
    state = tensors(sorted((run / "checkpoints").glob("step_*"))[-1])
    names = {name.removeprefix("model."): tensor for name, tensor in state.items() if name.startswith("model.")}
    model.load_state_dict(names)
    return model.double().eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (4, ["one", "several here", "limited", "three samples"]),
        *(pytest.param(ranks, [*CASES], marks=pytest.mark.nightly) for ranks in (1, 2, 4)),
    ],
)
def test_each_set_is_averaged_as_a_whole(ranks: int, names: list[str], tmp_path: Path) -> None:
    run([job(tmp_path, name, *CASES[name]) for name in names], ranks, tmp_path)
    for name in names:
        task, overrides = CASES[name]
        place = tmp_path / name
        tolerance = 1e-5 if FP32 in overrides else 2e-2
        last = records(place)[-1]
        model = trained(place)
        if name == "one":
            expected = {"eval/loss": by_hand(model, SETS["near"])}
        elif name == "three samples":
            expected = {"eval/loss": by_hand(model, Sequences(3, 10))}
        else:
            first = {"near": [n * 13 // 5 for n in range(5)], "far": [n * 7 // 5 for n in range(5)], "stream": range(5)}
            taken = first if "train.eval_samples=5" in overrides else {}
            expected = {f"eval/{of}/loss": by_hand(model, data, taken.get(of)) for of, data in SETS.items()}
            expected["eval/loss"] = expected["eval/near/loss"]
        seen = {key: value for key, value in last.items() if key.startswith("eval/")}
        assert seen == pytest.approx(expected, rel=tolerance), (name, task)
        assert {key: value for key, value in summary(place).items() if key.startswith("eval/")} == seen
        assert [any(key.startswith("eval/") for key in record) for record in records(place)] == [False, True, True]


@pytest.mark.slow
def test_an_evaluation_that_a_stop_left_out_is_made_up_for(tmp_path: Path) -> None:
    several, options = {"held_out": "several"}, (FP32, "checkpoint.every=2")
    whole = job(tmp_path, "whole", several, options)
    stopped = job(tmp_path, "stopped", several, options, stop=2)  # after step 2, before its evaluation
    again = job(tmp_path, "stopped", several, [*options, "train.eval_micro_size=5", "train.eval_samples=100"])
    run([whole, stopped, again], 2, tmp_path)
    seen = [[{k: v for k, v in r.items() if k[:5] in ("train", "eval/")} for r in records(tmp_path / name)]
            for name in ("whole", "stopped")]  # fmt: skip
    assert len(seen[0]) == len(seen[1]) == 3
    for wanted, got in zip(*seen, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_a_set_without_items_is_named(tmp_path: Path) -> None:
    best = (FP32, "checkpoint.best=eval/accuracy", "checkpoint.best_mode=max")
    jobs = [
        job(tmp_path, "no item", {"held_out": "no item"}, (FP32,), raises="DataError"),
        job(tmp_path, "no sample", {"held_out": "no sample"}, best, raises="TaskError"),
    ]
    out = run(jobs, 2, tmp_path)
    assert "eval_data()['none'] has no item" in out
    assert "eval_data()['none'] has no sample" in out, "and not that there is no eval/accuracy"
    assert not (tmp_path / "no sample" / "metrics.jsonl").exists()


class Numbers(IterableDataset[int]):
    sharded = False

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class OwnNumbers(Numbers):
    """Each rank has numbers of its own; ``World`` says which."""

    sharded = True


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_limit_takes_the_same_samples_in_every_world(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.train.evaluation.dist.all_reduce", lambda *_: None)  # each rank alone
    monkeypatch.setattr("launcher.train.evaluation.sending_device", lambda: CPU)

    def used(dataset: Any, limit: str = "7") -> list[int]:
        plan = make_plan(f"train.eval_samples={limit}", "train.eval_micro_size=2", "train.loader_workers=0")
        shares = [list(eval_batches(dataset, plan, World(r, ranks, r), CPU, list)) for r in range(ranks)]
        assert isinstance(dataset, Numbers) or len({len(share) for share in shares}) == 1
        return sorted(number for share in shares for batch in share for number in batch.data[: batch.samples])

    assert used(list(range(20))) == [0, 2, 5, 8, 11, 14, 17], "spread evenly"
    assert used(list(range(5))) == [0, 1, 2, 3, 4]
    assert used(Numbers()) == [0, 1, 2, 3, 4, 5, 6]
    assert len(used(OwnNumbers())) == 7
    assert used(list(range(20)), "null") == used(Numbers(), "null") == list(range(20))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({}, "eval_data() returned an empty dict.\n  Return None"),
        ({3: [1]}, "a dict with the key 3: a dict must contain data sets by their names"),
        ({"a/b": [1]}, "a dict with the key 'a/b'"),
        ({"": [1]}, "a dict with the key ''"),
        ([], "eval_data() has no sample: there is nothing to evaluate on.\n  Return None to have no evaluation."),
        (
            {"near": [1], "far": []},
            "eval_data()['far'] has no sample: there is nothing to evaluate on.\n  Leave it out.",
        ),
        (
            (Sequences(3, 1), Sequences(3, 2)),
            "eval_data() returned a tuple of Sequences, Sequences.\n  Return one data",
        ),
        ({"near": None}, "eval_data()['near'] is a NoneType: it must be a data set."),
    ],
)
def test_names_are_checked(returned: Any, words: str) -> None:
    task: Any = SimpleNamespace(eval_data=lambda: returned)
    with pytest.raises(TaskError, match=re.escape(words)):
        eval_sets(task, 0)


@pytest.mark.parametrize("returned", [{"train": [1]}, [Sequences(3, 1), Sequences(3, 2)]])
def test_training_data_is_one_set(returned: Any) -> None:
    task: Any = SimpleNamespace(train_data=lambda: returned)
    with pytest.raises(
        TaskError, match=r"train_data\(\) returned a (dict|list) of (list|Sequences, Sequences): it must"
    ):
        train_data(task, 0)


class Misspelt:
    def eval_dta(self) -> Any: ...
    def evaluate_all(self) -> Any: ...
    def optimiser(self, model: Any) -> Any: ...
    def ordered(self) -> Any: ...


class Inheriting(evaluation_tasks.Detector):
    def eval_dta(self) -> Any: ...
    def eval_dataset(self) -> Any: ...


def test_a_method_whose_name_is_close_to_an_optional_one_is_noted() -> None:
    assert near_misses(cast("Any", Misspelt())) == [
        "Misspelt has a method eval_dta, which the launcher does not call; did you mean eval_data?",
        "Misspelt has a method optimiser, which the launcher does not call; did you mean optimizer?",
    ]
    assert near_misses(cast("Any", evaluation_tasks.Detector())) == []
    (note,) = near_misses(cast("Any", Inheriting()))
    assert note.startswith("Inheriting has a method eval_dta,")


def test_one_set_and_none() -> None:
    data = [1, 2]
    assert eval_sets(cast("Any", SimpleNamespace(eval_data=lambda: data)), 0) == {"": data}
    assert eval_sets(cast("Any", SimpleNamespace(eval_data=lambda: None)), 0) == {}
    assert eval_sets(cast("Any", SimpleNamespace()), 0) == {}


def test_the_plan_builds_the_data_once_and_knows_the_sets() -> None:
    evaluation_tasks.BUILT.clear()
    fields = probe(inspection_of(f"{TASKS}.Detector", held_out="several"))
    assert fields["eval_sets"] == ("near", "far", "stream")
    assert evaluation_tasks.BUILT == ["train", "eval"]
