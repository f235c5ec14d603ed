"""Deferred construction: the values, the random numbers and the memory of it, against an ordinary build."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
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
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.tasks.bytes_model import GPT
from launcher.train.deferred import NotDeferrable, build, fill
from tests.helpers import torchrun

WORKER = Path(__file__).parent / "deferred_worker.py"
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """``build`` looks through all objects for tensors: not through those of the tests before, each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def module(make: Callable[[Any], None]) -> Make:
    """A model whose constructor is ``make``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make(self)

    return Model


def initialised(layer: Make, *inits: Callable[[Tensor], Any]) -> Make:
    """``layer()``, then each of ``inits`` over all matrices, as so many models end their constructors."""

    def make() -> nn.Module:
        model = layer()
        for init in inits:
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    init(parameter)
        return model

    return make


def rope(self: Any) -> None:
    frequencies = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
    angles = torch.outer(torch.arange(16), frequencies)
    self.register_buffer("cos", angles.cos(), persistent=False)
    self.register_buffer("table", torch.view_as_real(torch.polar(torch.ones_like(angles), angles)))


def masks(self: Any) -> None:
    self.register_buffer("causal", torch.tril(torch.ones(6, 6)).view(1, 1, 6, 6))
    bias = torch.zeros(6, 6)
    bias[2:, :3] = 1
    self.register_buffer("bias", bias.masked_fill(bias == 0, -torch.inf))
    places = torch.zeros(6, 4)
    places[:, 0::2] = torch.sin(torch.arange(6).float()).unsqueeze(1)
    self.register_buffer("places", places)


def real_from_the_start(self: Any) -> None:
    self.a = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    self.b = nn.Parameter(torch.empty(3, 4))
    values = torch.from_numpy(np.arange(12.0, dtype=np.float32).reshape(3, 4))
    self.b.data.copy_(values)
    values.zero_()  # the value of the copy is that of its moment
    self.c = nn.Parameter(torch.full((2,), 3.0, device="cpu") * torch.tensor([1.0, 2.0]))
    self.d = nn.Parameter(torch.randn(3, 3) + torch.as_tensor([1.0, 2.0, 3.0], device=self.b.device))
    self.e = nn.Parameter(self.d.new_tensor([1.0, 2.0]))
    self.register_buffer("f", torch.tensor([1, 2, 3]))
    self.register_buffer("g", torch.linspace(0, 1, 5))


def random_of_all_kinds(self: Any) -> None:
    self.a = nn.Parameter(torch.randn(3, 4, device="cpu"))
    self.b = nn.Parameter(torch.Tensor(5, 6).uniform_(-1, 1))  # the legacy constructor
    self.c = nn.Parameter(torch.normal(0.0, 2.0, (3, 3)))
    self.d = nn.Parameter(torch.normal(torch.rand(7), 1.0))
    self.register_buffer("e", torch.randperm(17))
    self.register_buffer("f", torch.bernoulli(torch.rand(40)))
    self.register_buffer("g", torch.multinomial(torch.rand(40), 9))
    self.register_buffer("h", torch.randint(0, 9, (4,)))
    self.i = nn.Parameter(torch.empty(64, 64).exponential_())
    self.j = nn.Parameter(torch.rand_like(self.a))
    generator = torch.Generator().manual_seed(5)
    self.k = nn.Parameter(torch.randn(9, generator=generator))
    self.m = nn.Parameter(torch.empty(33).normal_(generator=generator))
    self.n = nn.Parameter(nn.functional.dropout(torch.ones(20), 0.5))
    torch.poisson(torch.rand(9) * 20)  # draws as many numbers as its values say, though nobody wants the result
    self.o = nn.Parameter(torch.rand(5))


def views(self: Any) -> None:
    self.weight = nn.Parameter(torch.empty(4, 6))
    self.weight.data.normal_()
    with torch.no_grad():
        self.weight[1].zero_()
        self.weight[:, 2:4].uniform_()
        self.weight.t()[0].copy_(self.weight[:, 5])
        self.weight.view(-1)[::5] *= 3
    self.turned = nn.Parameter(torch.randn(3, 5).t())
    flat = torch.randn(20)
    self.first, self.second = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:])
    self.register_buffer("moved", torch.randn(3).to("cpu").cpu().mul_(2))
    self.late = nn.Parameter(torch.empty(3))
    self.late.data = torch.randn(4)


def tied(self: Any) -> None:
    self.emb, self.head = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7, bias=False)
    self.head.weight = self.emb.weight
    nn.init.normal_(self.head.weight, std=0.02)
    self.register_buffer("a", torch.randn(3))
    self.register_buffer("b", self.a)


def rescaled(self: Any) -> None:
    self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for depth, layer in enumerate(self.layers, 1):
        layer.weight.data.div_(math.sqrt(2 * depth))
    self.average = copy.deepcopy(self.layers)
    self.to(torch.bfloat16)


def under_another_dtype(self: Any) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.ones(3) * 2)
    finally:
        torch.set_default_dtype(torch.float32)


def meta_aware(self: Any) -> None:
    self.weight = nn.Parameter(torch.empty(4, 4))
    if self.weight.is_meta or self.weight.device.type == "meta":  # torch's nn.init has such lines, too
        return
    nn.init.normal_(self.weight)
    self.register_buffer("zeros", torch.zeros(3, device=self.weight.device))


def other_generators(self: Any) -> None:
    self.a = nn.Parameter(torch.full((2,), random.random()))
    self.b = nn.Parameter(torch.from_numpy(np.random.rand(3)))


def drawn_for_the_depth(self: Any) -> None:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Dropout(rate)) for rate in rates)


def loaded(self: Any) -> None:
    self.layer, other = nn.Linear(3, 4), nn.Linear(3, 4)
    file = io.BytesIO()
    torch.save({"weight": torch.arange(12.0).view(4, 3), "bias": torch.tensor([1.0, 2, 3, 4])}, file)
    file.seek(0)
    self.layer.load_state_dict(torch.load(file))
    self.assigned = other
    self.assigned.load_state_dict({"weight": torch.ones(4, 3), "bias": torch.tensor([0.0] * 4)}, assign=True)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(5, 4))


def low_rank() -> nn.Module:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4, 1))

        def forward(self, weight: Tensor) -> Tensor:
            return weight * self.scale

    layer = nn.Linear(5, 4)
    parametrize.register_parametrization(layer, "weight", Scaled())
    return layer


MODELS: dict[str, Make] = {
    "gpt": lambda: GPT(64, 16, 3, 2, 8, 0.0),
    "linear": lambda: nn.Linear(5, 3),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose1d(2, 4, 3), nn.PReLU()),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "embedding": lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=3), nn.EmbeddingBag(5, 4)),
    "recurrent": lambda: nn.Sequential(nn.LSTM(4, 5, 2, bidirectional=True), nn.GRU(3, 3)),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "encoder": encoder,
    "encoder, again": initialised(encoder, nn.init.xavier_uniform_),
    "bilinear": lambda: nn.Bilinear(3, 4, 5),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 4)),
    "spectral norm": spectral,
    "parametrized": low_rank,
    "trunc_normal_": initialised(encoder, nn.init.trunc_normal_),
    "narrow trunc_normal_": initialised(encoder, lambda w: nn.init.trunc_normal_(w, std=0.02, a=0.01, b=0.03)),
    "orthogonal_": initialised(encoder, nn.init.orthogonal_),
    "eye_": initialised(lambda: nn.Linear(4, 5), nn.init.eye_),
    "dirac_": initialised(lambda: nn.Conv1d(4, 4, 3), nn.init.dirac_),
    "sparse_": initialised(lambda: nn.Linear(8, 6), lambda w: nn.init.sparse_(w, 0.3)),
    "kaiming, xavier": initialised(encoder, nn.init.kaiming_normal_, nn.init.xavier_normal_),
    "transposed": initialised(lambda: nn.Linear(4, 5), lambda w: w.data.t().normal_()),
    "double": lambda: nn.Linear(4, 5).double(),
    **{
        make.__name__: module(make)
        for make in (
            rope,
            masks,
            real_from_the_start,
            random_of_all_kinds,
            views,
            tied,
            rescaled,
            under_another_dtype,
            meta_aware,
            other_generators,
            drawn_for_the_depth,
            loaded,
        )
    },
}


def instructed(instructions: list[tuple[int, int, int]]) -> Make:
    """Four matrices, and any sequence of what constructors do to them."""

    def make(self: Any) -> None:
        tensors = [torch.empty(4, 4).zero_() for _ in range(4)]
        for what, first, second in instructions:
            a, b = tensors[first], tensors[second]
            match what:
                case 0:
                    a.normal_()
                case 1:
                    a[1:3].uniform_()
                case 2:
                    a.t()[0].zero_()
                case 3:
                    a.mul_(b).clamp_(-9, 9)
                case 4:
                    a.copy_(b)
                case 5:
                    tensors[first] = (a + b).clamp_(-9, 9)
                case 6:
                    tensors[first] = b.detach()  # one storage from now on
                case 7:
                    tensors[first] = torch.randn(4, 4)
                case 8:
                    a[second] = b[0]
                case 9:
                    torch.normal(a, 1.0, out=b)
                case _:
                    nn.init.trunc_normal_(a, std=0.5)
        for i, tensor in enumerate(tensors):
            self.register_parameter(f"p{i}", nn.Parameter(tensor))

    return module(make)


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
    model, recipe = build(make)
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
    model, _ = build(MODELS["gpt"])
    assert states() == before
    assert all(parameter.is_meta for parameter in model.parameters())


def test_tied_parameters_come_once_with_all_their_names() -> None:
    _, recipe = build(module(tied))
    assert recipe.ties == [("emb.weight", "head.weight"), ("a", "b")]
    seen: list[tuple[str, ...]] = []
    recipe.replay(lambda names, _: seen.append(names))
    assert sorted(seen) == sorted(recipe.ties)


def test_a_model_of_other_names_is_not_filled() -> None:
    _, recipe = build(lambda: nn.Linear(2, 2))
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
    model, recipe = build(make)
    sizes = sorted(p.numel() * p.element_size() for p in model.parameters())
    with Live() as live:
        recipe.replay(lambda *_: None)
    assert sizes[-1] <= live.peak <= 2 * sizes[-1], "Live sees what there is, and that is little"
    assert live.peak < sum(sizes) / 4


def test_recording_takes_no_memory() -> None:
    with Live() as live:
        build(lambda: GPT(256, 64, 8, 4, 32, 0.0))
    assert live.peak < 64 * 64 * 4


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
    "meta": (module(makes_meta), "meta tensors of its own"),
    "skip_init": (lambda: nn.utils.skip_init(nn.Linear, 3, 3), "meta tensors of its own"),
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
        build(draws_first)
    assert states() == before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_ranks_hold_their_parts_of_the_same_values(ranks: int, tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, ["values"], ranks, tmp_path).splitlines()[-1])
    assert seen == {"same": [1, 1]}, "sharded over all ranks, and over half of them"


@pytest.mark.slow
def test_a_rank_never_holds_the_whole_model(tmp_path: Path) -> None:
    seen = json.loads(torchrun(WORKER, ["memory"], 2, tmp_path).splitlines()[-1])
    assert seen["model"] > 350e6
    # half of the model sharded, and one parameter
    assert seen["grown"] < 0.75 * seen["model"], seen
