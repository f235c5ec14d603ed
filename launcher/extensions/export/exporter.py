"""Process of `launch export`: writes the tensors of a checkpoint as safetensors files, one tensor at a time, and what
`from_pretrained` needs beside them.

Reads an ExportRequest from standard input; writes the answer to the file named on the command line.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.errors import ExportFailed, LauncherError, UserError
from launcher.extensions.export.model_files import ExportedModel, ExportNames
from launcher.extensions.export.request import ExportRequest
from launcher.extensions.export.safetensors_file import (
    TensorEntry,
    require_known_dtypes,
    split_into_files,
    verify_safetensors,
    write_index,
    write_safetensors,
)
from launcher.process import die_with_parent, exit_at_once
from launcher.quantities import bytes_text
from launcher.rundir.files import sync_directory, value_from_json
from launcher.task import Task, build_model, load_task
from launcher.tracebacks import users_frames
from launcher.train.checkpoint.file_format import require_intact
from launcher.train.checkpoint.initial import model_state, overflows, plain_name
from launcher.train.checkpoint.weights import CheckpointWeights
from launcher.train.inspection.built_task import build_inspected

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SPARE = 10_000_000  # bytes, for the files beside the tensors


def export(request: ExportRequest) -> dict[str, Any]:
    """Write the files, and return the fields of ``Exported`` that describe them.

    Raises:
        UserError: the checkpoint is damaged, or has no such model.
        ExportFailed, OSError: a file could not be written.
    """
    checkpoint, directory = Path(request.checkpoint), Path(request.directory)
    require_intact(checkpoint)
    task = load_task(request.target, request.params, request.import_from, request.seed) if request.target else None
    model = None if task is None else _model_of(task, request)
    tensors = _Tensors(request, CheckpointWeights(checkpoint), model)
    entries = tensors.entries()
    require_known_dtypes(entries)
    _require_room(directory, sum(entry.nbytes for entry in entries))
    files = split_into_files(entries, request.shard_bytes, tensors.layout.stem)
    checksums: dict[str, int] = {}
    for name, its in files.items():
        own = {alias: kept for alias, kept in tensors.layout.tied.items() if kept in {entry.name for entry in its}}
        checksums |= write_safetensors(directory / name, its, {"format": "pt", **own}, tensors.read)
    if len(files) > 1:
        write_index(directory, files)
    if model is not None and task is not None:
        model.write_files(directory, task, tensors.common_dtype())
    hook: Callable[[nn.Module, Path], object] | None = getattr(task, "export", None)
    if task is not None and callable(hook):
        hook(_whole_model(task, request.seed, tensors), directory)
    _sync(directory)
    for name, its in files.items():
        verify_safetensors(directory / name, its, checksums)
    written = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        "files": [str(path.relative_to(directory)) for path in written],
        "bytes": sum(path.stat().st_size for path in written),
        "tensors": len(entries),
        "tied": tensors.layout.tied,
    }


def _model_of(task: Task, request: ExportRequest) -> ExportedModel:
    return ExportedModel(build_inspected(task, request.target, request.seed), merge_lora=request.merge_lora)


def _require_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed + _SPARE:
        raise UserError(
            f"{directory.parent} has {bytes_text(free)} of free space, and the export needs {bytes_text(needed)}.\n"
            "  Free space, or export to another disk; --dtype bf16 halves a model in fp32."
        )


class _Tensors:
    """Tensors to export, read from a checkpoint.

    Args:
        model: the run's model without values; None: not known, and the checkpoint's names are used.

    Attributes:
        layout: the names.
    """

    def __init__(self, request: ExportRequest, weights: CheckpointWeights, model: ExportedModel | None) -> None:
        self._weights, self._model, self._dtype = weights, model, _DTYPES.get(request.dtype or "")
        self._format = request.dtype
        self._averages: CheckpointWeights | None = None
        if not weights.tensors:
            raise UserError(f"{request.checkpoint} has no tensors of a model.")
        if weights.others:
            print(f"Not exported, because they are no tensors: {', '.join(weights.others)}.", file=sys.stderr)
        if model is not None and (problems := model.misfits(weights.tensors, weights.others)):
            raise UserError(
                f"{request.checkpoint} does not fit the model that task._target_={request.target} makes now:\n  "
                + "\n  ".join(problems)
                + "\n  Export with the code and the configuration of the run."
            )
        if request.averages is not None:
            self._averages = CheckpointWeights(Path(request.checkpoint), f"callbacks.{request.averages}/averages/")
            if not self._averages.tensors:
                raise UserError(f"--ema: {request.checkpoint} has no averages of {request.averages}.")
        self.layout = (
            ExportNames({name: name for name in weights.tensors}) if model is None else model.layout(weights.tensors)
        )

    def entries(self) -> list[TensorEntry]:
        """Return the tensors to write, in the order of the checkpoint."""
        stored = self._weights.tensors
        return [
            TensorEntry(name, stored[source].shape, self._dtype_of(source))
            for name, source in self.layout.sources.items()
        ]

    def _dtype_of(self, source: str) -> torch.dtype:
        stored = self._weights.tensors[source].dtype
        convertible = stored.is_floating_point and stored.itemsize > 1  # not the 8-bit formats of quantized models
        return self._dtype if self._dtype is not None and convertible else stored

    def common_dtype(self) -> torch.dtype:
        """Return the dtype of the first floating-point tensor, which is that of the model for Hugging Face."""
        dtypes = map(self._dtype_of, self.layout.sources.values())
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)

    def read(self, entry: TensorEntry) -> Tensor:
        """Return the values to write."""
        value = self.value(self.layout.sources[entry.name], self.layout.aliases.get(entry.name, ()))
        if self._model is not None:
            value = self._model.complete(entry.name, value, self.value)
        converted = value.to(entry.dtype)
        if overflows(value, converted):
            raise UserError(
                f"--dtype {self._format}: {entry.name} has values that are infinite in it.\n"
                "  Use --dtype bf16, or leave --dtype out."
            )
        return converted

    def value(self, source: str, aliases: Sequence[str] = ()) -> Tensor:
        """Return a tensor of the checkpoint: its average, if averages are exported.

        Args:
            aliases: further names of it.
        """
        if self._averages is not None:
            for name in (source, *aliases):
                if name in self._averages.tensors:
                    return self._averages.read(name)
        return self._weights.read(source)


def _whole_model(task: Task, seed: int, tensors: _Tensors) -> nn.Module:
    """Return the task's model with the exported values, on the CPU and in eval mode."""
    model = build_model(task, seed)
    layout, state = tensors.layout, model_state(model)
    with torch.no_grad():
        for (name, *_), target in state.named:
            kept = layout.tied.get(name, name)
            target.copy_(tensors.value(layout.sources.get(kept, name), layout.aliases.get(kept, ())))
    extra = {name: source for name in state.extra if (source := layout.sources.get(plain_name(name))) is not None}
    if extra:
        model.load_state_dict({name: tensors.value(source) for name, source in extra.items()}, strict=False)
    return model.eval()


def _sync(directory: Path) -> None:
    """Make all files durable."""
    for path in (*directory.rglob("*"), directory):
        sync_directory(path)  # and files: an fsync of what it opens


def _answer(request: ExportRequest) -> dict[str, Any]:
    try:
        return export(request)
    except LauncherError as error:
        return {"error": str(error), "user": not isinstance(error, ExportFailed)}
    except OSError as error:
        if str(error.filename).startswith(request.checkpoint):
            text = f"{request.checkpoint} cannot be read: {error}.\n  A run that continues deletes old checkpoints."
            return {"error": text, "user": True}
        return {"error": f"the export could not be written: {error}.\n  Nothing of it is left.", "user": False}
    except pickle.UnpicklingError as error:
        return {"error": f"{request.checkpoint} cannot be read: {error}.", "user": True}
    except Exception as error:  # user code may raise anything
        text = f"task._target_={request.target}: {type(error).__name__}: {error}\n{users_frames(error)}"
        return {"error": text, "user": False}


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    request = value_from_json(ExportRequest, json.load(sys.stdin))
    Path(sys.argv[1]).write_text(json.dumps(_answer(request)), encoding="utf-8")


if __name__ == "__main__":
    main()
    exit_at_once()  # threads that the task has started may never end
