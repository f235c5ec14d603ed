"""`launch keys`: every key is there, with what its class or the schema says; the schema accepts what Hydra does."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launcher.cli import run
from launcher.cli.keys import launch_keys
from launcher.config.added_groups import option_files
from launcher.config.hydra import compose_with_yaml
from launcher.config.key_docs import class_keys, groups, schema_of
from launcher.config.schema import known_keys
from launcher.errors import EXIT_USER
from launcher.targets import find_target
from tests.conftest import Launch

TASKS = [*option_files("task")]
FILE = """
# @package _global_
defaults:
  - override /strategy: fsdp
  - override /task: llama
train: {steps: 10, epochs: null, clip_norm: 1}
checkpoint: {every: "${train.steps}"}
task: {size: 60m}
optimizer: {lr: 3.0e-4, groups: [{match: embed, lr: 1.0e-4}], rho: 0.9}
batch: {ramp: [[100, 16]], micro_size: auto}
cluster: {sbatch: {exclusive: true}, nodes: "2:4"}
trackers: [wandb, mlflow]
callbacks: [{_target_: mine.Callback}]
"""
MINE = '''
class Mine:
    """A task.

    Args:
        width: hidden units,
            in each layer.
    """

    def __init__(self, width: int = 3, dropout=0.1, *, name: str | None = None) -> None: ...
'''


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert launch_keys([*words]) == 0
    return capsys.readouterr().out


def test_every_key_of_the_schema_is_listed_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {key["name"]: key for key in json.loads(printed(capsys, "--json"))}
    groups_of_keys = {group.name for group in groups() if group.keys[0].name != group.name}
    expected = {name for name in known_keys() if not name.endswith(".kind")} - groups_of_keys
    assert {name for name in keys if not name.endswith(".ARGUMENT")} == expected
    assert all(key["meaning"] and key["type"] for key in keys.values())
    assert keys["train.seed"]["default"] == "0"
    assert keys["optimizer.lr"]["defaults"]["sgd"] == "0.1"
    assert keys["strategy.sync"]["values"][0] == "auto"


@pytest.mark.parametrize("task", TASKS)
def test_the_keys_of_a_task_are_the_arguments_of_its_class(task: str) -> None:
    target = yaml.safe_load(option_files("task")[task].read_text())["_target_"]
    found = class_keys("task", target)
    parameters = inspect.signature(find_target("task", target)).parameters
    assert [key.name for key in found] == [f"task.{name}" for name in parameters]
    assert [key.name for key in found if not key.meaning] == []


def test_the_keys_of_a_class_of_the_users(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = launch("keys", "task._target_=mine.Mine")
    lines = ["task.width = 3", "    integer. hidden units, in each layer.", "task.dropout = 0.1", "    number."]
    assert done.stdout.splitlines() == [*lines, "task.name", "    text."], done.stderr


def test_the_arguments_of_an_optimizer_are_without_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "optimizer._target_=torch.optim.Adagrad").splitlines()
    assert lines[0] == "optimizer.lr = 0.01"
    assert not any(line.startswith("optimizer.params") for line in lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.steps"], ["train.steps"]),
        (["nesterov"], ["optimizer.nesterov"]),
        (["powersgd", "rank"], ["powersgd.rank"]),
        (["task=llama", "kv"], ["task.kv_heads"]),
        (["Passes", "over"], ["train.epochs"]),  # in the meaning
        (["effective batch"], ["batch.global_size"]),  # another trainer's name
        (["gradient accumulation"], ["batch.global_size", "batch.accumulation"]),
    ],
)
def test_words_select_keys(words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [key["name"] for key in json.loads(printed(capsys, "--json", *words))] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian.steps"], "did you mean 'train.steps'?"),
        (["task=lama"], "Write task=bytes_gpt, "),
        (["task._target_=builtins.object"], "task._target_=builtins.object: the class has no arguments"),
        (["strategy=fsdp"], "names no class"),
        (["task._target_=nowhere.Task"], "no module 'nowhere'"),
        (["--schema", "train"], "Groups: cluster, strategy, precision"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_what_does_not_exist_is_one_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["keys", *words]) == EXIT_USER
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("gradient_accumulation_steps=4", "batch.global_size=N"),
        ("+training.max_steps=3", "train.steps=N"),
        ("optimizer.learning_rate=0.1", "optimizer.lr=X"),
        ("strategy=deepspeed", "did you mean 'fsdp'"),
        ("precision=bf16-mixed", "did you mean 'bf16'"),
        ("--max-steps=3", "train.steps=N"),
        ("--per_device_train_batch_size", "batch.micro_size=N"),
    ],
)
def test_a_name_of_another_trainer_is_translated(
    argument: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", argument]) == EXIT_USER
    assert answer in capsys.readouterr().err


def problems(schema: dict[str, Any], content: Any) -> list[str]:
    return [error.json_path for error in jsonschema.Draft7Validator(schema).iter_errors(content)]


def test_the_schema_is_one_and_accepts_every_file_of_conf(capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(printed(capsys, "--schema"))
    jsonschema.Draft7Validator.check_schema(whole)
    assert problems(whole, yaml.safe_load(compose_with_yaml([])[1])) == []
    assert problems(whole, yaml.safe_load(FILE)) == []
    strategy = schema_of(next(group for group in groups() if group.name == "strategy"))
    assert problems(strategy, {"defaults": ["fsdp", "_self_"], "sync": "every"}) == []
    assert problems(strategy, {"defaults": ["fsdp"], "snyc": "every"}) == ["$"]
    for group in groups():
        if group.options:
            schema = json.loads(printed(capsys, "--schema", group.name))
            for option, content in group.options.items():
                assert problems(schema, content) == [], (group.name, option)


@pytest.mark.parametrize(
    ("content", "places"),
    [
        ({"train": {"stpes": 3}}, ["$.train"]),
        ({"train": {"steps": "many"}}, ["$.train.steps"]),
        ({"train": {"steps": 1.5}}, ["$.train.steps"]),
        ({"strategy": {"sync": "sometimes"}}, ["$.strategy.sync"]),
        ({"trackers": [["wandb"]]}, ["$.trackers"]),
        ({"batches": {}}, ["$"]),
        ({"batch": 3}, ["$.batch"]),
    ],
)
def test_the_schema_refuses_what_the_launcher_refuses(content: dict[str, Any], places: list[str]) -> None:
    assert problems(schema_of(None), content) == places


def test_keys_of_an_option_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_option.py").write_text("class Task:\n    def __init__(self, depth: int = 3): ...\n")
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "deep.yaml").write_text("_target_: own_option.Task\n")
    assert launch_keys(["task=deep", "--config-dir", "conf"]) == 0
    assert capsys.readouterr().out.startswith("task.depth = 3")
    (tmp_path / "conf" / "task" / "deep.yaml").write_text("depth: 3\n")
    assert run(["keys", "task=deep", "--config-dir", "conf"]) == EXIT_USER
    assert "deep.yaml: has no _target_" in capsys.readouterr().err
    assert run(["keys", "task=deep", "--config-dir", "none"]) == EXIT_USER
