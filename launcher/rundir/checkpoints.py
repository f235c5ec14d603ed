"""Choice of one of a run's checkpoints."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from launcher.errors import UserError
from launcher.quantities import first_names
from launcher.rundir.files import read_json
from launcher.rundir.paths import STATE, RunPaths


def choose_checkpoint(paths: RunPaths, *, step: int | None, best: bool) -> Path:
    """Return one of a run's checkpoints: that of ``step``, of the best evaluation, or the newest.

    Raises:
        UserError: there is no such checkpoint.
    """
    name, checkpoints = paths.root.name, paths.committed_checkpoints()
    if best and step is not None:
        raise UserError(f"step {step} and the best checkpoint of {name}: only one can be chosen.\n  Name one of them.")
    if not checkpoints:
        raise UserError(f"{name}: has no checkpoint yet.\n  `launch status {name}` shows the run's state.")
    if best:
        step = _best_step(paths, checkpoints)
    if step is None:
        return checkpoints[0]
    chosen = paths.checkpoint(step)
    if chosen not in checkpoints:
        steps = [each.name.removeprefix("step_").lstrip("0") or "0" for each in reversed(checkpoints)]
        which = ", that of its best evaluation" if best else ""
        raise UserError(
            f"{name} has no checkpoint of step {step}{which}.\n  It has those of steps {first_names(steps, 20)}."
        )
    return chosen


def _best_step(paths: RunPaths, newest_first: list[Path]) -> int:
    """Return the step of the best evaluation, from the summary or the newest readable checkpoint."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return int((read_json(paths.summary) or {})["best"]["step"])
    for checkpoint in newest_first:
        with suppress(OSError, ValueError, LookupError, TypeError):
            return int((read_json(checkpoint / STATE) or {})["run"]["account"]["best"]["step"])
    raise UserError(
        f"{paths.root.name} has no best checkpoint: it was trained without checkpoint.best, or has not been evaluated "
        "yet.\n  Use the newest checkpoint, or that of a step."
    )
