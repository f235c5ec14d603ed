"""Texts and images that the model generates at each evaluation."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from launcher.errors import TaskError
from launcher.rundir.files import write_text
from launcher.targets import find_target
from launcher.train.engine.engine import Engine
from launcher.train.evaluation import eval_mode

Sample = str | Tensor


class GeneratedSamples:
    """Samples of the model at each evaluation, in the run's directory as ``samples/step_000100/NAME.txt`` or ``.png``.

    The task's method ``sample(model)`` runs on every rank, because a sharded model needs all of them; rank 0's result
    is stored, and W&B shows it. The model is in eval mode, without gradients. The method returns a text, an image, or
    a dict of several by name. An image is a tensor of shape [height, width], [1, height, width] or [3, height, width],
    in uint8, or in floating point from 0 to 1.

    Args:
        function: dotted path of a function to call as ``function(model)`` instead.
    """

    def __init__(self, function: str | None = None) -> None:
        self._function = function

    def on_start(self, engine: Engine) -> None:
        self._sample(engine)

    def _sample(self, engine: Engine) -> Callable[[Any], Any]:
        if self._function is not None:
            return find_target("function", self._function, engine.plan.cluster.import_from)
        method = getattr(engine.owner, "sample", None)
        if not callable(method):
            raise TaskError(
                f"{type(engine.owner).__name__} has no method sample(model).\n  Add it, or name a function: "
                "{_target_: launcher.callbacks.GeneratedSamples, function: my_project.samples.generate}."
            )
        return cast("Callable[[Any], Any]", method)

    def on_evaluation(self, engine: Engine, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        sample = self._sample(engine)
        with eval_mode(engine, "") as model, engine.precision.autocast():
            result = sample(model)
        if engine.world.rank:
            return
        directory = engine.plan.paths.samples(engine.steps)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in _named(result):
            _write(directory, name, content)


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
