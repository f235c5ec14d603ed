"""`launch verify`: what it must pass, what it must catch, and what it must say of a task that cannot be trained."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.extensions.verify.certificate import (
    FP32,
    Certificate,
    Comparison,
    Effect,
    Hazard,
    Rule,
    VerifyOutcome,
    WindowCheck,
    judge_windows,
    narrow_rule,
)
from launcher.extensions.verify.comparison import Gradient, compare_gradients
from launcher.extensions.verify.verify_worker import Measured, _notes
from launcher.rundir.files import value_from_json
from tests.helpers import make_plan, torchrun

WORKER = Path(__file__).parent / "verify_worker.py"

# with the hazards that are only noted
EXACT = {
    "Padded": set[str](),
    "Padded strategy=fsdp precision=bf16": set[str](),
    "MultiLoss strategy=fsdp strategy.sync=every": set[str](),
    "Tied": set[str](),
    "Curriculum precision=fp16": set[str](),
    "Buffered": {"changing buffers"},
    "Dropped strategy.compress=bf16 strategy.sync=every": {"dropout"},
    "Augmented": {"random data"},
    "Streamed": set[str](),
    "StreamedFiles train.data_shards=4": set[str](),
    "Greedy": set[str](),
    "Normalised batch.norm=window": set[str](),
    "Normalised batch.norm=freeze": set[str](),
    "SometimesPadding": set[str](),
    "Bf16Parameters strategy=fsdp precision=bf16": set[str](),
    "Adapted precision=bf16": set[str](),
    "Gathered batch.micro_size=6 batch.short_window=drop": {"a loss that is no sum over items"},
    "Matched": {"dropout"},
    "Denoising": {"bare mean"},
    "Advantages": set[str](),
    "Surrogate": set[str](),
}
# more of the same with other options
EXACT_TOO = {
    "Padded strategy=fsdp strategy.sync=every precision=bf16": set[str](),
    "Streamed batch.global_size=40": set[str](),
    "Bf16Parameters precision=bf16 precision.parameters=keep": set[str](),
    "Bf16Parameters precision.parameters=keep": set[str](),
    "Bf16Parameters": set[str](),
    "Matched batch.micro_size=6": {"dropout"},
    "Matched strategy=fsdp precision=bf16": {"dropout"},
    "Denoising precision=bf16": {"bare mean"},
    "Denoising precision=fp16 strategy.sync=every": {"bare mean"},
    "Advantages strategy=fsdp precision=fp16": set[str](),
    "Bf16Parameters precision=bf16": set[str](),
    "Padded precision=fp16": set[str](),
}
# jobs whose own arithmetic is not fp32 without rounding of its own
NARROW = ("precision", "compress")
# with what decides
CAUGHT = {
    "BareMean": "a loss that is no sum over items",
    "MeanAsSum": "a loss that is no sum over items",
    "Contrasted": "a loss that is no sum over items",
    "CountsPadding": "items that do not add up",
    "Remembers": "hidden state",
    "RemembersInTask": "hidden state",
    "RemembersInBuffer": "changing buffers",
    "Normed": "BatchNorm",
    "Normalised batch.norm=sync": "BatchNorm",
    "OtherData": "data that differs between ranks",
    "NotSharded": "a stream that is not sharded",
}
COARSE = "CoarseAlone precision=bf16"
BLIND = {
    "Noisy": "randomness in the forward pass",
    "Unrepeatable": "non-determinism",
    "UnseededData": "data that differs at each reading",
}
# with words of the message
REFUSED = {
    "Unused": "does not depend on 1 of the model's parameters: forgotten",
    "WritesRows": "have different models: 1 of 3 parameters on rank 1 differ from those of rank 0: 0.weight.",
    "WritesRows strategy=fsdp": "0.weight: written by the forward pass, the loss or the backward pass, which strategy=",
    "OtherLength": "not the same on all ranks",
    "AllPadding": "holds an item",
    "NotEvaluated": "The evaluation fails: ValueError: no labels in the held-out data",
    "Negative task.as_tensor=1": "must be a finite number, 0 or more",
    "Gathered batch.short_window=drop": "The loss of a micro-batch depends on what other ranks have computed",
}
# those of them that are mistakes in the task
MISTAKES = ("WritesRows strategy=fsdp", "Negative task.as_tensor=1", "Gathered batch.short_window=drop")
ERRORS = {
    "Vector": "The loss of a micro-batch is of shape [",
    "NumberLoss": "must be a scalar tensor",
    "Negative": "this one has -2",
    "ItemsWithGradient": "The number of items of a micro-batch requires a gradient",
}


HERE = " train.loader_workers=0"


def certified(lines: list[str], place: Path) -> dict[str, dict[str, Any]]:
    """Return the certificates of tasks, from one start of two ranks."""
    out = torchrun(WORKER, lines, 2, place)
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"line"')]
    return {one.pop("line").removesuffix(HERE): one for one in found}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the certificates of most tasks. One of them has loader processes."""
    first, *others = EXACT
    lines = (line + HERE for line in (*others, *CAUGHT, COARSE, *BLIND, *REFUSED, *ERRORS))
    return certified([first, *lines], tmp_path_factory.mktemp("verify"))


