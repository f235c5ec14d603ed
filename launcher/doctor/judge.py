"""All checks of what the hosts answered, in the order of the report."""

from __future__ import annotations

from launcher.check import Check, failure, merge
from launcher.config import ClusterKind, Config
from launcher.doctor import machine, mirror, storage, wires
from launcher.doctor.desk import Answer
from launcher.plan import LaunchPlan


def judge(config: Config, plan: LaunchPlan, login: Answer, answers: dict[int, Answer], unwritten: str) -> list[Check]:
    """A line a check, what is alike on all hosts once.

    Args:
        login: facts of the host that asks.
        answers: of each node that has given one.
        unwritten: why ``login`` could not write to the working directory; empty where it could.
    """
    cluster, shared = plan.cluster, plan.cluster.kind is ClusterKind.slurm
    if not answers and not shared:  # of Slurm's nodes their job says why
        remedy = "Its own words are above this; try `python -c 'import launcher.doctor.probe'`."
        return [failure("probe", "this machine's probe gave no answer", remedy)]
    run_dir = plan.paths.root.parent
    looked = {node: answer for node, answer in answers.items() if "facts" in answer}
    each = list(looked.values())
    # in a container Python is the image's, the same on all nodes
    model = each[0]["facts"] if each and config.cluster.container else login
    several = [
        [machine.python(model, one) for one in each],
        [machine.packages(model, one) for one in each],
        [torch for one in each if (torch := machine.torch(one)) is not None],
        [machine.gpus(one, cluster.device, cluster.workers_per_node) for one in each],
        [limit for one in each for limit in machine.limits(one)],
        storage.run_dir(run_dir, login["host"], looked, shared=shared),
        storage.working_directory(login["host"], unwritten, looked, shared=shared),
    ]
    hosts = [one["host"] for one in answers.values()]
    wandb = mirror.wandb(config.wandb.mode, login["packages"]["wandb"], answers.get(0, {}))
    return [
        *(check for checks in several for check in merge(checks, hosts)),
        *wires.interfaces(looked),
        *(told for one in answers.values() if (told := _unfinished(one)) is not None),
        *wires.connections(looked),
        *wires.clocks(looked),
        *wires.all_reduce(looked, cluster.device.value, cluster.link_gbit, hosts=cluster.nodes > 1),
        *([] if wandb is None else [wandb]),
    ]


def _unfinished(answer: Answer) -> Check | None:
    """What ended a host's own look."""
    if "error" not in answer and answer.get("done"):
        return None
    problem, _, remedy = answer.get("error", "its probe did not come to its end").partition("\n")
    return failure("probe", problem, remedy.strip() or "The lines above say how far it came.", answer["host"])
