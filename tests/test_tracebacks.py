"""Tracebacks: the user's frames are shown, those of the launcher and of torch are not."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from launcher.errors import LauncherError, TaskError
from launcher.targets import find_target
from launcher.tracebacks import failure_in_loader, in_one_line, lost_connection, task_method, users_traceback


def raised(function: Any, *arguments: Any) -> Exception:
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def text_of(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def mine() -> None:
    torch.nn.Linear(7, 7)(torch.zeros(1))


def test_a_message_in_one_line_has_the_place_instead_of_the_traceback() -> None:
    def odd() -> None:
        raise ValueError("width is odd,\n  as it must not be")

    with pytest.raises(TaskError) as failed, task_method("model()"):
        odd()
    text = in_one_line(f"{failed.value}\n  Use an even one.")
    assert text.startswith(
        "The task's model() raised ValueError: width is odd, as it must not be Use an even one. (File "
    )
    assert text.endswith("in odd)")
    assert "raise" not in text.partition(" raised")[2]


def test_a_traceback_has_the_users_frames_alone() -> None:
    whole = text_of(raised(mine))
    short = users_traceback(whole)
    assert "torch/nn/modules" in whole
    assert "torch/nn/modules" not in short
    assert "in mine" in short
    lines = short.splitlines()
    assert (lines[0], lines[-1]) == (whole.splitlines()[0], whole.splitlines()[-1])
    theirs = text_of(raised(lambda: None, 1)).replace(__file__, torch.__file__)
    assert users_traceback(theirs) == theirs, "there is nothing else to show"


def test_a_chain_of_exceptions_keeps_its_parts() -> None:
    def outer() -> None:
        try:
            mine()
        except RuntimeError as error:
            error.add_note("While the third\n    indented thing was computed.")
            raise ValueError("in the end") from error

    short = users_traceback(text_of(raised(outer)))
    assert "The above exception was the direct cause" in short
    assert "While the third" in short
    assert short.rstrip().endswith("ValueError: in the end")


def test_a_lost_connection_is_one_line() -> None:
    gone = "lost the connection to another rank, which has ended or cannot be reached: Connection closed by peer"
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
    for text in (gloo, f"RuntimeError: {gloo}", f"{gloo}\nException raised from x at y.cpp:1\nframe #0: c10::Error"):
        assert lost_connection(text) == f"{gone} [10.0.0.2]:4711"
    assert lost_connection("DistBackendError: NCCL error: remote process exited or there was a network error")
    for other in ("Connection refused", "NCCL error: invalid usage", "ValueError: gloo", "CUDA error: out of memory"):
        assert lost_connection(other) == ""


def test_errors_in_loader_processes() -> None:
    samples = [torch.zeros(2), torch.zeros(3)]
    error = raised(default_collate, samples)
    assert error.__traceback__ is not None
    text = failure_in_loader(error.with_traceback(error.__traceback__.tb_next))
    assert "by torch's default_collate" in text
    assert text.splitlines()[-1] == "  Give the task a method collate(samples) that pads or stacks them."
    assert "File" not in text
    text = failure_in_loader(raised(lambda rows: rows[3], samples))
    assert text.startswith(
        "IndexError: list index out of range\n  Raised in a loader process by the dataset or collate:\n"
    )
    assert "in <lambda>" in text
    error = TypeError("C.collate() takes 1 positional argument but 2 were given")
    assert "and not in a line of yours.\n  Check that collate(samples) takes one list" in failure_in_loader(error)


def test_a_tasks_method_is_named() -> None:
    def enter(error: Exception) -> None:
        with task_method("optimizer(model)"):
            raise error

    error = raised(enter, KeyError("lr"))
    assert isinstance(error, TaskError)
    assert str(error).startswith("The task's optimizer(model) raised KeyError: 'lr'\n  File ")
    assert isinstance(raised(enter, LauncherError("own")), LauncherError)
    assert isinstance(raised(find_target, "key", "no_dots"), LauncherError)
    assert "write key=my_module.Task" in str(raised(find_target, "key", "__main__.Task"))
