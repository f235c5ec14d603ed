"""`launch verify`: what it must pass, what it must catch, and what it must say of a task that cannot be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.certificate import (
    Certificate,
    Deviation,
    Effect,
    Hazard,
    Outcome,
    WindowCheck,
    judge,
    tolerance_for,
)
from launcher.fromjson import build
from tests.helpers import torchrun

WORKER = Path(__file__).parent / "verify_worker.py"

# with the hazards that are only noted
EXACT = {
    "Padded": set[str](),
    "Padded strategy=fsdp precision=bf16": set[str](),
    "Padded precision=fp16": set[str](),
    "MultiLoss strategy=fsdp strategy.sync=every": set[str](),
    "Tied": set[str](),
    "Buffered": {"changing buffers"},
    "Dropped strategy.compress=bf16 strategy.sync=every": {"dropout"},
    "Augmented": {"random data"},
    "Streamed": set[str](),
    "Streamed batch.global_size=40": set[str](),
    "Greedy": set[str](),
    "Normalised batch.norm=window": {"changing buffers"},
    "Normalised batch.norm=freeze": set[str](),
    "SometimesPadding": set[str](),
}
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
BLIND = {
    "Noisy": "randomness in the forward pass",
    "Unrepeatable": "non-determinism",
    "UnseededData": "data that is another one each time",
}
# with words of the message
REFUSED = {
    "Unused": "does not depend on 1 of the model's parameters: forgotten",
    "OtherLength": "not the same on all ranks",
    "AllPadding": "holds an item",
    "Negative task.as_tensor=1": "must be a whole number, 0 or more",
}
ERRORS = {
    "Vector": "The loss of a micro-batch is of shape [",
    "NumberLoss": "want a scalar tensor",
    "Negative": "this one has -2",
    "ItemsWithGradient": "The items of a micro-batch require grad",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one start of two ranks says of all of them."""
    lines = [*EXACT, *CAUGHT, *BLIND, *REFUSED, *ERRORS]
    out = torchrun(WORKER, lines, 2, tmp_path_factory.mktemp("verify"))
    found = [json.loads(line) for line in out.splitlines() if line.startswith('{"line"')]
    return {one.pop("line"): one for one in found}


def certificate(answers: dict[str, dict[str, Any]], line: str) -> Certificate:
    return build(Certificate, answers[line])


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("line", EXACT)
def test_exact(answers: dict[str, dict[str, Any]], line: str) -> None:
    found = certificate(answers, line)
    assert (found.outcome, found.exit_status) == (Outcome.exact, 0), found
    assert found.windows
    assert found.windows[-1].samples < 12 or "global_size" in line, "a short one is among them"
    for window in found.windows:
        assert window.whole.error is not None
        assert window.whole.error < 1e-6
        assert window.loss == pytest.approx(window.reference_loss, rel=1e-5)
    assert {hazard.name for hazard in found.hazards} == EXACT[line]
    narrow = any(word in line for word in ("precision", "compress"))
    assert {window.configured is not None for window in found.windows} == {narrow}
    if narrow:  # rounding is reported apart, and is there
        assert all(1e-5 < (window.configured or 0) < 2e-2 for window in found.windows)
    fitted = [window.reference_batches for window in found.windows]
    assert fitted == ([4, 4, 2] if line == "Greedy" else [1] * len(fitted))
    assert any("did not fit into memory" in note for note in found.notes) == (line == "Greedy")


@pytest.mark.parametrize("line", CAUGHT)
def test_caught(answers: dict[str, dict[str, Any]], line: str) -> None:
    found = certificate(answers, line)
    assert (found.outcome, found.exit_status) == (Outcome.differs, 1), found
    assert CAUGHT[line] in found.reason
    assert CAUGHT[line] in {hazard.name for hazard in found.hazards}
    # the numbers say it too, where the windows that are looked at can show it
    assert all(window.agrees(found.tolerance) == (line == "NotSharded") for window in found.windows)


@pytest.mark.parametrize("line", BLIND)
def test_what_cannot_be_compared_is_not_certified(answers: dict[str, dict[str, Any]], line: str) -> None:
    found = certificate(answers, line)
    assert (found.outcome, found.exit_status) == (Outcome.undecided, 1), found
    assert BLIND[line] in found.reason
    assert [hazard.name for hazard in found.hazards] == [BLIND[line]], "nothing is blamed for what may be chance"


@pytest.mark.parametrize("line", REFUSED)
def test_refused(answers: dict[str, dict[str, Any]], line: str) -> None:
    found = certificate(answers, line)
    assert (found.outcome, found.exit_status) == (Outcome.refused, 1), found
    assert REFUSED[line] in found.reason


@pytest.mark.parametrize("line", ERRORS)
def test_a_loss_that_is_none_is_one_message(answers: dict[str, dict[str, Any]], line: str) -> None:
    assert ERRORS[line] in answers[line]["error"]


def window(error: float, share: float = 1.0, configured: float | None = None, one_batch: float | None = None):
    one = Deviation(name="all", parameters=1, norm=1.0, error=error, share=share)
    return WindowCheck(
        name="window 1", samples=1, items=1, reference_items=1, micro_batches=1, reference_batches=1, loss=1.0,
        reference_loss=1.0, whole=one, groups=(one,), worst=(one,), configured=configured,
        configured_one_batch=one_batch,
    )  # fmt: skip


def hazard(effect: Effect) -> Hazard:
    return Hazard(name="x", effect=effect, seen="", matters="", remedy="")


@pytest.mark.parametrize(
    ("check", "effect", "outcome"),
    [
        (window(1e-6), None, Outcome.exact),
        (window(1e-4), None, Outcome.differs),
        (window(0.5, share=1e-7), None, Outcome.exact),  # a gradient that is rounding has no digits to compare
        (window(1e-6), Effect.blinds, Outcome.exact),
        (window(1e-4), Effect.blinds, Outcome.undecided),
        (window(1e-6), Effect.breaks, Outcome.differs),
        (window(1e-6, configured=0.03, one_batch=0.01), None, Outcome.exact),
        (window(1e-6, configured=0.3, one_batch=0.1), None, Outcome.exact),
        (window(1e-6, configured=0.3, one_batch=0.01), None, Outcome.differs),
    ],
)
def test_the_verdict(check: WindowCheck, effect: Effect | None, outcome: Outcome) -> None:
    assert judge([check], [] if effect is None else [hazard(effect)], None, 1e-5)[0] is outcome


def test_the_tolerance_follows_the_models_own_rounding_within_bounds() -> None:
    assert tolerance_for(1e-8) == 1e-5
    assert tolerance_for(1e-5) == pytest.approx(1e-4)
    assert tolerance_for(1.0) == 1e-3
