"""`launch resume RUN key=value`: resume a run with changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launcher.cli import start
from launcher.cli.overrides import require_overrides
from launcher.errors import UserError
from launcher.plan.run_plan import RunPlan
from launcher.rundir import records
from launcher.rundir.paths import RunPaths
from launcher.runs import control
from launcher.runs.amendment import changed, replan
from launcher.runs.status import State

if TYPE_CHECKING:
    from rich.console import Console


def resume_changed(paths: RunPaths, overrides: list[str], console: Console, *, force: bool, wait: bool) -> int:
    """Resume a run with changes. All checks precede the first write; a plan that cannot be submitted is withdrawn."""
    require_overrides(overrides)
    if odd := [word for word in overrides if word[0] in "+~"]:
        raise UserError(
            f"{odd[0]}: launch resume changes keys that there are: key=value.\n  Leave the {odd[0][0]} out."
        )
    run = control.one(paths)
    old = control.to_change(run)
    if not isinstance(old, RunPlan):
        raise UserError(f"{run.name}: is a script of `launch run`, which takes no overrides.\n  Resume it as it is.")
    new = replan(paths, old, overrides, force=force, done=run.state is State.done)
    with changed(new.plan, new.yaml):
        if new.changed:
            console.print(f"{run.name} goes on with {new.words}.", markup=False, highlight=False)
            records.note_event(paths, "changed", **{each.key: f"{each.before} -> {each.after}" for each in new.changed})
        return start.go_on(new.plan, console, wait=wait)
