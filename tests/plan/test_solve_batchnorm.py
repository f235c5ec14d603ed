"""The plan of a model with BatchNorm: notes, costs and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.errors import ConfigError
from launcher.plan.run_plan import RunPlan
from launcher.plan.solve import what_norms_do
from tests.helpers import make_plan

WINDOW = ("batch.global_size=32", "batch.micro_size=4", "cluster.workers_per_node=2")  # accumulation 4


def said(layers: int, *overrides: str) -> str | None:
    return what_norms_do(layers, make_plan(*WINDOW, *overrides).batch)


def test_statistics_of_a_part_of_the_window_are_said_and_what_else_there_is() -> None:
    left = said(3) or ""
    assert "3 BatchNorm layers: statistics of 4 samples" in left
    assert "of the 32 of a window" in left
    assert "batch.norm=sync|freeze|window" in left
    synced = said(1, "batch.norm=sync") or ""
    assert "1 BatchNorm layer: statistics of 8 samples" in synced
    assert "batch.norm=freeze|window" in synced
    assert "runs at least 6 times more" in (said(3, "batch.norm=window") or "")
    assert "model() comes with" in (said(3, "batch.norm=freeze") or "")


def test_statistics_of_the_whole_window_are_said_to_be_so() -> None:
    for norm in ("sync", "window"):
        whole = said(2, f"batch.norm={norm}", "batch.micro_size=16") or ""
        assert "of the whole window" in whole


def test_an_option_without_effect_is_named() -> None:
    assert said(0) is None
    batch = replace(make_plan(*WINDOW, "batch.norm=sync").batch, world_size=1, accumulation=8)
    assert "no effect on one rank" in (what_norms_do(2, batch) or "")


def test_activations_computed_again_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch\.norm=window: does not work with strategy\.recompute=blocks"):
        make_plan(*WINDOW, "batch.norm=window", "strategy.recompute=blocks")
    make_plan(*WINDOW, "batch.norm=sync", "strategy.recompute=blocks")


def test_a_loss_of_the_whole_window_has_passes_of_its_own() -> None:
    task = replace(make_plan(batch_norms=2).task, window_loss=True)
    with pytest.raises(ConfigError, match=r"batch\.norm=window: does not work with a task that has window_loss"):
        make_plan(*WINDOW, "batch.norm=window", task=task)
    note = make_plan(*WINDOW, "batch.norm=sync", task=task).notes[-1]
    assert "each micro-batch runs forward once more" in note


def test_a_short_window_with_micro_batches_of_one_sample_is_said_with_a_way_out() -> None:
    one, two = "cluster.workers_per_node=1", "cluster.workers_per_node=2"

    def noted(samples: int, *overrides: str, batch_norms: int = 1) -> list[str]:
        sizes = ("batch.global_size=16", "batch.micro_size=4", "train.epochs=1")
        plan = make_plan(*sizes, *overrides, samples=samples, batch_norms=batch_norms)
        return [note for note in plan.notes if "more than 1 value per channel" in note]

    assert "short window of 1 sample" in noted(33, one)[0]
    assert "Use batch.short_window=drop, another batch.global_size, batch.norm=window" in noted(33, two)[0]
    full = noted(35, two, "batch.global_size=5", "batch.micro_size=2", "batch.uneven=true")[0]
    assert "A window of 5 samples has" in full
    assert "Use a larger batch.micro_size or batch.global_size, batch.norm=window" in full
    for samples in (35, 34):  # shares of 2 and 1, of 1 and 1
        assert noted(samples, two)
    for samples, overrides in (
        (34, [one]), (32, [two]), (36, [two]), (33, [one, "batch.short_window=drop"]), (33, [two, "batch.norm=sync"]),
    ):  # fmt: skip
        assert not noted(samples, *overrides)
    assert not noted(33, one, batch_norms=0)


@pytest.mark.parametrize(
    ("samples", "overrides", "said"),
    [
        (33, [], "short window of 1 sample at the end of each epoch of 33 samples"),
        (33, ["train.epochs=null", "train.steps=3"], "short window of 1 sample"),
        (33, ["train.epochs=null", "train.steps=2"], None),  # ends before it
        (33, ["batch.short_window=drop"], None),
        (33, ["batch.norm=window"], None),
        (35, ["cluster.workers_per_node=2"], "short window of 3 samples"),  # one rank has one of them
        (34, [], None),
        (34, ["cluster.workers_per_node=2"], "short window of 2 samples"),
        (32, ["batch.micro_size=1"], "batch.micro_size=1: .*A window of 16 samples"),
        (33, ["batch.micro_size=1"], "batch.micro_size=1: "),
        (
            32,
            ["batch.global_size=5", "batch.micro_size=2", "batch.uneven=true", "cluster.workers_per_node=2"],
            "window of 5",
        ),
    ],
)
def test_a_layer_that_fails_on_one_sample_is_refused_where_the_run_has_such_a_micro_batch(
    samples: int, overrides: list[str], said: str | None
) -> None:
    def plan(layer: str) -> RunPlan:
        task = replace(make_plan(batch_norms=1).task, samples=samples, one_value_norm=layer)
        sizes = ("batch.global_size=16", "batch.micro_size=4", "train.epochs=1", "cluster.workers_per_node=1")
        return make_plan(*sizes, *overrides, task=task)

    assert not [note for note in plan("").notes if "one sample" in note], "no layer of it fails: images, say"
    if said is None:
        plan("net.1")
        return
    with pytest.raises(ConfigError, match=f"(?s){said}") as refused:
        plan("net.1")
    for text in ("the BatchNorm net.1 ", "batch.global_size", "batch.norm=window"):
        assert text in str(refused.value)
