"""Sites that are jobs of their own and exchange through a store. Rank 0 of each site talks to the store.

An exchange is closed by the first site that posts the list of its members: all sites, or those that were there when its
patience ended. That list is never changed, so that all sites, also those that read it much later, average the same
values.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from launcher.errors import ConfigError, SiteError
from launcher.plan.run_plan import RunPlan
from launcher.quantities import count
from launcher.rundir.files import read_json, write_json
from launcher.train.outer.part_collector import PartCollector, make_part, part_header, part_problem
from launcher.train.outer.rank_zero import RankZero
from launcher.train.outer.sites import Sites
from launcher.train.outer.store_client import BEFORE_ALL, Closed, OuterExchange, PatientStore
from launcher.train.world import OfFirst, World

_LEAVE_S = 5.0  # most seconds to tell the other sites that this one stops


class StoreSites(Sites):
    """The sites of separate jobs, seen from a rank of one. All ranks of the site call each method that is not private,
    in the same order.

    Attributes:
        number: number of sites.
        rank_0: of this site, the only one that talks to the store.
        newest: the newest exchange that was received.
        missed: how often a site was no member, over all exchanges so far.
        left_out: steps that this site has left out to catch up.
    """

    def __init__(self, world: World, plan: RunPlan, stop: Callable[[], bool]) -> None:
        """``stop``: whether this rank was asked to stop; it does not wait for other sites then."""
        super().__init__(dataclasses.replace(world, sites=1))
        self._stop = stop
        assert plan.outer is not None
        self._plan, self._paths, self.number = plan.outer, plan.paths, world.sites
        self._is_first, self.rank_0 = world.rank == 0, RankZero(world, stop)
        self._opened = PatientStore(plan.outer, stop) if self._is_first else None
        self._collectors: dict[OuterExchange, PartCollector] = {}
        self._obsolete: PartCollector | None = None  # one whose exchange was closed without this site
        self._started = {self.site}  # sites that are known to have started
        self._received_bytes = 0
        self._histories: dict[int, str] = {}  # by fragment: digest of all averages so far, with their members
        self.newest = Closed(BEFORE_ALL, [*range(self.number)])
        self.missed = self.left_out = 0
        # until this step a resumed site also waits for stopped ones: all may have been stopped together
        self._first_step_alone = 0

    # the start

    @property
    def of_first(self) -> OfFirst:
        return self.agree_once

    def agree_once(self, name: str, own: Any) -> Any:
        """Return the JSON value that the first of all sites gave for ``name``."""
        return self.rank_0.call(lambda: json.loads(self._store.decide(name, json.dumps(own).encode())))

    def compare_tasks(self, own: Mapping[str, Any]) -> None:
        """Tell the user which parameters of the task are not those of the first site: paths may differ, for example."""
        own = json.loads(json.dumps(own))
        first = self.agree_once("task", own)
        for key in sorted(first.keys() | own.keys()):
            if (theirs := first.get(key)) != (mine := own.get(key)):
                own_text, first_text = ("the default" if value is None else value for value in (mine, theirs))
                self._print(f"Note: task.{key} is {own_text}; the first site of outer.store has {first_text}.")

    def require_own_store(self, *, restored: bool) -> None:
        """Check that the store is that of this run, and that nothing in it was left by another one.

        Raises:
            SiteError: it is not.
        """
        problem = self.rank_0.call(lambda: self._store_problem(restored=restored))
        if problem is not None:
            raise SiteError(f"outer.store={self._plan.store}: {problem}")

    def _store_problem(self, *, restored: bool) -> str | None:
        identity = self._store.decide("job", uuid.uuid4().hex.encode()).decode()
        record = self._paths.outer_store
        known = read_json(record) or {"job": identity, "run": uuid.uuid4().hex}
        if known["job"] != identity:
            return "it is not the store that this run has used before.\n  Restore it, or start a new run."
        write_json(record, known)  # before the other sites see it, so that a run that is killed here can start again
        own = known["run"].encode()
        if self._store.decide(f"run/site{self.site}", own) != own and not restored:
            return (
                f"it holds what another run has sent as site {self.site}.\n"
                "  Use a new directory for each job, and another outer.site for each of its runs."
            )
        return None

    def introduce(self, wanted: list[str]) -> None:
        """Tell the other sites that this one is there, and which values of the first site's model it needs."""
        self.rank_0.call(lambda: self._store.decide(f"hello/site{self.site}", json.dumps(wanted).encode()))

    def wanted_by_others(self) -> list[str]:
        """Wait for the other sites, and return the values of the model that they need."""
        return self.rank_0.call(self._await_others)

    def _await_others(self) -> list[str]:
        wanted, missing, announced = dict[str, None](), {*range(self.number)} - {self.site}, False
        for in_time in self._store.tries():
            for site in sorted(missing):
                hello = self._store.get(f"hello/site{site}")
                if hello is not None:
                    missing.discard(site)
                    wanted |= dict.fromkeys(json.loads(hello))
            if not missing or self._stop():
                return [*wanted]
            if not in_time:
                break
            if not announced:
                announced = True
                self._print(f"Waiting for the other sites, at most outer.patience_s={self._plan.patience_s:g}.")
        which, have, them = ("Site", "has", "it") if len(missing) == 1 else ("Sites", "have", "them")
        self._print(
            f"{which} {', '.join(map(str, sorted(missing)))} {have} not started: training starts without {them}.\n"
            f"  It can still join, with outer.store={self._plan.store}; until then averages are of the others only."
        )
        return [*wanted]

    def send_value(self, name: str, value: Tensor) -> None:
        """Send a value of the model to all sites."""
        data = _bytes_of(value) if self._is_first else b""
        self.rank_0.call(lambda: self._store.decide(f"model/{name}", data) and None)

    def receive_value(self, name: str, like: Tensor) -> Tensor:
        """Return a value of the first site's model, in host memory.

        Raises:
            SiteError: nobody has sent it.
        """
        received: list[bytes | None] = []

        def is_missing() -> bool:
            received.append(self._store.wait_for(f"model/{name}"))
            return received[0] is None

        if self.rank_0.call(is_missing):
            raise SiteError(
                f"The model of site {self.site} begins with other values than that of the first site ({name}), which "
                f"did not send them within outer.patience_s={self._plan.patience_s:g}.\n"
                "  Make model() use the seed, or start the sites together; or copy a checkpoint of another site into "
                f"{self._paths.checkpoints}."
            )
        return self.rank_0.broadcast(received, like.nbytes).view(like.dtype).view(like.shape)

    # exchanges

    def send(self, exchange: OuterExchange, norm: float, payload: Tensor, buffers: Mapping[str, int]) -> None:
        """Start to send this site's part of an exchange.

        Args:
            norm: of the shared parameters before it, which is the same at all sites.
            payload: bytes in host memory.
            buffers: length of each buffer whose values, in fp64, precede the outer gradients in ``payload``.
        """
        self._payload_bytes += payload.nbytes
        if not self._is_first:
            return
        header = {"norm": norm, "history": self._histories.get(exchange.fragment, ""), "saved": self._safe_step()}
        part = make_part({**header, "buffers": buffers}, payload)
        self._collectors[exchange] = PartCollector(
            self._store, self._plan, exchange, part, self.newest.saved, self._obsolete
        )

    def close(self, exchange: OuterExchange, *, unless_stopped: bool = False) -> Closed | None:
        """Wait for the other sites' parts of an exchange, and return the list of its members.

        Args:
            unless_stopped: return None when this site is asked to stop; the exchange stays open then.
        """
        call = functools.partial(self._close, exchange, unless_stopped=unless_stopped)
        return self.rank_0.call(call, unless_stopped=unless_stopped)

    def closed(self, exchange: OuterExchange) -> Closed | None:
        """Return the list of members of an exchange that was closed before; None: it is still open, or this site was
        asked to stop and the store cannot be reached."""
        return self.rank_0.call(lambda: self._store.closed(exchange), unless_stopped=True)

    def _close(self, exchange: OuterExchange, *, unless_stopped: bool) -> Closed | None:
        collector = self._collectors[exchange] = self._collectors[exchange].again()
        for in_time in self._store.tries(collector.join):
            if collector.closed is not None:
                return collector.closed
            if unless_stopped and self._stop():
                return None
            collector.require_no_error()
            if not collector.sent:
                # the others may go on without this site, which does not go on without its own part
                if (closed := self._store.closed(exchange)) is not None:
                    return closed
            elif not in_time or not self._awaits_others(exchange, collector):
                collector.close_now()
        raise AssertionError("the loop has no end")

    def _awaits_others(self, exchange: OuterExchange, collector: PartCollector) -> bool:
        """Return whether a site whose part is not here yet may still send it in time."""
        if (names := collector.names) is None:
            return True
        for site in {*range(self.number)} - collector.parts.keys() - {self.site}:
            left = f"left{site}" in names and exchange.step > self._first_step_alone
            absent = left or site not in self.newest.members or not self._has_started(site)
            if {f"site{site}", f"returned{site}"} & names or not absent:
                return True
        return False

    def _has_started(self, site: int) -> bool:
        if site not in self._started and self._store.has(f"hello/site{site}"):
            self._started.add(site)
        return site in self._started

    def receive(self, closed: Closed, norm: float, size: int) -> Iterator[tuple[int, dict[str, int], Tensor]]:
        """Yield the number, the lengths of the buffers, and the payload in host memory of each member of an exchange.

        Args:
            norm: of this site's shared parameters.
            size: bytes of each member's outer gradients.

        Raises:
            SiteError: a part is missing or has another size; or a member's shared parameters were others.
        """
        history = self._histories.get(closed.exchange.fragment, "")
        for site in closed.members:
            parts: list[bytes | None] = []

            def receive(site: int = site, parts: list[bytes | None] = parts) -> tuple[str | None, dict[str, int]]:
                parts.append(value := self._part(closed.exchange, site))
                buffers = {} if value is None else part_header(value)["buffers"]
                return part_problem(value, site, closed.exchange, norm, history, size), buffers

            problem, buffers = self.rank_0.call(receive)
            if problem is not None:
                raise SiteError(f"outer.store={self._plan.store}: {problem}")
            length = size + 8 * sum(buffers.values())
            yield site, buffers, self.rank_0.broadcast(parts, length)
        self._note(closed)

    def _part(self, exchange: OuterExchange, site: int) -> bytes | None:
        collector = self._collectors.get(exchange)
        if site == self.site and collector is not None and collector.stored:
            return collector.own
        value = None if collector is None else collector.parts.get(site)
        value = self._store.get(f"{exchange.name}/site{site}") if value is None else value
        self._received_bytes += 0 if value is None else len(value)
        return value

    def _note(self, closed: Closed) -> None:
        fragment = closed.exchange.fragment
        history = f"{self._histories.get(fragment, '')} {closed.exchange.name} {closed.members}"
        self._histories[fragment] = hashlib.blake2b(history.encode(), digest_size=16).hexdigest()
        before, self.newest = self.newest.members, closed
        self.missed += self.number - len(closed.members)
        collector = self._collectors.pop(closed.exchange, None)
        if collector is not None and self.site not in closed.members:
            collector.abandon()
            self._obsolete = collector
        if not self._is_first:
            return
        for site in range(self.number):
            if (site in before) != (site in closed.members):
                took = "takes part again" if site in closed.members else "took no part; the others continue without it"
                who = "this site" if site == self.site else f"site {site}"
                self._print(f"Average after step {closed.exchange.step}: {who} {took}.")

    def return_at(self, exchange: OuterExchange) -> None:
        """Ask the other sites to wait for this one at an exchange, if they would not: it was no member of the last one,
        or has said that it stops."""
        self.rank_0.call(lambda: self._return_at(exchange), unless_stopped=True)

    def _return_at(self, exchange: OuterExchange) -> None:
        if self.site not in self.newest.members or self._store.has(f"{exchange.name}/left{self.site}"):
            self._store.decide(f"{exchange.name}/returned{self.site}", b"1")

    def leave_before(self, exchange: OuterExchange) -> None:
        """Tell the other sites not to wait for this one, which stops before an exchange, and before its parts of others
        are sent. It does not wait for the store either: a checkpoint follows, and there may be little time for it."""
        if self._is_first:
            unsent = [each for each, collector in self._collectors.items() if not collector.sent]
            leaving = threading.Thread(target=self._leave_before, args=([exchange, *unsent],), daemon=True)
            leaving.start()
            leaving.join(_LEAVE_S)

    def _leave_before(self, exchanges: list[OuterExchange]) -> None:
        with suppress(ConfigError, SiteError):
            for each in exchanges:
                self._store.post(f"{each.name}/left{self.site}", b"1")

    def note_left_out(self, steps: int, step: int, samples: int) -> None:
        """Count steps that this site leaves out to continue after ``step``. ``samples``: of all of them."""
        self.left_out += steps
        self._print(
            f"Site {self.site} continues after step {step}, where the other sites are: it leaves out "
            f"{count(steps, 'step')}, with {count(samples, 'sample')} of its share."
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "newest": [*self.newest.exchange], "members": self.newest.members, "saved": dict(self.newest.saved),
            "missed": self.missed, "left_out": self.left_out,
            "histories": {str(fragment): history for fragment, history in self._histories.items()},
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.newest = Closed(OuterExchange(*state["newest"]), state["members"], state["saved"])
        self.missed, self.left_out = state["missed"], state["left_out"]
        self._first_step_alone = self.newest.exchange.step + 2 * self._plan.every
        self._histories = {int(fragment): history for fragment, history in state["histories"].items()}

    def leave(self) -> None:
        if self._is_first:
            self._store.close()

    def take_metrics(self) -> dict[str, float]:
        values = {
            "outer/sites": self.number,
            "outer/members": len(self.newest.members),
            "outer/rounds": self.rounds,
            "outer/payload_bytes": self._payload_bytes,
            "outer/wire_bytes": self._payload_bytes,
            "outer/received_bytes": self._received_bytes,
            "outer/time_s": self._seconds,
        }
        self._seconds, self._payload_bytes, self._received_bytes = 0.0, 0, 0
        return values | self.totals()

    def totals(self) -> dict[str, float]:
        return {"outer/missed": self.missed, "outer/left_out_steps": self.left_out}

    def _print(self, text: str) -> None:
        if self._is_first:
            print(text, flush=True)

    @property
    def _store(self) -> PatientStore:
        assert self._opened is not None, "rank 0 talks to the store"
        return self._opened

    def _safe_step(self) -> int:
        """Return the step of the checkpoint before this site's newest one, which may be damaged; 0 without any."""
        steps = [int(path.name.removeprefix("step_")) for path in self._paths.committed_checkpoints()[:2]]
        return min(steps, default=0)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
