"""Sites that are jobs of their own and exchange through a store: late, killed, back again, and of different sizes."""

from __future__ import annotations

import json
import random
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Launch
from tests.exchange.test_store import make_key
from tests.infra.checkpoints import tensors
from tests.infra.runs import records, summary, wait_for, wait_for_steps
from tests.infra.store_jobs import ONE, JobOfSite, Server, assert_equal, sent_in, shared_after
from tests.train.outer.test_outer_steps import (
    JOB,
    RECORDER,
    STREAMING,
    Site,
    events,
    in_levels,
    parameters_in,
    reference,
)
from tests.user_project.speech.fitted import Odd, Samples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


CASES: dict[str, tuple[list[list[str]], list[str], dict[str, Any]]] = {
    "two ranks with fsdp, and one rank": ([["cluster.workers_per_node=2", "strategy=fsdp"], ONE], [], {}),
    "three sites, int8, streaming": (
        [ONE, ONE, ONE], ["outer.fragments=2", "outer.delay=1", "outer.compress=int8", "batch.micro_size=4"],
        {**STREAMING, "sent": in_levels(256, 127)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_that_of_the_published_algorithm(case: str, project: Path) -> None:
    of_sites, overrides, settings = CASES[case]
    jobs = [
        JobOfSite(
            project,
            site,
            len(of_sites),
            *own,
            *overrides,
            "outer.every=3",
            "train.steps=8",
            RECORDER,
        ).start()
        for site, own in enumerate(of_sites)
    ]
    for job in jobs:
        job.finish()
    start = parameters_in(next(each for each in events(jobs[0].directory, 0) if each["event"] == "start"))
    history, shared = reference(start, len(jobs), **settings)
    near = {"rtol": 1e-4, "atol": 1e-5} if "fsdp" in case else {"rtol": 1e-9, "atol": 1e-11}
    for number, job in enumerate(jobs):
        taken = job.steps()
        for step, of_sites_then in enumerate(history, 1):
            for one, other in zip(taken[step], of_sites_then[number], strict=True):
                torch.testing.assert_close(one, other, **near, msg=lambda text, step=step: f"step {step}: {text}")
        assert_equal(job.model(8), jobs[0].model(8))
        for one, other in zip(job.model(8), shared, strict=True):
            torch.testing.assert_close(one, other, **near)
    assert not torch.allclose(history[0][0][0], history[0][1][0]), "sites differ between outer steps"


SIZES = [12] * 4 + [24] * 10  # of the windows of three passes over 96 samples


def odd_reference(start: list[Tensor]) -> list[Tensor]:
    """Return the shared parameters of two sites that have trained `speech.fitted.Odd`."""
    data, task = Samples(96), Odd()
    models = [task.model() for _ in range(2)]
    for model in models:
        for parameter, value in zip(model.parameters(), start, strict=True):
            parameter.data = value.clone()
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    inner = [torch.optim.AdamW(each, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0) for each in trained]
    shared = [nn.Parameter(p.detach().clone()) for p in trained[0]]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    position = 0
    for step, size in enumerate(SIZES, 1):
        for site, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            first = position % 96 + site * size // 2
            samples = [data[number] for number in range(first, first + size // 2)]
            loss = task.loss(model, [torch.stack(each) for each in zip(*samples, strict=True)])
            optimizer.zero_grad()
            (loss.total / loss.items).backward()
            optimizer.step()
        position += size
        if step % 3 == 0 or step == len(SIZES):
            for number, value in enumerate(shared):
                value.grad = torch.stack([value.detach() - own[number].detach() for own in trained]).mean(0)
            outer.step()
            for parameter, value in zip([*trained[0], *trained[1]], shared * 2, strict=True):
                parameter.data = value.detach().clone()
    return [value.detach() for value in shared]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_odd_models_data_and_windows(dtype: str, project: Path) -> None:
    """Shapes that the ranks of a site cannot divide, a frozen part, a ramp, epochs, Ema, and parameters in bf16."""
    more = [
        "task._target_=speech.fitted.Odd", f"+task.dtype={dtype}", "outer.every=3", "batch.ramp=[[4,12]]",
        "batch.micro_size=2", "train.epochs=3", "checkpoint.every=5",
        "callbacks=[{_target_: launcher.callbacks.Ema, decay: 0.9}, {_target_: speech.hooked.Recorder}]",
    ]  # fmt: skip
    sharded = ["cluster.workers_per_node=3", "strategy=fsdp", "+task.samples=96"]
    jobs = [JobOfSite(project, site, 2, *own, *more).start() for site, own in enumerate([sharded, ONE])]
    outputs = [job.finish() for job in jobs]
    assert sum("Note: task.samples is" in output for output in outputs) == 1, "the site that is not the first says it"
    finals = [tensors(job.run / "checkpoints" / f"step_{len(SIZES):06d}") for job in jobs]
    model = Odd(dtype=dtype).model()
    start = events_of(jobs[0], "start")[0]
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    wide = torch.float32 if dtype == "bfloat16" else torch.float64
    # what each site has sent gives the shared parameters, and these the models
    shared = torch.cat([start[name].to(wide) for name in trained])
    moving = torch.zeros_like(shared)
    exchanges = sorted((project / "store" / "exchange").iterdir())
    assert [int(each.name.split(".")[0]) for each in exchanges] == [3, 6, 9, 12, 14]
    for exchange in exchanges:
        mean = torch.stack([sent_in(exchange / f"site{site}", wide) for site in range(2)]).mean(0)
        moving = 0.9 * moving + mean
        shared = shared - 0.7 * (mean + 0.9 * moving)
    sizes = [start[name].numel() for name in trained]
    for (name, kind), value in zip(trained.items(), shared.split(sizes), strict=True):
        for site, final in enumerate(finals):
            found = final[f"callbacks.StoreOuterSteps/shared/{name}"].flatten()
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-7, msg=f"site {site}, {name}")
            assert torch.equal(final[f"model.{name}"].flatten(), found.to(kind)), f"site {site}, {name}"
    for name, value in model.named_parameters():
        if not value.requires_grad:
            assert all(torch.equal(final[f"model.{name}"].flatten().double(), start[name]) for final in finals)
    # each site has averaged its own parameters
    for job, final in zip(jobs, finals, strict=True):
        averages = {name: start[name].clone() for name in trained}
        steps = events_of(job, "step")
        assert len(steps) == len(SIZES)
        for parameters in steps:
            for name, average in averages.items():
                average.lerp_(parameters[name], 0.1)
        for name, average in averages.items():
            found = final[f"callbacks.Ema/averages/{name}"].flatten().double()
            torch.testing.assert_close(found, average, rtol=1e-5, atol=1e-7, msg=name)
    if dtype == "float64":
        started = [start[name].view_as(p) for name, p in model.named_parameters()]
        wanted = torch.cat([value.flatten() for value in odd_reference(started)])
        torch.testing.assert_close(shared, wanted, rtol=1e-4, atol=1e-5)


def events_of(job: JobOfSite, event: str) -> list[dict[str, Tensor]]:
    """Return the parameters that a site's first rank has noted, in fp64, at each event of one kind."""
    return [
        {name: torch.tensor(values, dtype=torch.float64) for name, values in each["parameters"].items()}
        for each in events(job.directory, job.site) if each["event"] == event
    ]  # fmt: skip


def test_a_late_site_is_not_lost(project: Path) -> None:
    """Its outer gradient of the missed round is part of the next one, and it continues where the others are."""
    pace = ["outer.every=4", "train.steps=40", "+task.pause_s=0.1", "outer.patience_s=5", *ONE, RECORDER]
    pace += ["optimizer=sgd", "optimizer.momentum=0", "batch.micro_size=12"]
    first, late = (JobOfSite(project, site, 2, *pace).start() for site in range(2))
    wait_for_steps(late.run, 9)
    stopped = late.processes()
    for process in stopped:
        process.suspend()
    wait_for_steps(first.run, 21)
    for process in stopped:
        process.resume()
    outputs = [job.finish() for job in (first, late)]
    assert "site 1 took no part" in outputs[0]
    assert "site 1 takes part again" in outputs[0]
    assert "Site 1 continues after step" in outputs[1]
    assert "this site left out" in outputs[1]
    assert all("missing: a site was late" in output for output in outputs)
    assert_equal(first.model(40), late.model(40))
    start = parameters_in(next(each for each in events(first.directory, 0) if each["event"] == "start"))
    shared = shared_after(project / "store", start)
    assert_equal(first.model(40), shared[40])
    exchanges = {step: project / "store" / "exchange" / f"{step:08d}.0" for step in shared if step}
    members = {step: json.loads((path / "members").read_text())["members"] for step, path in exchanges.items()}
    missed = [step for step in members if 1 not in members[step]]
    assert missed == [*range(missed[0], missed[-1] + 1, 4)]
    # the site trained until the first missed exchange, and left out the steps until the last one
    at, back = missed[0], missed[-1] + 4
    assert [*late.steps()] == [*range(1, at + 1), *range(missed[-1] + 1, 41)]
    progress = [own_progress(shared[step - 4], step - 3) for step in (at, back)]
    torch.testing.assert_close(sent_in(exchanges[back] / "site1"), sum(progress), rtol=1e-9, atol=1e-11)
    result = summary(late.run)
    assert result["outer/missed"] == len(missed)
    assert result["outer/left_out_steps"] == missed[-1] - at
    assert records(first.run)[-1]["outer/missed"] == len(missed)


def own_progress(start: list[Tensor], step: int) -> Tensor:
    """Return the outer gradient of site 1 of two after four steps of SGD, of which ``step`` is the first."""
    site, data = Site(start, "sgd"), Samples(96)
    for each in range(step, step + 4):
        site.step(data, range((each - 1) * 24 % 96 + 12, (each - 1) * 24 % 96 + 24))
    return torch.cat([(a - b).detach().flatten() for a, b in zip(start, site.parameters, strict=True)])


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_key(tmp_path_factory.mktemp("key") / "key.pem")


def test_a_killed_site_resumes_and_a_killed_server_is_started_again(project: Path, key: Path) -> None:
    """Through a server, with fragments that arrive later, int8, and BatchNorm-like buffers."""
    server = Server(project / "store", key)
    more = [
        "outer.every=4", "outer.fragments=2", "outer.delay=1", "outer.compress=int8", f"outer.key={key}",
        "outer.patience_s=3", "train.steps=60", "+task.pause_s=0.1", "+task.buffer=true", "checkpoint.every=5", *ONE,
        "batch.micro_size=12",
    ]  # fmt: skip
    jobs = [JobOfSite(project, site, 2, *more, store=server.address).start() for site in range(2)]
    wait_for_steps(jobs[1].run, 12)
    jobs[1].kill()
    wait_for_steps(jobs[0].run, 25)
    server.kill()
    wait_for(lambda: no_progress(jobs[0].run), "a wait for the store")
    server.start()
    jobs[1].start("resume", "r")
    outputs = [job.finish() for job in jobs]
    server.kill()
    assert "site 1 took no part" in outputs[0]
    assert "Site 1 continues after step" in outputs[1]
    finals = [tensors(job.run / "checkpoints" / "step_000060") for job in jobs]
    for name, value in finals[0].items():
        if name.startswith(("model.", "buffers.")):
            torch.testing.assert_close(finals[1][name], value, rtol=0, atol=0, msg=name)
    assert [each["step"] for each in records(jobs[0].run)] == [*range(1, 61)]
    left_out = summary(jobs[1].run)["outer/left_out_steps"]
    assert left_out > 0
    assert len({each["step"] for each in records(jobs[1].run)}) == 60 - left_out


def no_progress(run: Path) -> bool:
    before = len(records(run))
    time.sleep(1.5)
    return len(records(run)) == before


def keep_all(store: Path, kept: Path, ended: threading.Event) -> None:
    """Keep what is removed from a store, too."""
    last = False
    while not last:
        last = ended.is_set()
        for path in (store / "exchange").glob("*/*"):
            copy = kept / "exchange" / path.parent.name / path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError, FileNotFoundError):
                copy.hardlink_to(path)
        ended.wait(0.05)


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_sites_are_killed_at_random_and_nothing_is_lost(rounds: int, project: Path) -> None:
    """Each is killed several times, together and one by one; the averages follow from what was sent, and all agree."""
    steps = 30 * rounds
    more = [
        "outer.every=3", "outer.patience_s=2", f"train.steps={steps}", "+task.pause_s=0.1", "checkpoint.every=4", *ONE,
        "batch.micro_size=2", RECORDER,
    ]  # fmt: skip
    jobs = [JobOfSite(project, site, 3, *more).start() for site in range(3)]
    ended = threading.Event()
    keeper = threading.Thread(target=keep_all, args=(project / "store", project / "kept", ended))
    keeper.start()
    chance = random.Random(7)
    for job in jobs:
        wait_for(lambda job=job: any((job.run / "checkpoints").glob("step_*")), "a checkpoint of each site")
    for _ in range(rounds):
        victims = chance.sample(jobs, chance.choice((1, 1, 2, 3)))
        time.sleep(chance.uniform(0.5, 3))
        for job in victims:
            if job.process.poll() is None:
                job.kill()
        time.sleep(chance.uniform(0, 3))
        for job in victims:
            if not (job.run / "summary.json").exists():
                job.start("resume", "r")
    for job in jobs:
        job.finish()
    ended.set()
    keeper.join()
    saved = min(int(path.name[5:]) for path in (jobs[0].run / "checkpoints").glob("step_*"))
    state = tensors(jobs[0].run / "checkpoints" / f"step_{saved:06d}")
    begin = [
        [state[f"callbacks.StoreOuterSteps/{kind}/layers.{number}.weight"] for number in range(4)]
        for kind in ("shared", "momentum")
    ]
    shared = shared_after(project / "kept", *begin, since=saved)
    assert len(shared) > 5 * rounds
    for job in jobs:
        assert_equal(job.model(steps), shared[steps])
        trained = len({each["step"] for each in records(job.run)})
        assert trained + summary(job.run)["outer/left_out_steps"] == steps


def test_killed_sites_resume_bit_by_bit_within_a_round(project: Path) -> None:
    """All are killed while a part is under way. Nothing is late, so that the result is that of an uninterrupted job."""
    more = [
        "outer.every=4", "outer.fragments=2", "outer.delay=2", "outer.compress=int8", "train.steps=19", *ONE,
        "batch.micro_size=12", "checkpoint.every=3", "+task.buffer=true", "train.clip_norm=1",
        "task._target_=speech.fitted.Even",
    ]  # fmt: skip
    finals: list[list[dict[str, Tensor]]] = []
    for name in ("whole", "killed"):
        pace = ["+task.pause_s=0.2"] if name == "killed" else list[str]()
        jobs = [JobOfSite(project / name, site, 2, *more, *pace).start() for site in range(2)]
        if name == "killed":
            for job in jobs:
                wait_for_steps(job.run, 9)
            for job in jobs:
                job.kill()
            for job in jobs:
                job.start("resume", "r")
        for job in jobs:
            job.finish()
        finals.append([tensors(job.run / "checkpoints" / "step_000019") for job in jobs])
    for whole, resumed in zip(*finals, strict=True):
        assert whole.keys() == resumed.keys()
        for key, value in whole.items():
            if not key.startswith("random"):
                assert torch.equal(value, resumed[key]), key


MISTAKES = {
    "one site": (["outer.store=s", "outer.sites=1", "outer.site=0"], "outer.sites=1: must be 2 or more"),
    "no number": (["outer.store=s", "outer.sites=2"], "outer.site: must be from 0 to 1"),
    "a number too large": (["outer.store=s", "outer.sites=2", "outer.site=2"], "outer.site=2: must be from 0 to 1"),
    "no store": (["outer.sites=2", "outer.group=1"], "outer.sites=2: has an effect with outer.store only"),
    "a group": (["outer.store=s", "outer.sites=2", "outer.site=0", "outer.group=2"], "outer.group=2: has no effect"),
    "no key": (["outer.store=https://h:1", "outer.sites=2", "outer.site=0"], "outer.key: is needed for a store"),
    "a key for a directory": (
        ["outer.store=s", "outer.sites=2", "outer.site=0", f"outer.key={__file__}"], "outer.key=",
    ),
    "a key that is missing": (
        ["outer.store=https://h:1", "outer.sites=2", "outer.site=0", "outer.key=none.pem"],
        "outer.key=none.pem: cannot be read: No such file",
    ),
    "no server": (["outer.store=http://h:1", "outer.sites=2", "outer.site=0"], "https://HOST:PORT"),
    "a batch that cannot be shared": (
        ["outer.store=s", "outer.sites=2", "outer.site=0", "batch.global_size=25"], "cannot be shared by 2 ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_before_anything_starts(mistake: str, launch: Launch, project: Path) -> None:
    words, message = MISTAKES[mistake]
    done = launch("train", *JOB, *ONE, "train.steps=2", *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert not (project / "runs").exists()


def test_a_site_with_another_job_is_refused(project: Path) -> None:
    """Before its first step; the other one, which was first, continues."""
    more = ["outer.every=4", "train.steps=6", *ONE, "batch.micro_size=12", "outer.patience_s=1"]
    first = JobOfSite(project, 0, 2, *more).start()
    wait_for(lambda: (project / "store" / "hello" / "site0").exists(), "the first site")
    for number, (key, own, theirs) in enumerate((("outer.lr", 0.5, 0.7), ("optimizer.lr", 0.02, 0.01))):
        other = JobOfSite(project / str(number), 1, 2, *more, f"{key}={own}", store=str(project / "store")).start()
        assert f"{key}={own}: the first site of outer.store={project / 'store'} has {theirs}" in other.finish(2)
        assert not (other.run / "metrics.jsonl").exists()
    first.finish()
    # a new run needs a new store: here it would find the averages of the old one
    again = JobOfSite(project / "again", 0, 2, *more, store=str(project / "store"))
    assert "holds what another run has sent as site 0" in again.start().finish(2)
