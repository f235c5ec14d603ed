"""Checks of the doctor: each in each of its states, from made-up facts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from launcher.config.choices import WandbMode
from launcher.config.schema import ClusterConfig, Config, Device
from launcher.extensions.doctor import host_checks, slurm_checks
from launcher.extensions.doctor.bandwidth import KINDS, Sample
from launcher.extensions.doctor.check import Check, CheckState, exit_status, failure, merge, ok, warning
from launcher.extensions.doctor.examination import judge_hosts
from launcher.extensions.doctor.slurm_checks import ProbeJob
from launcher.launch.slurm.client import SlurmJob
from launcher.plan.host import Partition
from tests.helpers import make_plan

PACKAGES = {
    "launcher": "0.1.0", "torch": "2.13.0", "hydra-core": "1.3.8", "wandb": "0.31.0", "submitit": "1.5.4",
    "rich": "15.0.0", "numpy": "2.4.6",
}  # fmt: skip
RUNS = Path("/shared/runs")


def facts(**other: Any) -> dict[str, Any]:
    return {
        "host": "login", "python": "3.11.7", "executable": "/env/bin/python", "package_dir": "/env/launcher",
        "packages": PACKAGES, "devices": 0, "gpu_use": None, "shm_bytes": 8 * 10**9,
        "open_files": 65536, "no_compiler": {"cpu": "", "cuda": ""}, "infiniband": None,
    } | other  # fmt: skip


def place(**other: Any) -> dict[str, Any]:
    return {"path": "/shared", "problem": "", "kind": "nfs", "mount": "/shared", "free_bytes": 10**12} | other


def answer(host: str = "node1", of: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
    return {
        "host": host, "facts": facts(**(of or {})), "slurm_gpus": None, "run_dir": place(),
        "cwd": place(same=True), "interfaces": ["lo", "eth0"], "named_interfaces": {}, "done": True,
    } | other  # fmt: skip


def link(node: int, **other: Any) -> dict[str, Any]:
    return {"node": node, "address": f"10.0.0.{node}", "problem": "", "rtt_s": 1e-4, "offset_s": 0.0} | other


def two(first: dict[str, Any], second: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {0: answer("node1", **first), 1: answer("node2", **second)}


def has(check: Check | Iterable[Check], state: CheckState, *words: str) -> None:
    (check,) = [check] if isinstance(check, Check) else check
    assert check.state is state, check
    text = f"{check.found} -> {check.remedy}"
    assert all(word in text for word in words), text
    assert bool(check.remedy) == (state is not CheckState.ok)


def test_the_exit_status_is_that_of_failures() -> None:
    assert exit_status([ok("a", "x"), warning("b", "y", "do z")]) == 0
    assert exit_status([ok("a", "x"), failure("b", "y", "do z")]) == 1


def test_equal_checks_of_several_hosts_are_one_line() -> None:
    checks = [(host, ok("a", "same")) for host in ("n1", "n2", "n3")]
    assert merge(checks, ["n1", "n2", "n3"]) == [ok("a", "same")]
    checks[2] = ("n3", ok("a", "other"))
    assert merge(checks, ["n1", "n2", "n3"]) == [ok("a", "same", "n1, n2"), ok("a", "other", "n3")]


def test_python() -> None:
    has(host_checks.python(facts(), answer()), CheckState.ok, "3.11.7", "/env/bin/python")
    other = host_checks.python(facts(), answer(of={"python": "3.12.1"}))
    has(other, CheckState.failure, "3.12.1", "on login it is 3.11.7", "share")


@pytest.mark.parametrize(
    ("versions", "state", "words"),
    [
        ({}, CheckState.ok, ["torch 2.13.0", "wandb 0.31.0"]),
        ({"numpy": None}, CheckState.failure, ["numpy missing (login: 2.4.6)"]),
        ({"wandb": None}, CheckState.failure, ["not installed: wandb"]),
        ({"torch": "2.12.0"}, CheckState.failure, ["torch 2.12.0 (login: 2.13.0)", "one environment"]),
    ],
)
def test_packages(versions: dict[str, str | None], state: CheckState, words: list[str]) -> None:
    has(host_checks.packages(facts(), answer(of={"packages": PACKAGES | versions})), state, *words)


def test_an_old_torch_is_old_everywhere() -> None:
    old = {"packages": PACKAGES | {"torch": "2.9.1+cu128"}}
    has(host_checks.packages(facts(**old), answer(of=old)), CheckState.failure, "2.9.1+cu128 is too old", "torch>=2.11")


def test_another_checkout_is_another_launcher() -> None:
    has(host_checks.packages(facts(), answer(of={"package_dir": "/old"})), CheckState.failure, "launcher from /old")


def test_torch_that_does_not_start() -> None:
    assert [*host_checks.torch(answer(bandwidth={"world": 1, "gpus": 0, "times": []}))] == []
    has(
        host_checks.torch(answer(bandwidth={"world": 1, "error": "ImportError: libcudart"})),
        CheckState.failure,
        "libcudart",
    )


@pytest.mark.parametrize(
    ("device", "of", "seen", "state", "words"),
    [
        (Device.cpu, {}, {}, CheckState.ok, ["no GPU: CPU workers"]),
        (Device.cpu, {"devices": 8}, {}, CheckState.ok, ["8 GPUs", "not used with cluster.device=cpu"]),
        (
            Device.cpu, {"devices": 8, "packages": PACKAGES | {"torch": "2.13.0+cpu"}}, {}, CheckState.warning,
            ["build for CPUs", "CUDA build"],
        ),
        (
            Device.cuda, {"devices": 4, "gpu_use": [[0, 3, 0], [1, 3, 0]]}, {"gpus": 4, "cuda": "13.0"}, CheckState.ok,
            ["4 GPUs", "13.0", "4 given by Slurm", "idle"],
        ),
        (Device.cuda, {"devices": 4}, {"gpus": 4, "cuda": "13.0"}, CheckState.ok, ["no nvidia-smi"]),
        (
            Device.cuda, {"devices": 4}, {"gpus": 1, "cuda": "13.0"}, CheckState.failure,
            ["sees 1 GPUs of 4", "4 workers", "nvidia-smi"],
        ),
        (
            Device.cuda, {"devices": 4, "gpu_use": [[0, 70000, 98], [1, 3, 0]]}, {"gpus": 4, "cuda": "13.0"},
            CheckState.warning, ["GPU 0: 70000 MiB, 98%"],
        ),
        (Device.cuda, {"devices": 4}, {"error": "killed"}, CheckState.warning,
         ["the number that torch sees is unknown"]),
    ],
)  # fmt: skip
def test_gpus(device: Device, of: dict[str, Any], seen: dict[str, Any], state: CheckState, words: list[str]) -> None:
    given = "4" if device is Device.cuda else None
    has(host_checks.gpus(device, 4, answer(of=of, bandwidth=seen, slurm_gpus=given)), state, *words)


def tried(**other: Any) -> dict[str, Any]:
    h100 = {"index": 1, "name": "NVIDIA H100", "error": 0.002, "problem": ""}
    return {
        "gpus": 2, "cuda": "13.0", "driver": 13000, "nccl": "2.28.9",
        "tried": [h100 | {"index": 0}, h100 | other],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "state", "words"),
    [
        (tried(), CheckState.ok, ["CUDA 13.0, driver for up to 13.0, NCCL 2.28.9", "computes as the CPU does"]),
        (tried() | {"driver": 13010, "cuda": "13.2"}, CheckState.ok, ["13.2, driver for up to 13.1"]),
        (
            tried() | {"driver": 12040, "gpus": 0, "tried": []}, CheckState.failure,
            ["sees 0 GPUs", "driver for up to 12.4", "Update the driver, or install a build of torch"],
        ),
        (tried() | {"driver": 0, "gpus": 0, "tried": []}, CheckState.failure, ["sees 0 GPUs", "nvidia-smi"]),
        (
            tried(error=None, problem="CUDA error: no kernel image is available for execution on the device"),
            CheckState.failure, ["GPU 1 (NVIDIA H100) does not compute", "Install a build of torch for this GPU"],
        ),
        (
            tried(error=None, problem="CUDA error: uncorrectable ECC error"), CheckState.failure,
            ["GPU 1 (NVIDIA H100) does not compute: CUDA error: uncorrectable ECC", "nvidia-smi -q -i 1"],
        ),
        (tried(error=0.5), CheckState.failure, ["GPU 1 (NVIDIA H100)", "50% off the CPU's", "defective"]),
        # a collective failed, and the reason is known
        (tried(error=None, problem="out of memory") | {"error": "NCCL"}, CheckState.failure, ["out of memory"]),
    ],
)  # fmt: skip
def test_each_gpu_is_tried(seen: dict[str, Any], state: CheckState, words: list[str]) -> None:
    has(host_checks.gpus(Device.cuda, 2, answer(of={"devices": 2}, bandwidth=seen)), state, *words)


def test_a_compiler_is_missing_where_something_compiles() -> None:
    none = answer(of={"no_compiler": {"cpu": "", "cuda": "no C compiler (gcc or clang)"}})
    has(host_checks.compiler(Device.cpu, True, none), CheckState.ok, "can build kernels")
    has(host_checks.compiler(Device.cuda, True, none), CheckState.warning, "no C compiler", "python3-dev")
    has(host_checks.compiler(Device.cuda, False, none), CheckState.ok, "no C compiler", "only train.compile")


def test_what_nccl_needs_for_infiniband() -> None:
    def found(device: Device = Device.cuda, hosts: int = 2, **other: Any) -> list[Check]:
        ports = [["mlx5_0:1", True, 400.0], ["mlx5_1:1", False, 10.0]]
        facts = {"ports": ports, "library": True, "devices": True, "locked_bytes": None} | other
        return [*host_checks.infiniband(device, hosts, answer(of={"infiniband": facts}))]

    has(found(), CheckState.ok, "1 of 2 ports active (mlx5_0:1 400 Gbit/s)", "libibverbs")
    assert found(Device.cpu) == [*host_checks.infiniband(Device.cuda, 2, answer())] == []
    has(found(library=False), CheckState.warning, "no libibverbs.so.1", "TCP", "apt-get install libibverbs1")
    has(found(devices=False), CheckState.warning, "/dev/infiniband/uverbs", "--device=/dev/infiniband")
    has(found(locked_bytes=8 * 2**20), CheckState.warning, "8 MiB", "--ulimit memlock=-1", "LimitMEMLOCK")
    has(found(ports=[["mlx5_0:1", False, 10.0]]), CheckState.warning, "0 of 1 ports active", "ibstat")
    has(found(hosts=1, ports=[["mlx5_0:1", False, 10.0]]), CheckState.ok, "0 of 1 ports active", "one host")


def test_a_link_that_is_much_slower_than_its_ports() -> None:
    def across(gbit: float, workers: int = 1) -> Check:
        facts = {"ports": [["mlx5_0:1", True, 400.0], ["mlx5_1:1", True, 400.0]]}
        one = measured(2 * workers, samples=samples(1e-5, gbit * 1e9 / 8, 2, 2, workers, gloo=False))
        host = one | {"of": {"infiniband": facts}}
        return host_checks.links(two(host, host), "cuda", hosts=2)[-1]

    has(across(360), CheckState.ok, "all-reduce 360", "its ports have 400 Gbit/s")
    has(across(40), CheckState.warning, "all-reduce 40", "slower than its ports", "NET/IB", "NET/Socket")
    has(across(360, workers=2), CheckState.ok, "its ports have 800 Gbit/s")
    has(across(200, workers=2), CheckState.warning, "its ports have 800 Gbit/s")


def test_limits() -> None:
    shm, files = host_checks.limits(answer())
    has(shm, CheckState.ok, "8.0 GB")
    has(files, CheckState.ok, "65,536")
    shm, files = host_checks.limits(answer(of={"shm_bytes": 64 * 2**20, "open_files": 256}))
    has(shm, CheckState.warning, "0.1 GB free", "--shm-size", "NCCL")
    has(files, CheckState.warning, "256", "ulimit -n 4096")
    shm, files = host_checks.limits(answer(of={"shm_bytes": None, "open_files": -1}))
    has(shm, CheckState.warning, "no /dev/shm")
    has(files, CheckState.ok, "no limit")


@pytest.mark.parametrize(
    ("there", "shared", "state", "words"),
    [
        ({}, True, CheckState.ok, ["writable", "written on login and read here", "1,000.0 GB free"]),
        ({}, False, CheckState.ok, ["writable; 1,000.0 GB free"]),
        ({"free_bytes": 1e9}, True, CheckState.warning, ["1.0 GB free", "checkpoint.keep"]),
        ({"kind": "tmpfs"}, True, CheckState.failure, ["this machine's memory", "others do not see it", "share"]),
        ({"kind": "tmpfs"}, False, CheckState.warning, ["this machine's memory", "a reboot"]),
    ],
)
def test_run_directory(there: dict[str, Any], shared: bool, state: CheckState, words: list[str]) -> None:
    has(host_checks.run_dir(RUNS, "login" if shared else None, {}, answer(run_dir=place(**there))), state, *words)


def test_a_node_whose_file_does_not_appear_is_named() -> None:
    answers = two({"absent": [1]}, {"absent": []})
    has(
        host_checks.run_dir(RUNS, "login", answers, answers[0]),
        CheckState.failure,
        "what node2 wrote did not appear",
        "share",
    )
    has(host_checks.run_dir(RUNS, "login", answers, answers[1]), CheckState.ok, "writable")


def test_working_directory() -> None:
    def of(unwritten: str = "", **there: Any) -> Iterable[Check]:
        return host_checks.working_directory("login", unwritten, answer(cwd=place(same=True) | there))

    has(of(), CheckState.ok, "the same everywhere")
    has(of(same=False), CheckState.failure, "another directory there than on login", "share")
    has(of(same=False, kind="", problem="No such file or directory"), CheckState.failure, "there is no /shared")
    has(of(problem="Read-only file system"), CheckState.warning, "Read-only")
    has(of("Permission denied", same=False), CheckState.warning, "Permission denied")


def test_interfaces() -> None:
    on = {"address": "10.0.0.1", "interface": "eth0"}
    (check,) = host_checks.addresses(two(on, on | {"address": "10.0.0.2"}))
    has(check, CheckState.ok, "node1 eth0 10.0.0.1, node2 eth0 10.0.0.2")
    wrong = answer(named_interfaces={"GLOO_SOCKET_IFNAME": "eth7"})
    words = ("GLOO_SOCKET_IFNAME=eth7", "Unset GLOO_SOCKET_IFNAME", "lo, eth0")
    has(host_checks.named_interfaces(wrong), CheckState.failure, *words)
    for name, said in (("NCCL_SOCKET_IFNAME", "eth"), ("NCCL_SOCKET_IFNAME", "^lo"), ("GLOO_SOCKET_IFNAME", "eth0")):
        assert [*host_checks.named_interfaces(answer(named_interfaces={name: said}))] == []
    for name, said in (("NCCL_SOCKET_IFNAME", "=eth"), ("GLOO_SOCKET_IFNAME", "eth")):
        has(host_checks.named_interfaces(answer(named_interfaces={name: said})), CheckState.failure)


def test_connections_and_clocks() -> None:
    whole = two({"reached": [link(1, rtt_s=2e-4)]}, {"reached": [link(0)]})
    has(host_checks.connections(whole)[0], CheckState.ok, "all 2 ways", "0.20 ms")
    has(host_checks.clocks(whole)[0], CheckState.ok, "0.000 s apart")
    cut = two({"reached": [link(1, problem="timed out")]}, {"reached": [link(0)]})
    (check,) = host_checks.connections(cut)
    has(check, CheckState.failure, "does not reach node2 at 10.0.0.1: timed out", "cluster.interface")
    assert check.node == "node1"
    assert host_checks.connections({0: answer()}) == host_checks.clocks({0: answer()}) == []


@pytest.mark.parametrize(
    ("apart", "state"), [(0.05, CheckState.ok), (-0.4, CheckState.warning), (3.0, CheckState.failure)]
)
def test_clocks(apart: float, state: CheckState) -> None:
    (check,) = host_checks.clocks(two({"reached": [link(1, offset_s=apart)]}, {"reached": [link(0, offset_s=-apart)]}))
    has(check, state, f"{abs(apart):.3f} s apart", *(["chronyd"] if state is not CheckState.ok else []))


def measured(world: int, **fields: Any) -> dict[str, Any]:
    return {"bandwidth": {"world": world, "gpus": 0, "samples": [], **fields}}


def samples(
    latency_s: float, bytes_per_s: float, ranks: int, hosts: int, groups: int = 1, *, gloo: bool = True
) -> list[dict[str, Any]]:
    """Return what workers measure on links with this latency and bandwidth."""
    found: list[dict[str, Any]] = []
    for kind, size in itertools.product(KINDS, (2**10, 2**16, 2**22)):
        fields = {"payload_bytes": size, "ranks": ranks, "hosts": hosts, "groups": groups}
        steps, moved = Sample(kind=kind, seconds=0.0, **fields).work(gloo=gloo)
        found.append({"kind": kind.value, "seconds": steps * latency_s + moved / bytes_per_s, **fields})
    return found


def test_links() -> None:
    inside, between = (1e-4, 1e9), (2e-3, 0.12e9)
    one = measured(2, samples=samples(*between, 2, 2))
    (check,) = host_checks.links(two(one, one), "cpu", hosts=2)
    has(check, CheckState.ok, "all-reduce 0.96, all-gather 0.96, reduce-scatter 0.96 Gbit/s of a host's link")
    has(check, CheckState.ok, "2, 2, 2 ms a step; fits within 3% (gloo, up to 4 MiB)")
    assert check.name == "between hosts"
    # half of the times are nine times as long as the others
    busy = [sample | {"seconds": 9 * sample["seconds"]} for sample in one["bandwidth"]["samples"]]
    varying = measured(2, samples=[*one["bandwidth"]["samples"], *busy])
    (check,) = host_checks.links(two(varying, varying), "cpu", hosts=2)
    has(check, CheckState.warning, "the times vary too much", "Run it again")
    several = measured(4, samples=[*samples(*inside, 2, 1), *samples(*between, 2, 2, 2)])
    within, across = host_checks.links(two(several, several), "cpu", hosts=2)
    assert (within.name, across.name) == ("inside a host", "between hosts")
    has(
        within,
        CheckState.ok,
        "all-reduce 8, all-gather 8, reduce-scatter 8 Gbit/s of a worker; 0.1, 0.1, 0.1 ms a step",
    )
    has(across, CheckState.ok, "0.96 Gbit/s of a host's link")
    slow = measured(2, samples=[one for one in one["bandwidth"]["samples"] if one["payload_bytes"] < 2**20])
    (check,) = host_checks.links(two(slow, slow), "cpu", hosts=2)
    has(check, CheckState.warning, "too slow to measure more than 64 KiB", "who else uses")
    broken = two(measured(2, error="eth7?"), one)
    has(host_checks.links(broken, "cpu", hosts=2), CheckState.failure, "no collective ran: eth7?")
    alone = two(measured(1), measured(1))
    has(host_checks.links(alone, "cpu", hosts=2), CheckState.warning, "not all nodes reach each other")
    has(host_checks.links({0: answer(**measured(1))}, "cpu", hosts=1), CheckState.ok, "one worker")


def test_wandb() -> None:
    has(host_checks.wandb(WandbMode.offline, "0.31.0", {}), CheckState.ok, "wandb 0.31.0", "no server is needed")
    assert [*host_checks.wandb(WandbMode.online, "0.31.0", answer())] == []
    said = {"no_key": "", "silent": ""}
    has(host_checks.wandb(WandbMode.online, "0.31.0", answer(wandb=said)), CheckState.ok, "key found")
    no_key = said | {"no_key": "there is no key.\n  Run `wandb login`."}
    has(
        host_checks.wandb(WandbMode.online, "0.31.0", answer(wandb=no_key)), CheckState.failure, "no key", "wandb login"
    )
    silent = said | {"silent": "https://api.wandb.ai does not answer within 5 s"}
    found = host_checks.wandb(WandbMode.online, "0.31.0", answer(wandb=silent))
    has(found, CheckState.warning, "does not answer", "wandb.mode=offline")


def partition(**other: Any) -> Partition:
    known: dict[str, Any] = {
        "name": "train", "nodes": 8, "max_nodes": None, "shapes": ((64, 0),), "gres": (), "limit_s": 86400,
        "default_s": 3600,
    }  # fmt: skip
    return Partition(**known | other)


def test_partition() -> None:
    has(slurm_checks.partition(partition(gres=("gpu:4",)), "UP"), CheckState.ok, "8 nodes, 64 cores, gpu:4 a node")
    has(slurm_checks.partition(partition(), "DOWN"), CheckState.warning, "its state is DOWN", "sinfo")
    unlike = partition(shapes=((32, 0), (64, 4)), gres=("gpu:4",))
    has(slurm_checks.partition(unlike, "UP"), CheckState.ok, "8 nodes, 32 to 64 cores, gpu:4 or none a node")


@pytest.mark.parametrize(
    ("limits", "time", "state", "words"),
    [
        ({}, None, CheckState.ok, ["longest 1-00:00:00, by default 01:00:00"]),
        ({"default_s": None}, None, CheckState.ok, ["by default the longest"]),
        ({"default_s": 60}, None, CheckState.warning, ["too short for one checkpoint", 'cluster.time="00:02:00"']),
        ({"default_s": None, "limit_s": None}, None, CheckState.warning, ["longest none", "jobs have no time limit"]),
        ({"default_s": 60}, "04:00:00", CheckState.ok, ["cluster.time=04:00:00"]),
    ],
)
def test_time_limits(limits: dict[str, int | None], time: str | None, state: CheckState, words: list[str]) -> None:
    has(slurm_checks.time_limits(partition(**limits), ClusterConfig(time=time)), state, *words)


def test_preemption() -> None:
    signal = {"PreemptType": "preempt/partition_prio", "SlurmctldParameters": "preempt_send_user_signal"}
    back = {"PreemptMode": "REQUEUE", "GraceTime": "60"}
    has(slurm_checks.preemption({"PreemptType": "preempt/none"}, back, 30), CheckState.ok, "none")
    has(slurm_checks.preemption(signal, back | {"PreemptMode": "OFF"}, 30), CheckState.ok, "none")
    has(slurm_checks.preemption(signal, back, 30), CheckState.ok, "GraceTime=60 s", "the signal to save comes first")
    has(
        slurm_checks.preemption(signal, back | {"GraceTime": "10"}, 30),
        CheckState.warning,
        "shorter than cluster.grace_s=30",
    )
    silent = signal | {"SlurmctldParameters": "(null)"}
    has(slurm_checks.preemption(silent, back, 30), CheckState.warning, "without the signal", "preempt_send_user_signal")


def asked(state: str, answers: dict[int, dict[str, Any]], words: dict[int, str]) -> ProbeJob:
    ended = SlurmJob(state=state, reason="Why", nodes="node[1-2]", restarts=0, end=None, preempted=False)
    return ProbeJob("12", ended, ["node1", "node2"], answers, words)


def test_an_answer_that_ends_early_is_not_fit() -> None:
    half = answer(done=False)
    assert exit_status(judge_hosts(Config(), make_plan(), facts(), {0: half}, "")) == 1
    assert exit_status(judge_hosts(Config(), make_plan(), facts(), {0: answer()}, "")) == 0


def test_a_host_that_differs_is_named() -> None:
    checks = judge_hosts(Config(), make_plan(), facts(), two({}, {"of": {"python": "3.12.1"}}), "")
    assert [(one.state, one.node) for one in checks if one.name == "python"] == [
        (CheckState.ok, "node1"),
        (CheckState.failure, "node2"),
    ]
    assert [one.node for one in checks if one.name == "packages"] == [None]


def test_a_node_without_an_answer_is_named() -> None:
    folder = RUNS / ".doctor-x"
    assert slurm_checks.judge_job(asked("COMPLETED", two({}, {}), {}), 2, folder) == []
    (check,) = slurm_checks.judge_job(asked("RUNNING", {0: answer()}, {0: "well"}), 2, folder)
    has(check, CheckState.failure, "the node does not see /shared/runs", "share")
    assert check.node == "node2"
    words = {1: f"FileNotFoundError: [Errno 2] No such file or directory: '{folder}/slurm/12_submitted.pkl'"}
    (check,) = slurm_checks.judge_job(asked("COMPLETED", {0: answer()}, words), 2, folder)
    has(check, CheckState.failure, "the node does not see /shared/runs")
    (check,) = slurm_checks.judge_job(asked("FAILED", {0: answer()}, {1: "No module named 'launcher'"}), 2, folder)
    has(check, CheckState.failure, "no probe ran: No module named 'launcher'", "login node")
    (check,) = slurm_checks.judge_job(asked("FAILED", {}, {}), 2, folder)
    has(check, CheckState.failure, "the nodes do not see /shared/runs: job 12 ended without output, FAILED (Why)")
    assert check.node == "node1"
    (check,) = slurm_checks.judge_job(asked("NODE_FAIL", two({}, {}), {}), 2, folder)
    has(check, CheckState.failure, "Slurm ended job 12: NODE_FAIL (Why)", "sinfo -R")


def test_waiting_for_nodes_has_a_limit() -> None:
    (check,) = slurm_checks.judge_job(asked("PENDING", {}, {}), 2, Path("/runs/.doctor-1"))
    has(check, CheckState.failure, "Slurm gave none within 180 s: job 12 was pending (Why)")
