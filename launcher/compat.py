"""Old module names used by jobs that the previous release queued; remove with the next release.

A job that waits at a site was submitted with the old names: its pickle (submitit's) names the function that runs on
each node, and its plan.json names a module that workers run with ``python -m``. It runs with the launcher that is
installed when it starts. A job that is running during the upgrade starts agents by their old names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

# old name -> new name; None: a package that only contained such modules
MOVED: dict[str, str | None] = {
    "launcher.cluster": None,
    "launcher.cluster.agent": "launcher.launch.agent",
    "launcher.cluster.script": "launcher.launch.script_worker",
    "launcher.cluster.slurm": None,
    "launcher.cluster.slurm.node": "launcher.launch.slurm.node",
    "launcher.launch.script": "launcher.launch.script_worker",
}


class _Finder(MetaPathFinder, InspectLoader):
    """Import hook that returns the new module under its old name: the same object, so that classes stay identical."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if fullname not in MOVED:
            return None
        return ModuleSpec(fullname, self, is_package=MOVED[fullname] is None)

    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        if new is not None:
            sys.modules[module.__name__] = importlib.import_module(new)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for ``python -m``."""
        new = MOVED[fullname]
        spec = None if new is None else importlib.util.find_spec(new)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            return None
        return spec.loader.get_code(spec.name)

    def get_source(self, fullname: str) -> str | None:  # noqa: ARG002
        return None

    def is_package(self, fullname: str) -> bool:
        return MOVED[fullname] is None


def install_old_names() -> None:
    """Make the old names importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