def certificate(answers: dict[str, dict[str, Any]], line: str) -> Certificate:
    return value_from_json(Certificate, answers[line])


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("line", EXACT)
def test_exact(answers: dict[str, dict[str, Any]], line: str) -> None:
    assert_exact(certificate(answers, line), line, EXACT[line])


@pytest.mark.nightly
def test_exact_too(tmp_path: Path) -> None:
    found = certified([*EXACT_TOO], tmp_path)
    for line, hazards in EXACT_TOO.items():
        assert_exact(certificate(found, line), line, hazards)


def assert_exact(found: Certificate, line: str, hazards: set[str]) -> None:
    assert (found.outcome, found.exit_status) == (VerifyOutcome.exact, 0), found
    assert found.windows
    assert found.windows[-1].samples < 12 or "drop" in line or "global_size" in line, "a short one is among them"
    narrow = any(word in line for word in NARROW)
    for window in found.windows:
        assert window.loss == pytest.approx(window.reference_loss, rel=1e-5, abs=1e-6)
        assert [comparison.arithmetic == "fp32" for comparison in window.comparisons] == [True, False][: 1 + narrow]
        wide = window.comparisons[0].whole
        assert wide.share is not None
        assert wide.share < 1e-6
        assert 0.99e-5 < wide.limit < 2e-5
        for own in window.comparisons[1:]:  # its limit is twice or more its own error, and not far above that
            assert own.one_batch is not None
            assert own.whole.share is not None
            assert 0 < own.whole.share < own.whole.limit < 0.1 or not window.items
            assert own.whole.limit == pytest.approx(3 * max(own.one_batch, 2**-8 if "p16" not in line else 2**-11))
    assert {hazard.name for hazard in found.hazards} == hazards
    for comparison in found.windows[0].comparisons:
        assert f"in {comparison.arithmetic} " in found.reason
        assert "(limit " in found.reason
    fitted = [window.reference_batches for window in found.windows]
    assert fitted == ([4, 4, 2] if line == "Greedy" else [1] * len(fitted))
    assert "in training mode with dropout off, and in fp32" in found.notes[0]
    assert any("did not fit into memory" in note for note in found.notes) == (line == "Greedy")


@pytest.mark.parametrize("line", CAUGHT)
def test_caught(answers: dict[str, dict[str, Any]], line: str) -> None:
    found = certificate(answers, line)
    assert (found.outcome, found.exit_status) == (VerifyOutcome.differs, 1), found
    assert CAUGHT[line] in found.reason
    assert CAUGHT[line] in {hazard.name for hazard in found.hazards}
    # the numbers say it too, where the windows that are looked at can show it
    assert all(window.agrees == (line == "NotSharded") for window in found.windows)


