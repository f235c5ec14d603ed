"""Deferred construction: the values, the random numbers and the memory of it, against an ordinary build."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.tasks.bytes_model import GPT
from launcher.train.parallel.deferred_init import build_deferred, fill
from launcher.train.parallel.init_recorder import NotDeferrable
from tests.helpers import torchrun
from tests.train.parallel.deferred_models import MODELS, Make, instructed, module, tied

WORKER = Path(__file__).parent / "deferred_worker.py"


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """``build`` looks through all objects for tensors: not through those of the tests before, each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def seed(value: int = 3) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def assert_same(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert values.keys() == wanted.keys()
    for name, value in wanted.items():
        assert values[name].dtype == value.dtype, name
        assert torch.equal(values[name], value.detach()), name


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_values_and_random_numbers_are_those_of_an_ordinary_build(make: Make) -> None:
    seed()
    ordinary = make()
    after = states()
    seed()
    model, recipe = build_deferred(make)
    fill(model.to_empty(device="cpu"), recipe)
    assert states() == after
    assert_same(state_of(model), state_of(ordinary))
    assert len(list(model.parameters())) == len(list(ordinary.parameters())), "ties hold"


@given(st.lists(st.tuples(st.integers(0, 10), st.integers(0, 3), st.integers(0, 3)), max_size=25))
def test_any_sequence_of_operators(instructions: list[tuple[int, int, int]]) -> None:
    test_values_and_random_numbers_are_those_of_an_ordinary_build(instructed(instructions))


def test_recording_draws_nothing() -> None:
    seed()
    before = states()
    model, _ = build_deferred(MODELS["gpt"])
    assert states() == before
    assert all(parameter.is_meta for parameter in model.parameters())


def test_tied_parameters_come_once_with_all_their_names() -> None:
    _, recipe = build_deferred(module(tied))
    assert recipe.ties == [("emb.weight", "head.weight"), ("a", "b")]
    seen: list[tuple[str, ...]] = []
    recipe.replay(lambda names, _: seen.append(names))
    assert sorted(seen) == sorted(recipe.ties)


def test_a_model_of_other_names_is_not_filled() -> None:
    _, recipe = build_deferred(lambda: nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"not the names that were recorded: bias"):
        fill(nn.Linear(2, 2, bias=False), recipe)


class Live(TorchDispatchMode):
    """The most bytes of storages alive at once, of those that an operator has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor | torch.UntypedStorage):
                storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else leaf
                if storage._cdata not in self._live and storage.device.type == "cpu":
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata)
                    self.peak = max(self.peak, sum(self._live.values()))
        return result


def rescaled_gpt() -> nn.Module:
    model = GPT(256, 64, 8, 4, 32, 0.0)
    for name, parameter in model.named_parameters():
        if name.endswith("down.weight"):
            parameter.data.mul_(0.5)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: GPT(256, 64, 8, 4, 32, 0.0),
        rescaled_gpt,
        lambda: rescaled_gpt().double(),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 128, batch_first=True), 8),
    ],
    ids=["gpt", "rescaled", "converted", "copied"],
)
def test_memory_is_that_of_the_largest_parameters(make: Make) -> None:
    model, recipe = build_deferred(make)
    sizes = sorted(p.numel() * p.element_size() for p in model.parameters())
    with Live() as live:
        recipe.replay(lambda *_: None)
    assert sizes[-1] <= live.peak <= 2 * sizes[-1], "Live sees what there is, and that is little"
    assert live.peak < sum(sizes) / 4


def test_recording_takes_no_memory() -> None:
    with Live() as live:
        build_deferred(lambda: GPT(256, 64, 8, 4, 32, 0.0))
    assert live.peak < 256 * 64 * 4, "that of the generators' state, and not even the largest parameter"


def asks(what: Callable[[Tensor], Any]) -> Make:
    def make(self: Any) -> None:
        self.weight = nn.Parameter(torch.randn(4))
        self.answer = what(self.weight.detach())

    return module(make)


def swallows(self: Any) -> None:
    try:
        self.scale = torch.randn(3).max().item()
    except NotDeferrable:
        self.scale = 1.0


def swallows_another(self: Any) -> None:
    try:
        self.scale = torch.randn(3).numpy()
    except TypeError:
        self.scale = None


def reseeds(self: Any) -> None:
    self.a = nn.Parameter(torch.randn(3))
    torch.manual_seed(3)
    self.b = nn.Parameter(torch.randn(3))


def forks(self: Any) -> None:
    with torch.random.fork_rng():
        self.a = nn.Parameter(torch.randn(3))
    self.b = nn.Parameter(torch.randn(3))


def seeds_only(self: Any) -> None:
    torch.manual_seed(3)
    self.a = nn.Parameter(torch.ones(3))


def draws_for_real(self: Any) -> None:
    self.a = nn.Parameter(torch.tensor([1.0, 2.0]).uniform_())


def draws_for_real_from_its_own(self: Any) -> None:
    generator = torch.Generator()
    self.a = nn.Parameter(torch.randn(3, generator=generator))
    torch.tensor([1.0]).uniform_(generator=generator)


def writes_into_real(self: Any) -> None:
    self.register_buffer("a", torch.tensor([1.0, 2.0]))
    self.a[0] = torch.randn(())


def makes_meta(self: Any) -> None:
    self.a = nn.Parameter(torch.empty(3, device="meta"))


def fails(self: Any) -> None:  # noqa: ARG001
    raise KeyError("width")


def old_weight_norm(self: Any) -> None:
    self.layer = nn.Linear(3, 3)
    self.layer.again = self.layer.weight * 2


NOT_DEFERRABLE: dict[str, tuple[Make, str]] = {
    "item": (asks(lambda w: w.max().item()), "needs values|asks a tensor for its value"),
    "if": (asks(lambda w: 1 if w.max() > 0 else 2), "asks a tensor for its value"),
    "tolist": (asks(lambda w: w.tolist()), "."),
    "numpy": (asks(lambda w: w.numpy()), "TypeError"),
    "equal": (asks(lambda w: torch.equal(w, w + 1)), "asks a tensor for its value"),
    "mask": (asks(lambda w: w[w > 0]), "nonzero"),
    "print": (asks(lambda w: np.asarray(w)), "."),
    "kept aside": (asks(lambda w: w * 2), "neither parameters nor buffers .*answer"),
    "kept in a list": (asks(lambda w: [w[:2]]), r"neither parameters nor buffers .*\(2,\)"),
    "sparse": (asks(lambda w: w.to_sparse()), "."),
    "swallowed": (module(swallows), "asks a tensor for its value"),
    "swallowed, another": (module(swallows_another), "TypeError"),
    "reseeds": (module(reseeds), "seeds or restores"),
    "forks": (module(forks), "seeds or restores"),
    "seeds": (module(seeds_only), "seeds or restores"),
    "draws": (module(draws_for_real), "has its memory already"),
    "draws from its own": (module(draws_for_real_from_its_own), "draws"),
    "writes": (module(writes_into_real), "has its memory already"),
    "meta": (module(makes_meta), "meta tensors itself"),
    "skip_init": (lambda: nn.utils.skip_init(nn.Linear, 3, 3), "meta tensors itself"),
    "fails": (module(fails), "KeyError: 'width'"),
    "weight beside a weight": (module(old_weight_norm), r"layer\.again"),
}


@pytest.mark.parametrize(("make", "reason"), NOT_DEFERRABLE.values(), ids=NOT_DEFERRABLE)
def test_what_cannot_be_deferred_says_why_and_leaves_no_trace(make: Make, reason: str) -> None:
    seed()

    def draws_first() -> nn.Module:
        random.random()
        np.random.rand()
        return make()

    before = states()
    with pytest.raises(NotDeferrable, match=reason):
        build_deferred(draws_first)
    assert states() == before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_ranks_hold_their_parts_of_the_same_values(ranks: int, tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, ["values"], ranks, tmp_path).splitlines()[-1])
    assert seen == {"same": [1, 1, 1]}, "sharded over all ranks, over half of them; tensors of any shape"


@pytest.mark.slow
def test_a_rank_never_holds_the_whole_model(tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, ["memory"], 2, tmp_path).splitlines()[-1])
    assert seen["model"] > 350e6
    # half of the model sharded, and one parameter
    assert seen["grown"] < 0.75 * seen["model"], seen


class _Named(nn.Module):
    """Values that depend on random numbers drawn before them, and a buffer that may depend on them too."""

    def __init__(self, random_buffer: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        values = torch.rand(4) if random_buffer else torch.arange(4.0).sin()
        self.register_buffer("phase", values * 2, persistent=False)


@pytest.mark.parametrize("random_buffer", [True, False])
def test_values_that_come_from_elsewhere_are_left_out(random_buffer: bool) -> None:
    seed()
    wanted = state_of(_Named(random_buffer))
    seed()
    model, recipe = build_deferred(lambda: _Named(random_buffer))
    before = torch.get_rng_state()
    recipe.leave_out({name for name in wanted if name != "phase"})
    with torch.no_grad():
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.fill_(7)
        fill(model, recipe)
    assert model.phase.equal(wanted["phase"])
    assert all((parameter == 7).all() for parameter in model.parameters())
    assert torch.get_rng_state().equal(before) != random_buffer, "nothing is drawn if no value depends on it"
