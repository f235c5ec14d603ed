"""What a host shows that only takes part: the run's live view is on its first host."""

from __future__ import annotations

from rich.console import Console

from launcher.plan import LaunchPlan


class JoinedDisplay:
    """Says which part of which run this is, and nothing more while all goes well."""

    def __init__(self, plan: LaunchPlan, console: Console) -> None:
        self._console = console
        assert plan.cluster.place is not None
        first = plan.cluster.place.store.rpartition(":")[0]
        self.say(f"This is node {plan.node} of run {plan.run.name}: {plan.run.dir}; the live view is on {first}.")

    def refresh(self) -> None: ...

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None: ...
