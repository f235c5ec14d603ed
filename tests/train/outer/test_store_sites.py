"""Sites that are jobs of their own, at the edges: late by less than a round, back at once, with another site's
checkpoint, or started with the wrong model or number."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import DataError, SiteError
from launcher.exchange.store import DirectoryStore, HttpsStore
from launcher.tls import client_context
from launcher.train.engine.engine import Engine
from launcher.train.outer.part_collector import PartCollector
from launcher.train.outer.sites import Sites
from launcher.train.outer.store_client import Closed, OuterExchange
from launcher.train.outer.store_sites import StoreSites
from launcher.train.world import World
from tests.exchange.test_store import make_key
from tests.helpers import make_plan, patience
from tests.infra.checkpoints import tensors
from tests.infra.runs import records, summary, wait_for, wait_for_steps
from tests.infra.store_jobs import ONE, PACE, JobOfSite, Suspended, assert_equal, members, sent_in
from tests.user_project.speech.fitted import Samples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("key") / "key.pem")


def test_a_site_that_is_late_by_less_than_a_round_is_waited_for_again(project: Path) -> None:
    more = [*PACE, "outer.every=10", "+task.pause_s=0.2"]
    first, late = (JobOfSite(project, site, 2, *more).start() for site in range(2))
    wait_for_steps(late.run, 17)
    suspended = Suspended(late)
    wait_for_steps(first.run, 22)
    suspended.end()
    for job in (first, late):
        job.finish()
    assert members(project, 20) == [0]
    assert [members(project, step) for step in (30, 40)] == [[0, 1], [0, 1]]
    assert_equal(first.model(40), late.model(40))
    assert summary(late.run)["outer/left_out_steps"] == 0


def kill_after_step_5(jobs: Sequence[JobOfSite]) -> None:
    for job in jobs:
        wait_for(lambda job=job: (job.run / "checkpoints" / "step_000005").exists(), "a checkpoint")
    for job in jobs:
        job.kill()


def load_checkpoints_of_first(jobs: Sequence[JobOfSite]) -> None:
    """Let the second site continue from the first one's checkpoints."""
    own, other = (job.run / "checkpoints" for job in jobs)
    shutil.rmtree(other)
    shutil.copytree(own, other)


def test_another_sites_checkpoint_has_averages_under_way(project: Path) -> None:
    """The site that loads it applies them, too."""
    more = [
        *PACE, "train.steps=20", "outer.every=4", "outer.delay=3", "checkpoint.every=5", "+task.pause_s=0.4",
        "outer.patience_s=30",
    ]  # fmt: skip
    jobs = [JobOfSite(project, site, 2, *more).start() for site in range(2)]
    kill_after_step_5(jobs)
    load_checkpoints_of_first(jobs)
    for job in jobs:
        job.start("resume", "r")
    for job in jobs:
        job.finish()
    assert_equal(jobs[0].model(20), jobs[1].model(20))
    of_both = [tensors(job.run / "checkpoints" / "step_000020") for job in jobs]
    for name, value in of_both[0].items():
        if "StoreOuterSteps/shared" in name or "StoreOuterSteps/momentum" in name:
            assert_equal([of_both[1][name]], [value])


def test_steps_that_are_left_out_are_counted_once(project: Path) -> None:
    """Also by a site that is killed between the checkpoint that says where it continues, and its next step."""
    more = [*PACE, "outer.every=4", "checkpoint.every=1", "+task.pause_s=0.4"]
    first, late = (JobOfSite(project, site, 2, *more).start() for site in range(2))
    wait_for_steps(late.run, 5)
    suspended = Suspended(late)
    wait_for_steps(first.run, 14)
    suspended.end()
    wait_for(lambda: (late.run / "checkpoints" / "step_000008").exists(), "the checkpoint at the missed average")
    late.kill()
    assert not (late.run / "checkpoints" / "step_000009").exists()
    late.start("resume", "r")
    for job in (first, late):
        job.finish()
    left_out = summary(late.run)["outer/left_out_steps"]
    assert left_out > 0
    assert len({each["step"] for each in records(late.run)}) + left_out == 40
    assert_equal(first.model(40), late.model(40))


