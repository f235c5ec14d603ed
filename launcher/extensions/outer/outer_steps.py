"""Outer steps of DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (Douillard et al. 2025).

Every site starts with the same parameters and trains on its own. Every H optimizer steps the sites take an outer step:

    outer gradient of a site = shared parameters - its own parameters
    g = mean of the outer gradients over the sites
    momentum = m * momentum + g;   shared parameters -= lr * (g + m * momentum)     (Nesterov)
    own parameters = mixing * own + (1 - mixing) * shared

The parameters may be divided into fragments that take their outer steps in turn, and the exchange of a fragment may
continue while the site trains on. Inner optimizer state is never exchanged. Each parameter crosses the link between two
sites once: ranks that hold copies of it send a part each.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.errors import ConfigError, DataError, ReplicasDiffer, TaskError
from launcher.extensions.outer.outer_keys import OuterConfig
from launcher.extensions.outer.site_exchange import Gathering, Sites
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count, first_names
from launcher.train.engine.engine import Engine
from launcher.train.engine.window_totals import StepResult
from launcher.train.parallel.base import local, wide_copy
from launcher.train.parallel.replicas import require_same_structure
from launcher.train.world import World

# most seconds for measuring what a synchronous step would cost between the sites
MEASURED_S = 5.0


def connected_sites(world: World, plan: RunPlan) -> Sites:
    """Return the sites of a job, which take outer steps."""
    sites = Sites(world, plan.train.hang_timeout)
    sites.callbacks.append(OuterSteps(plan.extension(OuterConfig), sites))
    return sites


class OuterSteps:
    """Outer steps of one site. It is a callback of the engine, so that its state is saved with the model.

    Attributes:
        shared: the parameters that all sites share, by name, sharded as the model's; in fp32 for narrower ones.
    """

    def __init__(self, plan: OuterConfig, sites: Sites) -> None:
        self._plan, self._sites = plan, sites
        self._mixing = plan.mixing if plan.mixing is not None else 0.5 if plan.delay else 0.0
        self._restored = False
        # by fragment that was sent: the step after which it is applied, and a function that waits for its mean
        self._sent: dict[int, tuple[int, Callable[[], list[Tensor]]]] = {}

    def on_setup(self, engine: Engine) -> None:
        named = {name: p.detach() for name, p in engine.model.named_parameters() if p.requires_grad}
        self.shared = {name: wide_copy(parameter) for name, parameter in named.items()}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self.shared.items()}
        # means that were received before their step, for a checkpoint
        self._means = {name: torch.zeros_like(t) for name, t in self.shared.items()} if self._plan.delay else {}
        self._fragments = _divided({name: p.numel() for name, p in named.items()}, self._plan.fragments)
        self._replicas = engine.parallel.replica_group()
        self._copies, self._copy = (1, 0) if self._replicas is None else (self._replicas.size(), self._replicas.rank())

    @torch.no_grad()
    def on_start(self, engine: Engine) -> None:
        """Share the first site's model, or check that a checkpoint has restored the same one at all sites."""
        try:
            require_same_structure(engine.model, self._sites.whole_job())
        except TaskError as error:
            raise ConfigError(
                "outer", "diloco", f"the sites have different models. {error}",
                f"Rank N is of site N // {self._sites.world.size}; all sites need the same names in the same order.",
            ) from None  # fmt: skip
        if not self._restored:
            tensors = [local(tensor.detach()) for tensor in (*engine.model.parameters(), *engine.model.buffers())]
            for tensor, differs in zip(tensors, self._sites.differing(tensors), strict=True):
                if differs:
                    tensor.copy_(self._sites.gather(tensor.cpu())()[0])
            for shared, parameter in zip(*self._locals(engine, [*self.shared]), strict=True):
                shared.copy_(parameter)
        self._require_same(engine)
        if (limit_s := engine.plan.train.calibrate_s) != 0:
            numbers = sum(local(tensor).numel() for tensor in self.shared.values()) // self._copies
            self._sites.measure(4 * numbers, min(MEASURED_S, limit_s or MEASURED_S))

    def _require_same(self, engine: Engine) -> None:
        kinds = [kind.value for kind in self._sites.of_all(engine.plan.precision.kind)]
        if len(set(kinds)) > 1:
            raise ConfigError(
                "precision", "auto", f"the sites have chosen different formats: {', '.join(kinds)}.",
                "Name one: precision=bf16 or precision=fp32.",
            )  # fmt: skip
        differing = [
            name for name, other in zip(self.shared, self._sites.differing(self.shared.values()), strict=True) if other
        ]
        if differing:
            raise ReplicasDiffer(
                f"After step {engine.steps} the sites do not share the same parameters: {first_names(differing)}.\n"
                "  Their checkpoints are of different runs, or code of yours changes the outer steps' state."
            )

    @torch.no_grad()
    def on_step(self, engine: Engine, result: StepResult) -> None:
        started, step, ends = time.perf_counter(), result.step, result.last and not result.stopped
        if result.skipped:
            raise DataError(
                f"The window of step {step + 1} holds no item at site {self._sites.site}: it cannot take a step that "
                "the other sites take.\n  Remove samples without items from train_data()."
            )
        for fragment in [each for each, (due, _) in self._sent.items() if step >= due or ends]:
            self._apply(engine, fragment, self._mixing)
        sent = [*range(self._plan.fragments)] if ends else self._plan.fragments_after(step)
        for fragment in sent:
            self._send(engine, fragment, step + self._plan.delay)
        if ends or not self._plan.delay:  # after the last step all sites have one model
            for fragment in sent:
                self._apply(engine, fragment, 0.0)
        if step % self._plan.every == 0 or ends:
            self._average_buffers(engine)
        self._sites.add_time(time.perf_counter() - started)

    def _send(self, engine: Engine, fragment: int, due: int) -> None:
        """Start the exchange of a fragment's outer gradients."""
        shared, parameters = self._locals(engine, self._fragments[fragment])
        # a narrower parameter is a rounded copy of the shared one; the rounding is no progress
        changes = [s.to(p.dtype).to(s.dtype) - p.to(s.dtype) for s, p in zip(shared, parameters, strict=True)]
        own = torch.cat([change.flatten() for change in changes])
        padded = torch.nn.functional.pad(own, (0, -own.numel() % self._copies))
        payload = padded.chunk(self._copies)[self._copy].cpu()
        self._sent[fragment] = due, functools.partial(self._receive, fragment, own, self._sites.gather(payload))

    def _receive(self, fragment: int, own: Tensor, gathering: Gathering) -> list[Tensor]:
        """Wait for a fragment's outer gradients, and return their mean for each of its parameters, flattened."""
        total = torch.zeros_like(own)
        for payload in gathering():
            parts = [payload.to(own.device)]
            if self._copies > 1:
                parts = [torch.empty_like(parts[0]) for _ in range(self._copies)]
                dist.all_gather(parts, payload.to(own.device), self._replicas)
            total += torch.cat(parts)[: own.numel()]
        sizes = [local(self.shared[name]).numel() for name in self._fragments[fragment]]
        return list((total / self._sites.count).split(sizes))

    def _apply(self, engine: Engine, fragment: int, mixing: float) -> None:
        """Take the outer step of a fragment that was sent."""
        names, plan = self._fragments[fragment], self._plan
        _, receive = self._sent.pop(fragment)
        frozen = {name for name, p in engine.model.named_parameters() if p in engine.parallel.frozen}
        for name, mean, kept, parameter in zip(names, receive(), *self._locals(engine, names), strict=True):
            momentum, gradient = local(self._momentum[name]), mean.view_as(kept)
            if name in frozen:  # sites average what they have changed before, and nothing follows
                momentum.zero_()
                kept.sub_(gradient)
            else:
                momentum.mul_(plan.momentum).add_(gradient)
                kept.sub_(gradient + plan.momentum * momentum, alpha=plan.lr)
            parameter.copy_(kept if not mixing else torch.lerp(kept, parameter.to(kept.dtype), mixing))
        self._sites.rounds += 1

    def _average_buffers(self, engine: Engine) -> None:
        """Average the buffers that training changes, such as BatchNorm's running statistics."""
        buffers = dict(engine.model.named_buffers())
        names = {name for found in self._sites.of_all(engine.buffers.changing) for name in found}
        changing = [buffers[name] for name in sorted(names) if buffers[name].is_floating_point()]
        if not changing:
            return
        together = torch.cat([buffer.detach().flatten().double() for buffer in changing]).cpu()
        mean = torch.stack(self._sites.gather(together)()).mean(0)
        for buffer, values in zip(changing, mean.split([buffer.numel() for buffer in changing]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def _locals(self, engine: Engine, names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of the shared and of the site's own parameters."""
        parameters = dict(engine.model.named_parameters())
        return [local(self.shared[name]) for name in names], [local(parameters[name].detach()) for name in names]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state. Exchanges that are under way are received first; their means are saved."""
        for fragment, (due, receive) in self._sent.items():
            for kept, mean in zip(self._received(fragment), receive(), strict=True):
                kept.copy_(mean.view_as(kept))
            self._sent[fragment] = due, functools.partial(self._received, fragment)
        return {
            "shared": self.shared, "momentum": self._momentum, "means": self._means,
            "rounds": self._sites.rounds, "arrived": {str(fragment): due for fragment, (due, _) in self._sent.items()},
        }  # fmt: skip

    def _received(self, fragment: int) -> list[Tensor]:
        return [local(self._means[name]) for name in self._fragments[fragment]]

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = {"shared": self.shared, "momentum": self._momentum, "means": self._means}
        for kind, tensors in own.items():
            for name, tensor in state.get(kind, {}).items():
                if name in tensors:
                    local(tensors[name]).copy_(local(tensor))
        self._sites.rounds = state["rounds"]
        for number, due in state["arrived"].items():
            self._sent[int(number)] = due, functools.partial(self._received, int(number))
        self._restored = True


def _divided(sizes: dict[str, int], parts: int) -> list[list[str]]:
    """Return the names in ``parts`` lists of adjacent ones, of about equal sizes."""
    if parts > len(sizes):
        raise ConfigError(
            "outer.fragments", parts, f"the model has {count(len(sizes), 'trained parameter')} to divide.",
            f"Use outer.fragments={len(sizes)} or less.",
        )  # fmt: skip
    fragments: list[list[str]] = [[] for _ in range(parts)]
    total, before, latest = sum(sizes.values()), 0, -1
    for position, (name, size) in enumerate(sizes.items()):
        # the next fragment at most, and one with so many names left that no later one stays empty
        latest = max(min(before * parts // total, latest + 1), latest, position + parts - len(sizes))
        fragments[latest].append(name)
        before += size
    return fragments
