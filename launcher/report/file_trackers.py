"""Adapters of the trackers that read files or a scrape endpoint: TensorBoard and Prometheus."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from launcher.plan.run_plan import RunPlan
from launcher.report.tracker_entry import StepEntry, settings_of

_LENGTH, _CRC = struct.Struct("<Q"), 4  # of a record of an event file: length, its CRC, data, their CRC


class TensorboardAdapter:
    """TensorBoard's event files, one for each start.

    A step is one record of the file, written at once, with its scalars, texts and images: it is there or it is not.
    The last complete record says which step was delivered.
    """

    def __init__(self, plan: RunPlan, status: dict[str, Any]) -> None:  # noqa: ARG002
        self._plan = plan
        self._directory = Path(plan.tensorboard.dir or Path(plan.run.dir, "tensorboard"))
        self._file: IO[bytes] | None = None
        self._step = 0

    def open(self) -> dict[str, Any]:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.hparams import summary

        self._directory.mkdir(parents=True, exist_ok=True)
        files = sorted(self._directory.glob("events.out.tfevents.*"))
        self._step = max((_last_step(file) for file in files), default=0)
        # readers take the files in the order of their names, which start with the time
        number = max([int(time.time()), *(int(file.name.split(".")[3]) + 1 for file in files)])
        name = f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (self._directory / name).open("ab", buffering=0)
        self._write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if not self._step:
            start = summary.session_start_pb(settings_of(self._plan), group_name=self._plan.run.name)
            text = json.dumps(json.loads(self._plan.to_json()), indent=2)
            start.value.extend(_text_summary("plan", f"    {text.replace(chr(10), chr(10) + '    ')}").value)
            self._write(event_pb2.Event(wall_time=time.time(), summary=start))
        return {"delivered": self._step, "dir": str(self._directory)}

    def log(self, entries: Sequence[StepEntry]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        for entry in entries:
            values = [summary_pb2.Summary.Value(tag=name, simple_value=v) for name, v in entry.numbers.items()]
            for name, text in entry.texts.items():
                values += _text_summary(name, text).value
            for name, file in entry.images.items():
                values.append(summary_pb2.Summary.Value(tag=name, image=_image(file)))
            summary = summary_pb2.Summary(value=values)
            self._write(event_pb2.Event(wall_time=entry.at, step=entry.step, summary=summary))
            self._step = entry.step

    def _write(self, event: Any) -> None:
        """Append one event, in one call of the operating system.

        Raises:
            OSError: it was not written, or in part; what is incomplete is removed.
        """
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        assert self._file is not None
        data = event.SerializeToString()
        header = _LENGTH.pack(len(data))
        crcs = [struct.pack("<I", masked_crc32c(part)) for part in (header, data)]
        before = self._file.tell()
        record = header + crcs[0] + data + crcs[1]
        if self._file.write(record) < len(record):
            self._file.truncate(before)
            raise OSError(28, os.strerror(28), str(self._directory))

    def finish(self, summary: dict[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.hparams import api_pb2
        from tensorboard.plugins.hparams import summary as hparams

        done = summary.get("verdict") in ("done", "stopped")
        end = hparams.session_end_pb(api_pb2.STATUS_SUCCESS if done else api_pb2.STATUS_FAILURE)
        text = json.dumps(summary, indent=2)
        end.value.extend(_text_summary("summary", f"    {text.replace(chr(10), chr(10) + '    ')}").value)
        # the last record of a file tells the last step
        self._write(event_pb2.Event(wall_time=time.time(), step=self._step, summary=end))
        assert self._file is not None
        self._file.close()


def _text_summary(name: str, text: str) -> Any:
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.text import metadata
    from tensorboard.util import tensor_util

    value = summary_pb2.Summary.Value(
        tag=name,
        metadata=metadata.create_summary_metadata(display_name=name, description=""),
        tensor=tensor_util.make_tensor_proto([text.encode()], shape=[1]),
    )
    return summary_pb2.Summary(value=[value])


def _image(file: Path) -> Any:
    from tensorboard.compat.proto import summary_pb2

    png = file.read_bytes()
    width, height, _, colour = struct.unpack(">IIBB", png[16:26])  # of the header chunk, which is the first
    return summary_pb2.Summary.Image(
        width=width, height=height, colorspace={0: 1, 2: 3, 4: 2}.get(colour, 4), encoded_image_string=png
    )


def _last_step(file: Path) -> int:
    """Return the last step in an event file; 0 if there is none.

    An incomplete record at its end, of a process that was killed, is removed: readers would wait for the rest of it. A
    file without any record is deleted.
    """
    from tensorboard.compat.proto import event_pb2

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
    return event_pb2.Event.FromString(last).step


class PrometheusAdapter:
    """Prometheus: a gauge for each metric of the newest record, on a scrape endpoint, in a file, or both.

    Names are those of the record after ``launcher_``, with _ for each character that Prometheus does not allow; the
    label ``name`` has the name itself.
    """

    def __init__(self, plan: RunPlan, status: dict[str, Any]) -> None:  # noqa: ARG002
        self._plan = plan
        self._entry: StepEntry | None = None
        self._verdict = "running"
        self._registry: Any = None

    def open(self) -> dict[str, Any]:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._registry.register(self)  # its ``collect`` is called for each scrape
        settings = self._plan.prometheus
        fields: dict[str, Any] = {"delivered": 0}
        if settings.port is not None:
            server, _ = start_http_server(settings.port, registry=self._registry)
            fields["url"] = f"http://{socket.gethostname()}:{server.server_port}/metrics"
        if settings.textfile is not None:
            fields["dir"] = settings.textfile
            self._write()
        return fields

    def collect(self) -> Iterator[Any]:
        """Yield the families of gauges that a scrape shows."""
        from prometheus_client.core import GaugeMetricFamily

        plan, entry = self._plan, self._entry  # one entry throughout, whatever another thread does
        run = {"run": plan.run.name, "id": plan.run.id}

        def gauge(name: str, meaning: str, values: dict[str, float], label: str) -> Any:
            family = GaugeMetricFamily(f"launcher_{name}", meaning, labels=[*run, label])
            for text, value in values.items():
                family.add_metric([*run.values(), text], value)
            return family

        yield gauge("run_verdict", "1 for the state of the run", {self._verdict: 1}, "verdict")
        yield gauge("run_info", "1", {plan.task.target: 1}, "task")
        if entry is None:
            return
        yield gauge("step", "Optimizer steps recorded", {"step": entry.step}, "name")
        families: dict[str, dict[str, float]] = defaultdict(dict)
        for name, value in entry.numbers.items():
            families[re.sub(r"[^a-zA-Z0-9_]", "_", name)][name] = value
        for name, values in families.items():
            yield gauge(name, f"{', '.join(values)} of the newest record", values, "name")

    def log(self, entries: Sequence[StepEntry]) -> None:
        self._entry = entries[-1]
        self._write()

    def finish(self, summary: dict[str, Any]) -> None:
        self._verdict = str(summary.get("verdict", "killed"))
        self._write()

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        if self._plan.prometheus.textfile is not None:
            write_to_textfile(self._plan.prometheus.textfile, self._registry)
