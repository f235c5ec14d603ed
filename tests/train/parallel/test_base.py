"""Models under every strategy: buffers, long sums, and models whose parts are used or called in other ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher
from tests.helpers import series, torchrun
from tests.infra.workers import run_shrinking

BUFFERS = Path(__file__).parent / "buffers_worker.py"
STATISTICS = 8 * 4 + 8 * 4 + 8 + 4  # mean, variance, how many batches; and an average of the model's own


@pytest.mark.slow
def test_statistics_are_shared_and_constants_are_not_sent(tmp_path: Path) -> None:
    strategies = ["strategy=ddp", "strategy=ddp strategy.sync=every", "strategy=fsdp"]
    lines = torchrun(BUFFERS, strategies, 2, tmp_path).splitlines()
    seen = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(seen) == 3
    for result in seen:
        assert result["apart"] == [0.0] * 8
        assert result["sent"] == [0] + [STATISTICS] * 7, "the first window shows which buffers change"
        assert result["counted"] == result["seen"] == 16, "each batch is seen once"


LONG_SUMS = Path(__file__).parent / "long_sums_worker.py"
BF16 = "precision=fp32 strategy=ddp strategy.compress=bf16"
KEPT = "bfloat16 precision=bf16 precision.parameters=keep"
SHARDED = "precision=bf16 precision.reduce_dtype=bf16"
CASES = {
    1: [f"{KEPT} strategy=single"],
    2: [
        f"float32 {BF16} strategy.sync=every",
        f"float32 {BF16} strategy.sync=boundary",
        f"{KEPT} strategy=ddp strategy.sync=boundary",
        f"{KEPT} strategy=ddp strategy.sync=every",
        f"{KEPT} strategy=fsdp strategy.sync=every",
        f"{KEPT} strategy=fsdp strategy.sync=boundary",
        f"float32 {SHARDED} strategy=fsdp strategy.sync=every",
    ],
    4: [
        f"float32 {SHARDED} strategy=hsdp strategy.shard_size=2 strategy.sync={sync}"
        for sync in ("replicas_at_boundary", "every", "boundary")
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "lengths", "every"),
    [
        (1, (3, 2048), 1),
        (2, (3, 512), 2),
        (4, (3, 512), 3),
        *(
            pytest.param(ranks, (1, 2, 3, long), 1, marks=pytest.mark.nightly)
            for ranks, long in ((1, 8192), (2, 1024), (4, 512))
        ),
    ],
)
def test_a_window_of_any_length_has_its_exact_gradient(
    ranks: int, lengths: tuple[int, ...], every: int, tmp_path: Path
) -> None:
    """``every``: 3 takes each third case."""
    lines = [f"{accumulation} {case}" for case in CASES[ranks][::every] for accumulation in lengths]
    errors = json.loads(torchrun(LONG_SUMS, lines, ranks, tmp_path).splitlines()[-1])
    assert errors.keys() == set(lines)
    # a few roundings to bf16, of half a unit in the last place; a sum in bf16 would be half of it or less
    assert max(errors.values()) < 4 * 2**-8, errors


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "options", [["batch.on_oom=shrink"], ["batch.balance=length", "batch.micro_tokens=1"]], ids=["shrunk", "bounded"]
)
def test_a_window_of_more_micro_batches_than_planned_has_its_exact_gradient(options: list[str]) -> None:
    plan = launcher.make_plan(
        ["batch.global_size=512", "batch.micro_size=512", "train.steps=1", "train.clip_norm=null", "cluster.device=cpu",
         "schedule=constant", "schedule.warmup_steps=0", "precision=bf16", "precision.parameters=keep", *options],
        samples=512,
    )  # fmt: skip
    assert plan.batch.accumulation == 1
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.zeros_(model.weight)
    engine = launcher.Engine(model, torch.optim.SGD(model.parameters(), 1.0), plan)

    def loss(batch: torch.Tensor) -> launcher.Loss:
        if len(batch) > 1:
            raise torch.OutOfMemoryError("injected")
        return launcher.Loss(engine.model(batch.bfloat16()).sum(), len(batch))

    windows = engine.windows(launcher.ArrangedData(list(torch.ones(512, 1)), lengths=[1] * 512))
    assert run_shrinking(engine, windows, loss) == [512]
    assert float(model.weight.detach()) == pytest.approx(-1, abs=4 * 2**-8)


def user_model(ranks: int, part: str, where: Path) -> dict[str, Any]:
    worker = Path(__file__).parent / "user_model_worker.py"
    return json.loads(torchrun(worker, [str(ranks), part], ranks, where).splitlines()[-1])


@pytest.mark.slow
@series(24, 56)
def test_the_gradient_is_that_of_plain_torch_however_the_model_is_used(part: str, cases: int, tmp_path: Path) -> None:
    seen = user_model(4, part, tmp_path)
    assert len(seen) == cases
    for name, found in seen.items():
        assert found["error"] < 2 * found["at once"], (name, found)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return user_model(2, "two ranks", tmp_path_factory.mktemp("two"))


def test_an_evaluation_leaves_no_gathered_parameters(of_two_ranks: dict[str, Any]) -> None:
    """A unit that was gathered early, and then not used, would be that of the evaluation in the next window."""
    for sync in ("every", "boundary", "gather_once"):
        without, evaluated = of_two_ranks[sync]
        assert evaluated == without, sync


def test_contrasts_over_all_ranks_are_exact_with_one_micro_batch(of_two_ranks: dict[str, Any]) -> None:
    contrasts = {name: found for name, found in of_two_ranks.items() if name.startswith("contrastive ")}
    assert len(contrasts) == 4
    for name, found in contrasts.items():
        assert found["error"] < 3 * found["at once"], (name, found)


def test_a_parameter_of_a_shard_unit_in_the_loss_is_refused(of_two_ranks: dict[str, Any]) -> None:
    seen = of_two_ranks
    assert "The loss uses blocks.0.up.weight of a shard unit outside of the unit's forward" in seen["weight_of_a_unit"]
    assert "The loss uses a parameter of a shard unit" in seen["decay_of_all"]
    assert "use the optimizer's" in seen["decay_of_all"]
    assert seen["part_of_a_unit"] == "torch: mixed tensors"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "part", "cases"),
    [
        (1, "half", 10),
        (4, "half", 35),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((1, "all", 20), (4, "all", 70))),
    ],
)
def test_the_gradient_is_that_of_plain_torch(ranks: int, part: str, cases: int, tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "uses_worker.py", [str(ranks), part], ranks, tmp_path).splitlines()
    seen = json.loads(lines[-1])
    assert len(seen) == cases
    for name, found in seen.items():
        assert found["error"] < 2 * found["at once"], (name, found)
        if "fsdp" in name and ranks > 1:  # of two units and the root, in two micro-batches: each once
            assert found["collectives"]["reduce_scatter"] == (6 if "sync=every" in name else 3), (name, found)


SCRIPTED, SPARSE = "model: blocks.0 has TorchScript's", "model: table has sparse gradients"
AGAIN = "blocks.0.linear.weight"
KEPT = {"sparse": SPARSE, "scripted": SCRIPTED, "weight": "The shard unit blocks.0 returns its parameter weight",
        "again": AGAIN}  # fmt: skip
FREED = KEPT | {"views in place": "write y = y + 1, not y += 1"}
TWICE = "The gradient of blocks.1.linear.bias has several parts, and DDP would reduce the first one"
REFUSED: dict[str, dict[str, str]] = {
    "ddp": {"sparse": SPARSE, "again": AGAIN, "reentrant twice": TWICE, "reentrant": TWICE},
    "every": FREED,
    "boundary": FREED,
    "gather_once": KEPT,
}


@pytest.mark.slow
@series(24, 48)
def test_parameters_are_those_of_plain_torch(part: str, cases: int, tmp_path: Path) -> None:
    lines = torchrun(Path(__file__).parent / "odd_models_worker.py", [part], 2, tmp_path).splitlines()
    seen: dict[str, dict[str, Any]] = json.loads(lines[-1])
    assert sum(map(len, seen.values())) == cases
    assert seen.keys() == REFUSED.keys()
    for strategy, outcomes in seen.items():
        for name, outcome in outcomes.items():
            expected = REFUSED[strategy].get(name)
            if expected is None:
                assert outcome == pytest.approx(0, abs=1e-5), (strategy, name)
            else:
                assert outcome.startswith("TaskError: "), (strategy, name, outcome)
                assert expected in outcome, (strategy, name, outcome)
