"""Cells side by side: the share of each, how many run at a time, and what a failure or a stop leaves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.config.hydra import compose
from launcher.config.schema import Device
from launcher.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RESUMABLE,
    ConfigError,
    SiteError,
    UserError,
)
from launcher.plan import host
from launcher.plan.host import Site, gpu_names, measured_device
from launcher.plan.placement import solve_cluster, solve_env
from launcher.process import CELLS_AT_ONCE
from launcher.rundir import history
from launcher.rundir.paths import RunPaths
from launcher.sweeps import local_cells
from launcher.sweeps.local_cells import Share, run_cells, shares

# a cell that writes what it has, waits until there is a file "go", and ends with the status in its name
CELL = """
import json, os, signal, sys, time
run, asked = sys.argv[1], []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: asked.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2))
assert os.environ.get("HIP_VISIBLE_DEVICES") in (None, os.environ.get("CUDA_VISIBLE_DEVICES"))
has = (os.environ.get("CUDA_VISIBLE_DEVICES", "all"), os.environ["LAUNCHER_CELLS_AT_ONCE"], *sys.argv[3:])
for name, content in ("has", " ".join(has)), ("job.json", json.dumps({"submissions": [
    {"at": "", "host": "", "user": "", "pid": os.getpid()}]})):
    with open(f"{run}/{name}.part", "w") as file:
        file.write(content)
    os.rename(f"{run}/{name}.part", f"{run}/{name}")
while not asked and not os.path.exists("go"):
    time.sleep(0.01)
