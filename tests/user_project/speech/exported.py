"""Tasks whose model is exported, and a callback that keeps what a run starts with."""

from __future__ import annotations

from pathlib import Path

import torch

import launcher
from speech.tasks import Tagger
from speech.tied import TiedModel


class Tied(Tagger):
    def __init__(self, width=16, tied=True, samples=100):
        super().__init__(width, samples)
        self.tied = tied

    def model(self):
        return TiedModel(self.width, self.tied)

    def shard_units(self, model):
        return list(model.blocks)


class Hooked(Tied):
    """Writes a file of its own."""

    def export(self, model, directory):
        torch.save({name: value.sum() for name, value in model.state_dict().items()}, directory / "sums.pt")


class Start:
    """Callback that writes the whole model before the first step to ``start.pt``."""

    def on_start(self, engine):
        state = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in (*engine.model.state_dict().items(), *engine.model.named_buffers())
        }
        if launcher.current().rank == 0:
            torch.save({name: value.clone() for name, value in state.items()}, Path("start.pt"))
