"""Texts and images that the model generates at each evaluation."""

from __future__ import annotations

import inspect
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from launcher.errors import ConfigError, TaskError
from launcher.rundir.files import write_text
from launcher.targets import find_target
from launcher.train.engine.engine import Engine
from launcher.train.evaluation import eval_mode

Sample = str | Tensor


class GeneratedSamples:
    """Samples of the model at each evaluation, in the run's directory as ``samples/step_000100/NAME.txt`` or ``.png``.

    The task's method ``sample(model)`` runs on every rank, because a sharded model needs all of them; rank 0's result
    is stored, and trackers show it. The model is in eval mode, without gradients. The method returns a text, an
    image, or a dict of several by name. An image is a tensor of shape [height, width], [1, height, width] or
    [3, height, width], in uint8, or in floating point from 0 to 1.

    Args:
        function: dotted path of a function to call as ``function(model)`` instead.
    """

    def __init__(self, function: str | None = None) -> None:
        self._function = function

    def on_start(self, engine: Engine) -> None:
        self.require_task(engine.owner, engine.plan.cluster.import_from)

    def require_task(self, task: object, search_path: Sequence[str]) -> Callable[[Any], Any]:
        """Return the function to call.

        Args:
            task: it may have a method ``sample``.
            search_path: directories of the user's code, for the message.

        Raises:
            ConfigError: there is no such function, or it takes other arguments.
            TaskError: the task's method is missing, or takes other arguments.
        """
        if self._function is None:
            method = getattr(task, "sample", None)
            if not callable(method):
                raise TaskError(
                    f"{type(task).__name__} has no method sample(model), which callbacks.GeneratedSamples calls.\n"
                    "  Add it, or name a function: {_target_: GeneratedSamples, function: "
                    "my_project.samples.generate}."
                )
            if problem := _not_callable_with_a_model(method):
                raise TaskError(f"The task's method must be sample(model): {problem}.")
            return cast("Callable[[Any], Any]", method)
        function = find_target("function", self._function, search_path, kind="function")
        if problem := _not_callable_with_a_model(function):
            raise ConfigError("function", self._function, f"is called as function(model): {problem}.")
        return function

    def on_evaluation(self, engine: Engine, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        sample = self.require_task(engine.owner, engine.plan.cluster.import_from)
        with eval_mode(engine, "") as model, engine.precision.autocast():
            result = sample(model)
        if engine.world.rank:
            return
        directory = engine.plan.paths.samples(engine.steps)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in _named(result):
            _write(directory, name, content)


def _not_callable_with_a_model(function: Any) -> str:
    """Return why ``function`` cannot be called with one argument; empty if it can."""
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        return str(error)
    except ValueError:  # built in C
        pass
    return ""


def _named(result: Any) -> Iterator[tuple[str, Sample]]:
    """Yield the name and content of each sample.

    Raises:
        TaskError: one is neither a text nor an image, or its name cannot be that of a file.
    """
    samples = cast("Mapping[str, Any]", result) if isinstance(result, Mapping) else {"sample": result}
    for name, content in samples.items():
        if not isinstance(content, str | Tensor):
            raise TaskError(
                f"sample(model) returned a {type(content).__name__} for {name!r}.\n"
                "  Return a text, an image tensor, or a dict of these by name."
            )
        if not name or not all(letter.isalnum() or letter in "_-. " for letter in name) or name.startswith("."):
            raise TaskError(f"sample(model) returned the name {name!r}: use letters, digits, spaces, _ - and dots.")
        yield name, content


def _write(directory: Path, name: str, content: Sample) -> None:
    if isinstance(content, str):
        write_text(directory / f"{name}.txt", content)
        return
    partial = directory / f".{name}.partial"
    partial.write_bytes(png(content))
    partial.replace(directory / f"{name}.png")


def png(image: Tensor) -> bytes:
    """Return an image as a PNG file.

    Args:
        image: [height, width], [1, height, width] or [3, height, width]; uint8, or floating point from 0 to 1.

    Raises:
        TaskError: it has another shape or dtype.
    """
    if image.ndim == 2:
        image = image[None]
    if image.ndim != 3 or image.shape[0] not in (1, 3) or not (image.dtype == torch.uint8 or image.is_floating_point()):
        raise TaskError(
            f"sample(model) returned a tensor of shape {list(image.shape)} and {image.dtype}, which is no image.\n"
            "  Return [height, width], [1, height, width] or [3, height, width], in uint8 or from 0 to 1."
        )
    if image.is_floating_point():
        image = (image.detach().float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    channels, height, width = image.shape
    rows = image.detach().cpu().permute(1, 2, 0).reshape(height, width * channels)
    # each row is preceded by the number of its filter, 0
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), rows], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(lines.flatten().tolist()))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
