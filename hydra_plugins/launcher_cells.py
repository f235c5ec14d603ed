"""Hydra's Launcher plugin of this project: any sweeper of Hydra's says which cells, and the rest is launcher/sweep/.

Hydra finds plugins in packages of this name, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class CellLauncher(Launcher):
    """Hands a sweeper's cells to whoever has called `launcher.config.hydra.run_with_config`, and their results back."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:  # noqa: ARG002
        from launcher.config import multirun

        self._config = config
        self._loader = hydra_context.config_loader = multirun.CellLoader(hydra_context.config_loader)
        multirun.confirm_size(self._loader, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:  # noqa: ARG002
        from launcher.config import multirun

        composed = [self._loader.load_sweep_config(self._config, list(overrides)) for overrides in job_overrides]
        return [self._returned(result) for result in multirun.begin(self._config, job_overrides, composed)]

    def _returned(self, result: Any) -> JobReturn:
        failed = isinstance(result, Exception)
        return JobReturn(status=JobStatus.FAILED if failed else JobStatus.COMPLETED, _return_value=result)
