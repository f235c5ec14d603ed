"""Sites of outer steps that are jobs of their own and are asked to stop: with the store and without it, and while they
wait for another one."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.exchange.test_store import make_key
from tests.helpers import patience
from tests.infra.checkpoints import tensors
from tests.infra.runs import records, summary, wait_for, wait_for_steps
from tests.infra.store_jobs import PACE, JobOfSite, Server, Suspended, assert_equal, members, sent_in, shared_after
from tests.train.outer.test_outer_steps import RECORDER, Site, events, parameters_in
from tests.user_project.speech.fitted import Samples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("key") / "key.pem")


def test_a_stopped_site_that_is_back_at_once_is_waited_for(project: Path) -> None:
    more = [*PACE, "outer.every=20", "+task.pause_s=0.1", "outer.patience_s=60"]
    first, back = (JobOfSite(project, site, 2, *more).start() for site in range(2))
    wait_for_steps(back.run, 3)
    suspended = Suspended(first)
    back.process.send_signal(signal.SIGTERM)
    back.process.communicate(timeout=patience(60))
    assert (project / "store" / "exchange" / "00000020.0" / "left1").exists()
    steps = max(each["step"] for each in records(back.run))
    back.start("resume", "r")
    wait_for(lambda: max(each["step"] for each in records(back.run)) > steps, "a step of the resumed site")
    late = Suspended(back)
    suspended.end()
    wait_for(lambda: (project / "store" / "exchange" / "00000020.0" / "site0").exists(), "the first site's part")
    time.sleep(1)  # in which it would close the average
    late.end()
    for job in (first, back):
        job.finish()
    assert [members(project, step) for step in (20, 40)] == [[0, 1], [0, 1]]
    assert_equal(first.model(40), back.model(40))


def test_a_site_that_stops_saves_without_the_store(project: Path, key: Path) -> None:
    """It does not wait half an hour for it, which a cluster would not wait."""
    server = Server(project / "store", key)
    more = [*PACE, "outer.every=40", "+task.pause_s=0.3", f"outer.key={key}"]
    jobs = [JobOfSite(project, site, 2, *more, store=server.address).start() for site in range(2)]
    wait_for_steps(jobs[1].run, 3)
    server.kill()
    jobs[1].process.send_signal(signal.SIGTERM)
    jobs[1].process.communicate(timeout=patience(60))
    assert summary(jobs[1].run)["verdict"] == "stopped"
    assert any((jobs[1].run / "checkpoints").glob("step_*"))
    jobs[0].kill()


@pytest.mark.parametrize("lost", [False, True])
def test_a_site_that_is_to_stop_while_it_waits_leaves_the_average_open(lost: bool, project: Path, key: Path) -> None:
    """Neither it nor the late site leaves out a step: it applies the average when it is resumed, two steps later, and
    what it has learned meanwhile is part of the next one. It saves its checkpoint also if the store is lost."""
    server = Server(project / "store", key) if lost else None
    more = [
        *PACE, "outer.every=8", "+task.pause_s=0.1", "outer.patience_s=3600", "train.steps=20", RECORDER,
        "optimizer=sgd", "optimizer.momentum=0", *([f"outer.key={key}"] if lost else []),
    ]  # fmt: skip
    store = server.address if server else None
    waiting, late = (JobOfSite(project, site, 2, *more, store=store).start() for site in range(2))
    wait_for_steps(late.run, 4)
    suspended = Suspended(late)
    exchanges = project / "store" / "exchange"
    wait_for(lambda: (exchanges / "00000008.0" / "site0").exists(), "the part of the first site")
    if server:
        server.kill()
        time.sleep(2)  # in which it looks for the other part
    waiting.process.send_signal(signal.SIGTERM)
    waiting.process.communicate(timeout=patience(60))
    assert summary(waiting.run)["verdict"] == "stopped"
    assert (waiting.run / "checkpoints" / "step_000009").exists()
    assert not (exchanges / "00000008.0" / "members").exists()
    if server:
        server.start()
    waiting.start("resume", "r")
    if not server:  # which was lost before it could be told that the site stops
        wait_for(lambda: (exchanges / "00000016.0" / "returned0").exists(), "the site that is back")
    suspended.end()
    for job in (waiting, late):
        job.finish()
        assert [each["step"] for each in records(job.run)] == [*range(1, 21)]
    if server:
        server.kill()
    assert [members(project, step) for step in (8, 16, 20)] == [[0, 1]] * 3
    start = parameters_in(next(each for each in events(waiting.directory, 0) if each["event"] == "start"))
    shared = shared_after(project / "store", start)
    for job in (waiting, late):
        assert_equal(job.model(20), shared[20])
    own = waiting.steps()[8]
    progress = progress_of_first(own, range(9, 11)) + progress_of_first(shared[8], range(11, 17))
    torch.testing.assert_close(sent_in(exchanges / "00000016.0" / "site0"), progress, rtol=1e-9, atol=1e-11)


def progress_of_first(start: list[Tensor], steps: range) -> Tensor:
    """Return by how much the first of two sites moves from ``start`` in steps of SGD, negated."""
    site, data = Site(start, "sgd"), Samples(96)
    for step in steps:
        first = (step - 1) * 24 % 96
        site.step(data, range(first, first + 12))
    return torch.cat([(a - b).detach().flatten() for a, b in zip(start, site.parameters, strict=True)])


@pytest.mark.parametrize(("every", "delay", "stops"), [(1, 0, 1), (2, 1, 1), (3, 0, 2)])
def test_an_average_is_not_left_out_if_the_next_one_follows_at_once(
    every: int, delay: int, stops: int, project: Path
) -> None:
    """A site that is to stop takes one more step, after which the same parameters may be sent again."""
    more = [
        *PACE, f"outer.every={every}", f"outer.delay={delay}", "+task.pause_s=0.1", "outer.patience_s=30",
        "train.steps=20",
    ]  # fmt: skip
    waiting, late = (JobOfSite(project, site, 2, *more).start() for site in range(2))
    wait_for_steps(late.run, 4)
    suspended = Suspended(late)
    for attempt in range(stops):
        time.sleep(2)  # in which the first site comes to the next average
        waiting.process.send_signal(signal.SIGTERM)
        if attempt < stops - 1:
            waiting.process.communicate(timeout=patience(60))
            waiting.start("resume", "r")
            time.sleep(6)
    time.sleep(1)
    suspended.end()
    waiting.process.communicate(timeout=patience(60))
    waiting.start("resume", "r")
    for job in (waiting, late):
        job.finish()
        assert len(records(job.run)) + summary(job.run)["outer/left_out_steps"] == 20
    assert_equal(waiting.model(20), late.model(20))


def test_sites_that_were_stopped_together_wait_for_each_other_when_they_are_back(project: Path) -> None:
    """One is back long before the other; neither leaves out a step."""
    more = [*PACE, "outer.every=3", "+task.pause_s=0.1", "outer.patience_s=600", "train.steps=30"]
    jobs = [JobOfSite(project, site, 2, *more).start() for site in range(2)]
    for job in jobs:
        wait_for_steps(job.run, 4)
    for job in jobs:
        job.process.send_signal(signal.SIGTERM)
    for job in jobs:
        job.process.communicate(timeout=patience(60))
    jobs[1].start("resume", "r")
    time.sleep(10)  # in which it starts and would go on alone
    jobs[0].start("resume", "r")
    for job in jobs:
        job.finish()
        assert [each["step"] for each in records(job.run)] == [*range(1, 31)]
        assert summary(job.run)["outer/missed"] == 0
    assert_equal(jobs[0].model(30), jobs[1].model(30))


def test_the_buffers_of_several_ranks_are_averaged_after_a_stop(project: Path) -> None:
    """They are sent before the stop, and averaged two steps later, with what has changed in them meanwhile."""
    more = [
        *PACE, "outer.every=8", "+task.pause_s=0.1", "+task.buffer=true", "outer.patience_s=3600", "train.steps=20",
        "checkpoint.every=10",
    ]  # fmt: skip
    ranks = [["cluster.workers_per_node=2", "batch.micro_size=6"], []]
    waiting, late = (JobOfSite(project, site, 2, *more, *ranks[site]).start() for site in range(2))
    wait_for_steps(late.run, 4)
    suspended = Suspended(late)
    exchange = project / "store" / "exchange" / "00000008.0"
    wait_for(lambda: (exchange / "site0").exists(), "the part of the first site")
    waiting.process.send_signal(signal.SIGTERM)
    waiting.process.communicate(timeout=patience(60))
    waiting.start("resume", "r")
    wait_for(lambda: (exchange.parent / "00000016.0" / "returned0").exists(), "the site that is back")
    suspended.end()
    for job in (waiting, late):
        job.finish()
    sent = [sent_in(exchange / f"site{site}")[:8] for site in range(2)]
    data, moving = Samples(96), sent[0]
    for step in (9, 10):
        first = (step - 1) * 24 % 96
        moving = 0.9 * moving + 0.1 * data.first[first : first + 6].mean(0)
    found = [tensors(waiting.run / "checkpoints" / f"step_{step:06d}")["model.moving"] for step in (10, 20)]
    torch.testing.assert_close(found[0], moving + (sent[0] + sent[1]) / 2 - sent[0], rtol=1e-9, atol=1e-12)
    assert torch.equal(found[1], tensors(late.run / "checkpoints" / "step_000020")["model.moving"])
    assert_equal(waiting.model(20), late.model(20))
