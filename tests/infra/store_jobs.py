"""Sites that are jobs of their own, their store, and what follows from what they have sent."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from launcher.launch.network import free_port
from tests.helpers import launch_command, patience
from tests.infra import warm
from tests.infra.checkpoints import tensors
from tests.infra.runs import PROJECT
from tests.train.outer.test_outer_steps import JOB, events, parameters_in

ONE = ["cluster.workers_per_node=1"]
PACE = ["train.steps=40", "batch.micro_size=12", "outer.patience_s=5", *ONE]


class JobOfSite:
    """`launch` of one site, in a directory of its own."""

    def __init__(self, project: Path, site: int, sites: int, *more: str, store: str | None = None) -> None:
        self.site, self.directory = site, project / f"site{site}"
        shutil.copytree(PROJECT / "speech", self.directory / "speech")
        self.run = self.directory / "runs" / "r"
        self._words = [
            *JOB, f"outer.store={store or project / 'store'}", f"outer.sites={sites}", f"outer.site={site}",
            "run.name=r", "checkpoint.keep=null", *more,
        ]  # fmt: skip

    def start(self, *command: str) -> JobOfSite:
        words = command or ("train", *self._words)
        self.process = warm.Popen(
            launch_command(*words), cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self

    def finish(self, status: int = 0) -> str:
        output, _ = self.process.communicate(timeout=patience(180))
        assert self.process.returncode == status, output
        return output

    def processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def kill(self) -> None:
        """Kill `launch`, its agents and workers at once."""
        for process in self.processes():
            process.kill()
        self.process.communicate()

    def model(self, step: int) -> list[Tensor]:
        found = tensors(self.run / "checkpoints" / f"step_{step:06d}")
        return [found[f"model.layers.{number}.weight"] for number in range(4)]

    def steps(self) -> dict[int, list[Tensor]]:
        """Return the site's parameters after each of its steps."""
        seen = events(self.directory, self.site)
        return {each["of"]: parameters_in(each) for each in seen if each["event"] == "step"}


def shared_after(
    store: Path, start: list[Tensor], speed: list[Tensor] | None = None, since: int = 0
) -> dict[int, list[Tensor]]:
    """Return the shared parameters after each exchange, from what the sites have sent (fp64, without compression).

    Args:
        start, speed: shared parameters and momentum after step ``since``.
    """
    shared = torch.cat([value.flatten() for value in start])
    moving = torch.zeros_like(shared) if speed is None else torch.cat([value.flatten() for value in speed])
    after = {since: start}
    for exchange in sorted((store / "exchange").iterdir()):
        step = int(exchange.name.split(".")[0])
        if step <= since:
            continue
        members = json.loads((exchange / "members").read_text())["members"]
        mean = torch.stack([sent_in(exchange / f"site{site}") for site in members]).mean(0)
        moving = 0.9 * moving + mean
        shared = shared - 0.7 * (mean + 0.9 * moving)
        after[step] = [*shared.view(4, 8, 8)]
    return after


def sent_in(value: Path, dtype: torch.dtype = torch.float64) -> Tensor:
    length, _, rest = value.read_bytes().partition(b"\n")
    return torch.frombuffer(bytearray(rest[int(length) :]), dtype=dtype)


def assert_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


class Server:
    """`launch store` of a directory, always at one address."""

    def __init__(self, directory: Path, key: Path) -> None:
        self.key, self._directory, self._port = key, directory, free_port("127.0.0.1")
        self.address = f"https://127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        words = ("store", str(self._directory), "--key", str(self.key), "--listen", f"127.0.0.1:{self._port}")
        self.process = warm.Popen(launch_command(*words), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert "Serving" in self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def members(project: Path, step: int, fragment: int = 0, store: str = "store") -> list[int]:
    return json.loads((project / store / "exchange" / f"{step:08d}.{fragment}" / "members").read_text())["members"]


class Suspended:
    """Processes of a job that do nothing, as on a host that does not answer."""

    def __init__(self, job: JobOfSite) -> None:
        self._processes = job.processes()
        for process in self._processes:
            process.suspend()

    def end(self) -> None:
        for process in self._processes:
            process.resume()
