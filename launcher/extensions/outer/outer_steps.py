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

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.errors import ConfigError, DataError, ReplicasDiffer
from launcher.plan.outer import OuterPlan
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count, first_names
from launcher.train.outer.sites import Gathering, Sites, digest_of
from launcher.train.parallel.base import Parallel, local, wide_copy
from launcher.train.parallel.replicas import Buffers

# most seconds for measuring what a synchronous step would cost between the sites
MEASURED_S = 5.0


class EngineOfSite(Protocol):
    """The part of an engine that outer steps use."""

    plan: RunPlan
    parallel: Parallel
    buffers: Buffers

    @property
    def model(self) -> nn.Module: ...
    @property
    def steps(self) -> int: ...


class ResultOfSite(Protocol):
    """The part of a StepResult that they use."""

    @property
    def step(self) -> int: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def last(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...


@dataclass
class _UnderWay:
    """Outer gradients of a fragment that are under way.

    Attributes:
        own: outer gradients of this site.
        due: optimizer step after which they are applied.
    """

    own: Tensor
    due: int
    gathering: Gathering


class OuterSteps:
    """Outer steps of one site. It is a callback of the engine, so that its state is saved with the model.

    Attributes:
        shared: the parameters that all sites share, by name, sharded as the model's; in fp32 for narrower ones.
    """

    def __init__(self, plan: OuterPlan, sites: Sites) -> None:
        self._plan, self._sites = plan, sites
        self._restored = False
        self._under_way: dict[int, _UnderWay] = {}
        self._arrived: dict[int, int] = {}  # fragments whose mean was received before it is applied, and when that is

    def on_setup(self, engine: EngineOfSite) -> None:
        named = {name: p.detach() for name, p in engine.model.named_parameters() if p.requires_grad}
        self.shared = {name: wide_copy(parameter) for name, parameter in named.items()}
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self.shared.items()}
        # means that wait for their step
        self._means = {name: torch.zeros_like(t) for name, t in self.shared.items()} if self._plan.delay else {}
        self._fragments = _divided({name: p.numel() for name, p in named.items()}, self._plan.fragments)
        self._replicas = engine.parallel.replica_group()

    def on_start(self, engine: EngineOfSite) -> None:
        """Share the first site's model, or check that a checkpoint has restored the same one at all sites."""
        everyone = self._sites.of_all(forms_of(engine.model))
        for site, forms in enumerate(everyone):
            require_same_forms(forms, everyone[0], site)
        if not self._restored:
            self._sites.share([local(tensor) for tensor in (*engine.model.parameters(), *engine.model.buffers())])
            for shared, parameter in zip(*self._locals(engine, [*self.shared]), strict=True):
                shared.copy_(parameter)
        self._require_same(engine)
        if (limit_s := engine.plan.train.calibrate_s) != 0:
            numbers = sum(local(tensor).numel() for tensor in self.shared.values()) // _size_and_rank(self._replicas)[0]
            self._sites.measure(4 * numbers, min(MEASURED_S, limit_s or MEASURED_S))

    def _require_same(self, engine: EngineOfSite) -> None:
        kinds = [kind.value for kind in self._sites.of_all(engine.plan.precision.kind)]
        if len(set(kinds)) > 1:
            raise ConfigError(
                "precision", "auto", f"the sites have chosen different formats: {', '.join(kinds)}.",
                "Name one: precision=bf16 or precision=fp32.",
            )  # fmt: skip
        digests = {name: digest_of(local(tensor)) for name, tensor in self.shared.items()}
        everyone = self._sites.of_all(digests)
        differing = [name for name in digests if len({each[name] for each in everyone}) > 1]
        if differing:
            raise ReplicasDiffer(
                f"After step {engine.steps} the sites do not share the same parameters: {first_names(differing)}.\n"
                "  Their checkpoints are of different runs, or code of yours changes the outer steps' state."
            )

    @torch.no_grad()
    def on_step(self, engine: EngineOfSite, result: ResultOfSite) -> None:
        started, step, ends = time.perf_counter(), result.step, result.last and not result.stopped
        if result.skipped:
            raise DataError(
                f"The window of step {step + 1} holds no item at site {self._sites.site}: it cannot take a step that "
                "the other sites take.\n  Remove samples without items from train_data()."
            )
        waiting = {number: each.due for number, each in self._under_way.items()} | self._arrived
        for fragment, due in waiting.items():
            if step >= due or ends:
                self._apply(engine, fragment, self._plan.mixing)
        sent = [*range(self._plan.fragments)] if ends else self._plan.fragments_after(step)
        for fragment in sent:
            self._send(engine, fragment, step + self._plan.delay)
        if ends or not self._plan.delay:  # after the last step all sites have one model
            for fragment in sent:
                self._apply(engine, fragment, 0.0)
        if step % self._plan.every == 0 or ends:
            self._average_buffers(engine)
        self._sites.add_time(time.perf_counter() - started)

    def _send(self, engine: EngineOfSite, fragment: int, due: int) -> None:
        """Start the exchange of a fragment's outer gradients."""
        own = torch.cat(self._changes(engine, self._fragments[fragment]))
        ranks, rank = _size_and_rank(self._replicas)
        share = -(-own.numel() // ranks)  # of each rank that has the same parameters
        padded = torch.nn.functional.pad(own, (0, ranks * share - own.numel()))
        payload = padded[rank * share : (rank + 1) * share].cpu()
        self._under_way[fragment] = _UnderWay(own, due, self._sites.gather(payload))

    def _changes(self, engine: EngineOfSite, names: list[str]) -> list[Tensor]:
        """Return the outer gradients of this rank's parts, flattened."""
        shared, own = self._locals(engine, names)
        # a narrower parameter is a rounded copy of the shared one; the rounding is no progress
        return [(s.to(p.dtype).to(s.dtype) - p.to(s.dtype)).flatten() for s, p in zip(shared, own, strict=True)]

    def _receive(self, fragment: int) -> list[Tensor]:
        """Wait for a fragment's outer gradients, and return their mean for each of its parameters, flattened."""
        exchange = self._under_way.pop(fragment)
        own = exchange.own
        ranks, _ = _size_and_rank(self._replicas)
        total = torch.zeros_like(own)
        for payload in exchange.gathering.wait():
            parts = [payload.to(own.device)]
            if ranks > 1:
                parts = [torch.empty_like(parts[0]) for _ in range(ranks)]
                dist.all_gather(parts, payload.to(own.device), self._replicas)
            total += torch.cat(parts)[: own.numel()]
        sizes = [local(self.shared[name]).numel() for name in self._fragments[fragment]]
        return list((total / self._sites.count).split(sizes))

    def _apply(self, engine: EngineOfSite, fragment: int, mixing: float) -> None:
        """Take the outer step of a fragment that was sent."""
        if self._arrived.pop(fragment, None) is not None:
            means = [local(self._means[name]).flatten() for name in self._fragments[fragment]]
        else:
            means = self._receive(fragment)
        self._take_step(engine, fragment, means, mixing)

    def _take_step(self, engine: EngineOfSite, fragment: int, means: Sequence[Tensor], mixing: float) -> None:
        names, plan = self._fragments[fragment], self._plan
        frozen = {name for name, p in engine.model.named_parameters() if p in engine.parallel.frozen}
        shared, own = self._locals(engine, names)
        for name, mean, kept, parameter in zip(names, means, shared, own, strict=True):
            momentum, gradient = local(self._momentum[name]), mean.view_as(kept)
            if name in frozen:  # sites average what they have changed before, and nothing follows
                momentum.zero_()
                kept.sub_(gradient)
            else:
                momentum.mul_(plan.momentum).add_(gradient)
                kept.sub_(gradient + plan.momentum * momentum, alpha=plan.lr)
            parameter.copy_(kept if not mixing else torch.lerp(kept, parameter.to(kept.dtype), mixing))
        self._sites.rounds += 1

    def _average_buffers(self, engine: EngineOfSite) -> None:
        """Average the buffers that training changes, such as BatchNorm's running statistics."""
        buffers = dict(engine.model.named_buffers())
        names = {name for found in self._sites.of_all(engine.buffers.changing) for name in found}
        changing = [buffers[name] for name in sorted(names) if buffers[name].is_floating_point()]
        if not changing:
            return
        together = torch.cat([buffer.detach().flatten().double() for buffer in changing]).cpu()
        mean = torch.stack(self._sites.gather(together).wait()).mean(0)
        for buffer, values in zip(changing, mean.split([buffer.numel() for buffer in changing]), strict=True):
            buffer.copy_(values.view_as(buffer))

    def _locals(self, engine: EngineOfSite, names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
        """Return this rank's parts of the shared and of the site's own parameters."""
        parameters = dict(engine.model.named_parameters())
        return [local(self.shared[name]) for name in names], [local(parameters[name].detach()) for name in names]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the state, to which exchanges that are under way belong."""
        self._settle()
        return {
            "shared": self.shared, "momentum": self._momentum, "means": self._means,
            "rounds": self._sites.rounds, "arrived": {str(number): due for number, due in self._arrived.items()},
        }  # fmt: skip

    def _settle(self) -> None:
        """Receive the exchanges that are under way; their means are saved."""
        for fragment, exchange in [*self._under_way.items()]:
            for name, mean in zip(self._fragments[fragment], self._receive(fragment), strict=True):
                kept = local(self._means[name])
                kept.copy_(mean.view_as(kept))
            self._arrived[fragment] = exchange.due

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = {"shared": self.shared, "momentum": self._momentum, "means": self._means}
        for kind, tensors in own.items():
            for name, tensor in state.get(kind, {}).items():
                if name in tensors:
                    local(tensors[name]).copy_(local(tensor))
        self._sites.rounds = state["rounds"]
        self._arrived = {int(number): due for number, due in state["arrived"].items()}
        self._restored = True


def forms_of(model: nn.Module) -> list[str]:
    """Return name, shape, format and kind of each parameter and buffer, in their order."""
    parameters = [(name, each, ", trained" if each.requires_grad else "") for name, each in model.named_parameters()]
    named = [*parameters, *((name, each, ", a buffer") for name, each in model.named_buffers())]
    return [f"{name} {[*each.shape]} {str(each.dtype).removeprefix('torch.')}{kind}" for name, each, kind in named]


def require_same_forms(forms: list[str], first: list[str], site: int) -> None:
    """Raise ConfigError unless ``forms_of`` the model of a site are those of the first site."""
    if forms == first:
        return
    own, others = ([form for form in some if form not in more] for some, more in ((forms, first), (first, forms)))
    differing = f"{first_names(own) or 'nothing'}; the first site has {first_names(others) or 'nothing'}"
    differing = differing if own or others else "the same values in another order"
    raise ConfigError(
        "outer", "diloco", f"the model of site {site} is not that of the first site. It has {differing}.",
        "model() must return the same at all sites: names in the same order, shapes, formats, and what is trained.",
    )  # fmt: skip


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def _divided(sizes: dict[str, int], parts: int) -> list[list[str]]:
    """Return the names in ``parts`` lists of adjacent ones, of about equal sizes.

    Raises:
        ConfigError: there are fewer names than parts.
    """
    if parts > len(sizes):
        raise ConfigError(
            "outer.fragments", parts, f"the model has {count(len(sizes), 'trained parameter')} to divide.",
            f"Use outer.fragments={len(sizes)} or less.",
        )  # fmt: skip
    fragments: list[list[str]] = [[]]
    total, before = sum(sizes.values()), 0
    for position, (name, size) in enumerate(sizes.items()):
        left = parts - len(fragments)
        full = before * parts >= total * len(fragments)
        if fragments[-1] and left and (full or len(sizes) - position == left):
            fragments.append([])
        fragments[-1].append(name)
        before += size
    return fragments
