"""A run that goes on with another plan than it had: both of them are kept."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from launcher.cluster import jobfile
from launcher.paths import write_text
from launcher.plan import LaunchPlan


@contextmanager
def changed(plan: LaunchPlan, config_yaml: str) -> Generator[None, None, None]:
    """Around sending off a run with another plan than it had: that one is kept beside, under the number of the
    submission that it was the last one for, and is put back where none comes about."""
    paths = plan.paths
    jobfile.require_nobody_runs(paths)
    number = max(0, len(jobfile.submissions(paths)) - 1)
    old, yaml = (file.read_text(encoding="utf-8") for file in (paths.plan, paths.config))
    try:
        write_text(paths.plan_until(number), old)
        write_text(paths.config_until(number), yaml)
        plan.save()
        write_text(paths.config, config_yaml)
        yield
    except BaseException:
        if all(submission.refused for submission in jobfile.submissions(paths)[number + 1 :]):
            # by rename: a full disk takes no new text, and the old one lies beside
            for kept, place in ((paths.config_until(number), paths.config), (paths.plan_until(number), paths.plan)):
                if kept.exists():
                    kept.replace(place)
        raise
