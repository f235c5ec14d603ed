"""Hydra plugins of this project: cells of any Hydra sweeper go to launcher/sweeps/, and extensions have options.

Hydra finds plugins only in packages of this name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class CellLauncher(Launcher):
    """Launcher that passes cells to the caller of `launcher.config.hydra.run_with_config` and returns their results."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:  # noqa: ARG002
        from launcher.config import multirun

        self._config = config
        self._loader = hydra_context.config_loader = multirun.CellLoader(hydra_context.config_loader)
        multirun.confirm_size(self._loader, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:  # noqa: ARG002
        from launcher.config import multirun

        composed = [self._loader.load_sweep_config(self._config, list(overrides)) for overrides in job_overrides]
        return [self._returned(result) for result in multirun.start_cells(self._config, job_overrides, composed)]

    def _returned(self, result: Any) -> JobReturn:
        failed = isinstance(result, Exception)
        return JobReturn(status=JobStatus.FAILED if failed else JobStatus.COMPLETED, _return_value=result)


class AddedOptions(SearchPathPlugin):
    """Search path that has the options of installed packages, after the launcher's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from launcher.config.added_groups import conf_dirs

        for place in conf_dirs()[1:]:
            search_path.append("launcher.config", f"file://{place}")