def test_a_site_that_joins_later_takes_the_average_of_buffers(project: Path) -> None:
    """Before its first step it does not know which of them training changes."""
    more = ["train.steps=400", "batch.micro_size=12", *ONE, "outer.every=8", "outer.patience_s=1", "+task.buffer=true"]
    more += ["task._target_=speech.fitted.Even"]
    first, later = (JobOfSite(project, site, 2, *more) for site in range(2))
    first.start()
    wait_for_steps(first.run, 17)
    suspended = Suspended(first)
    later.start()
    exchanges = project / "store" / "exchange"
    wait_for(lambda: any(exchanges.glob("*/returned1")) or later.process.poll() is not None, "the other site")
    suspended.end()
    for job in (first, later):
        job.finish()
    finals = [tensors(job.run / "checkpoints" / "step_000400") for job in (first, later)]
    names = [name for name in finals[0] if name.endswith("moving")]
    assert names
    assert_equal([finals[1][name] for name in names], [finals[0][name] for name in names])


def test_a_model_of_another_size_is_refused(project: Path) -> None:
    more = [*PACE, "outer.every=4", "outer.patience_s=1", "task._target_=launcher.tasks.digits.Digits"]
    more += ["batch.short_window=drop"]
    first = JobOfSite(project, 0, 2, *more, "+task.width=16").start()
    wait_for(lambda: (project / "store" / "hello" / "site0").exists(), "the first site")
    other = JobOfSite(project, 1, 2, *more, "+task.width=24").start()
    assert "the model of site 1 is not that of the first site. It has " in other.finish(2)
    first.finish()


def test_two_runs_cannot_be_one_site(project: Path) -> None:
    """Also if they start at the same time: the first one has said only that it is there."""
    (project / "store" / "run").mkdir(parents=True)
    (project / "store" / "run" / "site0").write_text("the other run")
    job = JobOfSite(project, 0, 2, *PACE, "outer.every=4", "outer.patience_s=1").start()
    assert "holds what another run has sent as site 0" in job.finish(2)


