"""A real MLflow server with a database, which can be stopped and started again. Needs the package mlflow."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

import psutil

from launcher.launch.network import free_port
from tests.infra.runs import wait_for


class MlflowServer:
    """Server that stores its database and artifacts in ``directory``. A context: it is stopped at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self.uri = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def start(self) -> Self:
        """Start the server, and wait until it answers."""
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self._port),
            "--workers", "1", "--backend-store-uri", f"sqlite:///{self._directory}/mlflow.db",
            "--artifacts-destination", f"{self._directory}/artifacts",
        ]  # fmt: skip
        # a further process, for jobs that nothing here starts
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        wait_for(self._answers, "MLflow's server", 120)
        return self

    def kill(self) -> None:
        """Kill the server with its processes."""
        if self._process is None:
            return
        for child in psutil.Process(self._process.pid).children(recursive=True):
            child.kill()
        self._process.kill()
        self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self._port)) == 0
