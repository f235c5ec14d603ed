"""Texts and images at each evaluation: as files, as W&B has them, and as a decoder reads them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from launcher.errors import TaskError
from launcher.extensions.callbacks.samples import png
from launcher.rundir.paths import RunPaths
from tests.conftest import Launch
from tests.infra.runs import OWN

JOB = [*(word for word in OWN if not word.startswith(("task.", "run.name"))), "task._target_=speech.hooked.Talking"]
JOB += ["callbacks=[{_target_: GeneratedSamples}]", "train.steps=4", "train.eval_every=2"]


def pixels(data: bytes) -> Tensor:
    """Decode a PNG without filters, [channels, height, width]."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = dict[bytes, bytes](), 8
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        chunks[kind] = data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(kind + chunks[kind])
        at += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    channels = {0: 1, 2: 3}[colour]
    rows = torch.tensor(list(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels).permute(2, 0, 1)


@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 5), (3, 2, 7)])
def test_images(shape: tuple[int, ...]) -> None:
    image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert pixels(png(image)).equal(image if len(shape) == 3 else image[None])
    assert pixels(png(image / 255)).equal(pixels(png(image)))
    assert pixels(png(torch.full(shape, 7.5))).min() == 255


@pytest.mark.parametrize("image", [torch.zeros(2), torch.zeros(4, 3, 3), torch.zeros(2, 2, dtype=torch.int64)])
def test_what_is_no_image(image: Tensor) -> None:
    with pytest.raises(TaskError, match="which is no image"):
        png(image)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_in_a_job(launch: Launch, project: Path) -> None:
    job = [*JOB, "strategy=fsdp", "run.name=samples"]
    assert (done := launch("train", *job)).returncode == 0, done.stderr
    paths = RunPaths(project / "runs" / "samples")
    for step in (2, 4):
        assert sorted(path.name for path in paths.samples(step).iterdir()) == ["colour.png", "grey.png", "text.txt"]
        assert (paths.samples(step) / "text.txt").read_text().startswith("<b>[[")
        colour = pixels((paths.samples(step) / "colour.png").read_bytes())
        assert colour.equal(torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4))
    # a run without samples takes the same steps
    assert launch("train", *job, "callbacks=[]", "run.name=without").returncode == 0
    one, other = ((project / "runs" / name / "checkpoints/step_000004") for name in ("samples", "without"))
    for path in one.glob("*.distcp"):
        assert path.read_bytes() == (other / path.name).read_bytes()

    wrong = launch("train", *JOB, "run.name=wrong", "task.wrong=true")
    assert wrong.returncode == 1
    assert (
        "Callback GeneratedSamples failed in on_evaluation: sample(model) returned a int for 'sample'" in wrong.stderr
    )
    without = launch("train", *JOB, "run.name=none", "task._target_=speech.tasks.Tagger")
    assert without.returncode == 2
    assert "Tagger has no method sample(model)" in without.stderr
    assert not (project / "runs" / "none").exists()
