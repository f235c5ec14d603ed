"""TensorBoard's event files, read back by its own reader."""

from __future__ import annotations

import json
import math
import resource
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.extensions.callbacks.samples import png
from launcher.extensions.trackers.tensorboard_tracker import TensorboardTracker
from launcher.plan.run_plan import RunPlan
from launcher.trackers.tracker import StepEntry, entries_of
from tests.helpers import make_plan
from tests.infra.mirrored import differences, in_tensorboard, record_of, saved_plan

SAMPLES = "callbacks=[{_target_: GeneratedSamples}]"


def entries(plan: RunPlan, *steps: int) -> list[StepEntry]:
    return [*entries_of(plan, [json.dumps(record_of(step)) for step in steps], 0)]


def with_samples(plan: RunPlan, step: int) -> None:
    directory = plan.paths.samples(step)
    directory.mkdir(parents=True)
    (directory / "story.txt").write_text("once <upon>\na time")
    (directory / "face.png").write_bytes(png(torch.arange(12, dtype=torch.uint8).reshape(1, 3, 4)))
    (directory / ".story.txt.partial").write_text("")


def test_what_tensorboard_shows(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, "trackers=[tensorboard]", SAMPLES)
    with_samples(plan, 2)
    adapter = TensorboardTracker(plan, {})
    assert adapter.open() == {"delivered": 0, "dir": str(tmp_path / "tensorboard")}
    adapter.log(entries(plan, *range(1, 8)))
    adapter.finish({"verdict": "done", "train/loss": 0.5})
    seen = EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    tags = seen.Tags()
    assert set(tags["scalars"]) == {"train/loss", "progress/items", "train/acc@5", "time/total_s", "eval/held out/loss"}
    assert [event.step for event in seen.Scalars("train/loss")] == [*range(1, 8)]
    assert math.isnan(seen.Scalars("train/acc@5")[-1].value)
    (image,) = seen.Images("samples/face")
    assert (image.step, image.width, image.height) == (2, 4, 3)
    assert image.encoded_image_string == (plan.paths.samples(2) / "face.png").read_bytes()
    (text,) = seen.Tensors("samples/story")
    assert (text.step, text.tensor_proto.string_val[:]) == (2, [b"once <upon>\na time"])
    assert json.loads(seen.Tensors("summary")[0].tensor_proto.string_val[0])["verdict"] == "done"
    assert b'"global_size": 64' in seen.Tensors("plan")[0].tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in seen.summary_metadata


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_record_that_was_cut_off_is_sent_again(cut: int, tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, "trackers=[tensorboard]")
    TensorboardTracker(plan, {}).open()
    adapter = TensorboardTracker(plan, {})
    adapter.open()
    adapter.log(entries(plan, 1, 2, 3))
    last = sorted((tmp_path / "tensorboard").iterdir())[-1]
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - cut)
    again = TensorboardTracker(plan, {})
    assert again.open()["delivered"] == 2
    again.log(entries(plan, 3, 4))
    assert differences(in_tensorboard(tmp_path / "tensorboard"), 4, single=True) == []
    again.finish({})
    assert TensorboardTracker(plan, {}).open()["delivered"] == 4


def test_a_full_disk_leaves_no_part_of_a_record(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, "trackers=[tensorboard]")
    adapter = TensorboardTracker(plan, {})
    adapter.open()
    adapter.log(entries(plan, 1))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (adapter._file.stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            adapter.log(entries(plan, 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = TensorboardTracker(plan, {})
    assert again.open()["delivered"] == 1
    assert differences(in_tensorboard(tmp_path / "tensorboard"), 1, single=True) == []


def test_event_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    plan = saved_plan(tmp_path, "trackers=[tensorboard]")
    own = tmp_path / "tensorboard" / "events.out.tfevents.of.mine"
    empty = own.with_name("events.out.tfevents.9999999999.host.1.0")
    own.parent.mkdir()
    other = TensorboardTracker(plan, {})
    other._file = own
    other._write(0.0, 99)
    part = own.read_bytes() * 2 + b"in part"
    own.write_bytes(part)
    empty.touch()
    adapter = TensorboardTracker(plan, {})
    assert adapter.open()["delivered"] == 0
    adapter.log(entries(plan, 1))
    assert TensorboardTracker(plan, {}).open()["delivered"] == 1
    assert (own.read_bytes(), empty.read_bytes()) == (part, b"")


def test_the_directory_is_absolute_and_of_this_run() -> None:
    assert TensorboardTracker.destination(make_plan("tensorboard.dir=tb"), {}) == "/nowhere/tb/run-abcd1234"
    assert TensorboardTracker.destination(make_plan(), {}) == "/nowhere/run/tensorboard"