def test_a_fault_of_the_jobs_own_arithmetic_is_caught_where_it_is(answers: dict[str, dict[str, Any]]) -> None:
    """Two single samples of the short window are five percent off, and only in bf16."""
    found = certificate(answers, COARSE)
    assert (found.outcome, found.exit_status) == (VerifyOutcome.differs, 1), found
    *full, short = found.windows
    assert all(window.agrees for window in full)
    wide, own = short.comparisons
    assert wide.agrees
    assert not own.agrees
    assert own.whole.share is not None
    assert own.one_batch is not None
    assert 3 * max(own.one_batch, 2**-8) == pytest.approx(own.whole.limit)
    assert own.whole.limit < own.whole.share < 2**-4
    assert f"{short.name}, in bf16 {own.whole.share:.1e} off (limit {own.whole.limit:.1e}" in found.reason
    assert not found.hazards, "the probes run in fp32"


@pytest.mark.parametrize("line", BLIND)
def test_what_cannot_be_compared_is_not_certified(answers: dict[str, dict[str, Any]], line: str) -> None:
    found = certificate(answers, line)
    assert (found.outcome, found.exit_status) == (VerifyOutcome.undecided, 1), found
    assert BLIND[line] in found.reason
    assert [hazard.name for hazard in found.hazards] == [BLIND[line]], "nothing is blamed for what may be chance"


@pytest.mark.parametrize("line", REFUSED)
def test_refused(answers: dict[str, dict[str, Any]], line: str) -> None:
    found = certificate(answers, line)
    status = 2 if line in MISTAKES else 1  # as in `launch train`
    assert (found.outcome, found.exit_status) == (VerifyOutcome.refused, status), found
    assert REFUSED[line] in found.reason


@pytest.mark.parametrize("line", ERRORS)
def test_a_loss_that_is_none_is_one_message(answers: dict[str, dict[str, Any]], line: str) -> None:
    assert ERRORS[line] in answers[line]["error"]


def gradients(*numbers: float) -> Gradient:
    return {"whole.big": torch.tensor(numbers[:2]), "other.small": torch.tensor(numbers[2:])}


R = gradients(3.0, 4.0, 0.001)


def comparison(got: Gradient, rounded: Gradient = R, rule: Rule = FP32) -> Comparison:
    return compare_gradients("fp32", got, R, rounded, rule)


def window(*comparisons: Comparison, items: int = 1, batches: int = 1) -> WindowCheck:
    return WindowCheck(
        name="window 1", samples=1, items=items, reference_items=1, micro_batches=1, reference_batches=batches,
        loss=1.0, reference_loss=1.0, comparisons=comparisons,
    )  # fmt: skip


def hazard(effect: Effect) -> Hazard:
    return Hazard(name="x", effect=effect, seen="", matters="", remedy="")


AGREES, OFF = comparison(R), comparison(gradients(3.1, 4.0, 0.001))
BF16 = narrow_rule(2**-8)


@pytest.mark.parametrize(
    ("check", "effect", "outcome"),
    [
        (window(AGREES), None, VerifyOutcome.exact),
        (window(AGREES, items=2), None, VerifyOutcome.differs),
        (window(OFF), None, VerifyOutcome.differs),
        (window(AGREES, OFF), None, VerifyOutcome.differs),
        (window(AGREES), Effect.blinds, VerifyOutcome.exact),
        (window(OFF), Effect.blinds, VerifyOutcome.undecided),
        (window(AGREES), Effect.breaks, VerifyOutcome.differs),
        # windows outweigh what is suspected, if they were compared with one batch
        (window(AGREES), Effect.suspect, VerifyOutcome.exact),
        (window(AGREES, batches=2), Effect.suspect, VerifyOutcome.differs),
        (window(AGREES, batches=2), Effect.noted, VerifyOutcome.exact),
        (window(OFF), Effect.suspect, VerifyOutcome.differs),
    ],
)
def test_the_verdict(check: WindowCheck, effect: Effect | None, outcome: VerifyOutcome) -> None:
    assert judge_windows([check], [] if effect is None else [hazard(effect)], None)[0] is outcome


