"""From host to host: interfaces, connections, clocks, bandwidth. Answers of the probes in, checks out."""

from __future__ import annotations

from launcher.check import Check, failure, merge, ok, warning
from launcher.cluster.network import GLOO
from launcher.doctor.desk import Answer

_CLOCK_WARNING_S, _CLOCK_FAILURE_S = 0.1, 2.0
# of the link's rate; below it something is wrong
_FAR_BELOW = 0.5


def interfaces(answers: dict[int, Answer]) -> list[Check]:
    """Each host's interface and address towards the others; and whether it has those that its environment names."""
    looked = [answer for answer in answers.values() if "interfaces" in answer]
    hosts = [answer["host"] for answer in answers.values()]
    checks = merge((missing for answer in looked if (missing := _missing(answer)) is not None), hosts)
    used = [
        f"{answer['host']} {answer['interface']} {answer['address']}{_own_name(answer)}"
        for answer in looked
        if "address" in answer
    ]
    return [*checks, ok("interface", ", ".join(used))] if used else checks


def _missing(answer: Answer) -> Check | None:
    there: list[str] = answer["interfaces"]
    for name, said in answer["said_interfaces"].items():
        # NCCL takes the beginning of a name, or with = the whole; ^: all but these
        wanted, exact = tuple(said.lstrip("=").split(",")), name == GLOO or said.startswith("=")
        if said.startswith("^") or any(have in wanted or (not exact and have.startswith(wanted)) for have in there):
            continue
        return failure(
            "interface", f"the environment says {name}={said}, which it has not",
            f"Unset {name}, or name one of these: {', '.join(there)}.", answer["host"],
        )  # fmt: skip
    return None


def _own_name(answer: Answer) -> str:
    own = answer["facts"]["hostname_address"]
    return f" (its own name means {own} there, which is not used)" if own and own.startswith("127.") else ""


def connections(answers: dict[int, Answer]) -> list[Check]:
    """Every host to every other one, on a port that was free."""
    checks: list[Check] = []
    tried, slowest = 0, 0.0
    for answer in answers.values():
        for link in answer.get("reached", ()):
            tried += 1
            slowest = max(slowest, link.get("rtt_s", 0.0))
            if link["problem"]:
                there = answers[link["node"]]["host"] if link["node"] in answers else f"node {link['node']}"
                checks.append(
                    failure(
                        "connections",
                        f"does not reach {there} at {link['address']}: {link['problem']}",
                        "Open all ports between the nodes, or name another cluster.interface.",
                        answer["host"],
                    )
                )
    if tried and not checks:
        checks.append(ok("connections", f"all {tried} ways on arbitrary ports; {slowest * 1e3:.2f} ms there and back"))
    return checks


def clocks(answers: dict[int, Answer]) -> list[Check]:
    """Failures on several hosts are put in order by the clocks of these."""
    pairs = [
        (abs(link["offset_s"]), link["rtt_s"], answer["host"], answers[link["node"]]["host"])
        for answer in answers.values()
        for link in answer.get("reached", ())
        if not link["problem"] and link["node"] in answers
    ]
    if not pairs:
        return []
    apart, _, one, other = max(pairs)
    found = f"{apart:,.3f} s apart at most"
    if apart <= _CLOCK_WARNING_S:
        return [ok("clocks", found)]
    kind = failure if apart > _CLOCK_FAILURE_S else warning
    remedy = "Keep them in step (chronyd, ntpd): which failure was first is told by them."
    return [kind("clocks", found, remedy, f"{one}, {other}")]


def all_reduce(answers: dict[int, Answer], device: str, link_gbit: float | None, *, hosts: bool) -> list[Check]:
    """The algorithm bandwidth: wire bytes 2(W-1)/W of the payload in the time of one all-reduce.

    Args:
        link_gbit: Gbit/s of a host's link, where it was said.
        hosts: whether the workers were one a host, on several.
    """
    name, who = "all-reduce", "nodes" if hosts else "workers"
    measured = {k: answer["bandwidth"] for k, answer in answers.items() if "bandwidth" in answer}
    errors = [(answers[k]["host"], one["error"]) for k, one in measured.items() if "error" in one and one["world"] > 1]
    if errors:
        host, error = errors[0]
        remedy = "See the lines above: interface, connections, gpu."
        return [failure(name, f"none came about: {error}", remedy, host)]
    first: Answer | None = next((one for one in measured.values() if one.get("times")), None)
    if first is None:
        if hosts and measured:
            return [warning(name, "not measured: not all nodes reach each other", "See the lines above.")]
        return [ok(name, "one worker: nothing to sum")] if measured else []
    gbit, size, latency_s = bandwidth(first["times"], first["world"])
    library = "NCCL" if device == "cuda" else "gloo"
    found = f"{gbit:,.3g} Gbit/s of {first['world']} {who} ({library}, {size / 2**20:,.3g} MiB"
    found += f"; {first['times'][0][0] / 1024:.0f} KiB take {latency_s * 1e3:,.2f} ms)"
    if hosts and link_gbit is not None and gbit < _FAR_BELOW * link_gbit:
        remedy = "Look at cluster.interface, at who else uses the link, and at the link itself (`ethtool`)."
        return [warning(name, f"{found}: far below cluster.link_gbit={link_gbit:g}", remedy)]
    return [ok(name, found)]


def bandwidth(times: list[list[float]], world: int) -> tuple[float, float, float]:
    """Gbit/s of the largest size, which no buffer on the way takes in, its bytes, and the seconds of the smallest."""
    size, took = times[-1]
    return 8e-9 * size * 2 * (world - 1) / world / took, size, times[0][1]
