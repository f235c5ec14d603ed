"""Outer steps of a real job beside torchft's DiLoCo, in fp64, step by step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Launch
from tests.extensions.outer.test_outer_steps import JOB, RECORDER, TWO_OF_ONE, Site, events, parameters_in
from tests.user_project.speech.fitted import Samples

STEPS, EVERY = 12, 4


class Averages:
    """Stand-in for torchft's manager that averages over two sites, which are threads."""

    _use_async_quorum = False

    def __init__(self, site: int, sent: list[Tensor | None], barrier: threading.Barrier) -> None:
        self._site, self._sent, self._barrier, self._step = site, sent, barrier, 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Averages:
        assert not should_quantize
        self._sent[self._site] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(torch.stack([each for each in self._sent if each is not None]).mean(0))
        self._barrier.wait()
        return self

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def current_step(self) -> int:
        return self._step

    def nothing(self, *_: Any) -> None:
        pass

    wait = start_quorum = register_state_dict_fn = disallow_state_dict_read = allow_state_dict_read = nothing


def of_torchft(start: list[Tensor], fragments: int) -> list[list[Tensor]]:
    """Return the first site's parameters after each step."""
    from torchft.local_sgd import DiLoCo

    barrier, sent, taken = threading.Barrier(2), [None, None], list[list[Tensor]]()
    size = len(start) // fragments

    def train(number: int) -> None:
        site, data = Site(start, "adamw"), Samples(96)
        parts = [nn.ParameterList(site.parameters[n * size : (n + 1) * size]) for n in range(fragments)]
        outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        with DiLoCo(Averages(number, sent, barrier), [*parts], site.optimizer, outer, sync_every=EVERY):
            for step in range(STEPS - 1):
                first = step * 24 % 96 + 12 * number
                site.step(data, range(first, first + 12))
                if number == 0:
                    taken.append([parameter.detach().clone() for parameter in site.parameters])

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


@pytest.mark.nightly
@pytest.mark.parametrize("fragments", [1, 2])
def test_steps_are_those_of_torchft(fragments: int, launch: Launch, project: Path) -> None:
    job = [*JOB, *TWO_OF_ONE, f"outer.every={EVERY}", f"outer.fragments={fragments}", f"train.steps={STEPS}", RECORDER]
    done = launch("train", *job, "run.name=r")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = events(project, 0)
    start = parameters_in(next(each for each in seen if each["event"] == "start"))
    own = [parameters_in(each) for each in seen if each["event"] == "step"]
    theirs = of_torchft(start, fragments)
    assert len(theirs) == STEPS - 1, "after the last step the launcher averages everything once more"
    for step, (found, wanted) in enumerate(zip(own, theirs, strict=False), 1):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11, msg=lambda text, n=step: f"step {n}: {text}")
