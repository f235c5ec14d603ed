"""What is refused of a sweep before any of its cells begins."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.config import ClusterKind
from launcher.errors import ConfigError, UserError
from launcher.sweeps.sweeper import AskedCell

_SHOWN = 4


def require_one_sweep(asked: Sequence[AskedCell]) -> None:
    """Raises ConfigError for what belongs to a single run, or has to be alike in all cells and is not."""
    for cell in asked:
        config = cell.config
        if config.run.name is not None:
            raise ConfigError(
                "run.name", config.run.name, "names one run, and a sweep has many.",
                "Use sweep.name; its runs are named by what varies.",
            )  # fmt: skip
        if config.cluster.kind is ClusterKind.hosts:
            raise ConfigError(
                "cluster", "hosts", "has no scheduler that could begin the cells of a sweep on all hosts.",
                "Use cluster=slurm, or type the command for each cell.",
            )  # fmt: skip
        first = asked[0].config
        for key in ("sweep.name", "sweep.at_once", "sweep.objective", "run.dir"):
            group, name = key.split(".")
            value = getattr(getattr(config, group), name)
            if value != getattr(getattr(first, group), name):
                raise ConfigError(key, value, "is one for all cells of a sweep.", "Leave it out of what varies.")
    config = asked[0].config
    if config.sweep.at_once is not None and config.cluster.kind is ClusterKind.local:
        raise ConfigError(
            "sweep.at_once", config.sweep.at_once, "has no effect with cluster=local.",
            "Leave it out: there one cell runs after the other.",
        )  # fmt: skip


def require_a_possible_one(asked: Sequence[AskedCell], wrong: Sequence[UserError | None]) -> None:
    """Raises UserError where no cell can run; in one message, which is the cells' own where they all say the same.
    ``wrong``: what is, with each cell."""
    errors = [error for error in wrong if error is not None]
    if len(errors) < len(asked):
        return
    problems = {str(error): words.overrides for error, words in zip(errors, asked, strict=True)}
    if len(problems) == 1:
        raise errors[0]
    lines = [f"{' '.join(overrides)}: {problem}" for problem, overrides in problems.items()]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    raise UserError("No cell of this sweep can run.\n  " + "\n  ".join([*lines[:_SHOWN], *more]))