sys.exit(130 if signal.SIGINT in asked else 75 if asked else int(os.path.basename(run).partition("-")[2] or 0))
"""


class Machine:
    """Machine with four GPUs and eight cores, on which cells are processes that wait.

    Attributes:
        began: names of the cells that have started.
        said: messages to the user.
    """

    def __init__(self) -> None:
        self.began: list[str] = []
        self.said: list[str] = []

    def start(self, name: str, device: Device) -> Any:
        if name == "full":
            raise SiteError("the disk is full")
        self.began.append(name)
        paths = RunPaths(Path.cwd() / name)
        paths.root.mkdir()
        run = SimpleNamespace(dir=str(paths.root), name=name)
        return SimpleNamespace(cluster=SimpleNamespace(device=device, workers_per_node=1), run=run, paths=paths)

    def run(self, names: Sequence[str], watch: Callable[[], object], device: Device = Device.cuda) -> list[int]:
        """Run cells, four at a time. ``watch``: called when all that can run wait."""

        def alone(_: object) -> int:
            raise AssertionError

        return run_cells([partial(self.start, name, device) for name in names], 4, alone, watch, self.said.append)

    def has(self) -> list[str]:
        """Return what each cell has, in the order in which they have started."""
        return [(Path.cwd() / name / "has").read_text() for name in self.began]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_cells, "CELL", (sys.executable, "-S", "-c", CELL))
    monkeypatch.setattr(local_cells, "gpu_names", lambda _: ("4", "5", "GPU-a", "GPU-b"))
    monkeypatch.setattr(local_cells, "_WATCH_EVERY_S", 0.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    return Machine()


def test_a_failed_cell_leaves_the_others_and_each_has_its_share(machine: Machine) -> None:
    def watch() -> None:
        if not Path("go").exists():
            assert machine.began == ["a", "b-1", "c", "d"]
            assert machine.has() == ["4 4", "5 4", "GPU-a 4", "GPU-b 4"]
            Path("go").touch()

    assert sorted(machine.run(["a", "b-1", "c", "d", "e", "f-9"], watch)) == [0, 0, 0, 0, 1, 9]
    assert machine.began[4:] == ["e", "f-9"]
    assert {*machine.has()[4:]} <= {*machine.has()[:4]}


def test_cells_on_cpus_have_cores(machine: Machine) -> None:
    watch = Path("go").touch
    assert machine.run(["a", "b", "c"], watch, Device.cpu) == [EXIT_DONE] * 3
    assert machine.has() == ["all 3 0,1", "all 3 2,3", "all 3 4,5"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, EXIT_INTERRUPTED), (signal.SIGTERM, EXIT_RESUMABLE)])
def test_a_stop_ends_all_and_no_other_starts(machine: Machine, number: int, status: int) -> None:
    def watch() -> None:
        if not machine.said:
            os.kill(os.getpid(), number)

    assert {*machine.run(["a", "b", "c", "d", "e"], watch)} == {status}
    assert machine.began == ["a", "b", "c", "d"]
    assert len(machine.said) == 1


@pytest.mark.parametrize("visible", [("0", "1"), ()])
def test_cells_that_were_planned_for_other_gpus_do_not_share_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, visible: tuple[str, ...]
) -> None:
    monkeypatch.setattr(local_cells, "gpu_names", lambda _: visible)
    with pytest.raises(UserError, match=r"a: was planned for 1 GPU, and with sweep.at_once=4 each cell has 0 here"):
        machine.run(["a", "b"], Path("go").touch)
    assert machine.began == ["a"], "no other directory is made"
    assert not Path("a/has").exists()


def test_a_directory_that_cannot_be_made_ends_the_sweep_after_the_cells_that_run(machine: Machine) -> None:
    with pytest.raises(SiteError, match="disk is full"):
        machine.run(["a", "b", "full", "c"], Path("go").touch)
    assert machine.began == ["a", "b"]
    assert len(machine.has()) == 2


def test_a_killed_cell_has_failed(machine: Machine) -> None:
    def watch() -> None:
        if not Path("go").exists():
            (submission,) = history.submissions(RunPaths(Path.cwd() / "a"))
            assert submission.pid, "kill(0) would end all of pytest's group"
            os.kill(submission.pid, signal.SIGKILL)
            Path("go").touch()

    assert sorted(machine.run(["a", "b"], watch)) == [EXIT_DONE, EXIT_FAILED]


def test_hardware_threads_of_a_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_cells, "gpu_names", lambda _: ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    for core in range(8):
        place = tmp_path / f"cpu{core}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")
    assert shares(2, tmp_path) == [Share((), (0, 4, 1, 5)), Share((), (2, 6, 3, 7))]
    assert shares(3, tmp_path)[2] == Share((), (2, 6))
    assert shares(9, tmp_path) == [Share((), ())] * 9, "fewer cores than cells: all use all"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("0", "1", "2", "3")),
        ("3,1", ("3", "1")),
        ("GPU-0a, GPU-1b,void,2", ("GPU-0a", "GPU-1b")),
        ("MIG-a,MIG-b", ("MIG-a", "MIG-b")),  # a process sees one, and each cell can have another
        ("", ()),
    ],
)
def test_names_of_gpus(tmp_path: Path, visible: str | None, names: tuple[str, ...]) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_names(env, tmp_path, "2.13.0+cu130") == names


def test_names_of_gpus_of_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(host, "_gpus_of_torch", lambda _: 2)
    for env, names in (({}, "01"), ({"CUDA_VISIBLE_DEVICES": "3,1"}, "31"), ({"HIP_VISIBLE_DEVICES": "2,3"}, "23")):
        assert gpu_names({"ROCR_VISIBLE_DEVICES": "0,1,2,3"} | env, tmp_path, "2.13.0+rocm7") == tuple(names)
    both = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "2,3"}
    assert gpu_names(both, tmp_path, "2.13.0+rocm7") == ("2", "3")


def test_the_plan_of_a_cell_is_for_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "gpu_names", lambda _: tuple("01234567"))
    machine = Site(gpus=8, cores=32, cwd="/")

    def workers(at_once: int, *overrides: str) -> tuple[int, str]:
        cluster = compose(overrides).cluster
        site = machine.share(at_once, cluster.device)
        plan = solve_cluster(cluster, site, "run")
        threads = solve_env(plan, site).default
        assert threads["TORCHINDUCTOR_COMPILE_THREADS"] == threads["OMP_NUM_THREADS"]
        return plan.workers_per_node, threads["OMP_NUM_THREADS"]

    assert workers(4) == (2, "4")
    assert workers(3, "cluster.workers_per_node=1") == (1, "10")
    assert workers(16, "cluster.device=cpu") == (2, "1")
    with pytest.raises(ConfigError, match=r"sweep.at_once=16: this machine has 8 usable GPUs, and each cell needs one"):
        workers(16)
    with pytest.raises(
        ConfigError, match=r"(?s)workers_per_node=4: each of 4 cells at a time.*has 2 usable GPUs.*fewer"
    ):
        workers(4, "cluster.workers_per_node=4")


def test_a_device_beside_others_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_device("H100") == "H100"
    monkeypatch.setenv(CELLS_AT_ONCE, "3")
    assert measured_device("H100") == "H100, beside 2 other cells"
