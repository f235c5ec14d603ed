"""Outer steps of many simulated sites: what their number, and sites that are late, change of what is learned.

    python jobs/outer_sites.py                                   # 2 to 256 sites, none and a tenth of them late
    python jobs/outer_sites.py --sites 16 --late 0 0.5 --compress int8 --steps 80

Each site is a thread with a small network of its own that learns handwritten digits. Its outer steps, their exchange
through a directory and the way in which a late site catches up are those of real jobs (outer.store); the inner steps
are not. All rows have seen the same number of samples; a late site is late by a whole average.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import launcher
from launcher.plan.run_plan import RunPlan
from launcher.train.outer.store_client import OuterExchange
from launcher.train.outer.store_sites import StoreSites
from launcher.train.outer.store_steps import StoreOuterSteps
from launcher.train.world import World

# a job of one rank
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
HEAD = (
    "| sites | late | samples a step of a site | averages | parts missed | held-out loss | accuracy | bytes of a part "
    "| ms a step and site |\n|---|---|---|---|---|---|---|---|---|"
)


class Parallel:
    """Model of one rank."""

    frozen: frozenset[Tensor] = frozenset()

    def replica_group(self) -> None:
        return None


class Buffers:
    """None of them changes."""

    changing: tuple[str, ...] = ()


@dataclass
class Result:
    """Optimizer step of a simulated site."""

    step: int
    last: bool
    skipped: bool = False
    stopped: bool = False


class SimulatedSite(threading.Thread):
    """One site: a network, an optimizer, its share of each window, and real outer steps."""

    def __init__(self, plan: RunPlan, data: tuple[Tensor, Tensor], late: float) -> None:
        super().__init__(daemon=True)
        assert plan.outer is not None
        assert plan.outer.site is not None
        self.plan, self.parallel, self.buffers, self.steps = plan, Parallel(), Buffers(), 0
        self.model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self._data, self._late = data, late
        self._chance = random.Random(plan.outer.site)
        world = World(0, 1, 0, site=plan.outer.site, sites=plan.outer.sites, whole_job=True)
        self.sites = StoreSites(world, plan, lambda: False)
        self.outer = StoreOuterSteps(plan.outer, self.sites)
        self.error: BaseException | None = None

    def skip_to(self, step: int) -> None:
        self.steps = step

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        outer, steps = self.plan.outer, self.plan.train.steps
        assert outer is not None
        assert steps is not None
        self.outer.on_setup(self)
        self.outer.on_start(self)
        while self.steps < steps:
            self._step()
            self.steps = step = self.steps + 1
            if step % outer.every == 0 and step < steps and self._chance.random() < self._late:
                while self.sites.closed(OuterExchange(step, 0)) is None:
                    time.sleep(0.02)
            self.outer.on_step(self, Result(step, last=step == steps))

    def _step(self) -> None:
        images, labels = self._data
        size, site = self.plan.batch.global_size // self.sites.number, self.sites.site
        window = torch.randperm(len(images), generator=torch.Generator().manual_seed(self.steps))
        chosen = window[site * size : (site + 1) * size]
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images[chosen]), labels[chosen]).backward()
        self._optimizer.step()


def run(sites: int, late: float, options: argparse.Namespace) -> str:
    """Return the table's row for ``sites`` sites, each of which is late with probability ``late`` at each average."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    held_out = torch.arange(len(images)) % 5 == 4
    with tempfile.TemporaryDirectory() as directory:
        words = [
            "outer=diloco", f"outer.store={directory}/store", f"outer.sites={sites}", f"outer.every={options.every}",
            f"outer.compress={options.compress}", f"outer.patience_s={max(2, sites / 8) if late else 600}",
            f"train.steps={options.steps}",
            f"batch.global_size={options.batch}", "batch.short_window=drop", "schedule=constant",
            "schedule.warmup_steps=0", "precision=fp32", "cluster.device=cpu", "cluster.workers_per_node=1",
            f"run.dir={directory}", "wandb.mode=disabled", "task=digits", "checkpoint.enabled=false",
        ]  # fmt: skip
        data = images[~held_out], labels[~held_out]
        whole, everyone = launcher.make_plan([*words, "outer.site=0"], samples=len(data[0])), list[SimulatedSite]()
        assert whole.outer is not None
        for site in range(sites):
            root = Path(directory, f"site{site}")
            root.mkdir()
            plan = replace(whole, run=replace(whole.run, dir=str(root)), outer=replace(whole.outer, site=site))
            torch.manual_seed(0)
            everyone.append(SimulatedSite(plan, data, late))
        began = time.monotonic()
        with redirect_stdout(sys.stderr):  # each site says who is late
            for each in everyone:
                each.start()
            for each in everyone:
                each.join()
        seconds = time.monotonic() - began
        for each in everyone:
            if each.error is not None:
                raise each.error
        part = next(Path(directory, "store", "exchange").glob("*/site0")).stat().st_size
    models = [torch.cat([p.detach().flatten() for p in each.model.parameters()]) for each in everyone]
    if not all(torch.equal(models[0], other) for other in models):
        raise SystemExit("jobs/outer_sites.py: the sites have not ended with one model")
    with torch.no_grad():
        scores = everyone[0].model(images[held_out])
        loss = float(nn.functional.cross_entropy(scores, labels[held_out]))
        accuracy = float((scores.argmax(1) == labels[held_out]).float().mean())
    averages, missed = everyone[0].sites.rounds, everyone[0].sites.missed
    pace = 1e3 * seconds / options.steps / sites
    cells: list[Any] = [sites, f"{late:.0%}", options.batch // sites, averages, missed]
    return f"| {' | '.join(map(str, cells))} | {loss:.4f} | {accuracy:.1%} | {part:,} | {pace:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 4, 16, 64, 256])
    parser.add_argument("--late", type=float, nargs="+", default=[0, 0.1], help="chance of a site at each average")
    parser.add_argument("--compress", default="none")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=1024, help="samples of all sites in a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(ALONE)
    print(HEAD, flush=True)
    for sites in options.sites:
        for late in options.late:
            print(run(sites, late, options), flush=True)


if __name__ == "__main__":
    main()
