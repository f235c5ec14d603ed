"""Request of an export: which checkpoint, to where. Runs the export in a process of its own. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import secrets
import shutil
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import ExportFailed, UserError
from launcher.plan.callback_plan import installed_callback, name_of
from launcher.plan.run_plan import RunPlan
from launcher.plan.task_inspection import run_probe
from launcher.process import signal_handler
from launcher.quantities import first_names
from launcher.rundir.checkpoints import choose_checkpoint
from launcher.rundir.files import sync_directory
from launcher.rundir.paths import RunPaths

DTYPES = ("fp32", "bf16", "fp16")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Input of the process that exports.

    Attributes:
        checkpoint: its directory.
        directory: where the files are to be written; it exists and is empty.
        target, params: of the task; an empty target: there is none.
        import_from: directories of the user's modules.
        averages: name of the callback whose averages are used; None: the parameters.
        shard_bytes: largest size of a file.
    """

    checkpoint: str
    directory: str
    target: str
    params: dict[str, Any]
    import_from: tuple[str, ...]
    seed: int
    averages: str | None
    merge_lora: bool
    dtype: str | None
    shard_bytes: int


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        tied: names that are left out because they are another name's tensor, with that name.
    """

    run: str
    step: int
    directory: str
    files: list[str]
    bytes: int
    tensors: int
    tied: dict[str, str]


def export_run(
    paths: RunPaths, to: Path, *, step: int | None, best: bool, ema: bool, merge_lora: bool, dtype: str | None,
    max_shard_size: str,
) -> Exported:  # fmt: skip
    """Write the model of one of a run's checkpoints to the directory ``to``, and return what was written.

    The files are written to a temporary directory beside it, which is renamed when they are complete.

    Args:
        step: optimizer step of the checkpoint; None: the newest.
        best: the checkpoint of the best evaluation.
        ema: the averages of the callback Ema in place of the parameters.
        merge_lora: adapters of peft are merged into the model.
        dtype: format of floating-point tensors; None: that of the checkpoint.
        max_shard_size: largest file, such as 5GB.

    Raises:
        UserError: the run has no such checkpoint, it is damaged, or ``to`` is not empty.
        ExportFailed: a file could not be written.
    """
    plan = RunPlan.of_record(paths)
    if plan is None:
        raise UserError(f"{paths.root.name}: is a script of `launch run` without checkpoints of the engine.")
    checkpoint = choose_checkpoint(paths, step=step, best=best)
    averages = _name_of_averages(plan) if ema else None
    shard_bytes = parse_size("--max-shard-size", max_shard_size)
    target = require_free(to)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir()
    except OSError as error:
        raise UserError(f"--to {to}: {partial.parent} cannot be written: {error.strerror}.") from None
    request = ExportRequest(
        checkpoint=str(checkpoint), directory=str(partial), target=plan.task.target, params=plan.task.params,
        import_from=plan.cluster.import_from, seed=plan.train.seed, averages=averages, merge_lora=merge_lora,
        dtype=dtype, shard_bytes=shard_bytes,
    )  # fmt: skip
    try:
        with signal_handler((signal.SIGTERM, signal.SIGHUP), _interrupt):
            result = run_probe("launcher.extensions.export.exporter", json.dumps(dataclasses.asdict(request)))
        if result is None:
            raise ExportFailed(f"{paths.root.name}: the process that exports ended early; its output is above.")
        if "error" in result:
            raise (UserError if result["user"] else ExportFailed)(f"{paths.root.name}: {result['error']}")
        try:
            partial.rename(target)
            sync_directory(target.parent)
        except OSError as error:
            raise ExportFailed(f"--to {to}: cannot be created: {error.strerror}.") from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    written = int(checkpoint.name.removeprefix("step_"))
    return Exported(run=paths.root.name, step=written, directory=str(target), **result)


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def _name_of_averages(plan: RunPlan) -> str:
    """Return the name of the callback with averages, as checkpoints have it: of several, the one that is evaluated."""
    counts, names = Counter[str](), dict[str, bool]()
    for entry in plan.callbacks:
        kind = name_of(entry)
        counts[kind] += 1
        if (installed := installed_callback(entry)) is not None and installed.averages:
            name = kind if counts[kind] == 1 else f"{kind}_{counts[kind]}"
            names[name] = entry.get("evaluate") is not False
    evaluated = [name for name, is_evaluated in names.items() if is_evaluated]
    chosen = evaluated or list(names)
    if not chosen:
        raise UserError(
            f"--ema: {plan.run.name} has no averages: it was trained without the callback Ema.\n  Leave --ema out."
        )
    if len(chosen) > 1:
        raise UserError(f"--ema: {plan.run.name} has averages of {first_names(chosen)}, and evaluates none of them.")
    return chosen[0]


def parse_size(key: str, text: str) -> int:
    """Return the bytes of a size such as 5GB, 500MB or 2GiB.

    Raises:
        UserError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS or float(match[1]) * _UNITS[match[2]] < 1:
        raise UserError(f"{key} {text}: must be a size above 0, such as 5GB, 500MB or 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def require_free(to: Path) -> Path:
    """Return the absolute path of the directory to write.

    Raises:
        UserError: it exists and is not an empty directory, or its parent does not exist.
    """
    target = Path(os.path.abspath(to)).resolve()  # noqa: PTH100 (.. of a path that does not exist)
    if not target.parent.is_dir():
        raise UserError(f"--to {to}: there is no directory {target.parent}.\n  Create it, or choose another path.")
    if not target.exists():
        return target
    if not target.is_dir():
        raise UserError(f"--to {to}: is a file.\n  Choose another path.")
    if any(target.iterdir()):
        raise UserError(f"--to {to}: is not empty, and nothing in it is replaced.\n  Choose another path, or empty it.")
    return target
