"""Models for test_deferred_init.py: every way in which a constructor may come to its values."""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from launcher.tasks.bytes_model import GPT

Make = Callable[[], nn.Module]


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
    self.register_buffer("g", torch.multinomial(torch.rand(40), 9))
    self.j = nn.Parameter(torch.rand_like(self.a))
    self.k = nn.Parameter(torch.randn(9, generator=torch.Generator().manual_seed(5)))
    self.n = nn.Parameter(nn.functional.dropout(torch.ones(20), 0.5))


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


MODELS: dict[str, Make] = {
    "gpt": lambda: GPT(64, 16, 3, 2, 8, 0.0),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose1d(2, 4, 3), nn.PReLU()),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "embedding": lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=3), nn.EmbeddingBag(5, 4)),
    "recurrent": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "encoder": initialised(
        encoder, nn.init.xavier_uniform_, nn.init.trunc_normal_, nn.init.orthogonal_, lambda w: nn.init.sparse_(w, 0.3)
    ),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(5, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 4)),
    "double": lambda: nn.Linear(4, 5).double(),
    **{
        make.__name__: module(make)
        for make in (
            rope, masks, real_from_the_start, random_of_all_kinds, views, tied, rescaled, under_another_dtype,
            meta_aware, other_generators, drawn_for_the_depth, loaded,
        )
    },
}  # fmt: skip


def asks(what: Callable[[Tensor], Any]) -> Make:
    def make(self: Any) -> None:
        self.weight = nn.Parameter(torch.randn(4))
        self.answer = what(self.weight.detach())

    return module(make)


def swallows(self: Any) -> None:
    try:
        self.register_buffer("scale", torch.tensor(torch.randn(3).max().item()))
    except Exception:
        self.register_buffer("scale", torch.tensor(1.0))


def draws_for_real(self: Any) -> None:
    self.a = nn.Parameter(torch.tensor([1.0, 2.0]).uniform_(generator=torch.Generator().manual_seed(1)))


def writes_into_real(self: Any) -> None:
    self.register_buffer("a", torch.tensor([1.0, 2.0]))
    self.a[0] = torch.randn(())


def weight_beside_a_weight(self: Any) -> None:
    self.layer = nn.Linear(3, 3)
    self.layer.again = self.layer.weight * 2


# models that each rank builds in full, and a part of the message
FULL: dict[str, tuple[Make, str]] = {
    "item": (asks(lambda w: w.max().item()), "needs values"),
    "mask": (asks(lambda w: w[w > 0]), "needs values"),
    "kept aside": (asks(lambda w: w * 2), r"neither parameters nor buffers \(\.answer\)"),
    "kept in a list": (asks(lambda w: [w[:2]]), r"neither parameters nor buffers .*\(2,\)"),
    "sparse": (module(lambda self: self.register_buffer("s", torch.eye(3).to_sparse())), "."),
    "swallowed": (module(swallows), "needs values"),
    "draws": (module(draws_for_real), "draws random numbers"),
    "writes": (module(writes_into_real), "writes into a tensor"),
    "weight beside a weight": (module(weight_beside_a_weight), r"layer\.again"),
}
