"""Tracebacks reduced to the frames of the user's own code: those of the launcher and of torch do not help a user.

The log of a rank has the whole traceback. Imports no torch.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import LauncherError, TaskError

_FRAME = re.compile(r'  File "(.*)", line \d+')


def is_users(filename: str) -> bool:
    """Return False for a file of the launcher, of torch, or of Python's import system."""
    own = f"{Path(__file__).resolve().parent}{os.sep}"
    torch = sys.modules.get("torch")
    others = (own, "<frozen", *(() if torch is None else (f"{Path(str(torch.__file__)).parent}{os.sep}",)))
    return not filename.startswith(others) and "importlib" not in filename


def users_frames(error: BaseException, *, or_all: bool = True) -> str:
    """Return the frames of the traceback that are in the user's code, and the line of a syntax error.

    Args:
        or_all: return all frames if there are neither; otherwise the result is empty then.
    """
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_users(frame.filename)]
    syntax = traceback.format_exception_only(error)[:-1] if isinstance(error, SyntaxError) else []
    return "".join(traceback.format_list(users or ([] if syntax or not or_all else frames)) + syntax).rstrip()


def users_traceback(text: str) -> str:
    """Return a formatted traceback without the frames that are not the user's.

    A part of a chain of exceptions in which no frame is the user's keeps all of its frames, unless another part has one
    of the user's.
    """
    kept: list[str] = []
    within, any_users = True, False
    for line in text.splitlines():
        if (frame := _FRAME.match(line)) is not None:
            within = is_users(frame[1])
            any_users |= within
        elif not line.startswith("    "):  # a heading, or the exception itself
            within = True
        if within:
            kept.append(line)
    return "\n".join(kept) if any_users else text


def in_one_line(text: str) -> str:
    """Return a message in one line, with the place of the innermost frame instead of the traceback."""
    kept: list[str] = []
    place, within = "", False
    for line in text.splitlines():
        if _FRAME.match(line) is not None:
            place, within = f" ({line.strip()})", True
        elif not (within and line.startswith("    ")):
            within = False
            kept += line.split()
    return " ".join(kept) + place


# texts of connections whose other end is gone, those of torch alone, and where its C++ raised them
LOST = re.compile(
    r"onnection (was |has been )?(likely )?(closed|reset|aborted|refused|lost)|Broken pipe|remote process exited"
)
OF_TORCH = re.compile(
    r"gloo|NCCL|c10d|TCPStore|Dist(Backend|Network|Store)Error|torch/distributed/|did not come together"
)
_PLACE = re.compile(r"^(\w+(\.\w+)*: )?(\[\S+:\d+\] ?)?")


def lost_connection(message: str) -> str:
    """Return torch's ``message`` for a rank whose peer is gone as one line; empty for any other error."""
    line = next((line for line in message.splitlines() if LOST.search(line)), None)
    if line is None or not OF_TORCH.search(message):
        return ""
    return f"lost the connection to another rank, which has ended or cannot be reached: {_PLACE.sub('', line)[:200]}"


@contextmanager
def task_method(signature: str) -> Generator[None]:
    """Raise TaskError, with the user's frames, for an exception of the task's method ``signature`` in the body."""
    try:
        yield
    except LauncherError:
        raise
    except Exception as error:
        raise TaskError(
            f"The task's {signature} raised {type(error).__name__}: {error}\n{users_frames(error)}"
        ) from error


def failure_in_loader(error: Exception) -> str:
    """Return the message for an exception in a loader process, of the dataset or of collate."""
    text = "\n  ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    text += "\n  Raised in a loader process by the dataset or collate"
    if frames := users_frames(error, or_all=False):
        return f"{text}:\n{frames}"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    if last and Path(last[0].filename).match("torch/utils/data/_utils/collate.py"):
        return f"{text}: by torch's default_collate, which makes the batches.\n  " + (
            "Give the task a method collate(samples) that pads or stacks them."
        )
    return (
        f"{text}, and not in a line of yours.\n"
        "  Check that collate(samples) takes one list of samples (besides self), and what the dataset returns."
    )
