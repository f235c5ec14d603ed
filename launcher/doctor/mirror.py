"""Whether W&B can do what wandb.mode says. The answer of rank 0's host in, a check out."""

from __future__ import annotations

from launcher.check import Check, failure, ok, warning
from launcher.config import WandbMode
from launcher.doctor.desk import Answer

_OFFLINE = "use wandb.mode=offline and `wandb sync` later."


def wandb(mode: WandbMode, version: str | None, answer: Answer) -> Check | None:
    """``answer``: of the host that rank 0 is to run on. None where it was not asked."""
    if mode is not WandbMode.online:
        return ok("W&B", f"wandb {version}, wandb.mode={mode.value}: no server is needed")
    said: dict[str, str] | None = answer.get("wandb")
    if said is None:
        return None
    if said["no_key"]:
        problem, _, remedy = said["no_key"].partition("\n")
        return failure("W&B", problem, remedy.strip(), answer["host"])
    if said["silent"]:
        return warning(
            "W&B", f"wandb.mode=online: {said['silent']}", f"The run would be kept offline. Or {_OFFLINE}",
            answer["host"],
        )  # fmt: skip
    return ok("W&B", f"wandb {version}, key found, the server answers", answer["host"])
