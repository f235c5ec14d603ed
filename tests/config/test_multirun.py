"""Hydra's sweepers and the launcher: each cell's config is Hydra's own, and nothing begins by a slip."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
import pytest

from launcher.config import multirun
from launcher.config.hydra import compose, compose_with_yaml, run_with_config
from launcher.config.key_facts import typed
from launcher.config.multirun import RequestedCell, Result
from launcher.config.schema import Config
from launcher.errors import ConfigError, UserError
from tests.infra import composition


def cells_of(
    *arguments: str, confirmed: bool = False, keep: Callable[[Path], None] = lambda _: None
) -> list[RequestedCell]:
    """Return the cells that a sweeper asks for, in batches or all at once."""
    asked: list[RequestedCell] = []

    def take(cells: Sequence[RequestedCell], with_results: bool) -> Sequence[Result]:
        asked.extend(cells)
        return [cell.config.optimizer.lr if with_results else None for cell in cells]

    run_with_config("train", ["-m", *arguments], never, cells=take, confirmed=confirmed, keep=keep)
    return asked


def never(config: Config, yaml: str) -> int:
    raise AssertionError((config, yaml))


def test_each_cell_has_the_config_that_hydra_composes() -> None:
    """Groups, values, new keys, nulls and lists, in one sweep: the quick way and Hydra's own agree."""
    cells = cells_of(
        "optimizer=sgd,adamw", "batch.accumulation=1,2", "task.width=64,96", "cluster.setup=[A],[B,C]", "strategy=fsdp",
        "++task.depth=2", "train.clip_norm=null",
    )  # fmt: skip
    assert len(cells) == 16
    assert len({cell.overrides for cell in cells}) == 16
    for cell in cells:
        # of fixed overrides a cell does not speak: those are the whole sweep's
        assert not any("strategy" in word or "clip_norm" in word for word in cell.overrides)
        assert cell.config == compose(["strategy=fsdp", *cell.overrides, "task.depth=2", "train.clip_norm=null"]), (
            cell.overrides
        )


def test_a_wrong_type_in_any_cell_is_said_before_the_first_one() -> None:
    with pytest.raises(ConfigError, match=r"batch.accumulation: must be a whole number, not 'two'"):
        cells_of("batch.accumulation=1,two")
    with pytest.raises(ConfigError, match=r"did you mean 'batch.accumulation'"):
        cells_of("batch.acumulation=1,2")


@pytest.mark.parametrize(
    "arguments", [["train.seed=range(0,10000)"], ["train.seed=range(100)", "train.steps=range(1,101)"]]
)
def test_ten_thousand_cells_are_not_begun_by_a_slip(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"10,000 cells.*\n.*--yes"):
        cells_of(*arguments)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    answers = iter(["n", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(answers))
    for _ in range(2):
        with pytest.raises(UserError, match="Nothing was started"):
            cells_of(*arguments)


def test_many_cells_may_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multirun, "MANY_CELLS", 20)
    seen: list[int] = []

    def show(config: Config, yaml: str) -> int:  # noqa: ARG001
        seen.append(config.train.seed)
        return 0

    assert run_with_config("plan", ["-m", "train.seed=range(30)"], show) == 0
    assert seen == list(range(30))
    assert len(cells_of("train.seed=range(30)", confirmed=True)) == 30
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert len(cells_of("train.seed=range(30)")) == 30


@pytest.mark.parametrize("error", [ConfigError("batch.micro_size", 3, "is odd."), ValueError("of the verb's own")])
def test_what_a_verb_raises_is_not_put_in_other_words(error: Exception) -> None:
    def refuse(*_: object) -> Sequence[Result]:
        raise error

    with pytest.raises(type(error)) as raised:
        run_with_config("train", ["-m", "train.seed=1,2"], never, cells=refuse)
    assert raised.value is error


def test_a_sweeper_with_batches_gets_all_of_them() -> None:
    assert len(cells_of("train.seed=1,2,3,4,5", "hydra.sweeper.max_batch_size=2")) == 5


@pytest.mark.filterwarnings("ignore")  # Optuna's own, of its age
@pytest.mark.parametrize(("direction", "best"), [("minimize", min), ("maximize", max)])
def test_optuna_is_told_the_results(
    direction: str, best: Callable[[list[float]], float], capfd: pytest.CaptureFixture[str]
) -> None:
    kept: dict[str, str] = {}

    def keep(files: Path) -> None:
        kept.update({file.name: file.read_text() for file in files.glob("*.yaml")})

    cells = cells_of(
        "hydra/sweeper=optuna", "hydra.sweeper.n_trials=12", "hydra.sweeper.n_jobs=3", "hydra.sweeper.sampler.seed=1",
        f"hydra.sweeper.direction={direction}", "optimizer.lr=tag(log,interval(1e-4,1))", "train.steps=4",
        keep=keep,
    )  # fmt: skip
    assert len(cells) == 12
    rates = [cell.config.optimizer.lr for cell in cells]
    assert all(cell.overrides == (f"optimizer.lr={rate}",) for cell, rate in zip(cells, rates, strict=True))
    assert len(set(rates)) == 12
    assert f"best_value: {best(rates)}" in kept["optimization_results.yaml"]
    capfd.readouterr()  # Optuna's own lines


def test_the_plugin_is_found_where_hydra_looks(tmp_path: Path) -> None:
    """From another directory, without anything of the launcher's having been imported before."""
    code = (
        "from hydra.core.plugins import Plugins; from hydra.plugins.launcher import Launcher;"
        "print([c.__name__ for c in Plugins.instance().discover(Launcher)])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "CellLauncher" in said


VALUES = [
    None, True, 3, 1.0, 1e-4, "a", "a b", "a,b", "it's", "x\\'y", "back\\", "", "[x]", "null", "3", [1, None, "q,r"],
    {}, {"a": 1, "b": [{"c": "x y"}]},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_arrives_as_it_was_given(value: object) -> None:
    found = compose([f"task.word={typed(value)}"]).task["word"]
    assert (found, type(found)) == (value, type(value))


CASES = (
    (),
    ("strategy=fsdp", "precision=fp32", "batch.global_size=48", "train.steps=null", "run.calibrate_s=0.5"),
    ("precision=fp32", "train.steps=3", "strategy=fsdp", "train.steps=4"),
    ("strategy=hsdp", "strategy.shard_size=2", "batch.ramp=[[2,8],[1,16]]", "task.new=3", "task.width=64"),
    ("strategy=fsdp", "strategy=ddp"),
    ("cluster=slurm", "cluster.sbatch.comment='a, b'", "run.name=some name", "+task.more={a: 1}"),
)
REFUSED = tuple(
    (word,)
    for word in ("train.stepz=3", "train.steps=x", "strategy=none", "train.steps=1,2", "train.steps=[", "strategy.x=1")
)


def outcome(*overrides: str) -> object:
    try:
        return compose_with_yaml(overrides)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("overrides", [*CASES, *REFUSED], ids=" ".join)
def test_the_same_config_or_error(overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = outcome(*overrides)
    assert isinstance(wanted, str) == (overrides in REFUSED)
    monkeypatch.setattr(hydra, "compose", composition.compose)
    assert outcome(*overrides) == outcome(*overrides) == wanted
