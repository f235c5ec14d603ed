"""Models of which rank 0 alone has values before they are sharded: their values, random numbers and memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.train.parallel import deferred_init
from launcher.train.world import World
from tests.helpers import torchrun
from tests.train.parallel.deferred_models import FULL, MODELS

WORKER = Path(__file__).parent / "deferred_worker.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return json.loads(torchrun(WORKER, [], 2, tmp_path_factory.mktemp("deferred")).splitlines()[-1])


@pytest.mark.slow
def test_values_and_random_numbers_are_those_of_an_ordinary_build(seen: dict[str, Any]) -> None:
    assert seen["models"].keys() == MODELS.keys()
    for name, ranks in seen["models"].items():
        assert [same for same, _, _ in ranks] == [True, True], name
    in_full = {name for name, ranks in seen["models"].items() if not ranks[0][1]}
    assert in_full <= {"meta_aware", "spectral norm"}, "one has other buffers without values"


@pytest.mark.slow
def test_a_model_that_needs_values_is_built_in_full_and_says_why(seen: dict[str, Any]) -> None:
    for name, (_, reason) in FULL.items():
        for same, shards, output in seen["full"][name]:
            assert same, name
            assert not shards, name
            assert re.match(f"Each rank builds the full model before it is sharded: .*({reason})", output), (
                name,
                output,
            )


@pytest.mark.slow
def test_a_rank_other_than_0_never_holds_the_whole_model(seen: dict[str, Any]) -> None:
    assert seen["memory"]["model"] > 350e6
    # half of the model sharded, and one parameter
    assert seen["memory"]["grown"] < 0.75 * seen["memory"]["model"], seen["memory"]


@pytest.mark.slow
def test_no_rank_needs_values_that_come_from_elsewhere(seen: dict[str, Any]) -> None:
    assert seen["elsewhere"] == [[True, False]] * 2, "a buffer that is drawn has no value"


@pytest.mark.slow
def test_ranks_that_wait_for_the_model_do_not_seem_to_hang(seen: dict[str, Any]) -> None:
    assert seen["waits"] == [True, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_initial_values_are_drawn_with_heartbeats_and_counted(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beats: list[int] = []
    monkeypatch.setattr(deferred_init.HEARTBEAT, "beat", lambda *_: beats.append(len(beats)))
    monkeypatch.setattr(deferred_init, "PROGRESS_EVERY_S", 0)
    torch.manual_seed(0)
    plain = nn.Linear(30, 40)
    torch.manual_seed(0)
    with deferred_init.BuildProgress(World(rank, 2, rank)):
        watched = nn.Linear(30, 40)
        nn.init.trunc_normal_(torch.empty(100))
    assert torch.equal(plain.weight, watched.weight)
    assert len(beats) >= 3
    printed = capsys.readouterr().out
    assert ("Building the model: 1,340 initial values in " in printed) is (rank == 0)


@pytest.mark.slow
def test_ranks_hold_their_parts_of_the_same_values(seen: dict[str, Any], tmp_path: Path) -> None:
    assert seen["shards"] == [[True] * 3] * 2, "sharded over all ranks, over half of them; tensors of any shape"
    assert json.loads(torchrun(WORKER, [], 4, tmp_path).splitlines()[-1])["shards"] == [[True] * 3] * 4