@pytest.mark.parametrize(
    ("got", "rounded", "rule", "limit", "agrees"),
    [
        # in fp32: ten times the rounding error, within bounds
        ((3.00004, 4.0, 0.001), (3.0, 4.0, 0.001), FP32, 1e-5, True),
        ((3.0001, 4.0, 0.001), (3.0, 4.0, 0.001), FP32, 1e-5, False),
        ((3.0001, 4.0, 0.001), (3.00005, 4.0, 0.001), FP32, 1e-4, True),
        ((3.006, 4.0, 0.001), (3.1, 4.0, 0.001), FP32, 1e-3, False),
        # a gradient that is rounding itself counts by its share of the whole; one that is not, by its own size
        ((3.0, 4.0, 0.001004), (3.0, 4.0, 0.001), FP32, 1e-5, True),
        ((3.0, 4.0, 0.0011), (3.0, 4.0, 0.001), FP32, 1e-5, False),
        ((3.0, 4.0, 0.0011), (3.0, 4.0, 0.00102), FP32, 4e-5, True),
        # in bf16: three times what one big batch is off by, within bounds
        ((3.05, 4.0, 0.001), (3.0, 4.0, 0.001), BF16, 3 / 256, True),
        ((3.07, 4.0, 0.001), (3.0, 4.0, 0.001), BF16, 3 / 256, False),
        ((3.25, 4.0, 0.001), (3.1, 4.0, 0.001), BF16, 0.06, True),
        ((3.9, 4.0, 0.001), (3.45, 4.0, 0.001), BF16, 1 / 8, False),
    ],
)
def test_the_limit_follows_from_the_error_of_one_big_batch(
    got: tuple[float, ...], rounded: tuple[float, ...], rule: Rule, limit: float, agrees: bool
) -> None:
    found = comparison(gradients(*got), gradients(*rounded), rule)
    assert found.whole.limit == pytest.approx(limit, rel=1e-2)
    assert found.agrees == agrees


def test_rounding_beyond_the_largest_limit_proves_nothing() -> None:
    """18% off, where one big batch is 9% off: neither exact nor a mistake."""
    drowned = comparison(gradients(3.9, 4.0, 0.001), gradients(3.45, 4.0, 0.001), BF16)
    outcome, reason = judge_windows([window(AGREES, drowned)], [], None)
    assert outcome is VerifyOutcome.undecided
    assert "1.8e-01 off (limit 1.2e-01; one big batch rounds by 9.0e-02)" in reason
    beyond = comparison(gradients(4.8, 4.0, 0.001), gradients(3.45, 4.0, 0.001), BF16)
    assert judge_windows([window(AGREES, beyond)], [], None)[0] is VerifyOutcome.differs


def test_what_overflows_in_one_batch_is_held_to_the_largest_limit() -> None:
    found = comparison(gradients(3.5, 4.0, 0.001), gradients(math.inf, 4.0, 0.001), BF16)
    assert found.one_batch is None
    assert found.whole.limit == 1 / 8
    assert found.agrees


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["precision=fp32"], "in training mode with dropout off, and in fp32, as configured."),
        (["precision=bf16"], "in training mode with dropout off, and in fp32 in place of precision.kind=bf16."),
        (["precision=fp32", "strategy.compress=bf16"], "and in fp32 in place of strategy.compress=bf16."),
    ],
)
def test_what_the_comparison_changes_is_stated(overrides: list[str], words: str) -> None:
    plan = make_plan(*overrides)
    (note, *_) = _notes(plan, Measured([], None, None, plan, []), None, [])
    assert note.endswith(words)
