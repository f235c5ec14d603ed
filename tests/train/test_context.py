"""`launcher.current()`: what user code learns about its position in a job, and scalars of its own."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher
from launcher import Engine, make_plan
from launcher.errors import EngineMisuse
from launcher.train.context import ContextSource
from tests.conftest import Launch
from tests.infra.runs import OWN, records

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_engine_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.train.context._active", None)


def test_without_an_engine_one_message_says_where_it_works() -> None:
    with pytest.raises(EngineMisuse, match=r"where no engine runs.*\n.*constructor"):
        launcher.current()
    with ContextSource(CPU, seed=5).active():
        assert launcher.current().seed == 5
    with pytest.raises(EngineMisuse):
        launcher.current()


def test_a_source_is_not_kept_alive() -> None:
    ContextSource(CPU, seed=5).activate()
    with pytest.raises(EngineMisuse):
        launcher.current()


def test_a_context_is_a_frozen_snapshot() -> None:
    now = [1, 0]
    with ContextSource(CPU, 7, rank=1, world_size=4, progress=lambda: (now[0], now[1])).active():
        first = launcher.current()
        now[:] = [2, 1]
        second = launcher.current()
    assert (first.step, first.epoch, second.step, second.epoch) == (1, 0, 2, 1)
    assert (first.rank, first.world_size, first.device, first.evaluating) == (1, 4, CPU, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.step = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_scalars_of_rank_0_are_kept_until_they_are_taken() -> None:
    source = ContextSource(CPU, 0)
    value = torch.tensor([2.5], requires_grad=True)
    with source.active():
        launcher.current().log("a/b", 1)
        launcher.current().log("a/b", 2)
        launcher.current().log("tensor", value)
        with torch.no_grad():
            value.zero_()
        with source.evaluation():
            launcher.current().log("recall", True)
        with source.evaluation("news"):
            assert launcher.current().eval_set == "news"
            launcher.current().log("recall", 0.5)
    expected = {"task/a/b": 2.0, "task/tensor": 2.5, "task/eval/recall": 1.0, "task/eval/news/recall": 0.5}
    assert source.take_scalars() == expected
    assert source.take_scalars() == {}
    other = ContextSource(CPU, 0, rank=1, world_size=2)
    with other.active():
        launcher.current().log("a", 1)
    assert other.take_scalars() == {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("", 1.0, "a name is made of"),
        ("loss\n", 1.0, "a name is made of"),
        ("loss", torch.zeros(2), "shape \\[2\\]"),
        ("loss", "high", "is a str"),
        ("loss", None, "is a NoneType"),
        ("loss", 1j, "is a complex"),
    ],
)
def test_what_cannot_be_logged(name: str, value: Any, words: str) -> None:
    with ContextSource(CPU, 0).active(), pytest.raises(EngineMisuse, match=words):
        launcher.current().log(name, value)


def _call(send: Any) -> None:
    try:
        launcher.current()
    except EngineMisuse as error:
        send.send(str(error))


def test_a_loader_process_is_ahead_of_the_step() -> None:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with ContextSource(CPU, 0).active():
        process = context.Process(target=_call, args=(send,))
        process.start()
        assert "train.loader_workers=0" in receive.recv()
        process.join()


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_in_a_job(launch: Launch, project: Path) -> None:
    """100 samples in windows of 24, with 2 ranks and micro-batches of 3: 4 micro-batches in a full window."""
    job = [word for word in OWN if not word.startswith("task.")]
    job += ["task._target_=speech.hooked.Contextual", "train.epochs=2", "train.eval_every=5", "train.seed=3"]
    done = launch("train", *job, "train.loader_workers=0", "checkpoint.enabled=false", "precision=auto")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        lines = [json.loads(line) for line in (project / f"seen-{rank}.jsonl").read_text().splitlines()]
        assert {(each["rank"], each["size"], each["seed"]) for each in lines} == {(rank, 2, 3)}
        assert all(each["inside"] and each["device"] == "cpu" for each in lines)
        train = [each for each in lines if not each["evaluating"]]
        # the first window tries the loss, the third one looks for state that it carries
        passes = [9 + 4, 4, 5 + 4, *(4 if step % 5 else 1 for step in range(4, 11))]
        assert [each["step"] for each in train] == [step for step, count in enumerate(passes, 1) for _ in range(count)]
        assert [each["epoch"] for each in train] == [int(each["step"] > 5) for each in train]
        tried = range(9 + 4 + 4, 9 + 4 + 4 + 5)  # passes with values of the task's attributes of the first window
        assert all(each["collate"] == each["step"] for number, each in enumerate(train) if number not in tried)
        assert [each["step"] for each in lines if each["evaluating"]] == [0] + [5] * 4 + [10] * 4
    plan = json.loads((project / "runs" / "own" / "plan.json").read_text())
    assert plan["task"]["flops_per_sample"] is not None, "the inspection runs the loss, too"
    seen = [json.loads(line) for line in (project / "seen-0.jsonl").read_text().splitlines()]
    for record in records(project / "runs" / "own"):
        own = [each["longest"] for each in seen if each["step"] == record["step"] and not each["evaluating"]]
        assert record["task/lengths/longest"] == own[-1]
        assert "task/total" in record
        assert ("task/eval/total" in record) == ("eval/loss" in record)

    refused = launch("train", *job, "run.name=ahead", "checkpoint.enabled=false")
    assert refused.returncode == 1
    assert "train.loader_workers=0" in refused.stdout + refused.stderr


@pytest.mark.usefixtures("alone")
def test_in_a_loop_of_the_users_own() -> None:
    plan = make_plan(
        ["batch.global_size=4", "batch.micro_size=2", "train.steps=3", "train.loader_workers=0"], samples=4
    )
    model = torch.nn.Linear(1, 1)
    engine = Engine(model, torch.optim.SGD(model.parameters(), 0.1), plan)
    steps, between = list[int](), list[int]()
    for window in engine.windows(list(torch.ones(4, 1))):
        for batch in window:
            steps.append(launcher.current().step)
            launcher.current().log("last", len(steps))
            engine.backward(engine.model(batch).square().sum(), len(batch))
        engine.step()
        between.append(launcher.current().step)
    assert (steps, between) == ([1, 1, 2, 2, 3, 3], [1, 2, 3])
    assert engine.context.take_scalars() == {"task/last": 6.0}
