"""The directories of a run: writable, and the same on every host. What the probes found there in, checks out."""

from __future__ import annotations

from pathlib import Path

from launcher.check import Check, failure, ok, warning
from launcher.doctor.desk import Answer
from launcher.doctor.machine import gigabytes
from launcher.site import OWN_MEMORY

_FREE_BYTES = 10e9


def run_dir(run_dir: Path, login: str, answers: dict[int, Answer], *, shared: bool) -> list[Check]:
    """That each of these hosts has answered shows that it sees what ``login`` wrote there, and the other way round.

    Args:
        shared: whether other hosts than ``login`` were asked.
    """
    checks: list[Check] = []
    for node, answer in answers.items():
        place: Answer | None = answer.get("run_dir")
        if place is None:
            continue
        if unseen := sorted({answers[k]["host"] for k in answer.get("absent", ()) if k in answers}):
            checks.append(_unseen(run_dir, unseen, answer["host"]))
        elif place["kind"] in OWN_MEMORY:
            checks.append(in_memory(run_dir, place, answer["host"], shared=shared))
        else:
            checks.append(_space(run_dir, place, answer["host"], shared and node in answers, login))
    return checks


def _unseen(run_dir: Path, unseen: list[str], host: str) -> Check:
    return failure(
        "run directory", f"{run_dir}: what {', '.join(unseen)} wrote did not appear within a minute",
        "Use a run.dir on a disk that all nodes share.", host,
    )  # fmt: skip


def in_memory(run_dir: Path, place: Answer, host: str | None, *, shared: bool) -> Check:
    found = f"{run_dir} lies in this machine's memory ({place['kind']} on {place['mount']})"
    if shared:
        remedy = "Use a run.dir on a disk that the login node and all nodes share."
        return failure("run directory", f"{found}: others do not see it", remedy, host)
    return warning("run directory", f"{found}: a reboot takes the runs with it", "Use a run.dir on a disk.", host)


def _space(run_dir: Path, place: Answer, host: str, shared: bool, login: str) -> Check:
    seen = f", written on {login} and read here, and the other way round" if shared else ""
    found = f"{run_dir} ({place['kind']}): writable{seen}; {gigabytes(place['free_bytes'])} free"
    if place["free_bytes"] < _FREE_BYTES:
        return warning("run directory", found, "Make room, or lower checkpoint.keep: checkpoints lie there.", host)
    return ok("run directory", found, host)


def unusable(run_dir: Path, problem: str) -> Check:
    return failure("run directory", f"{run_dir} cannot be used: {problem}", "Choose a run.dir that you may write to.")


def working_directory(login: str, written: str, answers: dict[int, Answer], *, shared: bool) -> list[Check]:
    """``written``: why ``login`` could not write there; empty where it could."""
    checks: list[Check] = []
    for answer in answers.values():
        place: Answer | None = answer.get("cwd")
        if place is None:
            continue
        host, path = answer["host"], place["path"]
        if shared and not written and not place["same"]:
            what = f"{path} is another directory there" if place["kind"] else f"there is no {path}"
            remedy = "Type `launch` in a directory on the disk that the login node and all nodes share."
            checks.append(
                failure("working directory", f"{what} than on {login}" if place["kind"] else what, remedy, host)
            )
        elif problem := written or place["problem"]:
            found = f"{path}: nothing can be written there: {problem}"
            checks.append(warning("working directory", found, "Go to a directory that you may write to.", host))
        else:
            checks.append(ok("working directory", f"{path}: writable{', the same everywhere' if shared else ''}", host))
    return checks


def left_by_nodes(cwd: Path, token: str) -> list[Path]:
    """What the hosts that see the token have put beside it."""
    return sorted(cwd.glob(f"{token}.node*"))
