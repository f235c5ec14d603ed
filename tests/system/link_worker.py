"""Runs sync policies one after the other on the ranks of two hosts, and looks at the kernel's counters meanwhile.

argv: policies, such as "ddp boundary bf16": strategy, sync, compression. Each host's first rank prints a line of JSON a
policy: what the meter says that it has sent in a window, by collective, and what the host has, a window: on its link
without headers, and inside.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from launcher import Engine, make_plan
from tests.infra.netns import counters_in
from tests.infra.workers import leave_group

WIDTH, LAYERS, GLOBAL_SIZE = 192, 6, 16
BEFORE, AFTER = 2, 10  # windows
HEADERS = 14 + 20 + 32  # of a packet: Ethernet, IP, TCP with time stamps


def sent() -> tuple[int, int]:
    """Bytes so far: on the link, and inside. No rank is ahead of another."""
    dist.barrier()
    text = Path("/proc/net/dev").read_text()
    link, inside = (counters_in(text, interface) for interface in ("eth0", "lo"))
    counted = link[8] - HEADERS * link[9], inside[8]
    dist.barrier()
    return counted


def run(policy: str) -> dict[str, object]:
    kind, sync, *compress = policy.split()
    options = [
        f"strategy={kind}", f"strategy.sync={sync}", "precision=fp32", f"batch.global_size={GLOBAL_SIZE}",
        "batch.micro_size=1", "train.loader_workers=0", "run.calibrate_s=0", f"train.steps={AFTER}",
    ]  # fmt: skip
    options += [f"strategy.compress={name}" for name in compress]
    options += ["strategy.shard_size=2"] if kind == "hsdp" else []
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    plan = make_plan(options, samples=GLOBAL_SIZE)
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), 1e-3), plan, shard_units=lambda m: list(itertools.islice(m, LAYERS))
    )
    data = list(torch.ones(GLOBAL_SIZE, WIDTH))
    before, result = (0, 0), None
    for window in engine.windows(data):
        for batch in window:
            engine.backward((engine.model(batch) ** 2).sum(), len(batch))
        result = engine.step()
        if result.step == BEFORE:
            before = sent()
    assert result is not None
    on_link, within = ((b - a) / (AFTER - BEFORE) for a, b in zip(before, sent(), strict=True))
    kinds = {kind.value: traffic.wire_bytes for kind, traffic in result.comm.kinds.items()}
    return {
        "policy": policy,
        "accumulation": plan.batch.accumulation,
        "link": on_link,
        "within": within,
        "meter": kinds,
    }


def main() -> None:
    dist.init_process_group("gloo")
    for policy in sys.argv[1:]:
        told = run(policy)
        if os.environ["LOCAL_RANK"] == "0":
            print(json.dumps(told), flush=True)
    leave_group()


if __name__ == "__main__":
    main()
