"""Tasks that ask for their context, and tasks whose loss is not finite in chosen windows."""

from __future__ import annotations

import json
import os
from pathlib import Path

from torch import nn

import launcher
from launcher import Loss
from speech.tasks import Tagger


class Watching(nn.Sequential):
    """Asks for the context in its forward pass, too."""

    def forward(self, inputs):
        self.seen = launcher.current()
        return super().forward(inputs)


class Contextual(Tagger):
    """Writes each context that it sees to ``seen-RANK.jsonl``, and logs scalars."""

    def model(self):
        return Watching(*super().model())

    def collate(self, samples):
        self.step_in_collate = launcher.current().step
        return super().collate(samples)

    def loss(self, model, batch):
        now, loss = launcher.current(), super().loss(model, batch)
        inside = next((part.seen for part in [*getattr(model, "modules", list)()] if hasattr(part, "seen")), now)
        now.log("lengths/longest", batch.shape[1])
        now.log("total", loss.total)
        seen = {"rank": now.rank, "size": now.world_size, "step": now.step, "epoch": now.epoch, "seed": now.seed}
        seen |= {"evaluating": now.evaluating, "device": str(now.device), "inside": inside.step == now.step}
        seen |= {"collate": self.step_in_collate, "longest": batch.shape[1]}
        if "RANK" in os.environ:  # not while the task is inspected
            with Path(f"seen-{now.rank}.jsonl").open("a") as file:
                file.write(json.dumps(seen) + "\n")
        return Loss(loss.total, loss.items)


class Poisoned(Tagger):
    """One sample in the data makes the loss of its micro-batch nan."""

    def train_data(self):
        data = super().train_data()
        for sample in data.data:
            sample[sample == 29] = 28
        data.data[13][0] = 29
        return data

    def loss(self, model, batch):
        loss, poison = super().loss(model, batch), (batch == 29).any().float()
        return Loss(loss.total / (1 - poison) - loss.total * poison, loss.items)
