"""Outer steps of sites that are jobs of their own, and may be late, lost or back again.

The parts of an exchange are of whole parameters, so that sites may differ in number of ranks and in strategy. A site
that was no member of an exchange adds its whole outer gradient to what it has not sent yet. One that finds further
exchanges closed without it applies them in order, and continues at the step of the last one; its own windows until then
are left out. One that is asked to stop while it waits leaves the exchange open, and applies it when it is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from launcher.config.choices import OuterCompress
from launcher.errors import ConfigError, EngineMisuse, NotFinite
from launcher.plan.outer import SENT_BYTES, OuterPlan
from launcher.plan.run_plan import RunPlan
from launcher.train.outer.codec import BLOCK, decode, encode
from launcher.train.outer.outer_steps import (
    EngineOfSite,
    OuterSteps,
    ResultOfSite,
    UnderWay,
    forms_of,
    require_same_forms,
)
from launcher.train.outer.sites import Sites, digest_of
from launcher.train.outer.store_client import BEFORE_ALL, Closed, OuterExchange
from launcher.train.outer.store_sites import StoreSites
from launcher.train.parallel.base import local
from launcher.train.world import World


class StoreOuterSteps(OuterSteps):
    """Outer steps through a store.

    Attributes:
        applied: the newest exchange that was applied.
    """

    def __init__(self, plan: OuterPlan, sites: StoreSites) -> None:
        super().__init__(plan, sites)
        self._stores = sites
        self._compresses = True  # a part that comes too late is kept like one that was not sent
        self._block = BLOCK[plan.compress]
        self._statistics: dict[str, Tensor] = {}  # means of the changing buffers
        self._sent_buffers: dict[str, Tensor] = {}  # values of these that are under way
        self._send_again: dict[int, int] = {}  # fragments that were under way, and when they are due
        self._norms: dict[int, float] = {}
        self._closed: Closed | None = None  # the exchange that is applied
        self.applied = BEFORE_ALL
        self._caught_up_after = BEFORE_ALL
        self._continues_at = 0  # step after which this site continues, when it has left out others
        self._taken_over = set[int]()  # fragments that were under way at the site whose checkpoint this one has loaded

    def on_setup(self, engine: EngineOfSite) -> None:
        super().on_setup(engine)
        self._means = {name: torch.zeros_like(t) for name, t in self.shared.items()}
        self._engine, steps = engine, engine.plan.train.steps
        assert steps is not None
        self._total = steps
        self._require_same_job(engine)  # before this run claims its site, so that a refused run can be corrected

    # the start

    def on_start(self, engine: EngineOfSite) -> None:
        """Agree with the other sites on the job and on its first model, and catch up with them."""
        self._stores.require_own_store(restored=self._restored)
        if self._restored:
            self._stores.introduce([])
        else:
            self._share_model(engine)
        for fragment, due in self._send_again.items():
            if self._sites.joined:  # the site whose checkpoint this one has loaded sends the same
                self._taken_over.add(fragment)
            self._post(fragment, due, [self._means[name] for name in self._fragments[fragment]])
            self._stores.return_at(self._exchange(fragment, due))
        self._send_again = {}
        if self._continues_at > engine.steps:  # saved after it had caught up, before it continued there
            engine.skip_to(self._continues_at)
        self._catch_up(engine)

    def _require_same_job(self, engine: EngineOfSite) -> None:
        own = _contract(engine.plan, self._plan)
        first = self._stores.agree_once("contract", own)
        for name in {**own, **first}:
            value, theirs = own.get(name), first.get(name)
            if value != theirs:
                raise ConfigError(
                    name, value, f"the first site of outer.store={self._plan.store} has {theirs}.",
                    "All sites must have the same job: start this one with that value, under another run.name. A new "
                    "job needs a new store.",
                )  # fmt: skip
        self._stores.compare_tasks(engine.plan.task.params)
        forms = forms_of(engine.model)
        require_same_forms(forms, self._stores.agree_once("model/forms", forms), self._stores.site)

    def _share_model(self, engine: EngineOfSite) -> None:
        named: dict[str, Tensor] = {**dict(engine.model.named_parameters()), **dict(engine.model.named_buffers())}
        digests = {name: digest_of(_whole(tensor.detach())).hex() for name, tensor in named.items()}
        first = self._stores.agree_once("model/digests", {"site": self._stores.site, "digests": digests})
        wanted = [name for name, digest in digests.items() if first["digests"][name] != digest]
        self._stores.introduce(wanted)
        others_want = self._stores.wanted_by_others()
        if not wanted and first["site"] == self._stores.site:
            for name in others_want:
                self._stores.send_value(name, _whole(named[name].detach()))
        with torch.no_grad():
            for name in wanted:
                tensor = named[name].detach()
                whole = self._stores.receive_value(name, _whole(tensor))
                local(tensor).copy_(_part(whole.to(tensor.device), tensor))
            for shared, parameter in zip(*self._locals(engine, [*self.shared]), strict=True):
                shared.copy_(parameter)

    # exchanges

    def _exchange(self, fragment: int, due: int) -> OuterExchange:
        return OuterExchange(due - self._plan.delay, fragment)

    def on_step(self, engine: EngineOfSite, result: ResultOfSite) -> None:
        if engine.parallel.frozen:
            raise EngineMisuse(
                "engine.freeze() does not work with outer.store: a site that is late would freeze at another step.\n"
                "  Freeze in model(), by requires_grad=False, for the whole run."
            )
        super().on_step(engine, result)

    def _send(self, engine: EngineOfSite, fragment: int, due: int) -> None:
        assert fragment not in self._under_way, "an average cannot be left out"
        names = self._fragments[fragment]
        changes = zip(names, self._changes(engine, names), strict=True)
        self._post(fragment, due, [_like(self.shared[name], change) for name, change in changes])

    def _post(self, fragment: int, due: int, changes: Sequence[Tensor]) -> None:
        """Start to send the outer gradients of a fragment, which are sharded as the parameters."""
        target = torch.cat([_whole(change).flatten() for change in changes])
        if not target.isfinite().all():
            raise NotFinite(
                f"The outer gradient of site {self._stores.site} after step {due - self._plan.delay} has inf or nan "
                "values, and was not sent.\n  Lower optimizer.lr, or resume from an earlier checkpoint."
            )
        if fragment == self._plan.fragments - 1 and fragment not in self._send_again:
            own = {name: _wide_copy(value) for name, value in self._changing_buffers().items()}
            self._sent_buffers = self._stores.rank_0.value(own)  # the other ranks take them over with the next window
        buffers = self._sent_buffers if fragment == self._plan.fragments - 1 else {}
        sizes = {name: buffer.numel() for name, buffer in buffers.items()}
        padded = torch.nn.functional.pad(target, (0, -target.numel() % self._block))
        payload = torch.cat([*map(_bytes, buffers.values()), encode(padded, self._plan.compress).cpu()])
        self._stores.send(self._exchange(fragment, due), self._norm(fragment), payload, sizes)
        self._under_way[fragment] = UnderWay(target, due)

    def _receive(self, fragment: int) -> list[Tensor]:
        under_way, closed = self._under_way.pop(fragment), self._closed
        assert closed is not None
        means, own = self._means_of(closed)
        rest = under_way.target if own is None else under_way.target - own
        if fragment in self._taken_over:  # what is in no average is that other site's
            self._taken_over.discard(fragment)
            rest = torch.zeros_like(rest)
        self._keep_unsent(fragment, self._parts(fragment, rest))
        return means

    def _means_of(self, closed: Closed) -> tuple[list[Tensor], Tensor | None]:
        """Return the mean outer gradients of this rank's parts, flattened; and those of this site as it sent them, if
        it is a member."""
        fragment = closed.exchange.fragment
        like = [self.shared[name] for name in self._fragments[fragment]]
        numbers, dtype, device = sum(t.numel() for t in like), like[0].dtype, local(like[0]).device
        padded = -(-numbers // self._block) * self._block
        width = dtype.itemsize if self._plan.compress is OuterCompress.none else SENT_BYTES[self._plan.compress]
        size = round(width * padded)
        total, own = torch.zeros(numbers, dtype=dtype, device=device), None
        statistics: dict[str, list[Tensor]] = {}  # a site that starts now does not know yet which buffers change
        for site, sizes, data in self._stores.receive(closed, self._norm(fragment), size):
            *values, payload = data.split([*(8 * each for each in sizes.values()), size])
            for name, value in zip(sizes, values, strict=True):
                statistics.setdefault(name, []).append(value.view(torch.float64))
            decoded = decode(payload.to(device), self._plan.compress, padded, dtype)[:numbers]
            total += decoded
            if site == self._stores.site:
                own = decoded
        self._statistics = {name: torch.stack(values).mean(0) for name, values in statistics.items()}
        return self._parts(fragment, total / len(closed.members)), own

    def _take_step(self, engine: EngineOfSite, fragment: int, means: Sequence[Tensor], mixing: float) -> None:
        super()._take_step(engine, fragment, means, mixing)
        self._norms.pop(fragment, None)
        buffers, kept = dict(engine.model.named_buffers()), self._sent_buffers
        for name, values in self._statistics.items():
            mean, own = values.view_as(buffers[name]), _wide_copy(buffers[name])
            if name in kept:  # with what it has changed by since it was sent
                mean = torch.where(own == kept[name], mean, own + mean - kept[name])
            buffers[name].copy_(mean)
        if fragment == self._plan.fragments - 1:
            self._sent_buffers = {}

    def _apply(self, engine: EngineOfSite, fragment: int, mixing: float) -> None:
        """Take the outer step of a fragment that was sent, unless this site is asked to stop before all parts are
        there: it takes one more step then. If the fragment is to be sent again after that one, it waits in any case."""
        names, under_way = self._fragments[fragment], self._under_way[fragment]
        exchange = self._exchange(fragment, under_way.due)
        sent_next = engine.steps + 1 >= self._total or fragment in self._plan.fragments_after(engine.steps + 1)
        self._closed = self._stores.close(exchange, unless_stopped=not sent_next)
        if self._closed is None:
            return
        # after a stop: without mixing the outer step would undo the steps since it was due
        late = engine.steps > under_way.due and not mixing
        changes = self._changes(engine, names) if late else []
        super()._apply(engine, fragment, mixing)
        if late:
            for name, change, sent in zip(names, changes, self._parts(fragment, under_way.target), strict=True):
                unsent = local(self._unsent[name])
                unsent.add_((change - sent).view_as(unsent))
        self.applied = max(self.applied, exchange)

    def _exchanged(self, engine: EngineOfSite, result: ResultOfSite) -> None:
        if result.stopped:
            self._stores.leave_before(next(self._following(self._newest())))
        elif not result.last and self.applied > self._caught_up_after:
            self._catch_up(engine)

    # sites that are late

    def _following(self, exchange: OuterExchange) -> Iterator[OuterExchange]:
        """Yield the exchanges after one, in order."""
        for step in range(exchange.step, self._total + 1):
            last = step == self._total
            for fragment in range(self._plan.fragments) if last else self._plan.fragments_after(step):
                following = OuterExchange(step, fragment)
                if following > exchange and step:
                    yield following

    def _newest(self) -> OuterExchange:
        """Return the newest exchange that this site has sent its part of, or applied."""
        sent = [self._exchange(fragment, each.due) for fragment, each in self._under_way.items()]
        return max(self.applied, *sent) if sent else self.applied

    @torch.no_grad()
    def _catch_up(self, engine: EngineOfSite) -> None:
        """Apply the exchanges that the other sites have closed without this one, and continue where they are.

        An exchange that an earlier process of this site took part in is none of them: this one repeats its steps.
        """
        goal, exchange = 0, self.applied
        for exchange in self._following(self._newest()):
            closed = self._stores.closed(exchange)
            if closed is None or self._stores.site in closed.members:
                break
            if exchange.step == self._total:  # the last exchanges follow after the last step
                goal = self._total - 1
                break
            for fragment in [*self._under_way]:
                self._apply(engine, fragment, self._plan.mixing)
            if self._under_way:  # this site stops, and catches up when it is resumed
                break
            self._apply_missed(engine, closed)
            goal = exchange.step
        if exchange > self._newest():
            self._stores.return_at(exchange)
        if goal > max(engine.steps, self._continues_at):
            self._continue_after(engine, goal)
        self._caught_up_after = self.applied

    def _apply_missed(self, engine: EngineOfSite, closed: Closed) -> None:
        fragment = closed.exchange.fragment
        self._keep_unsent(fragment, self._changes(engine, self._fragments[fragment]))
        means, _ = self._means_of(closed)
        self._take_step(engine, fragment, means, 0.0)
        self.applied = closed.exchange

    def _continue_after(self, engine: EngineOfSite, step: int) -> None:
        left_out = range(max(engine.steps, self._continues_at), step)
        samples = sum(engine.plan.batch.global_size_at(window) for window in left_out)
        self._stores.note_left_out(len(left_out), step, samples)
        self._continues_at = step
        engine.skip_to(step)

    def _norm(self, fragment: int) -> float:
        """Return the norm of a fragment's shared parameters."""
        if fragment not in self._norms:
            whole = [_whole(self.shared[name]).flatten().double() for name in self._fragments[fragment]]
            self._norms[fragment] = float(torch.cat(whole).norm())
        return self._norms[fragment]

    def _parts(self, fragment: int, numbers: Tensor) -> list[Tensor]:
        """Return this rank's parts of a fragment's numbers, flattened."""
        like = [self.shared[name] for name in self._fragments[fragment]]
        split = numbers.split([tensor.numel() for tensor in like])
        return [_part(each.view(t.shape), t).flatten() for each, t in zip(split, like, strict=True)]

    def _changing_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that training changes, which are averaged with the last fragment."""
        buffers = dict(self._engine.model.named_buffers())
        return {n: buffers[n].detach() for n in sorted(self._engine.buffers.changing) if buffers[n].is_floating_point()}

    def _settle(self) -> None:
        """Keep what this site has sent, so that a checkpoint waits neither for the store nor for other sites."""
        for fragment, under_way in self._under_way.items():
            parts = self._parts(fragment, under_way.target)
            for name, part in zip(self._fragments[fragment], parts, strict=True):
                kept = local(self._means[name])
                kept.copy_(part.view_as(kept))

    def state_dict(self) -> dict[str, Any]:
        sent = {str(fragment): each.due for fragment, each in self._under_way.items()}
        return super().state_dict() | {
            "site": self._stores.site, "applied": self.applied, "sent": sent, "stores": self._stores.state_dict(),
            "continues_at": self._continues_at, "sent_buffers": self._sent_buffers,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sites.joined = state["site"] != self._stores.site
        super().load_state_dict(state)
        self.applied = OuterExchange(*state["applied"])
        self._send_again = {int(number): due for number, due in state["sent"].items()}
        self._continues_at = state["continues_at"]
        self._sent_buffers = dict(state.get("sent_buffers", {}))
        self._stores.load_state_dict(state["stores"])


def outer_parts(plan: RunPlan, world: World, stop: Callable[[], bool]) -> tuple[Sites, list[OuterSteps]]:
    """Return the sites of a job, and the callback that takes the outer steps, if the plan has any.

    Args:
        stop: whether this rank was asked to stop.
    """
    if plan.outer is None:
        return Sites(world, plan.train.hang_timeout), []
    if plan.outer.whole_job_is_site:
        stores = StoreSites(world, plan, stop)
        return stores, [StoreOuterSteps(plan.outer, stores)]
    sites = Sites(world, plan.train.hang_timeout)
    return sites, [OuterSteps(plan.outer, sites)]


def _contract(plan: RunPlan, outer: OuterPlan) -> dict[str, Any]:
    """Return, as JSON, what all sites must have in common, by key."""
    of_outer = ("sites", "every", "lr", "momentum", "fragments", "delay", "mixing", "compress")
    named = {f"outer.{name}": getattr(outer, name) for name in of_outer}
    for group, part in (("optimizer", plan.optimizer), ("schedule", plan.schedule)):
        keys = {"kind": group, "target": f"{group}._target_"}
        named |= {keys.get(name, f"{group}.{name}"): value for name, value in vars(part).items()}
    of_train = ("steps", "epochs", "seed", "shuffle", "clip_norm")
    named |= {f"train.{name}": getattr(plan.train, name) for name in of_train}
    named |= {
        "batch.global_size": plan.batch.whole.global_size,
        "batch.ramp": [[stage.windows, stage.global_size] for stage in plan.batch.whole.ramp],
        "batch.norm": plan.batch.norm, "task._target_": plan.task.target, "the number of samples": plan.task.samples,
        "precision": plan.precision.kind, "precision.parameters": plan.precision.parameters,
    }  # fmt: skip
    return json.loads(json.dumps(named))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(sharded: Tensor, part: Tensor) -> Tensor:
    """Return the tensor of which this rank has ``part``, sharded as ``sharded`` is."""
    part = part.view_as(local(sharded))
    if not isinstance(sharded, DTensor):
        return part
    return DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _part(whole: Tensor, sharded: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is to be sharded as ``sharded`` is."""
    if not isinstance(sharded, DTensor):
        return whole
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None).to_local()


def _wide_copy(buffer: Tensor) -> Tensor:
    return buffer.detach().to("cpu", torch.float64, copy=True)


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.flatten().view(torch.uint8)
