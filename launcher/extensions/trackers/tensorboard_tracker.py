"""TensorBoard, which reads event files."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.extensions.trackers.tracker_keys import TensorboardConfig
from launcher.plan.host import without_secrets
from launcher.plan.run_plan import RunPlan
from launcher.rundir.files import read_bytes
from launcher.trackers.tracker import StepEntry, Tracker, library, settings_of

_LENGTH, _CRC = struct.Struct("<Q"), 4  # of a record of an event file: length, its CRC, data, their CRC


class TensorboardTracker(Tracker):
    """TensorBoard's event files, one for each start.

    A step is one record of the file, written at once, with its scalars, texts and images: it is there or it is not.
    The last complete record says which step was delivered. Only files with ``MARK`` at the end of their names are read
    and repaired: the directory may contain event files of the user's own.
    """

    MARK = ".launcher"

    title, module, install = "TensorBoard", "tensorboard", "pip install 'samebatch[tensorboard]'"

    def __init__(self, plan: RunPlan, status: Mapping[str, Any]) -> None:
        super().__init__(plan, status)
        self._directory = Path(self.destination(plan, os.environ))
        self._file = self._directory
        self._step = 0

    @classmethod
    def destination(cls, plan: RunPlan, env: Mapping[str, str]) -> str:  # noqa: ARG003
        run, parent = Path(plan.run.dir), plan.extension(TensorboardConfig).dir
        return str(
            run / "tensorboard"
            if parent is None
            else (Path(plan.cluster.cwd) / parent / f"{run.name}-{plan.run.id}").resolve()
        )

    def open(self) -> dict[str, Any]:
        self._directory.mkdir(parents=True, exist_ok=True)
        files = sorted(self._directory.glob(f"events.out.tfevents.*{self.MARK}"))
        self._step = max((_last_step(file) for file in files), default=0)
        # readers take the files in the order of their names, which start with the time
        number = max([int(time.time()), *(int(file.name.split(".")[3]) + 1 for file in files)])
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}{self.MARK}"
        self._file = self._directory / name
        self._write(time.time(), 0, file_version="brain.Event:2")
        if not self._step:
            start = _session("session_start_info", settings_of(self.plan), group_name=self.plan.run.name)
            plan = _text_value("plan", json.dumps(without_secrets(json.loads(self.plan.to_json())), indent=2))
            self._write(time.time(), 0, summary={"value": [start, plan]})
        return {"delivered": self._step, "dir": str(self._directory)}

    def log(self, entries: Sequence[StepEntry]) -> None:
        value = library("tensorboard.compat.proto.summary_pb2").Summary.Value
        for entry in entries:
            values = [value(tag=name, simple_value=number) for name, number in entry.numbers.items()]
            values += [_text_value(name, text) for name, text in entry.texts.items()]
            values += [value(tag=name, image=_png_fields(file)) for name, file in entry.images.items()]
            self._write(entry.at, entry.step, summary={"value": values})
            self._step = entry.step

    def finish(self, summary: dict[str, Any]) -> None:
        statuses = library("tensorboard.plugins.hparams.api_pb2")
        done = summary.get("verdict") in ("done", "stopped")
        status = statuses.STATUS_SUCCESS if done else statuses.STATUS_FAILURE
        end = _session("session_end_info", {}, status=status, end_time_secs=time.time())
        text = _text_value("summary", json.dumps(summary, indent=2))
        # with the last step, which is read from a file's last record
        self._write(time.time(), self._step, summary={"value": [end, text]})

    def _write(self, at: float, step: int, **fields: Any) -> None:
        """Append an event to the file, in one call of the operating system.

        Raises:
            OSError: it was not written. What was written in part is removed.
        """
        event = library("tensorboard.compat.proto.event_pb2").Event(wall_time=at, step=step, **fields)
        masked_crc = library("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c
        data = event.SerializeToString()
        header = _LENGTH.pack(len(data))
        record = b"".join((header, struct.pack("<I", masked_crc(header)), data, struct.pack("<I", masked_crc(data))))
        with self._file.open("ab", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            if file.write(record) < len(record):
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))


def _session(part: str, hparams: dict[str, str | float | bool], **fields: Any) -> Any:
    """Return a summary value for the page of hyperparameters. TensorBoard's own function for it imports TensorFlow.

    Args:
        part: session_start_info or session_end_info.
    """
    metadata = library("tensorboard.plugins.hparams.metadata")
    data = library("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData(**{part: fields})
    for name, value in hparams.items():
        kind = "bool_value" if isinstance(value, bool) else "string_value" if isinstance(value, str) else "number_value"
        setattr(data.session_start_info.hparams[name], kind, value)
    return library("tensorboard.compat.proto.summary_pb2").Summary.Value(
        tag=getattr(metadata, f"{part.upper()}_TAG"), metadata=metadata.create_summary_metadata(data)
    )


def _text_value(name: str, text: str) -> Any:
    metadata = library("tensorboard.plugins.text.metadata")
    return library("tensorboard.compat.proto.summary_pb2").Summary.Value(
        tag=name,
        metadata=metadata.create_summary_metadata(display_name=name, description=""),
        tensor=library("tensorboard.util.tensor_util").make_tensor_proto([text.encode()], shape=[1]),
    )


def _png_fields(file: Path) -> dict[str, Any]:
    """Return the fields of a summary's image."""
    png = read_bytes(file)
    width, height, _, colour = struct.unpack(">IIBB", png[16:26])  # of the header chunk, which is the first
    return {
        "width": width,
        "height": height,
        "colorspace": {0: 1, 2: 3, 4: 2}.get(colour, 4),
        "encoded_image_string": png,
    }


def _last_step(file: Path) -> int:
    """Return the last step in an event file; 0 if there is none.

    An incomplete record at its end, of a process that was killed, is removed: readers would wait for the rest of it. A
    file without any record is deleted.
    """
    last, end = b"", 0
    with file.open("r+b") as events:
        size = events.seek(0, os.SEEK_END)
        start = length = 0
        while end + _LENGTH.size <= size:
            events.seek(end)
            (promised,) = _LENGTH.unpack(events.read(_LENGTH.size))
            if not promised or end + _LENGTH.size + promised + 2 * _CRC > size:
                break
            start, length = end + _LENGTH.size + _CRC, promised
            end = start + length + _CRC
        if end < size:
            events.truncate(end)
        if end:
            events.seek(start)
            last = events.read(length)
    if not end:
        file.unlink()
    return library("tensorboard.compat.proto.event_pb2").Event.FromString(last).step
