"""The bundled tasks: what they say of themselves without torch is what they are."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import launcher
from launcher.errors import TaskError
from launcher.tasks.bytes_gpt import BytesGPT
from launcher.tasks.bytes_model import ByteWindows
from launcher.tasks.digits import Digits
from launcher.tracebacks import users_frames
from launcher.train.parallel.batchnorm import batch_norms
from launcher.train.parallel.mixed_precision import matmul_parameters
from launcher.train.parallel.shard_units import find_units


@pytest.mark.parametrize("size", [{}, {"width": 24, "depth": 3, "heads": 2, "seq_len": 50}])
def test_facts_are_true(size: dict[str, int]) -> None:
    task = BytesGPT(**size)
    facts = task.facts()
    assert facts["parameters"] == sum(p.numel() for p in task.model().parameters())
    require_true_products(facts, task.model())
    assert facts["samples"] == len(task.train_data())
    assert len(task.eval_data()) == 512


def require_true_products(facts: dict[str, int], model: torch.nn.Module) -> None:
    """Require that the facts count what linear and convolution layers hold, in all and in shard units."""
    held = matmul_parameters(model)
    in_units = {parameter for unit in find_units(model) for parameter in unit.parameters()}
    assert facts["matmul_parameters"] == sum(p.numel() for p in held)
    assert facts["unit_matmul_parameters"] == sum(p.numel() for p in held if p in in_units)


def test_samples_are_the_text(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"f{number:02}.py").write_text(f"file = {number}\n")
    task = BytesGPT(seq_len=16, corpus=str(tmp_path))
    train, held_out = task._files  # pyright: ignore
    assert len(train) + len(held_out) == 60
    assert held_out
    text = b"".join(path.read_bytes() for path, _ in train)
    data = task.train_data()
    for index in (0, 1, len(data) - 1):
        assert bytes(data[index].tolist()) == text[index * 16 : index * 16 + 17]


def test_samples_of_an_evaluation_are_spread_over_the_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(number // 16 for number in range(11 * 16 + 1)))
    windows = ByteWindows([tmp_path / "text"], 16, at_most=6)
    assert [int(windows[index][0]) for index in range(len(windows))] == [0, 1, 3, 5, 7, 9]


def test_the_untrained_loss_is_that_of_guessing() -> None:
    task = BytesGPT(width=32, depth=1, heads=1, seq_len=32)
    data = task.train_data()
    loss = task.loss(task.model(), torch.stack([data[i] for i in range(8)]))
    assert loss.items == 8 * 32
    assert loss.total.item() / loss.items == pytest.approx(5.55, abs=0.1)


def test_an_empty_corpus(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="0 training and 0 held-out"):
        BytesGPT(corpus=str(tmp_path)).facts()


def test_no_sample_for_an_evaluation(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task.eval_samples=0: must be at least 1"):
        BytesGPT(eval_samples=0)
    for number in range(60):
        (tmp_path / f"f{number:02}.py").write_text(f"file = {number:02}\n")
    longest = min(sum(size for _, size in files) for files in BytesGPT(seq_len=1, corpus=str(tmp_path))._files) - 1  # pyright: ignore
    assert len(BytesGPT(seq_len=longest, corpus=str(tmp_path)).eval_data()) == 1
    with pytest.raises(TaskError, match=rf"task.seq_len={longest + 1}: [^\n]*\n  Use at most {longest}, or"):
        BytesGPT(seq_len=longest + 1, corpus=str(tmp_path)).eval_data()


@pytest.mark.parametrize("size", [{}, {"width": 5}])
def test_facts_of_digits_are_true(size: dict[str, int]) -> None:
    task = Digits(**size)
    facts, model = task.facts(), task.model()
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    require_true_products(facts, model)
    assert facts["samples"] == len(task.train_data())
    assert len(task.train_data()) + len(task.eval_data()) == 1797
    assert facts["batch_norms"] == len(batch_norms(model)) == 2
    assert facts["unit_parameters"] == sum(p.numel() for unit in find_units(model) for p in unit.parameters())


def test_digits_are_digits() -> None:
    pixels, digits = Digits().train_data().tensors
    held_out = {tuple(image.flatten().tolist()) for image in Digits().eval_data().tensors[0]}
    assert pixels.shape == (1438, 1, 8, 8)
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert sorted(set(digits.tolist())) == list(range(10))
    assert not held_out & {tuple(image.flatten().tolist()) for image in pixels}
    loss = Digits().loss(Digits().model().eval(), (pixels[:50], digits[:50]))
    assert loss.items == 50
    assert loss.total.item() / 50 == pytest.approx(2.3, abs=0.1)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"momentum": 0.0}, {"momentum": 1.5}])
def test_impossible_digits(wrong: dict[str, float]) -> None:
    with pytest.raises(TaskError, match=f"task.{next(iter(wrong))}="):
        Digits(**wrong)  # pyright: ignore[reportArgumentType]


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.tasks.digits.find_spec", lambda _: None)
    with pytest.raises(TaskError, match="pip install scikit-learn"):
        Digits()


@pytest.mark.parametrize("package", [launcher, torch])
def test_frames_beside_a_package_are_the_users(package: ModuleType) -> None:
    folder = Path(str(package.__file__)).resolve().parent

    def run(file: str, name: str, code: str) -> None:
        exec(compile(f"def {name}():\n    {code}\n", file, "exec"), functions)

    functions: dict[str, Any] = {}
    run(f"{folder}_tasks/mine.py", "mine", "1 / 0")
    run(f"{folder}/module.py", "theirs", "mine()")
    with pytest.raises(ZeroDivisionError) as raised:
        functions["theirs"]()
    frames = users_frames(raised.value)
    assert f"{folder}_tasks/mine.py" in frames
    assert f"{folder}/module.py" not in frames


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_syntax.py").write_text("class A:\n    def model(self)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SyntaxError) as raised:
        importlib.import_module("broken_syntax")
    shown = users_frames(raised.value)
    assert f'File "{tmp_path}/broken_syntax.py", line 2' in shown
    assert "def model(self)" in shown
    assert "<frozen importlib" not in shown