def test_a_value_that_the_server_would_refuse_is_not_sent(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.exchange.store.MAX_VALUE_GIB", 0)
    store = HttpsStore("127.0.0.1", 1, client_context(key, "outer.key"))  # nobody listens there
    with pytest.raises(SiteError, match="Use more"):
        store.post("exchange/00000001.0/site0", b"too much")


def test_a_checkpoint_of_other_averages_is_refused(project: Path) -> None:
    """Each part names the averages before it, so that a fork is noticed even if the parameters have nearly one norm."""
    more = [*PACE, "outer.every=5", "checkpoint.every=5", "+task.pause_s=0.05", "train.steps=200", "outer.momentum=0"]
    alone = JobOfSite(project / "alone", 1, 2, *more, store=str(project / "alone" / "store")).start()
    wait_for_steps(alone.run, 11)
    alone.kill()
    jobs = [JobOfSite(project, site, 2, *more, "outer.patience_s=60").start() for site in range(2)]
    wait_for_steps(jobs[1].run, 11)
    jobs[1].kill()
    shutil.rmtree(jobs[1].run / "checkpoints")
    shutil.copytree(alone.run / "checkpoints", jobs[1].run / "checkpoints")
    jobs[1].start("resume", "r")
    output = jobs[1].process.communicate(timeout=patience(180))[0]
    jobs[0].kill()
    assert "was computed after other averages than those of this site" in output, output


@pytest.mark.parametrize("until", ["null", "4"])
def test_freezing_within_a_run_is_refused(until: str, project: Path) -> None:
    """Also if the layer is trained again before anything is sent."""
    freezer = f"callbacks=[{{_target_: speech.fitted.Freezer, after: 2, until: {until}}}]"
    job = JobOfSite(project, 0, 2, *PACE, "outer.every=5", freezer).start()
    assert "engine.freeze() does not work with outer.store" in job.finish(1)


def two_sites(store: Path, stop: Callable[[], bool] = lambda: False) -> list[StoreSites]:
    """Return the sites of two jobs, in this process."""
    words = [
        "outer=diloco", "outer.every=4", f"outer.store={store}", "outer.sites=2", "outer.patience_s=3600",
        "cluster.workers_per_node=1", "schedule.warmup_steps=0", "batch.short_window=drop",
    ]  # fmt: skip
    return [
        StoreSites(World(0, 1, 0, site=site, sites=2, whole_job=True), make_plan(*words, f"outer.site={site}"), stop)
        for site in range(2)
    ]


PAYLOAD = torch.zeros(4, dtype=torch.uint8)


def test_a_site_that_never_started_is_waited_for_once(tmp_path: Path) -> None:
    """At the start, and at no average."""
    sites = two_sites(tmp_path)
    sites[0].introduce([])
    sites[0].send(OuterExchange(4, 0), 1.0, PAYLOAD, {})
    assert sites[0].close(OuterExchange(4, 0)) is not None
    assert members(tmp_path.parent, 4, store=tmp_path.name) == [0]


@pytest.mark.parametrize("slow_s", [0, 0.1])
def test_a_site_that_is_back_is_waited_for(slow_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the store is slow."""
    for name in ("get", "names", "post"):
        act = getattr(DirectoryStore, name)

        def slow(store: DirectoryStore, *arguments: Any, act: Callable[..., Any] = act) -> Any:
            time.sleep(slow_s)
            return act(store, *arguments)

        monkeypatch.setattr(DirectoryStore, name, slow)
    sites = two_sites(tmp_path)
    for each in sites:
        each.introduce([])
    sites[1].leave_before(OuterExchange(4, 0))
    sites[0].send(OuterExchange(4, 0), 1.0, PAYLOAD, {})
    closed = sites[0].close(OuterExchange(4, 0))
    assert closed is not None
    for each in sites:
        assert [site for site, _, _ in each.receive(closed, 1.0, len(PAYLOAD))] == [0]
    sites[1].return_at(OuterExchange(8, 0))
    sites[0].send(OuterExchange(8, 0), 1.0, PAYLOAD, {})
    found: list[Closed | None] = []
    closing = threading.Thread(target=lambda: found.append(sites[0].close(OuterExchange(8, 0))))
    closing.start()
    closing.join(2)  # in which it would close the average
    sites[1].send(OuterExchange(8, 0), 1.0, PAYLOAD, {})
    closing.join(60)
    assert found[0] is not None
    assert found[0].members == [0, 1]


def test_a_site_that_stops_before_its_part_is_sent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = two_sites(tmp_path)
    for each in sites:
        each.introduce([])
    with monkeypatch.context() as uploading:
        uploading.setattr(PartCollector, "run", lambda _: None)
        sites[1].send(OuterExchange(4, 0), 1.0, PAYLOAD, {})
    sites[1].leave_before(OuterExchange(8, 0))
    sites[0].send(OuterExchange(4, 0), 1.0, PAYLOAD, {})
    closed = sites[0].close(OuterExchange(4, 0))
    assert closed is not None
    assert closed.members == [0]


def test_a_site_that_is_to_stop_waits_for_the_last_average(tmp_path: Path) -> None:
    """An average that it needs later is left open."""
    sites = two_sites(tmp_path, lambda: True)
    for each in sites:
        each.introduce([])
    sites[0].send(OuterExchange(4, 0), 1.0, PAYLOAD, {})
    assert sites[0].close(OuterExchange(4, 0), unless_stopped=True) is None
    assert not (tmp_path / "exchange" / "00000004.0" / "members").exists()
    sites[1].send(OuterExchange(4, 0), 1.0, PAYLOAD, {})
    closed = sites[0].close(OuterExchange(4, 0))
    assert closed is not None
    assert closed.members == [0, 1]


DIFFERENT = {
    "samples": "train_data() is not that of the first site of outer.store: sample 0 differs.",
    "order": "train_data() is not that of the first site of outer.store: 96 samples",
    "held-out data": "eval_data()['other'] is not that of the first site of outer.store: 16 samples here",
    "order of parameters": "site 1 is not that of the first site. It has the same values in another order.",
    "trained": "It has layers.0.weight [8, 8] float64, trained, layers.1.weight [8, 8] float64; the first site has ",
}


def test_sites_with_other_data_or_models_are_refused_and_can_be_corrected(project: Path) -> None:
    more = [*PACE, "outer.every=4", "train.steps=90000", "task._target_=speech.fitted.Different", "+task.pause_s=0.05"]
    more += ["train.shuffle=true", "outer.patience_s=1"]  # shuffled by the task's own order
    first = JobOfSite(project, 0, 2, *more).start()
    wait_for(lambda: (project / "store" / "hello").exists(), "the first site")
    for what, message in DIFFERENT.items():
        wrong = JobOfSite(project / what, 1, 2, *more, store=str(project / "store"))
        (wrong.directory / "different").write_text(what)
        wrong.start()
        output, _ = wrong.process.communicate(timeout=patience(180))
        assert wrong.process.returncode in (1, 2), output
        assert message in output, output
    corrected = JobOfSite(project / "corrected", 1, 2, *more, store=str(project / "store")).start()
    wait_for_steps(corrected.run, 1)
    for job in (first, corrected):
        job.kill()


@pytest.mark.usefixtures("alone")
def test_a_loop_of_ones_own_compares_its_data_with_that_of_the_first_site(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, str] = {}

    def of_first(name: str, own: Any) -> Any:
        return json.loads(known.setdefault(name, json.dumps(own)))

    monkeypatch.setattr(Sites, "of_first", property(lambda _: of_first))
    plan = make_plan("cluster.workers_per_node=1", "batch.global_size=8", "train.loader_workers=0", samples=64)
    data = torch.utils.data.TensorDataset(torch.randn(64, 3))
    for each, alike in ((data, True), (torch.utils.data.TensorDataset(data.tensors[0].flip(0)), False)):
        model = torch.nn.Linear(3, 1)
        windows = Engine(model, torch.optim.SGD(model.parameters()), plan).windows(each)
        with nullcontext() if alike else pytest.raises(DataError, match="not that of the first site"):
            next(windows)


def moving_after(
    step: int, site: int, sent_at: Sequence[int] = (), delay: int = 0, of_first_ranks: Sequence[int] = (12, 12)
) -> torch.Tensor:
    """Return the buffer of `speech.fitted.Fit` at one of two sites, whose values of the steps ``sent_at`` are averaged
    ``delay`` steps later.

    Args:
        of_first_ranks: samples of a window that the first rank of each site has; it is its buffer that counts.
    """
    data = Samples(96)
    now = [torch.zeros(8, dtype=torch.float64) for _ in range(2)]
    sent = now
    for each in range(1, step + 1):
        for number in range(2):
            first = (each - 1) * 24 % 96 + 12 * number
            now[number] = 0.9 * now[number] + 0.1 * data.first[first : first + of_first_ranks[number]].mean(0)
        if each in sent_at:
            sent = list(now)
        if each - delay in sent_at:
            mean = (sent[0] + sent[1]) / 2
            now = [value + mean - own for value, own in zip(now, sent, strict=True)]
    return now[site]


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_keep_what_changes_while_their_average_is_under_way(ranks: int, project: Path) -> None:
    more = [*PACE, "outer.every=4", "outer.delay=3", "train.steps=14", "+task.buffer=true", "outer.patience_s=60"]
    own = ([f"cluster.workers_per_node={ranks}", f"batch.micro_size={12 // ranks}"], [])
    jobs = [JobOfSite(project, site, 2, *more, *own[site], "checkpoint.every=1").start() for site in range(2)]
    for site, job in enumerate(jobs):
        job.finish()
        for step in (3, 4, 6, 7, 8, 11, 13):
            found = tensors(job.run / "checkpoints" / f"step_{step:06d}")
            wanted = moving_after(step, site, (4, 8), 3, (12 // ranks, 12))
            torch.testing.assert_close(
                found["model.moving"], wanted, rtol=1e-9, atol=1e-12, msg=f"step {step} of site {site}"
            )


@pytest.mark.parametrize("copied", [True, False])
def test_a_part_that_is_sent_again_is_what_it_was(copied: bool, project: Path) -> None:
    """The store has lost the parts that were under way: each site sends its own once more, and one that has loaded
    the checkpoint of another one sends what that site does."""
    more = [
        *PACE, "outer.every=4", "outer.delay=3", "train.steps=12", "+task.buffer=true", "outer.patience_s=60",
        "checkpoint.every=5", "+task.pause_s=0.4",
    ]  # fmt: skip
    jobs = [JobOfSite(project, site, 2, *more).start() for site in range(2)]
    kill_after_step_5(jobs)
    exchange = project / "store" / "exchange" / "00000004.0"
    before = [sent_in(exchange / f"site{site}") for site in range(2)]
    shutil.rmtree(exchange.parent)
    if copied:
        load_checkpoints_of_first(jobs)
    for job in jobs:
        job.start("resume", "r")
    for job in jobs:
        job.finish()
    assert members(project, 4) == [0, 1]
    for site, sent in enumerate(before):
        assert_equal([sent_in(exchange / f"site{site}")], [before[0] if copied else sent])
    torch.testing.assert_close(before[1][:8], moving_after(4, 1), rtol=1e-9, atol=1e-12)
    assert_equal(jobs[0].model(12), jobs[1].model(12))
